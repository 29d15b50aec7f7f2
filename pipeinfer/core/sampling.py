"""The acceptance rule: the target's choice as a pure function.

A choice depends on (logits, sampling parameters, the path's tokens, key, position) and nothing
else. Which rank computes it, when, and in which batch does not matter. A proposed token is accepted
when it equals the choice, so the text is the same for every proposer, policy, number of ranks and
timing. The draft applies the same rule, with the same noise, to its own logits.

Steps, in llama.cpp's order: logit bias, penalties, grammar, top-k, top-p, min-p, temperature; then
the arg-max of `logit / T + Gumbel noise` in float64, ties to the lowest id (the Gumbel-max trick:
the distribution is exactly the softmax). The noise is a hash of (key, position, token id),
see `gumbel`.

This module has no state and does not depend on models, trees or drafts.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from pipeinfer.core.types import ANY, NO_TOKEN, BoolArray, Choice, IntArray, SamplingParams

_U64 = np.uint64
_MIX_A, _MIX_B = _U64(0xBF58476D1CE4E5B9), _U64(0x94D049BB133111EB)
_STEP_TOKEN = _U64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
_BITS = 53  #: of a hash that become noise
_DROPPED = _U64(64 - _BITS)
_BLOCK = 128  #: values per block; `shortlist` compares the largest of each block first
_STRETCH = 8192  #: tokens that are hashed at a time, so that they stay in a processor's cache
_LEADERS = 64  #: tokens whose perturbed scores set the threshold for all others
_SLACK = 1e-9  #: far more than rounding can move a score or a threshold

Floats: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]


def noise_key(seed: int, choice_index: int = 0, thread: tuple[int, ...] = ()) -> int:
    """Return the 64-bit noise key of one causal thread of one choice of one request."""
    return _digest(f"{seed}/{choice_index}/{','.join(map(str, thread))}")


def thread_key(key: int, thread: int) -> int:
    """Return the 64-bit key of a response thread.

    key: of the whole response; thread 0 has this key itself
    thread: number of the thread
    """
    if not thread:
        return key
    return _digest(f"{key}/{thread}")


def _digest(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def gumbel(key: int, position: int, ids: npt.NDArray[Any]) -> Floats:
    """Return standard Gumbel noise, float64[n], for tokens after one row.

    key: 64-bit noise key
    position: of the row
    ids: integers[n], token ids
    """
    hashes = _mix(_start(key, position) + ids.astype(_U64) * _STEP_TOKEN)
    uniform = ((hashes >> _DROPPED).astype(np.float64) + 0.5) * 2.0**-_BITS
    return -np.log(-np.log(uniform))


def _start(key: int, position: int) -> npt.NDArray[np.uint64]:
    return _mix(np.array([(key + (position + 1) * 0xD1342543DE82EF95) & _MASK], _U64))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64; `x` is overwritten."""
    x ^= x >> _U64(30)
    x *= _MIX_A
    x ^= x >> _U64(27)
    x *= _MIX_B
    x ^= x >> _U64(31)
    return x


