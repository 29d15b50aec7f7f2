"""An index of texts that finds where the last tokens of a path occurred before.

Every run of 1 to `SEEDS` tokens leads to the places where it ended last; from there the longest
agreement is found by comparing backwards. The result is that of a suffix automaton, except for
places older than the last `PLACES` of their run, in bounded memory per run and with a cost per
token that does not depend on the texts. Independent of models and lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

SEEDS = 4  #: tokens of the longest run that is looked up
PLACES = 16  #: places that are stored for each run
LONGEST = 64  #: tokens that are compared at most


class Match(Struct, frozen=True):
    """Places that continue a path, the one with the longest agreement first, then the newest.

    text: of the first place
    start: index of the token that follows there
    length: number of tokens that agree at the first place
    followers: the tokens that follow the places, each once
    agreed: whether the same token follows at all of several places; None for a single place
    """

    text: Sequence[int]
    start: int
    length: int
    followers: tuple[int, ...]
    agreed: bool | None


class TextIndex(Struct):
    """The tokens of texts to which tokens are only ever appended.

    tokens: by the text's number
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    _places: dict[tuple[int, ...], list[tuple[int, int]]] = field(default_factory=dict)

    def append(self, token: int, text: int = 0) -> None:
        """Append a token to a text."""
        tokens = self.tokens.setdefault(text, [])
        tokens.append(token)
        end = len(tokens)
        for size in range(1, min(SEEDS, end) + 1):
            places = self._places.setdefault(tuple(tokens[end - size:]), [])
            places.append((text, end))
            del places[:-PLACES]

    def find(self, path: Sequence[int], without: int | None = None) -> Match | None:
        """Return the places where the end of `path` occurred with a token after it.

        path: its last `LONGEST` tokens suffice
        without: number of a text to leave out
        None where there is no such place, even for the last token alone.
        """
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
    """The number of tokens before `end` of the text that agree with the end of `path`.

    known: so many agree already
    """
    most = min(LONGEST, len(path), end)
    while known < most and text[end - 1 - known] == path[-1 - known]:
        known += 1
    return known
