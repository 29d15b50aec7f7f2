"""Rows of texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeinfer.core.types import Rows, make_rows


def chain(tokens: Iterable[int], first: int = 0, ids: tuple[int, ...] = (0,),
          outputs: bool = True) -> Rows:
    """Rows of tokens that follow one another from a position on, with all logits or none."""
    return make_rows([(int(token), first + i, ids, outputs) for i, token in enumerate(tokens)])


def chunk(tokens: Sequence[int], first: int = 0, ids: tuple[int, ...] = (0,)) -> Rows:
    """The same of a prompt: with the logits of the last token alone."""
    return make_rows([(int(token), first + i, ids, i == len(tokens) - 1)
                      for i, token in enumerate(tokens)])
