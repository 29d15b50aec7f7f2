"""The assignment of layers to ranks, as rank 0 keeps it: first set-up, losses and moves.

    assemble    send every stage its Setup, wait until it has loaded and answered Ready
    recover     after a loss: plan over the living ranks (`replan`), begin an epoch, assemble;
                a further loss during that starts it again
    move        the same without a loss, to a given assignment

The caller of `recover` replays the requests. This module has no runs and no scheduler. A rank that
hangs is ended on its own host (`watchdog`), not from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct, field, structs

from pipeinfer.cluster.shard_transfer import Sender, SourceOf
from pipeinfer.config import JobConfig
from pipeinfer.core import control
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import ShardHave, Tag
from pipeinfer.core.types import CURVE_ROWS
from pipeinfer.errors import (
    LOSSES,
    ClusterError,
    LinkCut,
    Loss,
    PlanError,
    RankLost,
    StageFailed,
    TransportTimeout,
)
from pipeinfer.nodes import RankInfo, group_of
from pipeinfer.planning.judge import Judge
from pipeinfer.planning.partition import Load, Member
from pipeinfer.planning.planner import Plan
from pipeinfer.planning.replan import Holding, MoveVerdict, left_out, rebalance, replan
from pipeinfer.planning.wide import is_cut, retake, share_of, stages_of, widths_of
from pipeinfer.runtime.head import take_result
from pipeinfer.runtime.link_watch import UNDER_WAY, LinkWatch
from pipeinfer.transport.base import Layout, Port


class StageState(Struct):
    """The progress of a node while it loads.

    spare: the rank, if the node is a spare that only receives shards; 0 for a stage.
    phase: what it does now. done, total: how far it is in that phase.
    since: when the phase began. heard: when its last message came. Both by `time.monotonic`.
    ready: its final answer.
    """

    spare: int = 0
    phase: str = "waiting"
    done: int = 0
    total: int = 0
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    ready: control.Ready | control.Received | None = None

    def reach(self, phase: str, done: int, total: int) -> None:
        """Record how far it is. A part of a file that is read once more counts once."""
        if phase != self.phase:
            self.since = self.heard
        elif total == self.total:
            done = max(done, self.done)
        self.phase, self.done, self.total = phase, done, total


class Change(Struct, frozen=True):
    """A new assignment of layers during a job.

    when: seconds since the epoch. epoch: number of the assignment. lost: ranks.
    why: the reason, in words. seconds: duration of the change. moved: layers loaded for it.
    """

    when: float
    epoch: int
    lost: tuple[int, ...]
    why: str
    seconds: float
    moved: int

    def __str__(self) -> str:
        layers = f"{self.moved} layer{'s' * (self.moved != 1)} moved"
        return f"{self.why}: went on after {self.seconds:.2f} s, {layers}"


class Terms(Struct, frozen=True):
    """Properties that all stages together have (see `exact_width.Widths`).

    exact: R, rows. row_cost: time of a further row, relative to the first.
    curve: (rows, time relative to a run of one row).
    """

    exact: int
    row_cost: float
    curve: tuple[tuple[int, float], ...]


_PATIENCE = 10.0  #: most seconds for the message: nothing is computed

ProgressHook = Callable[[dict[int, StageState]], None]
SetupOf = Callable[[Holding], control.Setup]


class Assembly:
    """Assigns layers to ranks and waits until the stages are ready; see the module docstring.

    plan: the first assignment.
    load: bytes and costs of the layers.
    members: by rank, what it could hold.
    hosts: the facts of every rank, by rank.
    setup_of: returns the Setup of a holding, without the fields that `_setup` fills in.
    source_of: returns the shard with layers `[start, stop)`, or a piece of it, to be sent.
    progress: called with the states of all nodes at each message from one.
    survives: whether the job continues after the death of a rank.
    """

    def __init__(
        self, config: JobConfig, port: Port, plan: Plan, load: Load, members: Mapping[int, Member],
        hosts: Sequence[RankInfo], setup_of: SetupOf, source_of: SourceOf,
        progress: ProgressHook | None, *, survives: bool,
    ) -> None:
        self.held = plan.held
        self.states: dict[int, StageState] = {}
        self.changes: list[Change] = []
        self.epoch = 0
        self.lost = {one.rank for one in hosts if one.dead}
        self.threads: dict[int, int] = {}
        self.judge: Judge | None = None  #: compares assignments after a loss, once it is set
        self._sources: set[int] = set()  # ranks whose messages did not reach another rank
        self._once = {holding.rank for holding in self.held}
        self._terms: Terms | None = None
        self._config, self._port, self._load, self._hosts = config, port, load, hosts
        self._members = members
        self._setup_of, self._source_of, self._progress = setup_of, source_of, progress
        self._survives = survives

    @property
    def grid(self) -> Grid:
        """The present stages and their members."""
        return Grid(widths_of(self.held))

    @property
    def ready(self) -> dict[int, control.Ready]:
        """The Ready message of each stage, by node."""
        return {node: state.ready for node, state in self.states.items()
                if isinstance(state.ready, control.Ready)}

    @property
    def spares(self) -> tuple[int, ...]:
        """Living ranks that may hold a stage and hold none."""
        used = {0} | {holding.rank for holding in self.held}  # a stage of rank 0 needs its thread
        return tuple(rank for rank in self._members
                     if rank not in used | self.lost and not self._hosts[rank].settings.drafts)

    @property
    def terms(self) -> Terms:
        """The terms of all stages together. After a loss R never rises, so that requests keep
        their bits."""
        said = self.ready.values()
        exact = min(one.exact_width for one in said)
        curve = tuple((rows, max(one.curve[k] for one in said))
                      for k, rows in enumerate(CURVE_ROWS))
        if self._terms is not None:
            exact = min(exact, self._terms.exact)
        return Terms(exact, max(one.row_cost for one in said), curve)

    def start(self) -> None:
        """Load the first assignment, and supply or prepare the spares.

        Recovers from losses. A stage's own error, such as a missing file or another version, is
        raised, so that the user sees it.
        """
        try:
            self._assemble()
        except LOSSES as loss:
            if isinstance(loss, StageFailed) and loss.exit_code != ClusterError.exit_code:
                raise
            self.recover(loss)
        self._terms = self.terms
        if self._config.cluster.distribute:
            self._supply_spares()
        else:
            self._prepare_spares()

    def recover(self, loss: Loss) -> bool:
        """Continue without the lost ranks.

        Returns whether stages have changed; they have not if only ranks without a stage were lost.
        Raises the loss if this MPI cannot continue, or if it is rank 0 or no rank is left;
        ClusterError if the living ranks cannot hold the model.
        """
        began, causes, cause = time.monotonic(), [str(loss)], loss
        before = {holding.rank: holding for holding in self.held}
        gone: set[int] = set()
        # a further rank may die while the others load: then it starts over without that one, too
        while True:
            gone |= self._cut_out(loss)
            if self._whole:
                self._note(began, gone, str(loss), before)
                return False
            held = self._plan_without(cause)
            try:
                self._enter(held)
                break
            except LOSSES as further:
                loss = further
                causes.append(str(further))
        self._note(began, gone, "; ".join(dict.fromkeys(causes)), before)
        return True

    def move(self, held: tuple[Holding, ...], why: str, threads: Mapping[int, int] | None = None
             ) -> None:
        """Change to another assignment while nothing is lost.

        held: the new assignment. why: the reason, for the notes.
        threads: by rank, see `Setup.cores`.
        """
        self.threads = dict(threads or {})
        began, before = time.monotonic(), {holding.rank: holding for holding in self.held}
        try:
            self._enter(held)
        except LOSSES as loss:
            self.recover(loss)
            return
        self._note(began, set(), why, before)

    def better(self, seconds: Sequence[float], judge: Judge) -> MoveVerdict:
        """Look for a better split of whole layers. seconds: present times of the stages for a
        run."""
        return rebalance(self._load, self._rooms(self.held), self.held, seconds, self.spares, judge,
                         self.returning)

    @property
    def returning(self) -> tuple[int, ...]:
        """Idle ranks that have held layers before and may get some again."""
        return tuple(rank for rank in self.spares if rank in self._once)

    @property
    def grows(self) -> bool:
        """Whether a stage may use the threads of idle ranks. It may not if its layers are cut, if
        sums are split by threads, which would change bits, or if the user has bound threads."""
        exact = 0 if self._terms is None else self._terms.exact
        bound = self._config.model.threads or self._config.cluster.keep_binding
        return exact > 1 and not bound and not is_cut(self.held) and not any(
            one.settings.bound for one in self._hosts)

    # --- steps --------------------------------------------------------------------------------

    def _cut_out(self, loss: Loss) -> set[int]:
        """Record every rank that is lost by now; return the new ones.

        Raises the loss if the job cannot continue without that rank.
        """
        match loss:
            case RankLost(rank=rank) | StageFailed(rank=rank):
                pass
            case LinkCut():
                rank = left_out(loss.source, loss.target, self._sources)
                self._sources.add(loss.source)
        if not self._survives or rank == 0:
            raise loss
        fresh = ({rank} | self._port.new_losses() | self._port.gone) - self.lost
        self.lost |= fresh
        return fresh

    @property
    def _whole(self) -> bool:
        """Whether every stage is alive and ready."""
        return all(holding.rank not in self.lost for holding in self.held) and bool(
            self.states) and all(state.ready for state in self.states.values())

    def _plan_without(self, loss: Loss) -> tuple[Holding, ...]:
        words = str(loss)
        alive = [holding for holding in self.held if holding.rank not in self.lost]
        lost = [holding for holding in self.held if holding.rank in self.lost]
        try:
            if is_cut(self.held):
                return retake(self.held, self.lost, self.spares, self._has_room,
                              {one.rank: group_of(one) for one in self._hosts})
            return replan(self._load, self._rooms(alive), alive, self.spares, lost, self.judge)
        except PlanError as error:
            if not alive and not self.spares:
                raise loss from None
            raise ClusterError(f"{words}; {error}") from loss

    def _rooms(self, alive: Sequence[Holding]) -> dict[int, Member]:
        """Return the living ranks with their memory in bytes: what their stage takes now, and
        their share of what is free on their host, or on their GPU."""
        own = {holding.rank: self._bytes_of(holding) for holding in alive}
        ranks = [*own, *self.spares]
        names = {rank: self._members[rank].room or self._hosts[rank].host for rank in ranks}
        rooms = {}
        for rank in ranks:
            here = [other for other in ranks if names[other] == names[rank]]
            free = min(self._members[other].memory for other in here) \
                - sum(own.get(other, 0.0) for other in here)
            rooms[rank] = structs.replace(
                self._members[rank],
                memory=own.get(rank, 0.0) + max(free, 0.0) / len(here))
        return rooms

    def _bytes_of(self, holding: Holding) -> float:
        """Bytes of memory that a holding takes on its rank."""
        return self._load.slices_bytes(
            holding.start, holding.stop, share_of(holding), max(1, len(holding.slices)))

    def _has_room(self, rank: int, holding: Holding) -> bool:
        alive = [one for one in self.held if one.rank not in self.lost]
        return self._bytes_of(holding) <= self._rooms(alive)[rank].memory

    def _enter(self, held: tuple[Holding, ...]) -> None:
        self._once |= {holding.rank for holding in held}
        self._group(held)
        self._assemble()
        self._terms = self.terms
        self._prepare_spares()

    def _group(self, held: tuple[Holding, ...]) -> None:
        """Begin an epoch in which these holdings are the nodes."""
        self.held = held
        self.epoch += 1
        self._port.regroup(Layout((0, *(holding.rank for holding in held)), self.epoch), self.lost)

    def _note(self, began: float, lost: set[int], why: str, before: Mapping[int, Holding]) -> None:
        moved = 0
        for now in self.held:
            old = before.get(now.rank, Holding(now.rank, 0, 0))
            if set(now.slices) <= set(old.slices):  # else a further slice of each layer is loaded
                moved -= max(0, min(now.stop, old.stop) - max(now.start, old.start))
            moved += now.stop - now.start
        self.changes.append(Change(time.time(), self.epoch, tuple(sorted(lost)), why,
                                   time.monotonic() - began, moved))

    def _prepare_spares(self) -> None:
        """Let idle ranks load and measure the stages' shards once, so that they are in the page
        cache. A shard that does not fit beside what the host holds is left out: loading it could
        cost a living stage its memory."""
        if not self._survives or self._config.cluster.distribute:
            return
        for rank in self.spares:
            fitting = [one for one in self.held if self._has_room(rank, one)]
            self._port.order(rank, control.Rehearse(tuple(
                self._setup(one, rank) for one in fitting)))

    def _supply_spares(self) -> None:
        """Send the requested spares the shards of all stages, before there are requests. Spares
        of one host may share a cache and are supplied one after the other."""
        able = [rank for rank in self._members if not self._hosts[rank].settings.drafts]
        last = able[len(able) - self._config.cluster.spares :]
        done: set[int] = set()
        # again after a loss: the stages, and so the shards of a spare, are others then
        while self._survives:
            batch = {self._hosts[rank].host: rank for rank in reversed(self.spares)
                     if rank not in done
                     and (rank in last or self._hosts[rank].settings.role == "spare")}
            if not batch:
                return
            if self._supply(tuple(sorted(batch.values()))):
                done.update(batch.values())
            else:
                done.clear()  # a rank was lost: stages may hold other layers now

    def _supply(self, spares: tuple[int, ...]) -> bool:
        """Make these ranks the nodes for one epoch, in which they receive shards as stages do.

        Returns whether all succeeded. If not, the job has already recovered without the lost
        ranks.
        """
        held, loss = self.held, None
        here = tuple(holding.rank for holding in held if holding.rank == 0)  # keeps its mailbox
        setups = {rank: tuple(self._setup(holding, rank) for holding in held) for rank in spares}
        nodes = here + spares
        self._group(tuple(Holding(rank, 0, 0) for rank in nodes))
        try:
            self._prepare({node: control.Receive(control.PortName(node), setups.get(rank, ()))
                           for node, rank in enumerate(nodes, 1)})
        except RankLost as error:
            loss = error
        except StageFailed as error:
            loss = RankLost(error.rank, f"failed: {error.summary}")
        except TransportTimeout as error:
            loss = RankLost(error.peer or 0, "did not receive its layers in time")
        self.held, self.states = held, {}
        try:
            if loss is not None:
                raise loss
            self._enter(held)
        except LOSSES as error:
            self.recover(error)
            return False
        return True

    def _setup(self, holding: Holding, rank: int) -> control.Setup:
        """Return the Setup for one of `held`, with the settings of this rank."""
        agreed, grid = self._terms, self.grid
        name = grid.name(self.held.index(holding) + 1)
        team = stages_of(self.held)[name.stage - 1]
        hosts = {self._hosts[one.rank].bell.host or self._hosts[one.rank].host for one in team}
        setup = self._setup_of(holding)
        return msgspec.structs.replace(
            setup, port=name,
            widths=grid.widths, cut=holding.cut, near=len(hosts) == 1,
            holders=tuple(one.slices for one in team) if holding.cut else (),
            settings=structs.asdict(self._hosts[rank].settings),
            exact=agreed.exact if agreed else setup.exact,
            cores=self.threads.get(rank, setup.cores),
            curve=tuple(cost for _, cost in agreed.curve) if agreed else None)

    def _assemble(self) -> None:
        """Send every stage its Setup, wait until all are ready, and check each link between
        stages.

        Raises LOSSES, TransportTimeout.
        """
        self._prepare({node: self._setup(holding, holding.rank)
                       for node, holding in enumerate(self.held, 1)})
        if self.grid.n_stages > 1:
            greet(self._port, self.grid, self._config.cluster.timeout)

    def _prepare(self, setups: Mapping[int, control.Setup | control.Receive]) -> None:
        """Send each node its setup and wait until all are ready."""
        self.states = {
            node: StageState(self.held[node - 1].rank if isinstance(setup, control.Receive) else 0)
            for node, setup in setups.items()}
        sender = Sender(self._port, self._source_of)
        for node, setup in setups.items():
            self._port.send(node, Tag.TRANSACTION, setup)
        self._await_ready(sender)

    def _await_ready(self, sender: Sender) -> None:
        """Receive messages until all nodes are ready, and send them the shards that they request.

        Raises TransportTimeout for a node that has sent nothing for the job's timeout.
        """
        port, states, grid = self._port, self.states, self.grid
        # shards are sent in the same loop: a stage that waits for its layers is never ready
        while not all(state.ready for state in states.values()):
            envelope = take_result(port)
            busy = sender.pump()
            for waiting in sender.hashing:
                states[waiting].heard = time.monotonic()
            if envelope is None:
                if not busy:
                    port.wait(0.2)
                self._check_news()
                continue
            match envelope.message:
                case ShardHave() as have:
                    if have.node in states:
                        states[have.node].heard = time.monotonic()
                    sender.hear(have)
                case control.ShardWanted(port=name) as wanted if (
                        node := grid.node(name)) in states:
                    assert node is not None
                    states[node].heard = time.monotonic()
                    sender.offer(node, wanted.start, wanted.stop, wanted.piece)
                case (control.Progress() | control.Ready() | control.Received()) as news if (
                        node := grid.node(news.port)) in states:
                    assert node is not None
                    self._hear(states[node], news)
                case _:
                    pass  # of an earlier epoch

    def _check_news(self) -> None:
        now, timeout = time.monotonic(), self._config.cluster.timeout
        for node, state in self.states.items():
            if not state.ready and now - state.heard > timeout:
                rank = state.spare or self._port.rank_of(node)
                raise TransportTimeout(
                    rank=0, peer=rank, tag=f"Ready (rank {rank} is {state.phase} since "
                    f"{now - state.since:.0f} s)", run_id=None, seconds=timeout)

    def _hear(self, state: StageState,
              news: control.Progress | control.Ready | control.Received) -> None:
        state.heard = time.monotonic()
        match news:
            case control.Progress(phase=phase, done=done, total=total):
                state.reach(phase, done, total)
            case control.Ready() | control.Received():
                state.phase, state.ready = "ready", news
        if self._progress is not None:
            self._progress(self.states)


def greet(port: Port, grid: Grid, timeout: float) -> None:
    """Send a message through all stages and wait until every node has received it, so that a cut
    link is found before a client's stream depends on it.

    timeout: seconds.
    Raises LinkCut, TransportTimeout, and what `take_result` raises.
    """
    watch, began = LinkWatch(port, grid, min(_PATIENCE, UNDER_WAY * timeout)), time.monotonic()
    watch.greet()
    # two living stages with a cut link show only by what passes between them
    while not watch.all_reached:
        envelope = take_result(port)
        if envelope is not None:
            if isinstance(envelope.message, control.Standing):
                watch.hear(envelope.message)
            continue
        seconds = time.monotonic() - began
        if (link := watch.turn()) is not None:
            source, target = map(port.rank_of, link)
            raise LinkCut(source, target, seconds)
        if seconds > timeout:
            missing = port.rank_of(watch.first_missing or 0)
            raise TransportTimeout(rank=0, peer=missing, tag="Standing",
                                   run_id=None, seconds=timeout)
        port.wait(0.2)
