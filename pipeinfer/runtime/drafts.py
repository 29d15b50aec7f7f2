"""The head's sources of proposals: `Drafts`, and its three kinds.

    DraftWorker     a proposer in a thread of rank 0
    RemoteDraft     one on a rank of its own (`draft_rank` is the other end), or, as `SlicedDraft`,
                    in slices at the members of the only stage (`sliced_head` is the other end)
    DraftTeam       several of these at once

Accepted tokens of a lane are sent to another rank once: each job carries only the new ones. If that
rank is lost, every job is answered with no proposals, so that the target goes on alone. Members of
a team are ordered by how good their proposals are expected to be. A job has one answer: the
proposals that have come, merged as those of a cascade, as soon as they are nearly certain or no
better member is worth waiting for. A member that has a rank of its own and evaluates a model takes
the newest job whenever it becomes idle; the others answer the jobs in between. It is waited for if
it is fast enough to keep the stages busy by itself: proposals of the others would only displace
better ones. This module loads no model.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field, structs

from pipeinfer.core.control import DraftDone, DraftReady, DraftSetup, DraftStop
from pipeinfer.core.drafting import FeedDraft, Proposal, StartDraft
from pipeinfer.core.messages import LaneClose, LaneOpen, Message, Tag
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import ClusterError, RankLost, TransportTimeout
from pipeinfer.scheduler.events import Drafted
from pipeinfer.strategies.proposers.base import Proposer, ReadsRows
from pipeinfer.strategies.proposers.cascade import TrackRecord, certain, merged
from pipeinfer.transport.base import Port


class Drafts(Protocol):
    """The head's interface to a source of proposals. The head calls it in its own thread.

    busy_seconds: seconds of computation so far.
    free: whether it evaluates no model.
    local: whether it computes on rank 0.
    on_lost: called once, with the reason, when there will be no more proposals.
    """

    on_lost: Callable[[str], None]

    @property
    def busy_seconds(self) -> float: ...
    @property
    def free(self) -> bool: ...
    @property
    def local(self) -> bool: ...

    def start(self, job: StartDraft) -> None:
        """Queue a job. Its result is returned by `take`; results may come in any order."""

    def stop(self, job_id: int) -> None:
        """Withdraw a job: its result is no longer needed."""

    def feed(self, rows: FeedDraft) -> None:
        """Queue rows of the target for the jobs after it."""

    def take(self) -> Drafted | None:
        """Return the result of a finished job, or None. After a loss each job has one without
        proposals."""

    def lose(self, why: str) -> None:
        """Give the draft up: answer all jobs, and those to come, without proposals."""

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to do."""

    def close(self, timeout: float) -> None:
        """Release the draft, waiting at most `timeout` seconds for the current job."""


