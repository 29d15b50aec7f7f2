"""Two drafts that work concurrently: a quick one on rank 0 and a better one on draft ranks.

Proposals of the quick draft are issued at once; those of the better draft correct them. The better
draft always takes the newest job when it becomes idle; jobs in between are answered by the quick
draft alone. If the better draft is fast enough to keep the stages busy by itself, proposals of the
quick draft would only displace better ones. They are then held back until the better draft returns
nothing, unless their confidence is at least `SURE`. Of a job for trees both answers are merged.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from msgspec import structs

from pipeinfer.core.drafting import SURE, FeedDraft, StartDraft
from pipeinfer.runtime.draft_worker import Drafts
from pipeinfer.runtime.remote_draft import RemoteDraft
from pipeinfer.scheduler.events import Drafted
from pipeinfer.strategies.proposers.cascade import merged_trees

_REMEMBERED = 64  #: jobs
_KEEPS_UP = 2.0  #: slowest draft that is waited for, in times of the slowest stage
_FEW_ROWS = 8  #: jobs with more rows do not count in the measured time of a proposal
_EVERY = 8  #: jobs after which the time of the stages is read again


class DraftTeam:
    """Combines two drafts behind the interface `Drafts`; see the module docstring.

    slot: returns the seconds that the slowest stage takes for a run, 0 if unknown.
    """

    local = True
    free = False

    def __init__(self, quick: Drafts, better: RemoteDraft) -> None:
        self.slot: Callable[[], float] = lambda: 0.0
        self._slot, self._asked, self._guess_seconds = 0.0, 0, 0.0
        self._held: dict[int, Drafted] = {}
        self._released: deque[Drafted] = deque()  # held until another job took the place of theirs
        self._quick, self._better = quick, better
        self._next: StartDraft | None = None
        self._at: StartDraft | None = None  #: the better draft's job
        self._answered: OrderedDict[int, None] = OrderedDict()

    @property
    def busy_seconds(self) -> float:
        """Seconds of computation on rank 0. The better draft computes on other ranks."""
        return self._quick.busy_seconds

    @property
    def better(self) -> RemoteDraft:
        """The draft that has ranks of its own."""
        return self._better

    def start(self, job: StartDraft) -> None:
        """Give the job to both drafts."""
        if self._asked % _EVERY == 0:
            self._slot = self.slot()
        self._asked += 1
        self._quick.start(job)
        if self._next is not None and (held := self._held.pop(self._next.job_id, None)):
            self._released.append(held)  # the better draft will not answer it
        self._next = job
        self._go_on()

    def stop(self, job_id: int) -> None:
        """Withdraw a job from both drafts."""
        self._quick.stop(job_id)
        self._held.pop(job_id, None)
        self._released = deque(one for one in self._released if one.job_id != job_id)
        if self._next is not None and self._next.job_id == job_id:
            self._next = None
        self._better.stop(job_id)

    def feed(self, rows: FeedDraft) -> None:
        """Give the rows to both drafts; those without a head ignore them."""
        self._quick.feed(rows)
        self._better.feed(rows)

    def take(self) -> Drafted | None:
        """Return the next result, or None.

        `more` is set in a first result that a second will follow, `further` in that second one.
        """
        if self._released:
            late = self._released.popleft()
            self._note(late.job_id)
            return late
        while (found := self._quick.take()) is not None:
            if found.job_id in self._answered:
                continue
            awaited = self._awaited(found.job_id)
            if awaited and not _sure(found) and (self._waits or not found.proposals):
                self._held[found.job_id] = found
                continue
            self._note(found.job_id)
            return structs.replace(found, more=awaited)
        while (found := self._better.take()) is not None:
            job = self._at
            self._learn(found)
            self._go_on()
            if found.job_id not in self._answered:
                held = self._held.pop(found.job_id, None)
                if held is None and not found.proposals:
                    continue  # the quick draft may still return some
                self._note(found.job_id)
                self._quick.stop(found.job_id)
                return _together(held, found, job)
            if found.proposals:
                return structs.replace(found, further=True)
        self._go_on()
        return None

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to do."""
        return bool(self._released) or self._quick.has_news or self._better.has_news or (
            self._next is not None and self._better.idle)

    def close(self, timeout: float) -> None:
        """Close both drafts, each within `timeout` seconds."""
        self._quick.close(timeout)
        self._better.close(timeout)

    def _go_on(self) -> None:
        if self._next is not None and self._better.idle:
            job, self._next = self._next, None
            self._at = job
            self._better.start(job)

    @property
    def _waits(self) -> bool:
        """Whether the better draft is fast enough that quick proposals would displace better
        ones."""
        return not self._slot or self._guess_seconds < _KEEPS_UP * self._slot

    def _learn(self, found: Drafted) -> None:
        if 0 < found.rows <= _FEW_ROWS:  # rows: proposals, and accepted tokens not yet evaluated
            seconds = found.seconds / found.rows
            before = self._guess_seconds or seconds
            self._guess_seconds = before + (seconds - before) / _EVERY

    def _awaited(self, job_id: int) -> bool:
        """Whether the better draft will answer this job as well."""
        at = self._at is not None and not self._better.idle and self._at.job_id == job_id
        return at or (self._next is not None and self._next.job_id == job_id)

    def _note(self, job_id: int) -> None:
        self._answered[job_id] = None
        if len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)


def _together(held: Drafted | None, better: Drafted, job: StartDraft | None) -> Drafted:
    """Return the answer of the two drafts to one job; held: that of the quick one, if it is
    there."""
    if held is None or not better.proposals:
        return held or better
    if job is None or job.branches == 1:
        return better
    return structs.replace(better, proposals=merged_trees((held.proposals, better.proposals), job))


def _sure(found: Drafted) -> bool:
    """Whether the first proposal is so confident that a better draft would hardly differ."""
    return bool(found.proposals) and found.proposals[0].confidence >= SURE
