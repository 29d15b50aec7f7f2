"""Where the last tokens of a path came up before in a text, by the longest run that agrees.

Every run of 1 to `SEEDS` tokens leads to the places where it ended lately; from there the longest
agreement is found by comparing backwards. That finds what a suffix automaton would, but for places
that are older than the last `PLACES` of their run, in memory that is bounded and with a cost per
token that does not depend on the text. This module knows no models and no lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SEEDS = 4  #: tokens of the longest run that is looked up
PLACES = 16  #: places that are remembered of each run
LONGEST = 64  #: tokens that are compared at most


@dataclass(frozen=True, slots=True)
class Match:
    """Places that continue a path, the one that agrees longest first, then the newest.

    ends: index of the token that follows each place. length: tokens that agree at the first.
    agreed: whether the same token follows at all of them, and there are several; None for a single
    place.
    """

    ends: tuple[int, ...]
    length: int
    agreed: bool | None


@dataclass(slots=True)
class TextIndex:
    """The tokens of one text, which only grows."""

    tokens: list[int] = field(default_factory=list)
    _places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def append(self, token: int) -> None:
        """The text goes on with this token."""
        tokens = self.tokens
        tokens.append(token)
        end = len(tokens)
        for size in range(1, min(SEEDS, end) + 1):
            places = self._places.setdefault(tuple(tokens[end - size:]), [])
            places.append(end)
            del places[:-PLACES]

    def find(self, path: Sequence[int]) -> Match | None:
        """Where the end of `path` (its last `LONGEST` tokens are enough) was followed by
        something. None where its last token is new."""
        text = len(self.tokens)
        for size in range(min(SEEDS, len(path)), 0, -1):
            ends = [end for end in self._places.get(tuple(path[-size:]), ()) if end < text]
            if ends:
                break
        else:
            return None
        lengths = {end: self._agreement(path, end, size) for end in ends}
        ends.sort(key=lambda end: (lengths[end], end), reverse=True)
        agreed = None if len(ends) == 1 else len({self.tokens[end] for end in ends}) == 1
        return Match(tuple(ends), lengths[ends[0]], agreed)

    def _agreement(self, path: Sequence[int], end: int, known: int) -> int:
        """How many tokens before `end` agree with the end of `path`; the last `known` do."""
        tokens, most = self.tokens, min(LONGEST, len(path), end)
        while known < most and tokens[end - 1 - known] == path[-1 - known]:
            known += 1
        return known
