"""Where the last tokens of a path came up before in texts, by the longest run that agrees.

Every run of 1 to `SEEDS` tokens leads to the places where it ended lately; from there the longest
agreement is found by comparing backwards. That finds what a suffix automaton would, but for places
that are older than the last `PLACES` of their run, in memory that is bounded and with a cost per
token that does not depend on the texts. This module knows no models and no lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

SEEDS = 4  #: tokens of the longest run that is looked up
PLACES = 16  #: places that are remembered of each run
LONGEST = 64  #: tokens that are compared at most


class Match(Struct, frozen=True):
    """Places that continue a path, the one that agrees longest first, then the newest.

    text, start: the text of the first place, and the index of the token that follows there.
    length: tokens that agree at the first. followers: the token that follows each place, other ones
    once. agreed: whether the same token follows at all of them, and there are several; None for a
    single place.
    """

    text: Sequence[int]
    start: int
    length: int
    followers: tuple[int, ...]
    agreed: bool | None


class TextIndex(Struct):
    """The tokens of texts, each of which only grows. tokens: by the text's number."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    _places: dict[tuple[int, ...], list[tuple[int, int]]] = field(default_factory=dict)

    def append(self, token: int, text: int = 0) -> None:
        """A text goes on with this token."""
        tokens = self.tokens.setdefault(text, [])
        tokens.append(token)
        end = len(tokens)
        for size in range(1, min(SEEDS, end) + 1):
            places = self._places.setdefault(tuple(tokens[end - size:]), [])
            places.append((text, end))
            del places[:-PLACES]

    def find(self, path: Sequence[int], without: int | None = None) -> Match | None:
        """Where the end of `path` (its last `LONGEST` tokens are enough) was followed by
        something. None where its last token is new. without: a text that is left out."""
        texts = self.tokens
        for size in range(min(SEEDS, len(path)), 0, -1):
            places = [(text, end) for text, end in self._places.get(tuple(path[-size:]), ())
                      if text != without and end < len(texts[text])]
            if places:
                break
        else:
            return None
        found = [(_agreement(path, texts[text], end, size), k)
                 for k, (text, end) in enumerate(places)]
        found.sort(reverse=True)
        length, best = found[0]
        followers = dict.fromkeys(
            texts[text][end] for text, end in (places[k] for _, k in found))
        text, end = places[best]
        return Match(texts[text], end, length, tuple(followers),
                     None if len(places) == 1 else len(followers) == 1)


def _agreement(path: Sequence[int], text: Sequence[int], end: int, known: int) -> int:
    """How many tokens before `end` of the text agree with the end of `path`; the last `known`
    do."""
    most = min(LONGEST, len(path), end)
    while known < most and text[end - 1 - known] == path[-1 - known]:
        known += 1
    return known
