"""PASTA's training layout: blocks, positions, visibility, targets, steps (paper sections 3, 4).

A flat response is ids in reading order: each block follows its promise.

Does not know: tokenizers, tasks, models.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeinfer.errors import UsageError
from pipeinfer.strategies.decomposers.pasta import UNIT, Positions, Spacing, spacing_of

IGNORE = -100


@dataclass(frozen=True, slots=True)
class Block:
    """One asynchronous block: flat indices of its promise's last token, of ``<async>``, of
    ``</async>``; ``room``: positions that the main thread leaves free for it."""

    promise: int
    start: int
    end: int
    room: int


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat example: ids, the length of the prompt, blocks and syncs (their last tokens) in order.

    ``opening``: tokens of ``<async>``, which the interpreter inserts. ``control``: how many tokens
    of the answer are no text: tags, inserted ones too, and the end of the answer.
    """

    tokens: tuple[int, ...]
    prompt: int
    blocks: tuple[Block, ...]
    syncs: tuple[int, ...]
    opening: int = 1
    control: int = 0

    @property
    def owner(self) -> NDArray[np.int64]:
        """Block number of every token, from 1; 0 is the main thread."""
        owner = np.zeros(len(self.tokens), dtype=np.int64)
        for number, block in enumerate(self.blocks, 1):
            owner[block.start : block.end + 1] = number
        return owner


def record_of(flat: Flat) -> dict[str, Any]:
    """A layout for JSON."""
    blocks = [[one.promise, one.start, one.end, one.room] for one in flat.blocks]
    return {"tokens": flat.tokens, "prompt": flat.prompt, "blocks": blocks, "syncs": flat.syncs,
            "opening": flat.opening, "control": flat.control, "unit": 1}


def flat_of(record: dict[str, Any]) -> Flat:
    """What `record_of` has written; earlier versions wrote the room in tens. Raises KeyError,
    TypeError or ValueError for anything else."""
    unit = int(record.get("unit", UNIT))
    flat = Flat(tuple(map(int, record["tokens"])), int(record["prompt"]),
                tuple(Block(promise, start, end, unit * room) for promise, start, end, room in (
                    map(int, block) for block in record["blocks"])),
                tuple(map(int, record["syncs"])), int(record["opening"]),
                int(record.get("control", 0)))
    ends = [at for block in flat.blocks for at in (block.promise, block.start, block.end)]
    if not 0 < flat.prompt < len(flat.tokens) or any(
            not flat.prompt <= at < len(flat.tokens) for at in (*ends, *flat.syncs)):
        raise ValueError("places outside the answer")
    if min(flat.tokens) < 0:
        raise ValueError("a token below 0")
    if any(not block.promise < block.start < block.end for block in flat.blocks) or any(
            one.end >= other.start for one, other in pairwise(flat.blocks)):
        raise ValueError("blocks that are not one behind the other")
    return flat


def trained_spacing(text: str) -> Spacing:
    """Return the rule for an option's text, by which answers are laid out for training.

    The oracles are none: they are pred-1x and pred-10x with other positions at decoding. Raises
    UsageError.
    """
    try:
        spacing = spacing_of(text)
    except UsageError:
        raise UsageError(f"--pasta-positions {text}: choose pred-10x, pred-1x, fixed or fixed:N"
                         ) from None
    if spacing.lengths:
        raise UsageError(f"--pasta-positions {text}: what is learnt has its true lengths anyway: "
                         "train by pred-1x or pred-10x, and decode by an oracle")
    return spacing


def attribute_of(length: int, spacing: Spacing | None = None) -> int:
    """What a promise says of a block of `length` tokens, both tags included: tokens for pred-1x;
    otherwise tens, at least one, halves rounded up."""
    if spacing is not None and spacing.kind is Positions.PRED_1X:
        return length
    return max(1, (length + UNIT // 2) // UNIT)


def positions(flat: Flat) -> NDArray[np.int64]:
    """Position ids: a block counts on from its promise, the main thread leaves room for it."""
    starts = {block.start: block for block in flat.blocks}
    out = np.zeros(len(flat.tokens), dtype=np.int64)
    at = main = 0
    while at < len(flat.tokens):
        block = starts.get(at)
        if block is None:
            out[at] = main
            main += 1
            at += 1
        else:
            out[at : block.end + 1] = main + np.arange(block.end + 1 - at)
            main += block.room
            at = block.end + 1
    return out


def visible(flat: Flat) -> NDArray[np.bool_]:
    """[n, n]: row i may attend column j (both main, same block, a block and the main text before
    it, or anything before the last sync)."""
    length, owner = len(flat.tokens), flat.owner
    synced = np.zeros(length, dtype=np.int64)
    for sync in flat.syncs:
        synced[sync:] += 1
    mine, other = owner[:, None], owner[None, :]
    allowed = (mine == other) | (other == 0) | (synced[:, None] > synced[None, :])
    return np.asarray(allowed & np.tri(length, dtype=bool))


def targets(flat: Flat) -> NDArray[np.int64]:
    """Next token of the same thread; ``IGNORE`` inside the prompt and after a block.

    The prompt's last token has a target: without it no model would learn how to begin.
    """
    out = np.full(len(flat.tokens), IGNORE, dtype=np.int64)
    out[flat.prompt - 1 : -1] = flat.tokens[flat.prompt :]
    for block in flat.blocks:
        after = block.end + 1
        out[block.promise] = flat.tokens[after] if after < len(flat.tokens) else IGNORE
        out[block.start : block.start + flat.opening - 1] = IGNORE
        out[block.end] = IGNORE
    # A promise right after a block begins with a token; no target may be an inserted tag.
    return out


def steps(flat: Flat) -> NDArray[np.int64]:
    """Step in which an ideal interpreter decodes each token, from 1; prompt and inserted tags 0."""
    out = np.zeros(len(flat.tokens), dtype=np.int64)
    starts = {block.start: block for block in flat.blocks}
    syncs = set(flat.syncs)
    last = open_until = 0
    at = flat.prompt
    while at < len(flat.tokens):
        block = starts.get(at)
        if block is not None:
            count = block.end + 1 - block.start - flat.opening
            out[at + flat.opening : block.end + 1] = last + 1 + np.arange(count)
            open_until = max(open_until, last + count)
            at = block.end + 1
            continue
        last += 1
        out[at] = last
        if at in syncs:
            last = max(last, open_until)
        at += 1
    return out


def chain(flat: Flat) -> int:
    """Steps of the whole response (paper section 5, critical path)."""
    return int(steps(flat).max(initial=0))


def parallelism(flat: Flat) -> float:
    """Tokens of text over steps (paper section 5: "non-control tokens"): below 1 where tags
    outweigh what they save."""
    return (len(flat.tokens) - flat.prompt - flat.control) / max(chain(flat), 1)