def shortlist(x: npt.NDArray[Any], count: int) -> Ids | None:
    """Return ids, ascending, among which are the `count` largest values and all that equal one of
    them.

    x: float[V]
    None where searching all values costs no more, or where values are not numbers.

    The largest of each block is a value, so the `count` largest of all are at least as large as the
    `count`-th of the blocks' largest.
    """
    blocks = len(x) // _BLOCK
    if not 0 < 2 * count <= blocks:
        return None
    maxima = x[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    found = np.flatnonzero(x >= np.partition(maxima, blocks - count)[blocks - count])
    return found if len(found) >= count else None  # comparisons with NaN are false


def contenders(x: npt.NDArray[Any], temperature: float, key: int, position: int, *, count: int = 1,
               margin: float = 0.0) -> tuple[Ids, Floats]:
    """Return the tokens with the highest `x / temperature + noise`, and these scores.

    x: float[V], logits
    temperature: above 0
    key: 64-bit noise key
    position: of the row
    count: how many of the best to return, at most 64
    margin: all tokens whose score is at most this far behind the best are returned, too
    The ids may include further tokens; ties are included.
    """
    ids = shortlist(x, _LEADERS)
    # every token outside `ids` has at most this score before noise
    rest = -math.inf if ids is None else float(x[ids].min()) / temperature
    if ids is None or not math.isfinite(rest):
        every = np.arange(len(x))
        return every, _scores(x, every, temperature, key, position)
    scores = _scores(x, ids, temperature, key, position)
    kth = len(scores) - count
    least = min(float(np.partition(scores, kth)[kth]), float(scores.max()) - margin)
    others = _noisier(len(x), least - rest - _SLACK * (1.0 + abs(rest)), key, position)
    ids = np.union1d(ids, others)
    return ids, _scores(x, ids, temperature, key, position)


def _scores(x: npt.NDArray[Any], ids: Ids, temperature: float, key: int, position: int) -> Floats:
    return x[ids].astype(np.float64) / temperature + gumbel(key, position, ids)


def _noisier(n: int, least: float, key: int, position: int) -> Ids:
    """Those of the first `n` tokens whose noise is at least `least`, and perhaps some more."""
    uniform = math.exp(-math.exp(min(-least, 700.0)))  # grows with the noise, as hashes do
    threshold = _U64(max(int(uniform * (1.0 - _SLACK) * 2.0**_BITS) - 1, 0) << int(_DROPPED))
    start, steps = _start(key, position), _steps(n)
    return np.concatenate([
        at + np.flatnonzero(_mix(start + steps[at : at + _STRETCH]) >= threshold)
        for at in range(0, n, _STRETCH)])


@lru_cache(maxsize=4)
def _steps(n: int) -> npt.NDArray[np.uint64]:
    """The multiples of the hash constant for all ids of a vocabulary, uint64[n]."""
    return np.arange(n, dtype=_U64) * _STEP_TOKEN


_DEPTHS = (4.0, 8.0, 12.0, math.inf)  #: distances below the best logit that top-p tries, in order
_FAR = 6.0  #: a token whose perturbed score is this far behind the best has a negligible share


class Candidates(Struct, frozen=True):
    """The tokens that remain after truncation, unordered.

    ids: int64[k], token ids
    scores: float64[k], perturbed scores
    """

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]

    def best(self) -> int:
        """The id with the highest score, ties to the lowest id; NO_TOKEN if there are no
        candidates.
        """
        if not self.ids.size:
            return NO_TOKEN
        return int(self.ids[self.scores == self.scores.max()].min())

    def ranked(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The `count` best ids, int64, and their scores, float64, best first."""
        keep = np.argsort(-self.scores, kind="stable")[:count]
        return self.ids[keep], self.scores[keep]


def candidates(
    logits: npt.NDArray[Any], params: SamplingParams, history: IntArray, position: int,
    allowed: BoolArray | None = None, *, count: int = 0,
) -> Candidates:
    """Return the perturbed scores of the tokens that may follow one row.

    logits: float[n_vocab], raw
    params: how to choose
    history: int32[position + 1], the path's tokens up to and including the row; read only when a
        penalty applies, and its last token when tokens are banned
    position: of the row
    allowed: bool[n], the tokens that a grammar allows; ids from n on are not allowed. None: no
        grammar
    count: how many of the best suffice, at most 64; more may be returned. 0: all are needed
    The result may be empty.
    """
    x, ids = _left(logits, params, history, position, allowed)
    return _perturbed(x, ids, params, position, count=count)


def best_shares(
    logits: npt.NDArray[Any], params: SamplingParams, history: IntArray, position: int,
    allowed: BoolArray | None = None, *, count: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the ids of the `count` best of `candidates`, best first, and their shares of the
    softmax.

    Arguments as for `candidates`; count: at most 64. Returns int64[k] and float64[k], k < count
    where fewer tokens are possible (logits of -inf never are). With temperature, tokens far behind
    the best are left out of the softmax, which makes the shares too large by up to some per cent.
    """
    if allowed is not None and not np.any(logits[np.flatnonzero(allowed[:len(logits)])] > -np.inf):
        return np.empty(0, np.int64), np.empty(0)
    x, ids = _left(logits, params, history, position, allowed)
    if params.temperature > 0:
        found = _perturbed(x, ids, params, position, count=count, margin=_FAR)
        total = np.exp(found.scores - found.scores.max(initial=-np.inf)).sum()
    else:
        found = _perturbed(x, ids, params, position, count=count)
        within = x if ids is None else x[ids]
        total = math.exp(log_total(within) - float(within.max())) if within.size else 1.0
    ranked, scores = found.ranked(count)
    if len(scores) and scores[-1] == -np.inf:
        ranked, scores = ranked[scores > -np.inf], scores[scores > -np.inf]
    return ranked, np.exp(scores - scores[:1]) / total


def choose(
    logits: npt.NDArray[Any], params: SamplingParams, history: IntArray, position: int,
    allowed: BoolArray | None = None,
) -> Choice:
    """Return the target's choice after one row; arguments as for `candidates`.

    The log-probabilities in the result are the log-softmax of the raw logits. Where no token is
    allowed, the token is NO_TOKEN and there are none.
    """
    if (params.temperature <= 0 and not params.logit_bias and not params.uses_history
            and not params.bans and allowed is None):
        token = int(logits.argmax())
    else:
        token = candidates(logits, params, history, position, allowed, count=1).best()
    if params.n_logprobs < 0 or token == NO_TOKEN:
        return Choice(token)
    total = log_total(logits)
    order = _descending(logits, params.n_logprobs).tolist() if params.n_logprobs else []
    return Choice(token, float(logits[token]) - total,
                  tuple((i, float(logits[i]) - total) for i in order))


def log_total(logits: npt.NDArray[Any]) -> float:
    """Return the log of the sum of `exp(logits)`, which turns logits into log-probabilities.

    logits: float[n_vocab]. Accurate to seven digits.
    """
    most = logits.max()
    below = (logits - most).astype(np.float32, copy=False)
    return float(most) + math.log(float(np.exp(below).sum(dtype=np.float64)))


def _left(logits: npt.NDArray[Any], params: SamplingParams, history: IntArray, position: int,
          allowed: BoolArray | None) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64] | None]:
    """Logits after biases and penalties, and the ids that grammar and truncation leave; None: all.
    """
    x = logits
    if params.logit_bias or params.uses_history:
        x = logits.astype(np.float64)
        for token, bias in params.logit_bias:
            if 0 <= token < len(x):
                x[token] += bias
        if params.uses_history:
            _penalise(x, params, history)
    if params.bans:
        allowed = _without_banned(params, int(history[-1]), position, len(x), allowed)
    if allowed is None:
        return x, _truncate(x, params)
    within = np.flatnonzero(allowed[: len(x)])
    kept = _truncate(x[within], params) if within.size else None
    return x, within if kept is None else within[kept]


