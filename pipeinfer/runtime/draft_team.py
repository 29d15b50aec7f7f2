"""Several sources of proposals that work concurrently, such as a draft on rank 0 and drafts on
other ranks.

They are ordered by how good their proposals are expected to be. The first answer to a job is issued
at once; answers of better members correct it. A member that has ranks of its own and evaluates a
model takes the newest job whenever it becomes idle; the others answer the jobs in between. If a
better member is fast enough to keep the stages busy by itself, proposals of the others would only
displace better ones. They are then held back until its answer, unless one is nearly certain.
Answers that have come by then are merged as those of a cascade.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from msgspec import Struct, field, structs

from pipeinfer.core.drafting import FeedDraft, StartDraft
from pipeinfer.runtime.draft_worker import Drafts
from pipeinfer.runtime.remote_draft import RemoteDraft
from pipeinfer.scheduler.events import Drafted
from pipeinfer.strategies.proposers.cascade import merged
from pipeinfer.strategies.proposers.track_record import TrackRecord, certain

_REMEMBERED = 256  #: jobs
_KEEPS_UP = 2.0  #: slowest draft that is waited for, in times of the slowest stage
_FEW_ROWS = 8  #: jobs with more rows do not count in the measured time of a proposal
_UNTRIED = 0.5  #: part of its claims that a model is taken to be worth before it has shown more
_EVERY = 8  #: jobs after which the time of the stages is read again


class _Member(Struct):
    """A source of proposals. One that is not `remote` gets every job at once.

    remote: it has ranks of its own, and evaluates a model
    next: the jobs that `remote` takes when it is idle: the newest, and before it those that no
        other member answers
    due: jobs that it will answer
    seconds: measured, of one proposal
    """

    draft: Drafts
    remote: RemoteDraft | None = None
    next: deque[StartDraft] = field(default_factory=deque)
    due: set[int] = field(default_factory=set)
    seconds: float = 0.0

    def go_on(self) -> None:
        """Start the next job if the last one is done."""
        if self.next and self.remote is not None and self.remote.idle:
            self.draft.start(self.next.popleft())

    def take(self) -> Drafted | None:
        """Return a result, or None; learn from it how fast the member is."""
        found = self.draft.take()
        if found is not None:
            self.due.discard(found.job_id)
            if 0 < found.rows <= _FEW_ROWS:  # rows: proposals, and accepted tokens to evaluate
                seconds = found.seconds / found.rows
                before = self.seconds or seconds
                self.seconds = before + (seconds - before) / _EVERY
        return found

    def stop(self, job_id: int) -> None:
        """Withdraw a job."""
        self.due.discard(job_id)
        kept = deque(job for job in self.next if job.job_id != job_id)
        if len(kept) < len(self.next):
            self.next = kept
        else:
            self.draft.stop(job_id)


class _DraftJob(Struct):
    """A job and the answers to it so far.

    held: not returned yet
    chance: that its first proposal is right
    by: the best member that has answered; -1: none
    """

    job: StartDraft
    held: Drafted | None = None
    chance: float = 0.0
    by: int = -1
    answered: bool = False


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
        self._asked: OrderedDict[int, _DraftJob] = OrderedDict()
        self._record = TrackRecord([
            1.0 if one.free or one is drafts[-1] else _UNTRIED for one in drafts])
        self._released: deque[Drafted] = deque()  # held until members were given another job

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
        for one in self._members:
            if one.due:
                one.draft.lose(why)

    def start(self, job: StartDraft) -> None:
        """Give the job to all members."""
        if self._count % _EVERY == 0:
            self._slot = self.slot()
        self._count += 1
        self._record.settle(job)
        self._asked[job.job_id] = _DraftJob(job)
        if len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        for one in self._members:
            one.due.add(job.job_id)
            if one.remote is None:
                one.draft.start(job)
                continue
            if one.next and self._without(one, one.next[-1].job_id):
                before = one.next.pop().job_id
                one.due.discard(before)
                self._release(before)
            one.next.append(job)
            one.go_on()

    def stop(self, job_id: int) -> None:
        """Withdraw a job from all members."""
        for one in self._members:
            one.stop(job_id)
        self._asked.pop(job_id, None)
        self._released = deque(one for one in self._released if one.job_id != job_id)

    def feed(self, rows: FeedDraft) -> None:
        """Give the rows to all members; those that read none ignore them."""
        for one in self._members:
            one.draft.feed(rows)

    def take(self) -> Drafted | None:
        """Return the next result, or None.

        `more` is set in a result that another may follow, `further` in those that follow a first.
        """
        if self._released:
            return self._released.popleft()
        for k, one in enumerate(self._members):
            while (found := one.take()) is not None:
                one.go_on()
                if (answer := self._answer(k, found)) is not None:
                    return answer
            one.go_on()
        return None

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to do."""
        return bool(self._released) or any(
            one.draft.has_news or (bool(one.next) and one.remote is not None
                                   and one.remote.idle) for one in self._members)

    def close(self, timeout: float) -> None:
        """Close all members, each within `timeout` seconds."""
        for one in self._members:
            one.draft.close(timeout)

    def _answer(self, k: int, found: Drafted) -> Drafted | None:
        """Return what the result of member `k` makes the answer; None: nothing, or not yet."""
        asked = self._asked.get(found.job_id)
        if asked is None:
            return None  # withdrawn
        self._record.add(k, asked.job, found.proposals)
        if asked.answered:
            if k < asked.by or not found.proposals:
                return None
            asked.by = k
            return structs.replace(found, further=True, more=bool(self._due(found.job_id, k)))
        held, best = asked.held or Drafted(found.job_id, ()), k > asked.by
        ours = self._record.judged(k, asked.job, found.proposals)
        theirs = held.proposals, asked.chance
        pair = (theirs, ours) if best else (ours, theirs)
        proposals, asked.chance = merged(*pair, asked.job)
        asked.held = structs.replace(found if best else held, proposals=proposals)
        asked.by = max(asked.by, k)
        return self._settle(asked)

    def _settle(self, asked: _DraftJob) -> Drafted | None:
        """Return the answer that is held, unless it is worth while to wait for another."""
        found, job_id = asked.held, asked.job.job_id
        if found is None:
            return None
        better = self._due(job_id, asked.by)
        if not found.proposals:
            if self._due(job_id):
                return None
        elif not certain((found.proposals, asked.chance), asked.job) and any(
                self._keeps_up(k) for k in better):
            return None
        asked.held, asked.answered = None, True
        for one in self._members[:asked.by]:
            one.stop(job_id)
        return structs.replace(found, more=bool(better))

    def _release(self, job_id: int) -> None:
        """Return what is held of a job, if the members that were waited for will not answer it."""
        asked = self._asked.get(job_id)
        if asked is not None and (found := self._settle(asked)) is not None:
            self._released.append(found)

    def _without(self, one: _Member, job_id: int) -> bool:
        """Whether a job has an answer, or gets one, without this member."""
        asked = self._asked.get(job_id)
        return asked is None or asked.answered or asked.held is not None or any(
            job_id in other.due for other in self._members if other is not one)

    def _due(self, job_id: int, above: int = -1) -> list[int]:
        """Return the members better than `above` that will answer a job."""
        return [k for k, one in enumerate(self._members) if k > above and job_id in one.due]

    def _keeps_up(self, k: int) -> bool:
        """Whether member `k` is fast enough that others' proposals would displace better ones."""
        return not self._slot or self._members[k].seconds < _KEEPS_UP * self._slot
