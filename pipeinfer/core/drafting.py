"""The data that the scheduler and a proposer exchange: drafting jobs and proposals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pipeinfer.core.types import SamplingParams


class Prefix(Sequence[int]):
    """A view of the first `length` tokens of a list to which tokens are only ever appended.

    Nothing is copied, and another thread may read the view while the list grows.
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: Sequence[int], length: int | None = None) -> None:
        self._tokens = tokens
        self._length = len(tokens) if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step == 1:
                return list(self._tokens[start:stop])
            return [self._tokens[i] for i in range(start, stop, step)]
        at = index + self._length if index < 0 else index
        if not 0 <= at < self._length:
            raise IndexError(f"token {index} of {self._length}")
        return self._tokens[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Prefix({list(self)!r})"


class StartDraft(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A drafting job: request proposals below a path.

    The path is the first `base` tokens of `accepted`, followed by `suffix`. To a draft rank the
    job travels without what that rank has: the lane's sampling parameters came as a LaneOpen, and
    successive jobs of a lane only append tokens.

    job_id: by which results and `DraftStop` refer to the job
    lane: the lane's number for proposers (`Lane.path_id`)
    accepted: the lane's accepted tokens at the time of the job
    base: how many of them belong to the path
    suffix: speculative tokens after them
    params: the lane's sampling parameters
    max_tokens: most proposals; 0: only bring the draft's cache up to the path
    max_depth: most levels below the path
    branches: most paths of the tree of proposals
    p_min: least confidence of a proposal
    p_split: least confidence of an alternative
    stop_ids: never proposed; they end the output when the target chooses them
    alternatives: how many alternatives of a drafted token are wanted, too
    shift: by how much the target's positions exceed those of the path
    pool: answers of this pool may be copied from; 0: none
    free_only: whether no model may be evaluated for the job
    free_max, free_min: `max_tokens` and `p_min` for proposers that evaluate no model; 0 and None:
        the same as for the others
    sent: how many tokens before those in `accepted` the receiver has
    fade: by how much confidences of proposals of depth 1, 2, ... have to be reduced (`Calibration`)
    rates: how often proposals were right whose confidence was in the first, second, ... of equal
        parts of 0 to 1; empty: as often as they claim
    chain_min: least probability that all of a chain is right at which the next token of it is
        drafted
    """

    job_id: int
    lane: int
    accepted: Sequence[int]
    base: int
    suffix: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    max_depth: int
    branches: int
    p_min: float
    p_split: float
    stop_ids: frozenset[int]
    alternatives: int = 0
    shift: int = 0
    pool: int = 0
    free_only: bool = False
    free_max: int = 0
    free_min: float | None = None
    sent: int = 0
    fade: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    chain_min: float = 0.0

    def chance(self, confidence: float, depth: int) -> float:
        """Return the probability that a proposal is right if those before it are.

        depth: its distance from the last accepted token, from 1
        """
        if self.fade:
            return confidence * self.fade[min(depth, len(self.fade)) - 1]
        if not self.rates:
            return confidence
        return self.rates[min(int(confidence * len(self.rates)), len(self.rates) - 1)]


class FeedDraft(Struct, frozen=True):
    """Rows of the target for a proposer that reads them (`StartDraft.lane` has the number).

    index: of the accepted token that the first of them belongs to
    rows: float32 or float16 [n, t], of that token and those after it, see `Decode.taps`
    """

    lane: int
    index: int
    rows: npt.NDArray[Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FeedDraft) and (self.lane, self.index, self.rows.dtype) == (
            other.lane, other.index, other.rows.dtype) and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]


ENOUGH = 0.6  #: least confidence of an inline proposer's first token at which no draft is queried
SURE = 0.95  #: confidence of a first token that a draft model seldom improves on


class Proposal(Struct, frozen=True):
    """A proposed token.

    parent: index of the earlier proposal that it follows; -1: it follows the job's path
    token: vocabulary id
    confidence: estimated probability that the target chooses the token, given its parent
    alternative: whether it is a second or later choice. Nothing is drafted below alternatives, and
        they come after all other proposals
    paid: whether only proposers that evaluated a model returned it
    depth: how many tokens behind the last row of the target it is, for proposers that read those
        rows and fade with the distance; 0: of another proposer
    """

    parent: int
    token: int
    confidence: float = 1.0
    alternative: bool = False
    paid: bool = False
    depth: int = 0