def _perturbed(x: npt.NDArray[Any], ids: npt.NDArray[np.int64] | None, params: SamplingParams,
               position: int, *, count: int = 0, margin: float = 0.0) -> Candidates:
    """Scores of `ids` (None: of all tokens).

    count: above 0 and where there are many, the `count` best and those at most `margin` behind the
        best suffice; more may be returned.
    """
    if ids is None and count and params.temperature > 0:
        return Candidates(*contenders(x, params.temperature, params.key, position, count=count,
                                      margin=margin))
    if ids is None and count:
        ids = shortlist(x, count)
    if ids is None:
        ids = np.arange(len(x))
    scores = x[ids].astype(np.float64)
    if params.temperature > 0 and ids.size:
        scores = scores / params.temperature + gumbel(params.key, position, ids)
    return Candidates(ids, scores)


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
    """Return the proposals of a hint row, as a Choice.

    The first `count` tokens under the target's rule and noise, without penalties, bias and grammar,
    with their raw log-probabilities. `token` is the best of them.
    logits: float[n_vocab], raw
    """
    plain = structs.replace(params, repeat_last_n=0, logit_bias=())
    found = candidates(logits, plain, np.zeros(0, np.int32), position, count=count)
    ids, _ = found.ranked(count)
    total = log_total(logits)
    return Choice(int(ids[0]), float(logits[ids[0]]) - total,
                  tuple((int(i), float(logits[i]) - total) for i in ids))


def _penalise(x: npt.NDArray[np.float64], params: SamplingParams, history: IntArray) -> None:
    history = history[history != NO_TOKEN]  # rows of pictures
    window = history if params.repeat_last_n < 0 else history[-params.repeat_last_n :]
    ids, counts = np.unique(window, return_counts=True)
    inside = (ids >= 0) & (ids < len(x))
    ids, counts = ids[inside], counts[inside]
    values = x[ids]
    values = np.where(values > 0, values / params.repeat_penalty, values * params.repeat_penalty)
    x[ids] = values - counts * params.frequency_penalty - params.presence_penalty


def _descending(x: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest values, largest first, ties to the lowest index."""
    ids = shortlist(x, count)
    if ids is None:
        ids = np.arange(len(x))
    values = x[ids]
    if count < len(values):
        inside = values >= np.partition(values, len(values) - count)[len(values) - count]
        ids, values = ids[inside], values[inside]
    return ids[np.lexsort((ids, -values))][:count]


def _truncate(x: npt.NDArray[Any], params: SamplingParams) -> npt.NDArray[np.int64] | None:
    """Indices that top-k, top-p and min-p leave, each applied to what the one before left; None:
    all.
    """
    if params.temperature <= 0:
        return None
    ids = None
    if params.top_p < 1.0:
        ids = _nucleus(x, params.top_k, params.top_p)
    elif params.top_k > 0:
        ids = _descending(x, params.top_k)
    if params.min_p > 0.0:
        least = np.float64(x.max()) + np.log(params.min_p)
        ids = np.flatnonzero(x >= least) if ids is None else ids[x[ids] >= least]
    return ids


def _nucleus(x: npt.NDArray[Any], top_k: int, top_p: float) -> npt.NDArray[np.int64]:
    """Top-k (0: none), then top-p: the likeliest, ties to the lowest index, as many as have `top_p`
    of what top-k leaves."""
    if 0 < top_k < len(x):
        ids = _descending(x, top_k)
        p = np.exp(x[ids] - np.float64(x.max()))
        return ids[: int(np.searchsorted(np.cumsum(p / p.sum()), top_p)) + 1]
    best = np.float64(x.max())
    total = math.exp(log_total(x) - best)
    for depth in _DEPTHS:
        values = np.sort(x[x >= x.dtype.type(best - depth)])[::-1]
        mass = np.cumsum(np.exp(values - best)) / total
        if mass[-1] >= top_p:
            break
    count = min(int(np.searchsorted(mass, top_p)) + 1, len(values))
    above = np.flatnonzero(x > values[count - 1])
    return np.concatenate((above, np.flatnonzero(x == values[count - 1])[: count - len(above)]))
