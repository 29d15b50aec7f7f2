"""From a specification to the decomposer of one response.

Runs where tokens are decoded: it knows the vocabulary, no chat template, cells, runs or ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from pipeinfer.errors import UsageError
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.strategies.decomposers.apar import Apar
from pipeinfer.strategies.decomposers.base import Decomposer, Specification, Vocabulary
from pipeinfer.strategies.decomposers.pasta import Pasta, Positions, Spacing
from pipeinfer.strategies.decomposers.pdos import Markers, Pdos
from pipeinfer.strategies.decomposers.skeleton import Prompts, Skeleton

METHODS = ("pasta", "pdos", "skeleton", "apar")
_HOLE = re.compile("\ue000(outline|index|point)\ue001")  # private use: in no text of a model


def hole(name: str) -> str:
    """What stands in a specification's text for the outline, the index or the point."""
    return f"\ue000{name}\ue001"


@functools.lru_cache(8)
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """What decomposers need of a tokenizer."""
    @functools.lru_cache(256)
    def split(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.split(text, special=True))

    return Vocabulary(functools.lru_cache(1 << 16)(functools.partial(
        tokenizer.piece, special=True)), lambda text: list(split(text)))


class Decomposition:
    """The methods for one model. most: threads beside the main one; spacing: of PASTA's positions;
    overlap: whether every stage takes positions in any order."""

    def __init__(self, tokenizer: Tokenizer, *, n_ctx: int, most: int,
                 spacing: Spacing | None = None, overlap: bool = True) -> None:
        self._tokenizer, self._overlap = tokenizer, overlap
        self._n_ctx, self._most, self._spacing = n_ctx, most, spacing
        self._vocabulary = vocabulary_of(tokenizer)

    def factory(self, wanted: Specification, n_prompt: int) -> Callable[[], Decomposer]:
        """Makes the decomposer of a response to a prompt of so many tokens.

        Raises UsageError for an unknown method, and ModelError for one whose tokens this
        vocabulary does not have.
        """
        vocabulary = self._vocabulary
        check(wanted.method, vocabulary)
        match wanted.method:
            case "pasta":
                return functools.partial(
                    Pasta, vocabulary, start=n_prompt, room=self._n_ctx, most=self._most,
                    spacing=self._spacing, overlap=self._overlap)
            case "pdos":
                return functools.partial(Pdos, vocabulary, n_prompt=n_prompt)
            case "apar":
                return functools.partial(Apar, vocabulary, n_prompt=n_prompt)
            case _:
                return functools.partial(
                    Skeleton, vocabulary, self._points(wanted), most=self._most)

    def _points(self, wanted: Specification) -> Prompts:
        def prompt(outline: str, index: int, point: str) -> tuple[int, ...]:
            values = {"outline": outline, "index": str(index), "point": point}
            text = _HOLE.sub(lambda found: values[found[1]], wanted.point)
            return tuple(self._tokenizer.encode(text, special=True))

        return Prompts(wanted.plain, prompt,
                       lambda index, text: f"{index}. {text}: " if wanted.lead else "")


def check(method: str, vocabulary: Vocabulary) -> None:
    """Raise UsageError for an unknown method, and ModelError for one whose tokens this vocabulary
    does not have."""
    if method not in METHODS:
        raise UsageError(f"there is no decomposer {method!r}: choose from {', '.join(METHODS)}")
    if method == "pdos":
        Markers.of(vocabulary)
    elif method == "apar":
        Apar(vocabulary, n_prompt=0)


def spacing_of(text: str) -> Spacing:
    """PASTA's positions from an option: pred-10x, pred-1x, fixed or fixed:N. Raises UsageError."""
    kind, colon, count = text.partition(":")
    if kind == "fixed" and (not colon or count.isdigit()):
        return Spacing(Positions.FIXED, int(count or 40))
    if kind in ("pred-10x", "pred-1x") and not colon:
        return Spacing(Positions(kind))
    raise UsageError(f"--pasta-positions {text}: choose pred-10x, pred-1x, fixed or fixed:N")
