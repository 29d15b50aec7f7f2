"""A pair of language models made of arithmetic: the acceptance is set, confidences are calibrated.

The target's token after a path is a hash of the position and the last tokens. The draft's first
guess has a confidence drawn (by another hash) from a Beta distribution whose mean is the
acceptance asked for, and is right exactly that often; its second and third guesses share what is
left in a fixed proportion. So a pair that agrees at 52 % or 79 % of the positions can be had at
once, and the same tokens come out in virtual time, paced time and any split. It knows no time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipeinfer.backends.base import Capabilities, ShardInfo
from pipeinfer.core.types import ALL_SEQS, FloatArray, Rows

N_VOCAB = 64  #: small: every logit costs time
TAIL = 3
_MASK = (1 << 64) - 1
_FLOOR = 1e-6  #: probability of every token that is not a guess


@dataclass(frozen=True)
class SyntheticPair:
    """How the two models behave.

    acceptance: share of positions at which the draft's first guess is the target's token
    seed: another seed, another text
    spread: concentration of the Beta distribution of confidences (small: nearly always sure or
        unsure; large: always the same)
    claimed: mean of the confidences that the draft claims; None: they are true
    by_depth: the draft is a prediction head, whose first guesses are right in these shares of
        positions, by the distance from the target's last row (beyond the last: as there)
    draft: number of the draft; different drafts are wrong independently
    """

    acceptance: float
    seed: int = 0
    spread: float = 1.0
    claimed: float | None = None
    by_depth: tuple[float, ...] = ()
    draft: int = 0

    @property
    def n_vocab(self) -> int:
        """Tokens that there are."""
        return N_VOCAB

    def prompt(self, count: int, request: int) -> tuple[int, ...]:
        """A prompt of so many tokens; another request has another."""
        return tuple((token + 7 * request) % 60 for token in range(1, 1 + count))

    def token(self, path: tuple[int, ...], pos: int) -> int:
        """The target's token after the row at `pos`, whose path ends with `path`."""
        return mixed(self.seed, pos, path, 1) % N_VOCAB

    def guesses(self, path: tuple[int, ...], pos: int, depth: int = 0
                ) -> tuple[list[int], list[float]]:
        """The draft's four best tokens there, and the confidences that it claims.

        depth: the distance from the target's last row, for a prediction head
        """
        acceptance = self.by_depth[min(depth, len(self.by_depth)) - 1] if depth else \
            self.acceptance
        draw = mixed(self.seed, pos, path, 2 + self.draft)
        rank = (draw & 0xFFFF) / 0x10000
        confidence = _quantile(acceptance, self.spread, rank)
        claim = confidence if self.claimed is None else _quantile(self.claimed, self.spread, rank)
        outcome = (draw >> 16 & 0xFFFFFFFF) / 0x100000000
        right = self.token(path, pos)
        tokens: list[int] = []
        claims: list[float] = []
        edge, left = 0.0, 1.0
        second = 0.55 * acceptance  # share of the rest that the next guess holds
        wrong = draw >> 48
        for k in range(4):
            share = confidence if k == 0 else left * second
            claims.append(claim if k == 0 else (1.0 - sum(claims)) * second)
            hit = edge <= outcome < edge + share
            tokens.append(right if hit else (right + 1 + k + wrong % 8 * 4) % N_VOCAB)
            edge, left = edge + share, left - share
        return tokens, claims

    def plain(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """What plain decoding gives."""
        path = list(prompt)
        for pos in range(len(prompt) - 1, len(prompt) - 1 + count):
            path.append(self.token(tuple(path[-TAIL:]), pos))
        return path[len(prompt):]


class SyntheticBackend:
    """A synthetic target, or its draft.

    Holds tokens by sequence id and position; a path that the scheduler never sent, or cells that
    a skipped run never made, give other tokens. Logits are the log-probabilities of the guesses.
    """

    def __init__(self, pair: SyntheticPair, n_ctx: int, n_seq_max: int, *, draft: bool = False
                 ) -> None:
        self.info = ShardInfo("synthetic", (0, 1), 1, True, True, 1, pair.n_vocab, n_ctx,
                              n_seq_max, 256, 0, 0)
        self.capabilities = Capabilities(free_positions=True, separate_views=False,
                                         embedding_rows=False, stops_inside=False)
        self.pair = pair
        self._draft = draft
        self._tokens = np.full((n_seq_max, n_ctx), -1, np.int32)

    def decode(
        self, rows: Rows, hidden: FloatArray | None = None,  # noqa: ARG002
        should_stop: Callable[[], bool] | None = None,  # noqa: ARG002
    ) -> FloatArray:
        """Evaluate `rows`; each makes one cell."""
        tokens = self._tokens
        places = list(zip(rows.tokens.tolist(), rows.positions.tolist(), rows.seq_ids,
                          strict=True))
        for token, pos, ids in places:
            for seq_id in ids:
                tokens[seq_id, pos] = token
        wanted = np.flatnonzero(rows.outputs).tolist()
        logits = np.full((len(wanted), self.info.n_vocab), np.log(_FLOOR), np.float32)
        for row, index in zip(logits, wanted, strict=True):
            _, pos, ids = places[index]
            path = self.path(ids[0], pos)
            if self._draft:
                names, claims = self.pair.guesses(path, pos)
                row[names] = np.log(np.maximum(claims, _FLOOR))
            else:
                row[self.pair.token(path, pos)] = 0.0
        return logits

    def path(self, seq_id: int, pos: int) -> tuple[int, ...]:
        """The last tokens of a sequence up to and with `pos`."""
        return tuple(self._tokens[seq_id, max(0, pos + 1 - TAIL) : pos + 1].tolist())

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove `seq_id` (ALL_SEQS: every id) from cells in `[p0, p1)`."""
        self._tokens[slice(None) if seq_id == ALL_SEQS else seq_id, p0:p1] = -1

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to the cells of `src` in `[p0, p1)`."""
        self._tokens[dst, p0:p1] = self._tokens[src, p0:p1]

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`."""
        keep = self._tokens[seq_id].copy()
        self._tokens[:] = -1
        self._tokens[seq_id] = keep

    def close(self) -> None:
        """Release the model and its cache."""


class SyntheticHead(SyntheticBackend):
    """A prediction head; its hidden rows, float32[n, 1], are distances from the target's."""

    shift = 0

    def __init__(self, pair: SyntheticPair, n_ctx: int, n_seq_max: int) -> None:
        super().__init__(pair, n_ctx, n_seq_max)
        self.tapped = np.zeros((0, 1), np.float32)

    def encode(self, rows: FloatArray) -> FloatArray:
        """Return the hidden rows, float32[n, n_embd], for rows of the target."""
        return np.zeros((len(rows), 1), np.float32)

    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray:
        """Evaluate `rows`; each makes one cell."""
        logits = super().decode(rows, hidden, should_stop)
        assert hidden is not None
        self.tapped = hidden + 1
        for row, index in zip(logits, np.flatnonzero(rows.outputs).tolist(), strict=True):
            pos = rows.lists.positions[index]
            names, claims = self.pair.guesses(
                self.path(rows.seq_ids[index][0], pos), pos, 1 + int(hidden[index, 0]))
            row[:] = np.log(_FLOOR)
            row[names] = np.log(np.maximum(claims, _FLOOR))
        return logits


def mixed(seed: int, pos: int, path: tuple[int, ...], salt: int) -> int:
    """64 well-mixed bits (the finaliser of SplitMix64 after each word)."""
    value = seed * 0x9E3779B97F4A7C15 + salt & _MASK
    for word in (pos, *path[-TAIL:]):
        value = (value ^ (word + 0x9E3779B97F4A7C15)) & _MASK
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value


def _quantile(mean: float, spread: float, rank: float) -> float:
    if mean <= 0.0 or mean >= 1.0:
        return mean
    table = _beta_table(mean, spread)
    return float(table[int(rank * len(table))])


@lru_cache(maxsize=64)
def _beta_table(mean: float, spread: float) -> FloatArray:
    """Quantiles of Beta(mean * spread, (1 - mean) * spread), with exactly that mean."""
    draws = np.random.default_rng(0).beta(mean * spread, (1 - mean) * spread, 1 << 18)
    table: FloatArray = np.sort(draws).reshape(1 << 12, -1).mean(axis=1).astype(np.float32)
    return table
