"""Decides when a job starts again, what its end means, when missing hosts are checked, and what
changed options do, without a clock or processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeinfer.config import options

SUCCESS = 600.0  #: seconds of life after which all restarts are available again
ALIVE = 20.0  #: seconds of life after which a failure does not count as a failed start
LONGEST = 30.0  #: most seconds between two starts
INTERRUPTED = 130
_NEVER_AGAIN = (0, 2, INTERRUPTED)  #: a normal end, what cannot be used as it is, an interrupt
_HOUR, _DAY = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """Limits restarts of a failing job. The pauses are 1, 2, 4 ... 30 s; 1 s if the job has run
    for 20 s. After ten minutes the job counts as successful, and all restarts are available
    again."""

    restarts: int
    left: int
    pause: float

    @classmethod
    def of(cls, restarts: int) -> RestartBudget:
        """Return the budget of a first start."""
        return cls(restarts, restarts, 1.0)

    def after(self, status: int, lived: float) -> tuple[RestartBudget, float | None]:
        """Return the budget after a job that ended with `status` after `lived` seconds, and the
        seconds until the next start; None if there is none."""
        left = self.restarts if lived >= SUCCESS else self.left
        # after a longer life it was no failure to start, and clients wait
        pause = 1.0 if lived >= ALIVE else self.pause
        if status in _NEVER_AGAIN or left <= 0:
            return self, None
        return RestartBudget(self.restarts, left - 1, min(2 * pause, LONGEST)), pause

    def used_up(self, status: int) -> bool:
        """Whether only the number of restarts kept such a job from another start."""
        return self.restarts > 0 and status not in _NEVER_AGAIN


def outcome(launcher: int, said: str, *, asked: bool) -> int:
    """Return the job's exit status.

    launcher: the launcher's exit status.
    said: the status file of rank 0 ("up" and its process id while it lives, then its exit status).
    asked: whether the user has ended the job.
    Where a job survives deaths, the launcher does not report that of rank 0.
    """
    word = said.split()[0] if said.split() else ""
    if word.isdigit():
        return int(word)
    status = launcher if launcher >= 0 else 128 - launcher  # a signal's number, as a shell has it
    if status == 0 and asked:
        return INTERRUPTED
    return 1 if status == 0 and word else status


@dataclass(slots=True)
class MissingHost:
    """A host that is not in the job.

    entry: its line of the hostfile, None for this host. due: when it is checked next.
    why: it cannot take ranks, "" if that is unknown or it can. back: since when it can, None.
    """

    entry: Any
    due: float
    why: str = ""
    back: float | None = None


class MissingHosts:
    """The hosts that are not in the job, and when each is checked.

    Checks are `every` seconds apart. With each loss of the same host its first check comes later,
    up to an hour after the loss, since each move costs a pause; a day without a loss makes it a new
    host again. new_hosts: whether a host that is missing for the first time is checked at once.
    Times are those of the caller's clock.
    """

    def __init__(self, every: float, *, new_hosts: bool = False) -> None:
        self.hosts: dict[str, MissingHost] = {}
        self._every, self._new_hosts = every, new_hosts
        self._losses: dict[str, tuple[int, float]] = {}  # their number, and when the last one was

    def update(self, missing: Mapping[str, Any], why: Mapping[str, str], now: float) -> None:
        """Record which hosts are missing now, with their entries, and why as far as the last start
        knows it."""
        self.hosts = {host: self.hosts.get(host) or MissingHost(
            entry, self._first_check(host, now)) for host, entry in missing.items()}
        for host, one in self.hosts.items():
            one.why = one.why or why.get(host, "") if one.back is None else ""

    def _first_check(self, host: str, now: float) -> float:
        count, last = self._losses.get(host, (0, now))
        count = count + 1 if now - last < _DAY else 1
        self._losses[host] = count, now
        pause = min(self._every * 2 ** (count - 1), max(_HOUR, self._every))
        return now + (0.0 if self._new_hosts and count == 1 else pause)

    def due(self, now: float) -> dict[str, MissingHost]:
        """Return the hosts to check now; they are due again after `every` seconds."""
        found = {host: one for host, one in self.hosts.items() if one.due <= now and self._every}
        for one in found.values():
            one.due = now + self._every
        return found

    @property
    def back(self) -> list[float]:
        """Since when each of those can take ranks that can."""
        return [one.back for one in self.hosts.values() if one.back is not None]

    def take_back(self) -> None:
        """Count those that are back as in the job; if the move has failed, each is lost anew."""
        self.hosts = {host: one for host, one in self.hosts.items() if one.back is None}


def affects_tokens(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the options that differ and on which tokens of an open request may depend. Keys,
    limits and sampling affect later requests only."""
    later = options("serve", "sampling", "request")
    same = {name for name, option in options().items() if not option.changes_tokens}
    names = {name for name in {*old, *new} if old.get(name) != new.get(name)}
    return sorted(names - same - set(later))


def fixed_options(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return an error text if options differ that belong to the HTTP process, which a new job
    does not replace; else ""."""
    differ = {name: option for name, option in options("serve").items()
              if option.fixed and old.get(name) != new.get(name)}
    if not differ:
        return ""
    as_now = " ".join(option.given(name, old[name]) for name, option in differ.items())
    called = ", ".join(option.called(name) for name, option in differ.items())
    return (f"{called} cannot change while the HTTP process keeps its clients: "
            f"give {as_now} as before, or `pipeinfer down` and `pipeinfer up` with other ones")


def is_wide(values: Mapping[str, Any]) -> bool:
    """Whether layers are cut into slices: another number of ranks may cut them differently."""
    return bool(values["grid"] or values["slices"])
