"""The permissions and limits of API keys. Uses lines of key files and times, no HTTP."""

from __future__ import annotations

import hashlib
import math
from contextvars import ContextVar

from msgspec import Struct

from pipeinfer.errors import UsageError

SCOPES = ("ask", "watch", "change")
_MOST = 1_000_000
_NUMBERS = {"requests-per-minute": ("per_minute", _MOST), "at-once": ("at_once", _MOST),
            "tokens-per-minute": ("tokens_per_minute", 1_000_000_000),
            "connections": ("connections", _MOST)}  #: to the field, and the highest value
LIMIT_HEADERS = [f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens")
                 for name in ("limit", "remaining", "reset")]


class Allowance(Struct, frozen=True):
    """The permissions of one key. 0 means no limit.

    scopes: "ask" for answers, "watch" the server, "change" its state.
    per_minute, at_once: requests for answers.
    tokens_per_minute: of prompts and answers.
    connections: open requests of any kind.
    """

    scopes: tuple[str, ...] = SCOPES
    per_minute: int = 0
    at_once: int = 0
    tokens_per_minute: int = 0
    connections: int = 0


def parse_line(line: str, where: str) -> tuple[str, Allowance]:
    """Return the key of a line of a key file, and its permissions: `KEY scopes=ask at-once=2`.

    A line without `NAME=VALUE` after its first word is a key as a whole.
    where: file and line number, for messages, which never show a key.
    Raises UsageError.
    """
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
            field, most = _NUMBERS[name]
            if not (value.isascii() and value.isdigit() and len(value) < 11
                    and 1 <= int(value) <= most):
                raise UsageError(f"{where}: {name} is a whole number from 1 to {most}")
            found[field] = int(value)
        else:
            raise UsageError(f"{where}: word {number} is none of scopes=, "
                             f"{', '.join(f'{known}=' for known in _NUMBERS)}")
    return key, Allowance(**found)  # type: ignore[arg-type]


class Bucket:
    """A token bucket: an amount per minute, of which at most one minute's is saved. Times are
    those of the caller's clock."""

    def __init__(self, per_minute: int) -> None:
        self.size = per_minute
        self._left, self._seen = float(per_minute), 0.0

    def left(self, now: float) -> float:
        """Return the amount that is left, negative if more was used."""
        if self._seen:
            gained = max(0.0, now - self._seen) * self.size / 60.0
            self._left = min(self._left + gained, float(self.size))
        self._seen = now
        return self._left

    def take(self, amount: float, now: float) -> None:
        """Use an amount, even if less is left."""
        if self.size:
            self._left = self.left(now) - amount

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until the amount is available, 0 if it is."""
        if not self.size:
            return 0.0
        return max(0.0, amount - self.left(now)) * 60.0 / self.size

    def refill(self, now: float) -> float:
        """Return the seconds until the bucket is full."""
        return self.wait(self.size, now)


class Meter:
    """The usage of a key.

    number: of the key, from 1: prompt lookup may copy from answers to the same key. open: its
        running requests for answers. connected: its open requests of any kind. salt: of its
        prompts, with `separate_keys`.

    A key may save up a minute's requests and tokens, and use them at once. Tokens are counted when
    they exist, so a request may use more than were left; then the next one waits.
    """

    def __init__(self, allowance: Allowance, number: int = 1) -> None:
        self.number, self.salt = number, b""
        self.allowance, self.open, self.connected = allowance, 0, 0
        self.requests = Bucket(allowance.per_minute)
        self.tokens = Bucket(allowance.tokens_per_minute)

    def allow(self, allowance: Allowance, number: int) -> None:
        """Let the key do this from now on. What it has used counts on while its limits stay."""
        self.number = number
        if allowance != self.allowance:
            self.allowance = allowance
            self.requests = Bucket(allowance.per_minute)
            self.tokens = Bucket(allowance.tokens_per_minute)

    def wait(self, now: float) -> float:
        """Return the seconds until one more request may come; if 0, it is counted."""
        seconds = max(self.requests.wait(1.0, now), self.tokens.wait(1.0, now))
        if not seconds:
            self.requests.take(1.0, now)
        return seconds

    def used(self, tokens: int, now: float) -> None:
        """Count tokens of a prompt or an answer."""
        self.tokens.take(tokens, now)

    @property
    def at_request_limit(self) -> bool:
        """Whether the most allowed requests for answers run."""
        return 0 < self.allowance.at_once <= self.open

    @property
    def at_connection_limit(self) -> bool:
        """Whether the most allowed requests are open."""
        return 0 < self.allowance.connections <= self.connected

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """Return the headers with the remaining amounts, as in OpenAI's API."""
        return [(f"x-ratelimit-{name}-{what}".encode(), value.encode())
                for what, bucket in (("requests", self.requests), ("tokens", self.tokens))
                if bucket.size
                for name, value in (
                    ("limit", str(bucket.size)),
                    ("remaining", str(max(0, int(bucket.left(now))))),
                    ("reset", duration(bucket.refill(now))))]


#: of the key with which this task's request came
METER: ContextVar[Meter] = ContextVar("meter")
NO_KEY = Meter(Allowance())  #: where there is none


def digest(key: bytes) -> bytes:
    """Return what stands for a key where the key itself must not be stored."""
    return hashlib.blake2b(key, digest_size=16).digest()


def duration(seconds: float) -> str:
    """Format seconds as in `x-ratelimit-reset-requests`: 59s, 1m0s, 250ms."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
