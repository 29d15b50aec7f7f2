"""Several sources of proposals that work concurrently, such as a draft on rank 0 and drafts on
other ranks.

They are ordered by how good their proposals are expected to be. A job has one answer: the
proposals that have come, merged as those of a cascade, as soon as they are nearly certain or no
better member is worth waiting for. A member that has a rank of its own and evaluates a model takes
the newest job whenever it becomes idle; the others answer the jobs in between. It is waited for if
it is fast enough to keep the stages busy by itself: proposals of the others would only displace
better ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct, field, structs

from pipeinfer.core.drafting import FeedDraft, StartDraft
from pipeinfer.runtime.draft_worker import Drafts
from pipeinfer.runtime.remote_draft import RemoteDraft
from pipeinfer.scheduler.events import Drafted
from pipeinfer.strategies.proposers.cascade import merged
from pipeinfer.strategies.proposers.track_record import TrackRecord, certain

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
        self.told: Callable[[str], None] = lambda _: None  # each member has its own
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
