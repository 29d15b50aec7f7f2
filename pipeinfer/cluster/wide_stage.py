"""Makes a rank's slices a member of a wide stage: the team, the path of the all-reduce, and how
long a member waits for the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeinfer.backends.shared_team import Region, SharedTeam, available
from pipeinfer.backends.team import PeerSilent, Team, TeamShape
from pipeinfer.config import ClusterConfig
from pipeinfer.core.control import Setup, SumRegion
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Part, Tag
from pipeinfer.errors import ProtocolError, TransportTimeout, UsageError
from pipeinfer.models.slice_parts import Slice
from pipeinfer.runtime.port_team import PortTeam
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.transport.base import Port

_TRIES = 24  #: sums that are timed at the start
_LOOKS = 8  #: times within a run that the leader checks whether to stop
PATIENCE = 0.5  #: of --timeout, for a part: waits for the stage or its run last longer


def shape_of(setup: Setup, n_embd: int, sum_type: str) -> TeamShape:
    """Return what the members of a stage have to know of each other. n_embd: elements of a row."""
    slices = [Slice.parse(name) for name in setup.cut]
    last = setup.stop == setup.n_layers
    vocabulary = tuple(one.vocab for one in slices) if last else ()
    capacity = max([setup.n_batch * n_embd, *(stop - start for start, stop in vocabulary)])
    return TeamShape(setup.holders, setup.port.member, sum_type, capacity, vocabulary,
                     max(1, (setup.stop - setup.start) // _LOOKS))


def team_of(config: ClusterConfig, setup: Setup, n_embd: int, port: Port, pulse: Pulse) -> Team:
    """Return this member's side of the stage's sums.

    All members call it together: the leader sends the others the path of the sums. Raises
    TransportTimeout, BackendError, UsageError.
    """
    shape = shape_of(setup, n_embd, config.sum_type)
    grid = Grid(setup.widths)
    nodes = grid.members(setup.port.stage)
    watch = SumWatch(port, nodes, shape, pulse, config.timeout)
    if config.sum_path == "memory" and not (setup.near and available()):
        raise UsageError("--set sum_path=memory needs all members of a stage on one host, and the "
                         "C part of pipeinfer (see pipeinfer doctor)")
    wanted = setup.near and config.sum_path != "messages" and available()
    region: Region | None = None
    early: list[Part] = []
    if len(nodes) == 1:
        region = Region.private(shape) if wanted else None
    elif shape.leads:
        region = Region.create(shape) if wanted else None
        for node in nodes[1:]:
            port.send(node, Tag.SUM, SumRegion(region.name if region else ""))
    else:
        name = _hear_region(port, config.timeout, nodes[0], early)
        region = Region.open(name, shape) if name else None
    team: Team = PortTeam(shape, port, nodes, watch, early) if region is None else \
        SharedTeam(shape, region, watch)
    watch.team = team
    return team


def _hear_region(port: Port, timeout: float, leader: int, early: list[Part]) -> str:
    """Wait for the leader's message on shared memory; return the region's name, "" for none.

    early: receives the parts of members that got this message before.

    The message is not a transaction, because the head sends those as well, and the order of
    messages from two senders is undefined. Raises TransportTimeout.
    """
    deadline = time.monotonic() + timeout
    while True:
        envelope = port.take(Tag.SUM)
        match envelope.message if envelope else None:
            case SumRegion(name):
                return name
            case Part() as part:
                early.append(part)
            case None:
                if time.monotonic() > deadline:
                    raise TransportTimeout(
                        rank=port.rank_of(port.node), peer=port.rank_of(leader), tag="SumRegion",
                        run_id=None, seconds=timeout)
                port.wait(0.2, tag=Tag.SUM)
            case other:
                raise ProtocolError(f"a member of a stage was sent {type(other).__name__} as a "
                                    "part of a sum")


def sum_seconds(team: Team, n_embd: int) -> float:
    """Return the median time of one sum for a single row, in seconds.

    All members call it together. Raises what waiting for others raises.
    """
    zeros = [np.zeros(n_embd, np.float32) for _ in team.shape.own]
    times = []

    def add(turn: int) -> bool:
        return team.part(team.shape.own[turn]).add(zeros[turn], 0)

    team.begin(-1, cancelled=False)
    team.arm(None)
    with ThreadPoolExecutor(len(zeros)) as pool:
        for _ in range(_TRIES):
            start = time.perf_counter()
            further = [pool.submit(add, turn) for turn in range(1, len(zeros))]
            if not add(0) or not all(one.result() for one in further):
                team.check()
            times.append(time.perf_counter() - start)
    if isinstance(team, SharedTeam):  # not only with the first run: members may die before it
        team.forget_name()
    return statistics.median(times[_TRIES // 4:])


class SumWatch:
    """Called repeatedly while a member waits for a part; limits that wait.

    timeout: --timeout in seconds, half of which is the limit. A call raises PeerSilent after it,
        and Regrouped or Dismissed if the job has gone on without this sum.
    """

    def __init__(self, port: Port, nodes: Sequence[int], shape: TeamShape, pulse: Pulse,
                 timeout: float) -> None:
        self.team: Team | None = None
        self._port, self._nodes, self._shape = port, tuple(nodes), shape
        self._pulse, self._timeout = pulse, PATIENCE * timeout
        self._sum, self._since, self._called = -1, 0.0, 0.0

    def __call__(self, index: int) -> None:
        member = self._shape.holder_of(index)
        count, now = (self.team.count if self.team else 0), time.monotonic()
        if count != self._sum or now - self._called > 1.0:  # the next wait has begun
            self._sum, self._since = count, now
        self._called = now
        self._pulse.beat(f"waits for slice {index} of its stage")
        self._port.take(Tag.ERROR)  # never sent to stages; raises if an epoch has begun meanwhile
        if now - self._since > self._timeout:
            run = None if self.team is None else self.team.run_id
            raise PeerSilent(rank=self._port.node, peer=self._nodes[member], tag=Tag.SUM.name,
                             run_id=run, seconds=self._timeout)
