"""When a job is started again, and what its end was: decisions without a clock or a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

SUCCESS = 600.0  #: seconds of life after which the tries are counted anew
ALIVE = 20.0  #: seconds of life after which a failure is none of the start
LONGEST = 30.0  #: seconds between two tries, at most
INTERRUPTED = 130
_NEVER_AGAIN = (0, 2, INTERRUPTED)  #: a normal end, what cannot be used as it is, an interrupt
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Again:
    """Try again after `pause` seconds; `left` more times after that."""

    pause: float
    left: int


@dataclass(frozen=True, slots=True)
class End:
    """Try no more. used_up: only because no try is left."""

    used_up: bool = False


Verdict: TypeAlias = Again | End


class Patience:
    """How often a job that fails is started again: after 1, 2, 4 ... 30 s, or after 1 s when it
    has lived for 20; ten minutes of life count as a success."""

    def __init__(self, restarts: int) -> None:
        self._restarts = self._left = restarts
        self._pause = 1.0

    def after(self, status: int, lived: float, *, asked: bool) -> Verdict:
        """What follows a job that ended with `status` after `lived` seconds. asked: by somebody."""
        if asked or status in _NEVER_AGAIN:
            return End()
        if lived >= SUCCESS:
            self._left, self._pause = self._restarts, 1.0
        elif lived >= ALIVE:
            self._pause = 1.0  # it was no failure to start, and clients wait
        if self._left <= 0:
            return End(used_up=self._restarts > 0)
        self._left -= 1
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST)
        return Again(pause, self._left)


def outcome(launcher: int, said: str, *, asked: bool) -> int:
    """The job's exit status. launcher: the launcher's; said: what rank 0 left behind ("up" and its
    process id while it lives, then its own exit status); asked: whether somebody ended the job.

    Where a job survives deaths, the launcher says nothing of rank 0's.
    """
    word = said.split()[0] if said.split() else ""
    if word.isdigit():
        return int(word)
    status = launcher if launcher >= 0 else 128 - launcher  # a signal's number, as a shell has it
    if status == 0 and asked:
        return INTERRUPTED
    return 1 if status == 0 and word else status


class Comeback:
    """When hosts that are missing are asked whether they are there again.

    Every `every` seconds; one that keeps getting lost is left alone for longer after each loss, up
    to an hour, since each move costs a pause. Times are those of the caller's clock.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._due: dict[str, float] = {}
        self._losses: dict[str, int] = {}

    def missing(self, host: str, now: float) -> None:
        """A host is not in the job; harmless to say again."""
        if host not in self._due:
            count = self._losses[host] = self._losses.get(host, 0) + 1
            self._due[host] = now + min(self._every * 2 ** (count - 1), max(_HOUR, self._every))

    def present(self, host: str) -> None:
        """A host is in the job."""
        self._due.pop(host, None)

    def due(self, now: float) -> list[str]:
        """The hosts to ask now; they are due again after the usual time."""
        if self._every <= 0:
            return []
        found = [host for host, due in self._due.items() if due <= now]
        for host in found:
            self._due[host] = now + self._every
        return found

    def soon(self, now: float) -> None:
        """Somebody wants to know: every missing host is due."""
        self._due = dict.fromkeys(self._due, now)
