"""The noise of the acceptance rule: standard Gumbel, a hash of (key, position, token id).

There is no generator with a state: equal arguments give equal noise, in any process and at any
time. Where only the few highest of many perturbed scores matter, `contenders` finds them without
taking two logarithms per token.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

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
