"""The all-reduce between the members of a wide stage.

Every slice of a stage's layers computes partial results of attention and of the feed forward. They
are summed in the order of the slices, twice per layer. So all members go through the same sums in
the same order. Member 0, the leader, decides whether a run goes on: before the run (skip) and at
any sum (stop). The number of sums so far serves as the members' common clock.

Uses numbers and slices; independent of messages and matrices. Runs are numbers here.
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

#: float formats of partial results on their way, with their numbers in sums.h
SUM_TYPES = {"f32": 0, "f16": 1, "bf16": 2}
GATHER = (1 << 24) - 1  #: the place of logits, which are gathered rather than summed


class PeerFailed(ClusterError):
    """Another member of this stage cannot go on. It has notified the head, which decides."""


class PeerSilent(TransportTimeout):
    """Another member of this stage has sent no partial result for too long; it or its link is
    broken.
    """


class TeamShape(Struct, frozen=True):
    """The distribution of a stage's slices over its members.

    holders: slices of each member, all of them together in order
    member: number of this member
    kind: float format in which partial results are sent (SUM_TYPES)
    capacity: numbers in the largest partial result of a sum
    vocabulary: `[start, stop)` of the output head's rows by slice; empty where the stage has none
    layers_between_looks: after how many layers the leader checks whether to stop
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
        """The number of slices of the stage."""
        return sum(map(len, self.holders))

    @property
    def leads(self) -> bool:
        """Whether this member is the leader."""
        return self.member == 0

    def holder_of(self, index: int) -> int:
        """Return the member that holds slice `index`. Raises ProtocolError where none does."""
        return owner_of(self.holders, index)


class Team(Protocol):
    """One member's side of the all-reduce.

    One thread calls all methods, except those of the objects that `part` returns.
    shape: of the team
    shares_memory: whether the members share memory
    """

    shape: TeamShape
    shares_memory: bool

    @property
    def waited(self) -> float:
        """The seconds that this member has waited for others' partial results."""

    @property
    def count(self) -> int:
        """The number of sums of this member so far."""

    @property
    def run_id(self) -> int:
        """The run that was begun last; -1 before any."""

    def begin(self, run_id: int, *, cancelled: bool) -> bool:
        """Begin a run; return whether to skip it.

        run_id: number of the run; all members call this for the same runs
        cancelled: at the leader, whether to skip the run. The other members get the leader's
            decision; where it has not arrived yet they begin, and may be stopped at the first sum
        """

    def part(self, index: int) -> PartSum:
        """Return the object that sums the partial results of slice `index`, which this member
        holds.
        """

    def arm(self, should_stop: Callable[[], bool] | None) -> None:
        """Set the function by which the leader may stop the decode that follows; None: no stop."""

    def gather(self, index: int, logits: FloatArray) -> FloatArray | None:
        """Concatenate the slices' logits after a decode.

        index: slice of this member
        logits: float32[k, rows of the slice]
        Returns float32[k, n_vocab] at the leader's first slice, None at the others.
        """

    def fail(self, index: int) -> None:
        """Notify the other members that slice `index` cannot go on; called by the thread of that
        slice.
        """

    def check(self) -> None:
        """Raise the reason for which the last decode ended early, unless the leader stopped it.

        PeerFailed, ProtocolError, or what the function raised that watches over waiting.
        """

    def close(self) -> None:
        """Release shared memory."""


def shorten(values: npt.NDArray[np.float32], kind: str) -> npt.NDArray[Any]:
    """Convert float32 values to the format in which they are sent.

    values: float32[n]
    kind: a key of SUM_TYPES
    Returns float32 as they are, or shorter floats as the bits of uint16, rounded to nearest, ties
    to even.
    """
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
    """Convert values that `shorten` returned to float32; kind: as there."""
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
    """The address of a contiguous array."""
    assert values.flags.c_contiguous
    return ctypes.c_void_p(values.__array_interface__["data"][0])


def add_up(parts: Sequence[npt.NDArray[Any]], kind: str) -> npt.NDArray[np.float32]:
    """Return the sum of partial results in their order, float32[n].

    parts: as `shorten` returned them
    kind: as there
    """
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
