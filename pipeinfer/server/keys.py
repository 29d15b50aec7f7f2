"""What a key may do, and how often. Knows lines of key files and times, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.errors import UsageError

SCOPES = ("ask", "watch", "change")
_MOST = 1_000_000
_NUMBERS = {"requests-per-minute": "per_minute", "at-once": "at_once"}


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one key may do. scopes: "ask" for answers, "watch" the server, "change" what it does;
    per_minute, at_once: requests for answers, 0 for any number."""

    scopes: tuple[str, ...] = SCOPES
    per_minute: int = 0
    at_once: int = 0


def parse_line(line: str, where: str) -> tuple[str, Allowance]:
    """The key of a line of a key file, and what follows it: `KEY scopes=ask at-once=2`. A line
    without `NAME=VALUE` after its first word is a key as it is. where: file and number of the line,
    for messages, which never show a key. Raises UsageError."""
    key, *words = line.split()
    if not any("=" in word for word in words):
        return line, Allowance()
    found: dict[str, tuple[str, ...] | int] = {}
    for number, word in enumerate(words, 2):
        name, equals, value = word.partition("=")
        if name == "scopes" and equals:
            scopes = tuple(dict.fromkeys(value.split(",")))
            if not set(scopes) <= set(SCOPES):
                raise UsageError(f"{where}: scopes are some of {','.join(SCOPES)}, separated by "
                                 "commas")
            found["scopes"] = scopes
        elif name in _NUMBERS and equals:
            if not (value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= _MOST):
                raise UsageError(f"{where}: {name} is a whole number from 1 to {_MOST}")
            found[_NUMBERS[name]] = int(value)
        else:
            raise UsageError(f"{where}: word {number} is none of scopes=, "
                             f"{', '.join(f'{known}=' for known in _NUMBERS)}")
    return key, Allowance(**found)  # type: ignore[arg-type]


class Meter:
    """How much of its allowance a key has used. Times are those of the caller's clock.

    A key may save up a minute's requests: those may come at once.
    """

    def __init__(self, allowance: Allowance) -> None:
        self.allowance, self.open = allowance, 0
        self._left, self._seen = float(allowance.per_minute), 0.0

    def wait(self, now: float) -> float:
        """Seconds until one more request may come; 0: it may come now, and counts."""
        each = self.allowance.per_minute / 60.0
        if not each:
            return 0.0
        if self._seen:
            self._left = min(self._left + (now - self._seen) * each,
                             float(self.allowance.per_minute))
        self._seen = now
        if self._left < 1.0:
            return (1.0 - self._left) / each
        self._left -= 1.0
        return 0.0

    @property
    def full(self) -> bool:
        """Whether as many requests run as may."""
        return 0 < self.allowance.at_once <= self.open
