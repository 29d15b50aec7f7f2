"""The all-reduce between the members of a wide stage.

Every slice of a stage's layers computes partial results of attention and of the feed forward. They
are summed in the order of the slices, twice per layer. So all members go through the same sums in
the same order. Member 0, the leader, decides whether a run goes on: before the run (skip) and at
any sum (stop). The number of sums so far serves as the members' common clock.

Members that share memory (ranks of one host, or slices within one process) have a `SharedTeam`:
sums.c adds up the partial results, from within llama.cpp's callback and without Python's lock. Here
are the memory, and the callbacks that decide whether to stop and whether to wait any longer.

Uses numbers and slices; independent of messages and matrices. Runs are numbers here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pipeinfer.backends.llamacpp.eval_callback import PartSum, compiled
from pipeinfer.core.grid import owner_of
from pipeinfer.core.messages import Verdict
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import BackendError, ClusterError, ProtocolError, TransportTimeout

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


_GIVEN_UP, _UNLIKE = 4, 5
_FOLDER = Path("/dev/shm")  #: memory that has names
_PREFIX = "pipeinfer-sums-"
_YOUNG = 60.0  #: seconds
_SPIN_NS = 2_000  #: how long to wait before the processor is offered to others
_CALL = ctypes.CFUNCTYPE(ctypes.c_int)


class Sums(ctypes.Structure):
    """The state of one slice in sums.c: struct sums."""

    _fields_ = (
        ("region", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("capacity", ctypes.c_size_t),
        ("n", ctypes.c_int32), ("me", ctypes.c_int32), ("leader", ctypes.c_int32),
        ("kind", ctypes.c_int32), ("alone", ctypes.c_int32), ("looks", ctypes.c_int32),
        ("layers", ctypes.c_int32), ("verdict", ctypes.c_int32), ("awaited", ctypes.c_int32),
        ("unused", ctypes.c_int32), ("turn", ctypes.c_uint64), ("run", ctypes.c_int64),
        ("spin_ns", ctypes.c_uint64), ("idle", _CALL), ("look", _CALL),
        ("waited_ns", ctypes.c_uint64), ("count", ctypes.c_uint64),
    )


class Region:
    """Memory for all slices of a stage.

    name: of the shared memory; empty where only this process has it
    """

    def __init__(self, memory: mmap.mmap, name: str = "") -> None:
        self._memory, self.name = memory, name
        self._view: Any = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.address = ctypes.addressof(self._view)

    @staticmethod
    def size(shape: TeamShape) -> int:
        """Return the bytes that a team needs."""
        return slice_bytes(shape) * shape.n_slices

    @classmethod
    def private(cls, shape: TeamShape) -> Region:
        """Allocate memory for slices of one process."""
        return cls(mmap.mmap(-1, cls.size(shape)))

    @classmethod
    def create(cls, shape: TeamShape) -> Region | None:
        """Create memory for processes of one host; None where there is not enough shared memory."""
        clear_leftovers()
        name = f"{_PREFIX}{secrets.token_hex(8)}"
        path = _FOLDER / name
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)  # until the last process has unmapped it
            os.posix_fallocate(handle, 0, cls.size(shape))  # access to a hole may raise SIGBUS
            return cls(mmap.mmap(handle, cls.size(shape)), name)
        except OSError:
            path.unlink(missing_ok=True)
            return None
        finally:
            os.close(handle)

    @classmethod
    def open(cls, name: str, shape: TeamShape) -> Region:
        """Open memory that another process has created.

        Raises ProtocolError for a name that cannot be one of such memory, and BackendError where it
        cannot be opened.
        """
        if not name.startswith(_PREFIX) or "/" in name:
            raise ProtocolError(f"{name!r} is no name of shared memory")
        try:
            handle = os.open(_FOLDER / name, os.O_RDWR)
            try:
                return cls(mmap.mmap(handle, cls.size(shape)), name)
            finally:
                os.close(handle)
        except (OSError, ValueError) as error:
            raise BackendError(f"the memory that members of a stage share cannot be opened "
                               f"({error}): use --set sum_path=messages") from error

    def forget_name(self) -> None:
        """Remove the name, once all members have opened the memory: it then vanishes with the
        processes.
        """
        if self.name:
            with contextlib.suppress(OSError):
                (_FOLDER / self.name).unlink()
            self.name = ""

    def close(self) -> None:
        """Unmap it."""
        self.forget_name()
        self.address = 0
        self._view = None
        with contextlib.suppress(BufferError):
            self._memory.close()


def clear_leftovers() -> None:
    """Remove shared memory of leaders that were killed before they could remove its name.

    No process holds a lock on it any more. Recent ones may not be locked yet, and stay.
    """
    with contextlib.suppress(OSError):
        for path in _FOLDER.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                if time.time() - path.stat().st_mtime > _YOUNG:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def slice_bytes(shape: TeamShape) -> int:
    """Return the bytes of one slice's place in the region."""
    return int(_library().pipeinfer_sums_bytes(ctypes.c_size_t(shape.capacity)))


def available() -> bool:
    """Return whether the C part is compiled and can be loaded."""
    return compiled() is not None


