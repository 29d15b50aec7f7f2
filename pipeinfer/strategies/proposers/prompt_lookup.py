"""Proposals copied from the text itself: what followed the last time these tokens came up.

Looks for the longest run of tokens that ends the path and occurs earlier in it (prompt and
output), most recent first, and proposes what followed there; other continuations become
alternatives. It costs no model, and pays where text repeats: code, summaries, edits
of a given text (known as prompt lookup or n-gram speculation). This module knows no model, cache
or thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.strategies.spec import ProposerSpec

_LANES = 32  #: lanes whose index is kept
#: how likely a continuation is right, by the number of tokens that agree; learnt corrections are
#: the scheduler's (calibration)
_CLAIM = {1: 0.25, 2: 0.45, 3: 0.6, 4: 0.7}
_LONGEST_CLAIM = 0.8
_MOST_PLACES = 16  #: places that are remembered of each run of tokens


@dataclass(slots=True)
class _Index:
    """Where each run of 1 to `longest` tokens ends in the accepted text of a lane."""

    longest: int
    length: int = 0
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def grow(self, tokens: Sequence[int], length: int) -> None:
        """Take in `tokens[:length]`, of which the start is known already."""
        for end in range(self.length + 1, length + 1):
            for size in range(1, min(self.longest, end) + 1):
                places = self.places.setdefault(tuple(tokens[end - size : end]), [])
                places.append(end)
                del places[:-_MOST_PLACES]
        self.length = max(self.length, length)


class PromptLookup:
    """A `Proposer`. longest: most tokens that are compared; shortest: least that must agree."""

    free = True

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"cannot compare runs of {shortest} to {longest} tokens")
        self.rows_evaluated = 0
        self._longest, self._shortest = longest, shortest
        self._lanes: dict[int, _Index] = {}

    def propose(self, job: StartDraft, stopped: Callable[[], bool]
                ) -> tuple[Proposal, ...] | None:
        """See `Proposer.propose`."""
        del stopped
        index = self._lanes.pop(job.lane, None) or _Index(self._longest)
        self._lanes[job.lane] = index  # the last one used is the last to go
        while len(self._lanes) > _LANES:
            del self._lanes[next(iter(self._lanes))]
        index.grow(job.accepted, job.base)
        if job.max_tokens <= 0 or job.max_depth <= 0:
            return ()
        path = [*job.accepted[max(0, job.base - self._longest) : job.base], *job.suffix]
        for size in range(min(self._longest, len(path)), self._shortest - 1, -1):
            ends = [end for end in index.places.get(tuple(path[-size:]), ())
                    if end < job.base + len(job.suffix)]
            if ends and (found := self._continue(job, ends[::-1], size)):
                return found
        return ()

    def close(self) -> None:
        """See `Proposer.close`."""
        self._lanes.clear()

    def _continue(self, job: StartDraft, ends: list[int], size: int) -> tuple[Proposal, ...]:
        """What followed the most recent place, and what else followed, as alternatives."""
        claim = _CLAIM.get(size, _LONGEST_CLAIM)
        if claim < job.p_min:
            return ()
        tokens = job.accepted
        chain: list[Proposal] = []
        start = next((end for end in ends if end < job.base), None)
        if start is None:
            return ()
        for at in range(start, min(start + min(job.max_tokens, job.max_depth), job.base)):
            if tokens[at] in job.stop_ids:
                break
            chain.append(Proposal(at - start - 1, tokens[at], claim))
        if not chain:
            return ()
        others = dict.fromkeys(tokens[end] for end in ends if end < job.base)
        alternatives = [token for token in others
                  if token != chain[0].token and token not in job.stop_ids][: job.alternatives]
        left = 1.0 - claim
        return (*chain, *(Proposal(-1, token, left / (k + 2), alternative=True)
                          for k, token in enumerate(alternatives)))


SPEC = ProposerSpec("prompt-lookup", "what followed when the same tokens came up before",
                    worker=lambda _: [PromptLookup()])
