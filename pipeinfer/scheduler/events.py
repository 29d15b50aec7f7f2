"""What the scheduler hears (events) and what it wants done (instructions): plain data.

Whoever executes instructions feeds what comes of them back as events; nothing here knows how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.types import Choice, Request, Rows, SamplingParams, SeqOp
from pipeinfer.errors import RequestError
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.decomposers.base import Decomposer


class Submit(Struct, frozen=True):
    """A new request. output: tokens that it has brought before and that are not emitted again;
    they are replayed, as after the loss of a cluster that had computed them. decompose: makes the
    decomposer of a response with threads, None for an ordinary one."""

    request: Request
    output: tuple[int, ...] = ()
    decompose: Callable[[], Decomposer] | None = None


class RunDone(Struct, frozen=True):
    """A run came back: the choices after its output rows, or None when it was skipped."""

    run_id: int
    choices: tuple[Choice, ...] | None


class Drafted(Struct, frozen=True):
    """A draft job ended with these proposals (none: nothing was confident enough).

    rows, seconds: what it evaluated for them and how long that took. more: a better draft may
    answer the same job later; further: this is such an answer.
    """

    job_id: int
    proposals: tuple[Proposal, ...]
    rows: int = 0
    seconds: float = 0.0
    more: bool = False
    further: bool = False


class Abort(Struct, frozen=True):
    """End a request now: the client left, a stop string matched, the user interrupted."""

    request_id: int
    reason: str


class Restart(Struct, frozen=True):
    """The stages are others, with empty caches, and know no lane: whatever was in flight is lost.

    limits: from now on. The context, the chunk and the room of the caches are those of before.
    reason: requests that ran end with it; empty: they are replayed.
    """

    limits: Limits
    reason: str = ""


Event: TypeAlias = Submit | RunDone | Drafted | Abort | Restart


# --- instructions -----------------------------------------------------------------------------


class LaneStats(Struct):
    """Counters of one lane; every issued node and run is counted once.

    guesses_tested: accepted positions at which a speculated child was there to be compared.
    reused: prompt tokens that were not computed again. preempted: how often its lane was given up
    for lack of cells and replayed. recovered: how often because stages were lost. steps: the
    longest chain of passes through the pipeline that had to wait for one another, prompt not
    counted (plain decoding: one per token). rows: issued, those of prompts not counted; attended:
    cells that these rows see, all together.
    """

    accepted: int = 0
    runs: int = 0
    speculative_runs: int = 0
    cancelled_runs: int = 0
    skipped_runs: int = 0
    drafted: int = 0
    issued_speculative: int = 0
    accepted_speculative: int = 0
    guesses_tested: int = 0
    empty_drafts: int = 0
    reused: int = 0
    preempted: int = 0
    recovered: int = 0
    steps: int = 0
    rows: int = 0
    attended: int = 0


class IssueRun(Struct, frozen=True):
    """Send a run into the pipeline. lanes: that of each row."""

    run_id: int
    parent_id: int
    lanes: tuple[int, ...]
    rows: Rows
    ops: tuple[SeqOp, ...]
    speculative: bool


class SendOps(Struct, frozen=True):
    """Send operations that no run carries."""

    ops: tuple[SeqOp, ...]


class OpenLane(Struct, frozen=True):
    """Announce a lane to the stages."""

    lane: int
    params: SamplingParams


class CloseLane(Struct, frozen=True):
    """Tell the stages to forget a lane."""

    lane: int


class CancelRuns(Struct, frozen=True):
    """Signal that these runs are useless."""

    run_ids: tuple[int, ...]


class StopDraft(Struct, frozen=True):
    """The proposals of this job are no longer wanted; it need not answer."""

    job_id: int


class Emit(Struct, frozen=True):
    """An output token of a request, in reading order.

    Of a response with threads: the thread that brought it, and what the reader sees of it (UTF-8,
    maybe a part of a character; text that nobody chose may be in it). None: the token's own text.
    """

    request_id: int
    choice: Choice
    speculated: bool
    thread: int = 0
    text: bytes | None = None


class Finish(Struct, frozen=True):
    """The terminal event of a request. reason: stop, length, context, or that of an Abort."""

    request_id: int
    reason: str
    stats: LaneStats


class Refuse(Struct, frozen=True):
    """The terminal event of a request that failed."""

    request_id: int
    error: RequestError


Instruction: TypeAlias = (
    IssueRun | SendOps | OpenLane | CloseLane | CancelRuns | StartDraft | StopDraft | Emit
    | Finish | Refuse
)


class ToNode(Struct, frozen=True):
    """An instruction for one of several nodes that each hold the whole model."""

    node: int
    instruction: Instruction
