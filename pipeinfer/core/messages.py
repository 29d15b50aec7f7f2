"""The messages between ranks, one class each. The codec (`core.codec`) defines their bytes."""

from __future__ import annotations

import enum
import math
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from pipeinfer.core.control import PortMessage
from pipeinfer.core.drafting import FeedDraft, StartDraft
from pipeinfer.core.types import Choice, FloatArray, Rows, SamplingParams, SeqOp

NO_RUN = -1
KEY_BYTES = 16  #: of a name on the stages' disks
Spans: TypeAlias = tuple[tuple[float, float, float], ...]


class Tag(enum.IntEnum):
    """The tags that messages are routed by.

    Messages with the same tag arrive in order. CANCEL is a tag of its own, so that cancellations
    can overtake transactions. DRAFT is for a prediction head in slices.
    """

    TRANSACTION = 1
    CANCEL = 2
    RESULT = 3
    ERROR = 4
    SUM = 5
    DRAFT = 0  # 6 and 7 are orders and posts of the transport


class Op(enum.IntEnum):
    """The kind of message that a frame holds; CONTROL stands for every `ControlMessage`."""

    DECODE = 1
    CACHE_OPS = 2
    RUN_FINISHED = 3
    RUN_CANCELLED = 4
    PART = 5
    SHARD_CHUNK = 6
    CONTROL = 7
    FEED_DRAFT = 8


class Piece(Struct, frozen=True):
    """Cells of a sequence that the stages' disks hold under a name.

    key: the name, `KEY_BYTES` long
    seq_id, start, stop: the cells of that sequence in `[start, stop)`
    state: whether it is the state behind `stop` instead, of layers that keep one
    """

    key: bytes
    seq_id: int
    start: int
    stop: int
    state: bool = False


class Decode(Struct, frozen=True):
    """Apply `ops`, then evaluate `rows`; travels from stage to stage with its activations.

    run_id: number of this run
    parent_id: the run whose cells this one continues (NO_RUN: none); a stage that skipped the
        parent skips this one, too
    rows: the n rows to evaluate
    lanes: for each row, the lane whose sampling parameters it uses
    ops: operations on the cache before the rows
    speculative: whether all rows are speculative tokens
    skipped: whether a stage has skipped the run because it was cancelled
    hidden: float32[n, d] activations; None to the first stage, or when skipped
    taps: float32 or float16 [n, t * d], the inputs of layers that a head of the target reads, as
        far as stages have passed that hold them; None without any
    saves: what each stage writes to its disk once it has computed the rows
    loads: what each stage reads from its disk instead of computing the rows, in order
    loaded: how many of `loads` all stages so far have read
    spans: for each stage passed: when it began with the run (seconds since the epoch, by its own
        clock), how many seconds it spent on the run (0: skipped there), and for how many of them
        its leader waited for other members
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
    taps: npt.NDArray[Any] | None = None
    saves: tuple[Piece, ...] = ()
    loads: tuple[Piece, ...] = ()
    loaded: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decode):
            return NotImplemented
        return (
            (self.run_id, self.parent_id, self.rows, self.lanes, self.ops, self.speculative,
             self.skipped, self.saves, self.loads, self.loaded)
            == (other.run_id, other.parent_id, other.rows, other.lanes, other.ops,
                other.speculative, other.skipped, other.saves, other.loads, other.loaded)
            and self.spans == other.spans and _same(self.hidden, other.hidden)
            and _same(self.taps, other.taps)
        )

    __hash__ = None  # type: ignore[assignment]


def _same(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and np.array_equal(one, other)


class CacheOps(Struct, frozen=True):
    """Apply sequence operations outside any run (lane end, idle times), then write `saves` to the
    disk."""

    ops: tuple[SeqOp, ...]
    saves: tuple[Piece, ...] = ()


class LaneOpen(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Announce a lane and the parameters with which its tokens are chosen.

    Raises ValueError for a grammar that starts before the text.
    """

    lane: int
    params: SamplingParams

    def __post_init__(self) -> None:
        if self.params.grammar_start < 0:
            raise ValueError(f"a grammar starts at position {self.params.grammar_start}")