class DraftWorker:
    """Runs draft jobs one after the other in a thread.

    proposer: computes the proposals; closed by `close`.
    notify: called in that thread after each job, and when the thread fails.
    """

    local = True

    def __init__(self, proposer: Proposer, notify: Callable[[], None]) -> None:
        self.busy_seconds = 0.0
        self.free = proposer.free
        self._proposer, self._notify = proposer, notify
        self._jobs: deque[StartDraft | FeedDraft] = deque()
        self._results: deque[Drafted] = deque()
        self._stopped: set[int] = set()
        self._wanted = threading.Event()
        self._last_done = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._waiting: set[int] = set()  # jobs without a result; the head's thread keeps it
        self.lost = ""  #: why there are no more proposals; empty while the draft works
        self.on_lost: Callable[[str], None] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
        self._thread.start()

    def start(self, job: StartDraft) -> None:
        """Queue a job; its thread begins it after those queued before."""
        self._waiting.add(job.job_id)
        if self.lost:
            self._results.append(Drafted(job.job_id, ()))
            return
        self._jobs.append(job)
        self._wanted.set()

    def stop(self, job_id: int) -> None:
        """Withdraw a job: its result is no longer needed."""
        self._waiting.discard(job_id)
        if job_id > self._last_done:
            self._stopped.add(job_id)

    def feed(self, rows: FeedDraft) -> None:
        """Queue rows of the target for the jobs after it."""
        if isinstance(self._proposer, ReadsRows):
            self._jobs.append(rows)
            self._wanted.set()

    def take(self) -> Drafted | None:
        """Return the result of a finished job, or None. No token depends on a draft, so an error
        in its thread is a loss of its proposals only."""
        if self._failure is not None and not self.lost:
            self.lose(f"the draft on rank 0 failed: {type(self._failure).__name__}: "
                      f"{self._failure}")
        # a result may belong to a job that was withdrawn while its thread computed
        while self._results:
            found = self._results.popleft()
            if found.job_id in self._waiting:  # neither withdrawn nor answered by `lose`
                self._waiting.discard(found.job_id)
                return found
        return None

    def lose(self, why: str) -> None:
        """Give the draft up. A thread that hangs is left alone."""
        if self.lost:
            return
        self.lost = why
        done = {one.job_id for one in self._results}
        self._results += [Drafted(job_id, ()) for job_id in sorted(self._waiting - done)]
        self.on_lost(why)

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to do."""
        return bool(self._results) or (self._failure is not None and not self.lost)

    def close(self, timeout: float) -> None:
        """End the thread, waiting at most `timeout` seconds for the current job.

        The proposer is closed only if the thread has ended by then.
        """
        self._closing = True
        self._wanted.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._proposer.close()

    def _run(self) -> None:
        try:
            # sleeps until a job comes: a draft that polled would take time from the stages
            while not self._closing:
                self._wanted.wait()
                self._wanted.clear()
                while self._jobs and not self._closing:
                    job = self._jobs.popleft()
                    if isinstance(job, StartDraft):
                        self._work(job)
                    elif isinstance(self._proposer, ReadsRows):
                        self._proposer.feed(job)
        except BaseException as error:  # `take` reports it in the head's thread
            self._failure = error
            self._notify()

    def _work(self, job: StartDraft) -> None:
        start, rows = time.perf_counter(), self._proposer.rows_evaluated
        if job.job_id not in self._stopped:
            proposals = self._proposer.propose(
                job, lambda: self._closing or job.job_id in self._stopped
            )
            if proposals is not None:
                self._results.append(Drafted(
                    job.job_id, proposals, self._proposer.rows_evaluated - rows,
                    time.perf_counter() - start))
        self._last_done = job.job_id
        self._stopped.discard(job.job_id)
        self.busy_seconds += time.perf_counter() - start
        self._notify()


LANES = 256  #: whose tokens the draft rank stores


class DraftPosts:
    """Sorts what draft ranks send to the head by its sender."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self._of: dict[int, deque[Message]] = {}

    def take(self, rank: int) -> Message | None:
        """Return the oldest message of a rank, or None."""
        # posts of all draft ranks share one port: each is kept for the draft that it belongs to
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
        self.on_lost: Callable[[str], None] = lambda _: None
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
        self._read_messages()
        return not self._waiting

    def await_ready(self, timeout: float) -> None:
        """Wait until the draft has loaded.

        timeout: seconds.
        Raises RankLost, TransportTimeout, and ClusterError with the exit code of the rank that
        failed.
        """
        deadline = time.monotonic() + timeout
        # a draft may load for long, so a dead rank is noticed before the deadline
        while not self.lost and len(self.ready) < len(self._ranks):
            if dead := self._port.gone.intersection(self._ranks):
                raise RankLost(min(dead), "is dead")
            if time.monotonic() > deadline:
                late = min(set(self._ranks) - set(self.ready))
                raise TransportTimeout(rank=0, peer=late, tag="DraftReady", run_id=None,
                                       seconds=timeout)
            self._port.wait(0.2)
            self._read_messages()
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
        self._read_messages()
        return self._results.popleft() if self._results else None

    @property
    def has_news(self) -> bool:
        """Whether `take` would return a result."""
        self._read_messages()
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

    def _read_messages(self) -> None:
        # all at once: an answer to a former draft may stand before the one that is awaited
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
        self.on_lost(why)

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


_KEEPS_UP = 2.0  #: slowest draft that is waited for, in times of the slowest stage
_FEW_ROWS = 8  #: jobs with more rows do not count in the measured time of a proposal
_UNTRIED = 0.5  #: part of its claims that a model is taken to be worth before it has shown more
_EVERY = 8  #: jobs after which the time of the stages is read again


class _Member(Struct):
    """A source of proposals. One that is not `remote` gets every job at once.

    remote: it has a rank of its own, and evaluates a model
    waiting: jobs that `remote` takes when it is idle, the newest last
    seconds: measured, of one proposal
    """

    draft: Drafts
    remote: RemoteDraft | None = None
    waiting: deque[StartDraft] = field(default_factory=deque)
    seconds: float = 0.0

    @property
    def may_go_on(self) -> bool:
        """Whether it can start its next job."""
        return bool(self.waiting) and self.remote is not None and self.remote.idle

    def take(self) -> Drafted | None:
        """Return a result, or None; learn from it how fast the member is."""
        found = self.draft.take()
        if found is not None and 0 < found.rows <= _FEW_ROWS:  # accepted tokens are among the rows
            seconds = found.seconds / found.rows
            before = self.seconds or seconds
            self.seconds = before + (seconds - before) / _EVERY
        if self.may_go_on:
            self.draft.start(self.waiting.popleft())
        return found


