"""The acceptance rule: the target's choice as a pure function.

A choice depends on (logits, sampling parameters, the path's tokens, key, position) and nothing
else, so it does not matter who computes it, when, or beside which rows. A proposed token is
accepted when it equals the choice; the text is then the same for every proposer, policy, number
of ranks and timing. The draft applies the same rule, with the same noise, to its own logits.

Steps, in llama.cpp's order: logit bias, penalties, grammar, top-k, top-p, min-p, temperature; then
the arg-max of `logit / T + Gumbel noise` in float64, ties to the lowest id (the Gumbel-max trick:
the law is exactly the softmax). The noise is a hash of (key, position, token id).

This module keeps no state and knows no model, tree or draft.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.core.types import ANY, NO_TOKEN, BoolArray, Choice, IntArray, SamplingParams

_U64 = np.uint64
_MIX_A, _MIX_B = _U64(0xBF58476D1CE4E5B9), _U64(0x94D049BB133111EB)
_STEP_TOKEN = _U64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def noise_key(seed: int, choice_index: int = 0, thread: tuple[int, ...] = ()) -> int:
    """The 64-bit key of one causal thread of one choice of one request."""
    return _digest(f"{seed}/{choice_index}/{','.join(map(str, thread))}")


def thread_key(key: int, thread: int) -> int:
    """The key of a thread inside a response whose own key is `key`; thread 0 has that itself."""
    if not thread:
        return key
    return _digest(f"{key}/{thread}")


def _digest(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def gumbel(key: int, position: int, ids: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise float64[n] for tokens `ids` after the row at `position`."""
    start = (key + (position + 1) * 0xD1342543DE82EF95) & _MASK
    state = _mix(_mix(np.array([start], _U64)) + ids.astype(_U64) * _STEP_TOKEN)
    uniform = ((state >> _U64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> _U64(30))) * _MIX_A
    x = (x ^ (x >> _U64(27))) * _MIX_B
    return x ^ (x >> _U64(31))


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is left after truncation: ids int64[k], perturbed scores float64[k], unordered."""

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]

    def best(self) -> int:
        """The id of the highest score, ties to the lowest id; NO_TOKEN of none."""
        if not self.ids.size:
            return NO_TOKEN
        return int(self.ids[self.scores == self.scores.max()].min())

    def ranked(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The `count` best ids and their scores, best first."""
        keep = np.argsort(-self.scores, kind="stable")[:count]
        return self.ids[keep], self.scores[keep]


def candidates(
    logits: npt.NDArray[Any], params: SamplingParams, history: IntArray, position: int,
    allowed: BoolArray | None = None,
) -> Candidates:
    """Perturbed scores of the tokens that may follow the row at `position`.

    logits: float[V], raw. history: int32[position + 1], the path's tokens up to and with that
    row (read only when a penalty is on, and its last token when something is banned). allowed:
    bool[n], the tokens that a grammar allows; ids from n on are not (None: no grammar). None may
    be left.
    """
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        if 0 <= token < len(x):
            x[token] += bias
    if params.uses_history:
        _penalise(x, params, history)
    if params.bans:
        allowed = _without_banned(params, int(history[-1]), position, len(x), allowed)
    within = None if allowed is None else np.flatnonzero(allowed[: len(x)])
    if within is not None and not within.size:
        return Candidates(within, x[within])
    if params.temperature <= 0:
        return Candidates(np.arange(len(x)), x) if within is None else Candidates(within, x[within])
    ids = _truncate(x, params) if within is None else within[_truncate(x[within], params)]
    scores = x[ids] / params.temperature + gumbel(params.key, position, ids)
    return Candidates(ids, scores)


def choose(
    logits: npt.NDArray[Any], params: SamplingParams, history: IntArray, position: int,
    allowed: BoolArray | None = None,
) -> Choice:
    """The target's choice after the row at `position`; arguments as for `candidates`.

    The log-probabilities reported are the log-softmax of the raw logits. The token is NO_TOKEN,
    without any, when no token is allowed.
    """
    if (params.temperature <= 0 and not params.logit_bias and not params.uses_history
            and not params.bans and allowed is None):
        token = int(np.argmax(logits))
    else:
        token = candidates(logits, params, history, position, allowed).best()
    if params.n_logprobs < 0 or token == NO_TOKEN:
        return Choice(token)
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    order = _descending(x, params.n_logprobs).tolist() if params.n_logprobs else []
    return Choice(token, float(x[token]), tuple((i, float(x[i])) for i in order))


def _without_banned(params: SamplingParams, token: int, position: int, n_vocab: int,
                    allowed: BoolArray | None) -> BoolArray:
    """`allowed` without what may not follow `token` at `position`."""
    mask = np.zeros(n_vocab, np.bool_)
    if allowed is None:
        mask[:] = True
    else:
        mask[: len(allowed)] = allowed[:n_vocab]
    for after, at, banned in params.bans:
        if after in (ANY, token) and at in (ANY, position) and 0 <= banned < n_vocab:
            mask[banned] = False
    return mask


def likeliest(logits: npt.NDArray[Any], params: SamplingParams, position: int, count: int
              ) -> Choice:
    """What a row names that only proposes: the `count` tokens that come first under the target's
    rule and noise (penalties, bias and grammar left out), with the raw log-probability of each."""
    plain = replace(params, repeat_last_n=0, logit_bias=())
    found = candidates(logits, plain, np.zeros(0, np.int32), position)
    best = np.argpartition(-found.scores, count)[:count] if count < len(found.ids) else slice(None)
    ids, _ = Candidates(found.ids[best], found.scores[best]).ranked(count)
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    return Choice(int(ids[0]), float(x[ids[0]]), tuple((int(i), float(x[i])) for i in ids))


def _penalise(x: npt.NDArray[np.float64], params: SamplingParams, history: IntArray) -> None:
    window = history if params.repeat_last_n < 0 else history[-params.repeat_last_n :]
    ids, counts = np.unique(window, return_counts=True)
    inside = (ids >= 0) & (ids < len(x))
    ids, counts = ids[inside], counts[inside]
    values = x[ids]
    values = np.where(values > 0, values / params.repeat_penalty, values * params.repeat_penalty)
    x[ids] = values - counts * params.frequency_penalty - params.presence_penalty


def _descending(x: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest values, largest first, ties to the lowest index."""
    if count < len(x):
        threshold = np.partition(x, len(x) - count)[len(x) - count]
        ids = np.flatnonzero(x >= threshold)
    else:
        ids = np.arange(len(x))
    return ids[np.lexsort((ids, -x[ids]))][:count]


def _truncate(x: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.int64]:
    """Ids left by top-k, top-p and min-p, applied one after the other to the remaining mass."""
    needs_order = params.top_p < 1.0
    if params.top_k > 0 or needs_order:
        ids = _descending(x, params.top_k if params.top_k > 0 else len(x))
    else:
        ids = np.arange(len(x))
    if needs_order:
        p = np.exp(x[ids] - x[ids].max())
        mass = np.cumsum(p / p.sum())
        ids = ids[: int(np.searchsorted(mass, params.top_p)) + 1]
    if params.min_p > 0.0:
        best = x[ids].max()
        ids = ids[x[ids] >= best + np.log(params.min_p)]
    return ids
