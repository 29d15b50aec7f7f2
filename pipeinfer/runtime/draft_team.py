"""Two drafts at work at once: a quick one's guesses go out at once, a better one's correct them.

The better one always has the newest job that it can begin with: where it is slower, jobs between
are answered by the quick one alone. Where it is quick enough to keep the stages busy by itself, the
other one's guesses would only take up room, and wait until it has nothing to say, unless they are
as good as certain. Knows no models.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from msgspec import structs

from pipeinfer.core.drafting import SURE, StartDraft
from pipeinfer.runtime.draft_worker import Drafts
from pipeinfer.runtime.remote_draft import RemoteDraft
from pipeinfer.scheduler.events import Drafted

_REMEMBERED = 64  #: jobs
_KEEPS_UP = 2.0  #: of the slowest stage's time; so slow may a draft be and still be waited for
_FEW_ROWS = 8  #: at most of a job from which one learns how long a guess takes
_EVERY = 8  #: jobs between two looks at what stages take


class DraftTeam:
    """See the module docstring, and `Drafts`. slot: seconds of the slowest stage for a run, 0 while
    that is not known."""

    local = True
    free = False

    def __init__(self, quick: Drafts, better: RemoteDraft) -> None:
        self.slot: Callable[[], float] = lambda: 0.0
        self._slot, self._asked, self._guess_seconds = 0.0, 0, 0.0
        self._held: dict[int, Drafted] = {}
        self._quick, self._better = quick, better
        self._next: StartDraft | None = None
        self._at = 0  #: the job that the better one has
        self._answered: OrderedDict[int, None] = OrderedDict()

    @property
    def busy_seconds(self) -> float:
        """That rank 0 has worked; the better draft does elsewhere."""
        return self._quick.busy_seconds

    @property
    def better(self) -> RemoteDraft:
        """The one on ranks of its own."""
        return self._better

    def start(self, job: StartDraft) -> None:
        """Ask both for guesses."""
        if self._asked % _EVERY == 0:
            self._slot = self.slot()
        self._asked += 1
        self._quick.start(job)
        self._next = job
        self._go_on()

    def stop(self, job_id: int) -> None:
        """Nobody's answer is wanted any more."""
        self._quick.stop(job_id)
        self._held.pop(job_id, None)
        if self._next is not None and self._next.job_id == job_id:
            self._next = None
        self._better.stop(job_id)

    def take(self) -> Drafted | None:
        """The next answer; where a job gets two, the first says so."""
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
            self._learn(found)
            self._go_on()
            if found.job_id not in self._answered:
                held = self._held.pop(found.job_id, None)
                if held is None and not found.proposals:
                    continue  # the quick one still looks
                self._note(found.job_id)
                self._quick.stop(found.job_id)
                return found if found.proposals or held is None else held
            if found.proposals:
                return structs.replace(found, further=True)
        self._go_on()
        return None

    @property
    def has_news(self) -> bool:
        """Whether `take` would do something."""
        return self._quick.has_news or self._better.has_news or (
            self._next is not None and self._better.idle)

    def close(self, timeout: float) -> None:
        """Release both."""
        self._quick.close(timeout)
        self._better.close(timeout)

    def _go_on(self) -> None:
        if self._next is not None and self._better.idle:
            job, self._next = self._next, None
            self._at = job.job_id
            self._better.start(job)

    @property
    def _waits(self) -> bool:
        """Whether the quick one's guesses would be in the way of better ones."""
        return not self._slot or self._guess_seconds < _KEEPS_UP * self._slot

    def _learn(self, found: Drafted) -> None:
        if 0 < found.rows <= _FEW_ROWS:  # a row for each guess, and for what had to be caught up on
            seconds = found.seconds / found.rows
            before = self._guess_seconds or seconds
            self._guess_seconds = before + (seconds - before) / _EVERY

    def _awaited(self, job_id: int) -> bool:
        """Whether the better one will answer it, too."""
        at = not self._better.idle and self._at == job_id
        return at or (self._next is not None and self._next.job_id == job_id)

    def _note(self, job_id: int) -> None:
        self._answered[job_id] = None
        if len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)


def _sure(found: Drafted) -> bool:
    """Whether a better draft would hardly say anything else."""
    return bool(found.proposals) and found.proposals[0].confidence >= SURE