class _DraftJob(Struct):
    """A job and the answers to it so far.

    due: the members that will answer it
    held: what they have proposed
    chance: that its first proposal is right
    by: the best member that has answered; -1: none
    """

    job: StartDraft
    due: set[int]
    held: Drafted
    chance: float = 0.0
    by: int = -1


class DraftTeam:
    """Combines sources of proposals behind the interface `Drafts`; see the module docstring.

    drafts: the best one last.
    slot: returns the seconds that the slowest stage takes for a run, 0 if unknown.
    """

    free = False

    def __init__(self, drafts: Sequence[Drafts]) -> None:
        self.slot: Callable[[], float] = lambda: 0.0
        self.on_lost: Callable[[str], None] = lambda _: None  # each member has its own
        self._slot, self._count = 0.0, 0
        self._members = [
            _Member(one, one if isinstance(one, RemoteDraft) and not one.free else None)
            for one in drafts]
        self._open: dict[int, _DraftJob] = {}  # without an answer
        self._record = TrackRecord([
            1.0 if one.free or one is drafts[-1] else _UNTRIED for one in drafts])

    @property
    def local(self) -> bool:
        """Whether some of it computes on rank 0."""
        return any(one.draft.local for one in self._members)

    @property
    def busy_seconds(self) -> float:
        """Seconds of computation on rank 0."""
        return sum(one.draft.busy_seconds for one in self._members if one.draft.local)

    @property
    def members(self) -> tuple[Drafts, ...]:
        """The sources, the best one last."""
        return tuple(one.draft for one in self._members)

    def lose(self, why: str) -> None:
        """Give up the members that owe an answer."""
        for k in {k for asked in self._open.values() for k in asked.due}:
            self._members[k].draft.lose(why)

    def start(self, job: StartDraft) -> None:
        """Give the job to all members."""
        if self._count % _EVERY == 0:
            self._slot = self.slot()
        self._count += 1
        self._record.settle(job)
        self._open[job.job_id] = _DraftJob(job, set(range(len(self._members))),
                                           Drafted(job.job_id, ()))
        for k, one in enumerate(self._members):
            if one.remote is None:
                one.draft.start(job)
                continue
            if one.waiting:  # the newer job takes its place, if others answer it
                before = self._open[one.waiting[-1].job_id]
                if before.due != {k} or before.by >= 0:
                    one.waiting.pop()
                    before.due.discard(k)
            one.waiting.append(job)
            if one.may_go_on:
                one.draft.start(one.waiting.popleft())

    def stop(self, job_id: int) -> None:
        """Withdraw a job from all members."""
        self._open.pop(job_id, None)
        for one in self._members:
            kept = deque(job for job in one.waiting if job.job_id != job_id)
            if len(kept) == len(one.waiting):
                one.draft.stop(job_id)
            one.waiting = kept

    def feed(self, rows: FeedDraft) -> None:
        """Give the rows to all members; those that read none ignore them."""
        for one in self._members:
            one.draft.feed(rows)

    def take(self) -> Drafted | None:
        """Return the next answer, or None."""
        for k, one in enumerate(self._members):
            # every member first: a better answer that is there already belongs to the same job
            while (found := one.take()) is not None:
                self._add(k, found)
        for asked in self._open.values():
            if self._is_ready(asked):
                self.stop(asked.job.job_id)
                return asked.held
        return None

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to do."""
        return any(one.draft.has_news or one.may_go_on for one in self._members) or any(
            map(self._is_ready, self._open.values()))

    def close(self, timeout: float) -> None:
        """Close all members, each within `timeout` seconds."""
        for one in self._members:
            one.draft.close(timeout)

    def _add(self, k: int, found: Drafted) -> None:
        """Merge the result of member `k` into the answer of its job."""
        if (asked := self._open.get(found.job_id)) is None:
            return  # withdrawn
        asked.due.discard(k)
        self._record.add(k, asked.job, found.proposals)
        ours = self._record.judged(k, asked.job, found.proposals)
        theirs, best = (asked.held.proposals, asked.chance), k > asked.by
        pair = (theirs, ours) if best else (ours, theirs)
        proposals, asked.chance = merged(*pair, asked.job)
        asked.held = structs.replace(found if best else asked.held, proposals=proposals)
        asked.by = max(asked.by, k)

    def _is_ready(self, asked: _DraftJob) -> bool:
        """Whether no further answer is worth waiting for."""
        found = asked.held.proposals
        return not asked.due or (bool(found) and (certain((found, asked.chance), asked.job) or not
                                 any(k > asked.by and self._keeps_up(k) for k in asked.due)))

    def _keeps_up(self, k: int) -> bool:
        """Whether member `k` is fast enough that others' proposals would displace better ones."""
        return not self._slot or self._members[k].seconds < _KEEPS_UP * self._slot