class SharedTeam:
    """A `team.Team` in shared memory.

    shape: of the team
    region: the memory
    watch: called every few milliseconds while waiting, with the slice that is awaited; an exception
        that it raises ends the waiting
    """

    shares_memory = True

    def __init__(self, shape: TeamShape, region: Region, watch: Callable[[int], None]) -> None:
        self.shape = shape
        self._region, self._watch = region, watch
        self._should_stop: Callable[[], bool] | None = None
        self._error: BaseException | None = None
        self._callbacks = (_CALL(self._idle), _CALL(self._wait_too), _CALL(self._look))
        leader = shape.holders[0][0]
        self._sums = {index: Sums(
            region=region.address, bytes=slice_bytes(shape), capacity=shape.capacity,
            n=shape.n_slices, me=index, run=-1, leader=leader, kind=SUM_TYPES[shape.kind],
            layers=max(1, shape.layers_between_looks), spin_ns=_SPIN_NS,
            idle=self._callbacks[turn > 0], look=self._callbacks[2])
            for turn, index in enumerate(shape.own)}
        self._first = self._sums[shape.own[0]]

    @property
    def waited(self) -> float:
        """The seconds that this member has waited for others' partial results."""
        return float(self._first.waited_ns) / 1e9

    @property
    def count(self) -> int:
        """The number of sums of this member so far."""
        return int(self._first.count)

    @property
    def run_id(self) -> int:
        """The run that was begun last; -1 before any."""
        return int(self._first.run)

    def begin(self, run_id: int, *, cancelled: bool) -> bool:
        """Begin a run; return whether to skip it."""
        self.forget_name()
        self._error = None
        for sums in self._sums.values():
            sums.run = run_id
        library = _library()
        first = ctypes.byref(self._first)
        if self.shape.leads:
            if not cancelled:
                return False
            library.pipeinfer_sums_say(first, int(Verdict.SKIP))
            self.check()
            others = [sums for sums in self._sums.values() if sums is not self._first]
        elif library.pipeinfer_sums_skipped(first):
            others = list(self._sums.values())
        else:
            return False
        for sums in others:
            library.pipeinfer_sums_pass(ctypes.byref(sums))
        return True

    def forget_name(self) -> None:
        """Remove the region's name after the first sum, when all members have opened the region.

        Processes that are killed from then on leave nothing behind.
        """
        if self.count:
            self._region.forget_name()

    def part(self, index: int) -> _SharedPart:
        """Return the object that sums the partial results of slice `index`, which this member
        holds."""
        return _SharedPart(self._sums[index])

    def arm(self, should_stop: Callable[[], bool] | None) -> None:
        """Set the function by which the leader may stop the decode that follows; None: no stop."""
        self._should_stop = should_stop
        self._first.looks = should_stop is not None and self.shape.leads

    def gather(self, index: int, logits: FloatArray) -> FloatArray | None:
        """Concatenate the slices' logits after a decode."""
        shape, sums = self.shape, self._sums[index]
        check_logits(shape, index, logits)
        leads = index == shape.holders[0][0]
        count = shape.n_slices
        starts = (ctypes.c_size_t * count)(*(start for start, _ in shape.vocabulary))
        counts = (ctypes.c_size_t * count)(*(stop - start for start, stop in shape.vocabulary))
        out = np.empty((len(logits), shape.vocabulary[-1][1]), np.float32) if leads else None
        for row, values in enumerate(logits):
            verdict = _library().pipeinfer_sums_gather(
                ctypes.byref(sums), ctypes.c_void_p(values.ctypes.data),
                ctypes.c_size_t(values.size), GATHER,
                None if out is None else ctypes.c_void_p(out[row].ctypes.data), starts, counts)
            if verdict != Verdict.GO:
                return None
        return out

    def fail(self, index: int) -> None:
        """Notify the other members that slice `index` cannot go on; called by the thread of that
        slice."""
        _library().pipeinfer_sums_say(ctypes.byref(self._sums[index]), int(Verdict.FAILED))

    def check(self) -> None:
        """Raise the reason for which the last decode ended early, unless the leader stopped it."""
        if self._error is not None:
            raise self._error  # kept until the next run begins: further slices stop by it
        for index, sums in self._sums.items():
            if sums.verdict == _UNLIKE:
                raise ProtocolError(
                    f"slice {index} and slice {sums.awaited} of a stage are not at the same sum of "
                    f"run {sums.run}: all hosts must run the same version with the same options")
            if sums.verdict == Verdict.FAILED:
                raise PeerFailed(f"slice {sums.awaited} of this stage has failed in run {sums.run}")

    def close(self) -> None:
        """Release shared memory."""
        self._region.close()

    def _idle(self) -> int:
        try:
            self._watch(int(self._first.awaited))
        except BaseException as error:  # it must not propagate into C: `check` raises it
            self._error = error
            return 1
        return 0

    def _wait_too(self) -> int:
        """Whether to stop waiting, for further slices of this process; only the first one calls
        `watch`.
        """
        return int(self._error is not None)

    def _look(self) -> int:
        try:
            return int(self._should_stop is not None and self._should_stop())
        except BaseException as error:
            self._error = error
            return 1


class _SharedPart:
    """A `eval_callback.PartSum` that sums.c computes."""

    def __init__(self, sums: Sums) -> None:
        self.address = ctypes.addressof(sums)

    def add(self, part: FloatArray, place: int) -> bool:
        """Replace `part` by the sum; used where the callback is Python's."""
        return bool(_library().pipeinfer_sum(
            ctypes.c_void_p(self.address), ctypes.c_void_p(part.ctypes.data),
            ctypes.c_size_t(part.size), place) == Verdict.GO)


def _library() -> Any:
    library = compiled()
    if library is None:
        raise BackendError("sums in shared memory need the C part, which was not compiled here: "
                           "use --set sum_path=messages")
    return library
