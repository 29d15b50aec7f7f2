"""What the scheduler and a proposer say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from msgspec import Struct

from pipeinfer.core.types import SamplingParams


class Prefix(Sequence[int]):
    """The first `length` tokens of a list that only ever grows, as they are now and stay.

    Nothing is copied, and another thread may read it while the list grows.
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


class StartDraft(Struct, frozen=True):
    """Ask for proposals below a path.

    The path is the first `base` accepted tokens of the lane followed by `suffix`; `accepted`
    is a view of the lane's tokens up to now. max_depth bounds the levels, max_tokens the
    tokens in all; max_tokens 0 only brings the draft's cache up to the path. alternatives: how many
    alternatives of a drafted token are wanted besides. stop_ids are never proposed: they end the
    output when the target chooses them. shift: by how much the target's positions exceed those of
    the path. pool: whose other answers may be guessed from, 0 for nobody's. free_only: no model is
    to be evaluated for it. free_max, free_min: max_tokens and p_min of proposers that evaluate no
    model; 0 and None: theirs are no others.
    """

    job_id: int
    lane: int
    accepted: Prefix
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


ENOUGH = 0.6  #: a first guess of the target's own rows as likely as that needs no second opinion
SURE = 0.95  #: a first guess as likely as that is seldom bettered by a draft


class Proposal(Struct, frozen=True):
    """A drafted token: `parent` indexes an earlier proposal of the batch, -1 is the tip.

    confidence: estimated probability that the target chooses it, given that its parent is.
    alternative: a second or later choice, below which nothing was drafted; these follow the others.
    paid: only proposers that evaluated a model named it.
    """

    parent: int
    token: int
    confidence: float = 1.0
    alternative: bool = False
    paid: bool = False
