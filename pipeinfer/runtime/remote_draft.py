"""The head's interface to a draft that has ranks of its own; `draft_rank` is the other end.

Accepted tokens of a lane are sent once: each job carries only the new ones. If a draft rank is
lost, every job is answered with no proposals, so that the target goes on alone. This module
loads no model.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

from msgspec import structs

from pipeinfer.core.control import DraftDone, DraftReady, DraftSetup, DraftStop
from pipeinfer.core.drafting import FeedDraft, Proposal, StartDraft
from pipeinfer.core.messages import LaneClose, LaneOpen, Message, Tag
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import ClusterError, RankLost, TransportTimeout
from pipeinfer.scheduler.events import Drafted
from pipeinfer.transport.base import Port

LANES = 256  #: whose tokens the draft rank stores


class DraftPosts:
    """Sorts what draft ranks send to the head by its sender."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self._of: dict[int, deque[Message]] = {}

    def take(self, rank: int) -> Message | None:
        """Return the oldest message of a rank, or None."""
        while (post := self.port.take_post()) is not None:
            self._of.setdefault(post[0], deque()).append(post[1])
        return found.popleft() if (found := self._of.get(rank)) else None


class RemoteDraft:
    """Implements `Drafts` over a port. Only the head's thread may use it.

    posts: of the port; shared by all drafts of a job.
    setups: what its rank loads; sent when the object is made. A head in slices has several ranks,
        the leader first.
    name: of the draft or the proposer, for messages.
    free: whether it evaluates no model.
    """

    local = False

    def __init__(self, posts: DraftPosts, setups: Mapping[int, DraftSetup], name: str = "", *,
                 free: bool = False) -> None:
        self.free, self.name = free, name
        self.busy_seconds = 0.0
        self.lost = ""  #: why there are no more proposals; empty while the draft works
        self.told: Callable[[str], None] = lambda _: None
        self.ready: dict[int, DraftReady] = {}
        self._posts, self._port = posts, posts.port
        self._ranks = tuple(setups)
        self._is_head = any(one.target for one in setups.values())
        self._waiting: set[int] = set()
        self._results: deque[Drafted] = deque()
        self._lanes: OrderedDict[int, tuple[SamplingParams, int]] = OrderedDict()
        self._load(setups)

    def _load(self, setups: Mapping[int, DraftSetup]) -> None:
        for setup in setups.values():
            self._send(setup)

    def _send(self, message: Message) -> None:
        self._port.post(self._ranks[0], message)

    def _next(self) -> Message | None:
        return self._posts.take(self._ranks[0])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank that holds the draft; of a head in slices, all its ranks."""
        return self._ranks

    @property
    def idle(self) -> bool:
        """Whether a new job would start at once."""
        self._hear()
        return not self._waiting

    def await_ready(self, timeout: float) -> None:
        """Wait until the draft has loaded.

        timeout: seconds.
        Raises RankLost, TransportTimeout, and ClusterError with the exit code of the rank that
        failed.
        """
        deadline = time.monotonic() + timeout
        while not self.lost and len(self.ready) < len(self._ranks):
            if dead := self._port.gone.intersection(self._ranks):
                raise RankLost(min(dead), "is dead")
            if time.monotonic() > deadline:
                late = min(set(self._ranks) - set(self.ready))
                raise TransportTimeout(rank=0, peer=late, tag="DraftReady", run_id=None,
                                       seconds=timeout)
            self._port.wait(0.2)
            self._hear()
        if self.lost:
            failed = next((one for one in self.ready.values() if one.error), None)
            if failed is None:
                raise RankLost(min(self._port.gone.intersection(self._ranks)), "is dead")
            error = ClusterError(self.lost)
            error.exit_code = failed.exit_code
            raise error

    def start(self, job: StartDraft) -> None:
        """Send a job to the draft. A job that allows only free proposals gets an empty result at
        once, as does every job after a loss, and before the draft is ready."""
        if self.lost or (job.free_only and not self.free) or len(self.ready) < len(self._ranks):
            self._results.append(Drafted(job.job_id, ()))
            return
        known = self._known(job)
        self._waiting.add(job.job_id)
        self._send(structs.replace(
            job, sent=known, accepted=job.accepted[known:job.base], params=SamplingParams()))

    def stop(self, job_id: int) -> None:
        """Withdraw a job: its result is no longer needed."""
        if job_id in self._waiting:
            self._send(DraftStop(job_id))

    def feed(self, rows: FeedDraft) -> None:
        """Queue rows of the target for the jobs after it; draft models read no rows."""
        if self._is_head and not self.lost:
            self._send(rows)

    def take(self) -> Drafted | None:
        """Return the result of a finished job, or None."""
        self._hear()
        return self._results.popleft() if self._results else None

    @property
    def has_news(self) -> bool:
        """Whether `take` would return a result."""
        self._hear()
        return bool(self._results)

    def close(self, timeout: float) -> None:
        """Withdraw all jobs. The rank keeps the draft loaded for the next scheduler."""
        del timeout
        for job_id in self._waiting:
            self.stop(job_id)
        self._waiting.clear()

    def _known(self, job: StartDraft) -> int:
        """Return how many of the lane's tokens the draft rank has; open the lane there if
        necessary."""
        params, known = self._lanes.pop(job.lane, (None, 0))
        if known > job.base or (params is not job.params and params != job.params):
            known = 0
            self._send(LaneOpen(job.lane, job.params))
        self._lanes[job.lane] = job.params, job.base
        if len(self._lanes) > LANES:
            self._send(LaneClose(self._lanes.popitem(last=False)[0]))
        return known

    def _hear(self) -> None:
        while (message := self._next()) is not None:
            match message:
                case DraftDone(job_id, proposals, rows, seconds):
                    self.busy_seconds += seconds
                    wanted = job_id in self._waiting
                    self._waiting.discard(job_id)
                    if wanted and proposals is not None:
                        self._results.append(Drafted(
                            job_id, tuple(Proposal(*one) for one in proposals),
                            rows, seconds))
                case DraftReady() as ready:
                    self.ready[ready.rank] = ready
                    if ready.error:
                        self.lose(f"rank {ready.rank} on {ready.host} cannot draft: {ready.error}")
                case _:
                    pass  # of an earlier draft
        if not self.lost and (dead := self._dead()):
            self.lose(f"rank {min(dead)}, which drafted, is dead")

    def _dead(self) -> set[int]:
        return self._port.gone.intersection(self._ranks)

    def lose(self, why: str) -> None:
        """Give the draft up: return all jobs, also later ones, without proposals."""
        if self.lost:
            return
        self.lost = why
        self._give_none()
        self.told(why)

    def _give_none(self) -> None:
        self._results += [Drafted(job_id, ()) for job_id in sorted(self._waiting)]
        self._waiting.clear()


class SlicedDraft(RemoteDraft):
    """A head that the members of the target's only stage have in slices: see `sliced_head`.

    posts, name: as of `RemoteDraft`
    setups: returns what each present member loads, the leader first
    """

    def __init__(self, posts: DraftPosts, setups: Callable[[], Mapping[int, DraftSetup]], name: str
                 ) -> None:
        self._setups = setups
        super().__init__(posts, setups(), name)

    def move(self) -> None:
        """Load the slices at the members of a new epoch. Until then jobs end without proposals."""
        if not self.lost:
            self._give_none()
            self._lanes.clear()
            self.ready.clear()
            setups = self._setups()
            self._ranks = tuple(setups)
            self._load(setups)

    def _load(self, setups: Mapping[int, DraftSetup]) -> None:
        for node, setup in enumerate(setups.values(), 1):
            self._port.send(node, Tag.TRANSACTION, setup)

    def _send(self, message: Message) -> None:
        match message:
            case StartDraft():
                params = self._lanes[message.lane][0]
                self._port.send(1, Tag.TRANSACTION, structs.replace(message, params=params))
                for node in range(2, len(self._ranks) + 1):
                    self._port.send(node, Tag.TRANSACTION, structs.replace(message, accepted=()))
            case FeedDraft():
                self._port.send(1, Tag.TRANSACTION, message)
            case _:
                pass  # jobs are short, and the leader finds out which lanes are open

    def _next(self) -> Message | None:
        envelope = self._port.take(Tag.DRAFT)
        return None if envelope is None else envelope.message

    def _dead(self) -> set[int]:
        return set()  # others take the place of a member
