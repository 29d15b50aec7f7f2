"""Two drafts at work at once: a quick one's guesses go out at once, a better one's correct them.

The better one always has the newest job that it can begin with: where it is slower, jobs between
are answered by the quick one alone. Knows no models.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from pipeinfer.core.drafting import StartDraft
from pipeinfer.runtime.draft_worker import Drafts
from pipeinfer.runtime.remote_draft import RemoteDraft
from pipeinfer.scheduler.events import Drafted

_REMEMBERED = 64  #: jobs


class DraftTeam:
    """See the module docstring, and `Drafts`."""

    local = True

    def __init__(self, quick: Drafts, better: RemoteDraft) -> None:
        self.free = quick.free
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
        self._quick.start(job)
        self._next = job
        self._go_on()

    def stop(self, job_id: int) -> None:
        """Nobody's answer is wanted any more."""
        self._quick.stop(job_id)
        if self._next is not None and self._next.job_id == job_id:
            self._next = None
        self._better.stop(job_id)

    def take(self) -> Drafted | None:
        """The next answer; where a job gets two, the first says so."""
        while (found := self._quick.take()) is not None:
            if found.job_id in self._answered:
                continue
            awaited = self._awaited(found.job_id)
            if found.proposals or not awaited:
                self._note(found.job_id)
                return dataclasses.replace(found, more=awaited)
        while (found := self._better.take()) is not None:
            self._go_on()
            if found.job_id not in self._answered:
                self._note(found.job_id)
                self._quick.stop(found.job_id)
                return found
            if found.proposals:
                return dataclasses.replace(found, further=True)
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

    def _awaited(self, job_id: int) -> bool:
        """Whether the better one will answer it, too."""
        at = not self._better.idle and self._at == job_id
        return at or (self._next is not None and self._next.job_id == job_id)

    def _note(self, job_id: int) -> None:
        self._answered[job_id] = None
        if len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)
