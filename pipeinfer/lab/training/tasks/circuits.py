"""Initial weights that can already look facts up: attention heads laid out by hand.

A small transformer spends most of its training on finding the two-step lookup that every task
here needs (mark each token with what came before it, then match). On a budget of a few million
tokens it does not find it; so the first three layers begin with it, and training shapes it. All
other weights stay random, and nothing is frozen.

Residual dimensions at the start: a token's code, the code of the token before it (``BEFORE``), of
the latest title (``TITLE``: a name or other word that opens a sentence), of the title of the token
before (``PAST``), and three features.

Does not know: tasks beyond the list of titles, training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeinfer.lab.training.pair.model import Block, Llama

CODE, BEFORE, TITLE, PAST = slice(0, 64), slice(64, 104), slice(104, 144), slice(144, 184)
CONSTANT, IS_TITLE, IS_BLANK_TITLE = 184, 185, 186
WIDTH, HEAD = 192, 64
#: Standard deviation of a code, and what the features are worth beside it.
SCALE = 0.065
#: Rotary pairs: fast ones tell neighbours apart, slow ones hardly turn within the context.
FAST, MIDDLE, SLOW = range(9), range(3, 13), range(12, 32)


def lay_out(model: Llama, bare: Sequence[int], blank: Sequence[int], seed: int) -> None:
    """Set embedding and the first three layers; ``bare`` and ``blank`` are the title tokens
    without and with a leading blank, in the same order.

    ValueError for a shape that the layout is not made for.
    """
    config = model.config
    if (config.n_embd, config.head_size, config.n_head_kv) != (WIDTH, HEAD, 3):
        raise ValueError("the layout needs width 192 and three heads of 64")
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn(64, 64, generator=generator))[0][:40]
    with torch.no_grad():
        _embed(model, bare, blank, generator)
        for block in model.blk[:3]:
            for matrix in (block.attn_q, block.attn_k, block.attn_v, block.attn_output):
                matrix.weight.mul_(0.2)
        first, second, third = model.blk[0], model.blk[1], model.blk[2]
        speeds = config.rope_base ** (-torch.arange(32) / 32)
        _at_offset(first, 0, 1, speeds)
        _move(first, 0, mix, CODE, BEFORE, 0.04)
        _latest(first, 1, IS_TITLE)
        _move(first, 1, mix, CODE, TITLE, 0.04)

        half = mix[:20]
        _match(second, 0, [(half, CODE, BEFORE), (torch.eye(40)[:20], TITLE, TITLE)], 1.75)
        _move(second, 0, torch.eye(64), CODE, CODE, 0.12)
        _at_offset(second, 1, 1, speeds)
        _move(second, 1, torch.eye(40), TITLE, PAST, 0.06)
        _match(second, 2, [(mix, CODE, BEFORE)], 1.25)
        _move(second, 2, torch.eye(64), CODE, CODE, 0.05)

        _match(third, 0, [(torch.eye(40)[:38], TITLE, PAST)], 1.3)
        _gate(third, 0, IS_BLANK_TITLE, 2.0)
        _move(third, 0, torch.eye(64), CODE, CODE, 0.05)


def _embed(
    model: Llama, bare: Sequence[int], blank: Sequence[int], generator: torch.Generator
) -> None:
    rows = model.token_embd.weight
    rows.zero_()
    rows[:, CODE] = SCALE * torch.randn(len(rows), 64, generator=generator)
    rows[:, CONSTANT] = 0.15
    apart = rows[list(blank), CODE].clone()
    rows[list(blank), CODE] = 0.92 * rows[list(bare), CODE] + 0.4 * apart
    rows[[*bare, *blank], IS_TITLE] = 0.3
    rows[list(blank), IS_BLANK_TITLE] = 0.3


def _rows(head: int) -> slice:
    return slice(head * HEAD, (head + 1) * HEAD)


def _clear(block: Block, head: int) -> tuple[Tensor, Tensor]:
    """Zeroed query and key rows of a head."""
    query, key = block.attn_q.weight[_rows(head)], block.attn_k.weight[_rows(head)]
    query.zero_()
    key.zero_()
    return query, key


def _at_offset(block: Block, head: int, offset: int, speeds: Tensor) -> None:
    """Attend to the token so many positions back: key phases turned by that much."""
    query, key = _clear(block, head)
    for pair in FAST:
        angle = float(speeds[pair]) * offset
        query[2 * pair, CONSTANT] = 2.2
        key[2 * pair, CONSTANT] = 2.2 * float(torch.tensor(angle).cos())
        key[2 * pair + 1, CONSTANT] = 2.2 * float(torch.tensor(angle).sin())


def _latest(block: Block, head: int, feature: int) -> None:
    """Attend to the nearest token with a feature, itself included."""
    query, key = _clear(block, head)
    for pair in MIDDLE:
        query[2 * pair, CONSTANT] = key[2 * pair, CONSTANT] = 2.0
    _gate(block, head, feature, 4.6)


def _gate(block: Block, head: int, feature: int, weight: float) -> None:
    """Prefer keys with a feature, by the slowest pair."""
    query, key = block.attn_q.weight[_rows(head)], block.attn_k.weight[_rows(head)]
    query[62, CONSTANT], key[62, feature] = weight, weight


def _match(
    block: Block, head: int, parts: Sequence[tuple[Tensor, slice, slice]], gain: float
) -> None:
    """Attend where a key's dimensions equal the query's (both read through one matrix, except that
    a code is mixed as its copies were)."""
    query, key = _clear(block, head)
    at = 2 * SLOW[0]
    for matrix, asked, kept in parts:
        count = len(matrix)
        query[at : at + count, asked] = gain * matrix
        same = matrix if matrix.shape[1] == kept.stop - kept.start else torch.eye(40)[:count]
        key[at : at + count, kept] = gain * same
        at += count


def _move(
    block: Block, head: int, matrix: Tensor, source: slice, target: slice, gain: float
) -> None:
    """Add what the head attends to from ``source`` into ``target``."""
    rows, count = _rows(head), len(matrix)
    value, output = block.attn_v.weight, block.attn_output.weight
    value[rows] = 0
    output[:, rows] = 0
    value[rows.start : rows.start + count, source] = matrix
    output[target, rows.start : rows.start + count] = gain * torch.eye(count)
