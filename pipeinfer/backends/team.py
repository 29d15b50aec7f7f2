"""The members of a wide stage at work on its sums.

Every slice of a stage's layers computes a part of what attention and the feed forward give; the
parts are added up, in the order of the slices, twice a layer. So all members go through the same
sums in the same order, and one of them, the leader, says whether they go on: before a run (skip)
and at any sum (stop). Sums are counted; that number is the only clock that members share.

Knows numbers and slices; no messages, no matrices. Runs are numbers here, to tell them apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pipeinfer.backends.llamacpp.layer_probe import PartSum, compiled
from pipeinfer.core.grid import owner_of
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import BackendError, ClusterError, TransportTimeout

#: how a number of a part travels, and its number in sums.h
SUM_TYPES = {"f32": 0, "f16": 1, "bf16": 2}
GATHER = (1 << 24) - 1  #: the place of what is gathered rather than summed up


class PeerFailed(ClusterError):
    """Another member of this stage cannot go on, and has told the head so: await its verdict."""


class PeerSilent(TransportTimeout):
    """Another member of this stage has sent no part for too long; it, or the way to it, is broken.
    """


class TeamShape(Struct, frozen=True):
    """Who holds what of a stage.

    holders: slices of each member, all of them together in order. member: this one. kind: how
    numbers travel (SUM_TYPES). capacity: numbers of the largest part of a sum. vocabulary:
    [start, stop) of the output head's rows by slice, empty where the stage has none.
    layers_between_looks: of the leader, for a reason to stop.
    """

    holders: tuple[tuple[int, ...], ...]
    member: int
    kind: str
    capacity: int
    vocabulary: tuple[tuple[int, int], ...] = ()
    layers_between_looks: int = 1

    @property
    def own(self) -> tuple[int, ...]:
        """The slices of this member."""
        return self.holders[self.member]

    @property
    def n_slices(self) -> int:
        """Slices of the stage."""
        return sum(map(len, self.holders))

    @property
    def leads(self) -> bool:
        """Whether this member leads."""
        return self.member == 0

    def holder_of(self, index: int) -> int:
        """The member that holds a slice."""
        return owner_of(self.holders, index)


class Team(Protocol):
    """One member's side. The methods but for those of `part` are called by one thread.

    waited: seconds spent waiting for others' parts; count: sums so far.
    """

    shape: TeamShape
    shares_memory: bool

    @property
    def waited(self) -> float:
        """Seconds that this member has waited for others' parts."""

    @property
    def count(self) -> int:
        """Sums of this member so far."""

    @property
    def run_id(self) -> int:
        """The run that was begun last, -1 before any."""

    def begin(self, run_id: int, *, cancelled: bool) -> bool:
        """All members come to this run; whether it is to be skipped. cancelled: what the leader
        knows, others ask it; where it has not said anything yet they begin, and may be stopped at
        the first sum."""

    def part(self, index: int) -> PartSum:
        """What adds up the parts of one of the slices held here."""

    def arm(self, should_stop: Callable[[], bool] | None) -> None:
        """The decode that follows may be stopped by the leader."""

    def gather(self, index: int, logits: FloatArray) -> FloatArray | None:
        """Put slices' logits beside each other, after a decode: float32[k, rows of the slice] in;
        at the leader's first slice float32[k, n_vocab] out, None for others."""

    def fail(self, index: int) -> None:
        """A slice held here cannot go on: tell the others where they look next. From the thread
        of that slice."""

    def check(self) -> None:
        """Raise what has ended the last decode early, unless the leader did: PeerFailed, what the
        watch over waiting raised, ProtocolError."""

    def close(self) -> None:
        """Let go of shared memory."""


def shorten(values: npt.NDArray[np.float32], kind: str) -> npt.NDArray[Any]:
    """Numbers as they travel: float32 as they are, shorter floats as the bits of uint16. Rounded to
    the nearest, ties to even."""
    if kind == "f32":
        return values
    library = compiled()
    if library is not None:
        short = np.empty(values.shape, np.uint16)
        library.pipeinfer_sums_narrow(SUM_TYPES[kind], _at(short), _at(values),
                                      ctypes.c_size_t(short.size))
        return short
    if kind == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def lengthen(values: npt.NDArray[Any], kind: str) -> npt.NDArray[np.float32]:
    """What `shorten` made, as float32."""
    if kind == "f32":
        return np.asarray(values, np.float32)
    library = compiled()
    if library is not None:
        long = np.empty(values.shape, np.float32)
        library.pipeinfer_sums_widen(SUM_TYPES[kind], _at(long), _at(values),
                                     ctypes.c_size_t(long.size))
        return long
    if kind == "f16":
        return values.view(np.float16).astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)


def _at(values: npt.NDArray[Any]) -> ctypes.c_void_p:
    """The address of an array whose numbers lie side by side."""
    assert values.flags.c_contiguous
    return ctypes.c_void_p(values.__array_interface__["data"][0])


def add_up(parts: Sequence[npt.NDArray[Any]], kind: str) -> npt.NDArray[np.float32]:
    """The sum of parts as they travelled, in their order, rounded as they were."""
    if len(parts) == 1:
        total = lengthen(parts[0], kind).copy()
    else:
        total = lengthen(parts[0], kind) + lengthen(parts[1], kind)
    for part in parts[2:]:
        total += lengthen(part, kind)
    return total if kind == "f32" else lengthen(shorten(total, kind), kind)


def check_logits(shape: TeamShape, index: int, logits: FloatArray) -> None:
    """Raise BackendError unless a slice's logits have its rows of the output head."""
    start, stop = shape.vocabulary[index]
    if logits.shape[1] != stop - start:
        raise BackendError(f"slice {index} gave {logits.shape[1]} logits a row, {stop - start} "
                           "expected")
