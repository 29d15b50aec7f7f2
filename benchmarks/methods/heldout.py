"""Prompts from text that the embedded pair has not seen: the beginnings of held-out library files.

Which files are held out is decided by a hash of their names, see `training.corpus`.
"""

from __future__ import annotations

from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer_lab.training.corpus import library


def prompts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """The first `length` tokens of `count` held-out files, the start-of-text token included."""
    found: list[list[int]] = []
    for text in library(held_out=True):
        tokens = tokenizer.encode(text[: 8 * length])[:length]
        if len(tokens) == length:
            found.append(tokens)
        if len(found) == count:
            break
    return found
