"""The messages between ranks, one class each. What their bytes look like is the codec's affair."""

from __future__ import annotations

import enum
import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pipeinfer.core.control import PortMessage
from pipeinfer.core.types import Choice, FloatArray, Rows, SamplingParams, SeqOp

NO_RUN = -1
Spans: TypeAlias = tuple[tuple[float, float, float], ...]


class Tag(enum.IntEnum):
    """Routing only: what shares a tag stays in order, CANCEL has its own so it can overtake."""

    TRANSACTION = 1
    CANCEL = 2
    RESULT = 3
    ERROR = 4
    SUM = 5


class Op(enum.IntEnum):
    """Which message a frame holds."""

    DECODE = 1
    CACHE_OPS = 2
    LANE_OPEN = 3
    LANE_CLOSE = 4
    SHUTDOWN = 5
    RUN_FINISHED = 6
    RUN_CANCELLED = 7
    CANCEL = 8
    WORKER_FAILED = 9
    CONTROL = 10
    SHARD_HAVE = 11
    SHARD_CHUNK = 12
    SHARD_END = 13
    PART = 14


class Decode(Struct, frozen=True):
    """Apply `ops`, then evaluate `rows`; travels from stage to stage with its activations.

    run_id: of this run
    parent_id: the run whose cells this one continues (NO_RUN: none); a stage that skipped the
        parent skips this one, too
    rows: what is evaluated, n rows
    lanes: of each row the lane whose sampling parameters a row uses
    ops: operations on the cache before the rows
    speculative: whether all rows are guesses
    skipped: whether a stage has left it out, as it was cancelled
    hidden: float32[n, d] activations; None to the first stage, or when skipped
    spans: for each stage passed, when it began with the run (seconds since the
        epoch, its own clock), how many seconds it was at it (0: skipped there), and for how many
        of them its leader waited for other members
    """

    run_id: int
    parent_id: int
    rows: Rows
    lanes: tuple[int, ...]
    ops: tuple[SeqOp, ...] = ()
    speculative: bool = False
    skipped: bool = False
    hidden: FloatArray | None = None
    spans: Spans = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decode):
            return NotImplemented
        mine, theirs = self.hidden, other.hidden
        return (
            (self.run_id, self.parent_id, self.rows, self.lanes, self.ops, self.speculative,
             self.skipped)
            == (other.run_id, other.parent_id, other.rows, other.lanes, other.ops,
                other.speculative, other.skipped)
            and self.spans == other.spans
            and (mine is None) == (theirs is None)
            and (mine is None or theirs is None or np.array_equal(mine, theirs))
        )

    __hash__ = None  # type: ignore[assignment]


class CacheOps(Struct, frozen=True):
    """Apply sequence operations outside any run (lane end, idle times)."""

    ops: tuple[SeqOp, ...]


class LaneOpen(Struct, frozen=True):
    """Announce a lane and the parameters its tokens are chosen with."""

    lane: int
    params: SamplingParams


class LaneClose(Struct, frozen=True):
    """Forget a lane; every run that uses it has passed."""

    lane: int


class Shutdown(Struct, frozen=True):
    """Pass it on, report, and leave."""


class RunFinished(Struct, frozen=True):
    """The choices after the output rows of a run, in row order; spans as in `Decode`."""

    run_id: int
    choices: tuple[Choice, ...]
    spans: Spans = ()

    @property
    def slowest(self) -> float:
        """The longest time that a stage took for it, in seconds."""
        return max((seconds for _, seconds, _ in self.spans), default=0.0)

    @property
    def computed(self) -> float:
        """The time that all stages together took for it, in seconds."""
        return math.fsum(seconds for _, seconds, _ in self.spans)


class RunCancelled(Struct, frozen=True):
    """A run was skipped somewhere; it has no choices, and its place in the order is kept."""

    run_id: int
    spans: Spans = ()


class Cancel(Struct, frozen=True):
    """Runs whose rows are all dead. Advisory, idempotent, travels against the flow."""

    run_ids: tuple[int, ...]


class Verdict(enum.IntEnum):
    """What a member of a wide stage says of a run in the header of its part."""

    GO = 0
    SKIP = 1  #: the leader: nobody begins with it
    STOP = 2  #: the leader: everybody leaves it here
    FAILED = 3  #: any member: it cannot go on


class Part(Struct, frozen=True, eq=False):
    """What a member of a wide stage has of one sum, or a verdict without it.

    member: which sends it. turn: counts the sums of an epoch, equally at all members. run_id: the
    run it belongs to. place: which sum of the model (`layer_probe.place_of`), so that none is taken
    for another. data: float32, or uint16 with the bits of shorter floats; the member's slices one
    after the other.
    """

    member: int
    turn: int
    run_id: int
    place: int
    verdict: Verdict
    data: npt.NDArray[Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part):
            return NotImplemented
        mine, theirs = self.data, other.data
        return (self.member, self.turn, self.run_id, self.place, self.verdict, mine.dtype,
                mine.tobytes()) == (other.member, other.turn, other.run_id, other.place,
                                    other.verdict, theirs.dtype, theirs.tobytes())

    __hash__ = None  # type: ignore[assignment]


class WorkerFailed(Struct, frozen=True):
    """A node's last words: where it failed, in which run, and its traceback."""

    node: int
    host: str
    run_id: int
    summary: str
    traceback: str
    exit_code: int = 6


class ShardHave(Struct, frozen=True):
    """A stage has the first `offset` bytes of its shard; the first time also their BLAKE2b."""

    node: int
    offset: int
    digest: bytes = b""


class ShardChunk(Struct, frozen=True):
    """Bytes of a shard from `offset` on. Decoded, `data` is a view into the frame."""

    offset: int
    data: bytes | memoryview


class ShardEnd(Struct, frozen=True):
    """All of a shard was sent; its BLAKE2b."""

    digest: bytes


Message: TypeAlias = (
    Decode | CacheOps | LaneOpen | LaneClose | Shutdown | RunFinished | RunCancelled | Cancel
    | Part | WorkerFailed | ShardHave | ShardChunk | ShardEnd | PortMessage
)