class LaneClose(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Delete a lane. Every run that uses it has passed before this message."""

    lane: int


class Shutdown(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Pass this message on, send the report, and exit."""


class RunFinished(Struct, frozen=True):
    """The choices after the output rows of a run, in row order.

    spans, taps: as in `Decode`; taps are of all rows of the run
    loaded: how many of the run's `loads` all stages have read
    """

    run_id: int
    choices: tuple[Choice, ...]
    spans: Spans = ()
    taps: npt.NDArray[Any] | None = None
    loaded: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RunFinished):
            return NotImplemented
        return (self.run_id, self.choices, self.spans, self.loaded) == (
            other.run_id, other.choices, other.spans, other.loaded) and _same(
                self.taps, other.taps)

    __hash__ = None  # type: ignore[assignment]

    @property
    def slowest(self) -> float:
        """The longest time that a stage spent on the run, in seconds."""
        return max((seconds for _, seconds, _ in self.spans), default=0.0)

    @property
    def computed(self) -> float:
        """The time that all stages together spent on the run, in seconds."""
        return math.fsum(seconds for _, seconds, _ in self.spans)


class RunCancelled(Struct, frozen=True):
    """A stage skipped the run, so there are no choices; takes the place of RunFinished in order."""

    run_id: int
    spans: Spans = ()


class Cancel(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Withdraw runs whose rows are all dead.

    Advisory and idempotent. Goes against the direction of the runs, or directly to every stage
    (`policy.CancelPath`).
    """

    run_ids: tuple[int, ...]


class Verdict(enum.IntEnum):
    """Whether a run goes on, from a member of a wide stage in the header of its `Part`."""

    GO = 0
    SKIP = 1  #: from the leader: no member starts the run
    STOP = 2  #: from the leader: every member stops at this sum
    FAILED = 3  #: from any member: it cannot go on


class Part(Struct, frozen=True, eq=False):
    """A member's partial results for one sum of a wide stage, or a verdict without them.

    member: the sender
    round: number of this sum within the epoch; all members count alike
    run_id: the run that the sum belongs to
    place: which sum of the model this is (`eval_callback.place_of`), so that members notice when
        they are at different sums
    verdict: whether the run goes on
    data: float32, or uint16 with the bits of shorter floats; the member's slices one after the
        other
    """

    member: int
    round: int
    run_id: int
    place: int
    verdict: Verdict
    data: npt.NDArray[Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part):
            return NotImplemented
        mine, theirs = self.data, other.data
        return (self.member, self.round, self.run_id, self.place, self.verdict, mine.dtype,
                mine.tobytes()) == (other.member, other.round, other.run_id, other.place,
                                    other.verdict, theirs.dtype, theirs.tobytes())

    __hash__ = None  # type: ignore[assignment]


class WorkerFailed(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The last message of a node that failed.

    node: where it failed
    host: of the node
    run_id: the run during which it failed
    summary: the error in one line
    traceback: of the error
    exit_code: for the process
    """

    node: int
    host: str
    run_id: int
    summary: str
    traceback: str
    exit_code: Annotated[int, Meta(ge=-2**31, lt=2**31)] = 6


class ShardHave(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A stage has the first `offset` bytes of its shard and requests those that follow.

    digest: BLAKE2b of the bytes that it has; in the first such message only
    """

    node: int
    offset: int
    digest: bytes = b""


class ShardChunk(Struct, frozen=True):
    """Bytes of a shard from `offset` on. After decoding, `data` is a view into the frame."""

    offset: int
    data: bytes | memoryview


class ShardEnd(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The whole shard was sent; `digest` is its BLAKE2b."""

    digest: bytes


#: the rare messages, which travel as JSON; the others have columns
ControlMessage: TypeAlias = (
    LaneOpen | LaneClose | Shutdown | Cancel | WorkerFailed | ShardHave | ShardEnd | StartDraft
    | PortMessage
)
Message: TypeAlias = (
    Decode | CacheOps | RunFinished | RunCancelled | Part | ShardChunk | FeedDraft | ControlMessage
)
