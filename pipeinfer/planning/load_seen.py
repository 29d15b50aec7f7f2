"""Observes the load of a pipeline: concurrent requests, prompt rows and tokens, while it worked.

Pure: callers pass times and counts.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct, field

from pipeinfer.core.policy import Policy
from pipeinfer.planning.judge import LoadMix

_STEP = 20.0  #: seconds of work between two marks
_MARKS = 10  #: stored marks: the load before the oldest does not count
_ALIKE = 1.25  #: loads whose streams and prompts are within this factor can be compared
_FEW_TOKENS = 64  #: fewer give no speed


class Seen(Struct, frozen=True):
    """Sums over a period: seconds with runs in flight, streams times seconds, prompt rows,
    output tokens."""

    busy: float = 0.0
    streams: float = 0.0
    prompts: float = 0.0
    tokens: int = 0

    def since(self, then: Seen) -> Seen:
        """Return the part after `then`."""
        return Seen(self.busy - then.busy, self.streams - then.streams,
                    self.prompts - then.prompts, self.tokens - then.tokens)

    @property
    def speed(self) -> float:
        """Tokens per second of work, 0 if there were too few tokens."""
        return self.tokens / self.busy if self.tokens >= _FEW_TOKENS and self.busy > 0 else 0.0

    def mix(self, policy: Policy, acceptance: float) -> LoadMix:
        """Return the observed load as a load to plan for."""
        streams = max(1, round(self.streams / self.busy)) if self.busy > 0 else 1
        prompts = self.prompts / self.tokens if self.tokens > 0 else 0.0
        return LoadMix(policy, streams, prompts, acceptance)

    def like(self, other: Seen) -> bool:
        """Whether both loads are so similar that their speeds can be compared."""
        if not self.speed or not other.speed:
            return False
        one, two = (seen.mix(Policy.ITERATIVE, 0.0) for seen in (self, other))
        near = [(one.streams, two.streams), (1 + one.prompt_rows, 1 + two.prompt_rows)]
        return all(max(pair) <= min(pair) * _ALIKE for pair in near)


class LoadWatch(Struct):
    """Sums up the load; must be called at every change of the runs in flight. worked: seconds
    with runs in flight since the beginning."""

    worked: float = 0.0
    _sum: Seen = field(default_factory=Seen)
    _marks: deque[Seen] = field(default_factory=lambda: deque(maxlen=_MARKS))
    _streams: int = 0
    _since: float = 0.0

    def running(self, streams: int, when: float) -> None:
        """Record that from `when` (seconds) on so many requests have runs in flight."""
        passed = max(0.0, when - self._since) if self._streams else 0.0
        self._sum = Seen(self._sum.busy + passed, self._sum.streams + passed * self._streams,
                         self._sum.prompts, self._sum.tokens)
        self._streams, self._since = streams, when
        self.worked += passed

    def prompt(self, rows: int) -> None:
        """Record prompt rows that were issued."""
        self._sum = Seen(self._sum.busy, self._sum.streams, self._sum.prompts + rows,
                         self._sum.tokens)

    def lately(self, tokens: int) -> Seen:
        """Return the load of the last minutes of work. tokens: output tokens so far."""
        now = Seen(self._sum.busy, self._sum.streams, self._sum.prompts, tokens)
        if not self._marks:
            self._marks.append(Seen())
        found = now.since(self._marks[0])
        if now.busy - self._marks[-1].busy >= _STEP:
            self._marks.append(now)
        return found

    def restart(self, tokens: int) -> None:
        """Discard the past, because the stages have changed."""
        self._sum = Seen(tokens=tokens)
        self._marks.clear()
        self._marks.append(self._sum)
