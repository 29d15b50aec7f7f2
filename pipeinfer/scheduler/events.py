"""The events that the scheduler handles and the instructions that it returns: plain data.

The part that executes the instructions (the head, or a simulation) returns their results as events.
Most instructions are the messages that stages and drafts receive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy.typing as npt
from msgspec import Struct

from pipeinfer.core.control import DraftStop
from pipeinfer.core.drafting import FeedDraft, Proposal, StartDraft
from pipeinfer.core.messages import CacheOps, Cancel, Decode, LaneClose, LaneOpen
from pipeinfer.core.types import Choice, Request
from pipeinfer.errors import RequestError
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.decomposers.base import Decomposer


class Enqueue(Struct, frozen=True):
    """A new request.

    output: tokens that a lost cluster had computed for it; they are replayed and not emitted again
    decompose: makes the decomposer of a response with threads; None for an ordinary response
    """

    request: Request
    output: tuple[int, ...] = ()
    decompose: Callable[[], Decomposer] | None = None


class RunDone(Struct, frozen=True):
    """A run returned.

    choices: of its output rows, in order; None when it was skipped
    taps: of all its rows, for a head of the target: see `Decode.taps`; None without one
    loaded: how many of its `loads` all stages have read
    """

    run_id: int
    choices: tuple[Choice, ...] | None
    taps: npt.NDArray[Any] | None = None
    loaded: int = 0


class Drafted(Struct, frozen=True):
    """A drafting job returned these proposals (none: no token was confident enough).

    rows: that were evaluated for them
    seconds: that this took
    """

    job_id: int
    proposals: tuple[Proposal, ...]
    rows: int = 0
    seconds: float = 0.0


class AbortRequest(Struct, frozen=True):
    """End a request now: the client left, a stop string matched, the user interrupted."""

    request_id: int
    reason: str


class Restart(Struct, frozen=True):
    """New stages with empty caches and no lanes: whatever was in flight is lost.

    limits: from now on; context, chunk and cache sizes have to stay the same
    reason: running requests end with it; empty: they are replayed
    """

    limits: Limits
    reason: str = ""


Event: TypeAlias = Enqueue | RunDone | Drafted | AbortRequest | Restart


# --- instructions -----------------------------------------------------------------------------


class LaneStats(Struct):
    """Counters of one lane; every issued node and run is counted once.

    guesses_tested: accepted positions at which a speculative child had been issued
    reused: prompt tokens that were not computed again
    restored: of these, tokens whose cells came from the stages' disks
    preempted: how often its lane was preempted for lack of cells and replayed
    recovered: how often it was replayed because stages were lost
    steps: the longest chain of passes through the pipeline that had to wait for one another, prompt
        not counted (plain decoding: one per token)
    rows: issued rows, those of prompts not counted
    attended: cells that these rows attend to, all together
    gave_up: threads that were ended because they were too long
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
    restored: int = 0
    preempted: int = 0
    recovered: int = 0
    steps: int = 0
    rows: int = 0
    attended: int = 0
    gave_up: int = 0


class Emit(Struct, frozen=True):
    """An output token of a request, in reading order.

    choice: the token and its log-probabilities
    speculated: whether it was in flight as a speculative token
    thread: in a decomposed response, the thread that produced it
    text: in a decomposed response, the text that the reader sees for it: UTF-8, possibly a part of
        a character, possibly with inserted text that the model did not choose. None: the token's
        own text
    reused: tokens of the prompt that were taken from the cache; None: unknown
    """

    request_id: int
    choice: Choice
    speculated: bool
    thread: int = 0
    text: bytes | None = None
    reused: int | None = None


class Finish(Struct, frozen=True):
    """The terminal event of a request. reason: stop, length, context, or the reason of an Abort."""

    request_id: int
    reason: str
    stats: LaneStats


class Refuse(Struct, frozen=True):
    """The terminal event of a request that failed."""

    request_id: int
    error: RequestError


Instruction: TypeAlias = (
    Decode | CacheOps | LaneOpen | LaneClose | Cancel | StartDraft | DraftStop | FeedDraft
    | Emit | Finish | Refuse
)
