"""State of the scheduler: requests that wait, lanes that run, runs in flight. Plain data."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from pipeinfer.core.drafting import StartDraft
from pipeinfer.core.messages import NO_RUN
from pipeinfer.core.types import Choice, Request
from pipeinfer.scheduler.events import LaneStats
from pipeinfer.scheduler.guess_queue import GuessQueue
from pipeinfer.scheduler.prefix_cache import Block
from pipeinfer.scheduler.token_tree import Node, Tree
from pipeinfer.strategies.decomposers.base import Decomposer


class QueuedRequest(Struct, eq=False):
    """A request on its way to a lane.

    order: of submission
    request: what was asked for
    output: tokens that it has brought already: it had a lane before and gave it up, or another
        cluster's was lost
    stats: its counters, over all lanes that it had
    decompose: makes the decomposer of a response with threads; None for a plain one
    past: choices by thread that its threads have brought already
    """

    order: int
    request: Request
    output: list[int] = field(default_factory=list)
    stats: LaneStats = field(default_factory=LaneStats)
    decompose: Callable[[], Decomposer] | None = None
    past: dict[int, list[Choice]] = field(default_factory=dict)


class Run(Struct, eq=False):
    """A run in flight.

    run_id: its number
    owners: the lane of each output row (of a prompt chunk without outputs: its lane)
    nodes: its output rows, in row order
    n_rows: all rows
    speculative: whether all rows are guesses
    chunk: whether it is a piece of a prompt
    block: the chunk that can be shared when the run is back
    hint: whether its rows' results are hints, wanted whatever becomes of the rows while the lane
        lasts
    useful: neither back nor cancelled
    in_flight: not back
    """

    run_id: int
    owners: list[Lane]
    nodes: list[Node]
    n_rows: int
    speculative: bool
    chunk: bool = False
    block: Block | None = None
    hint: bool = False
    useful: bool = True
    in_flight: bool = True

    @property
    def guesses(self) -> int:
        """How many of its rows are guesses, or are repeated for guesses that need them."""
        if self.speculative and not self.hint:
            return self.n_rows
        return sum(node.speculative for node in self.nodes)

    @property
    def plain(self) -> bool:
        """Whether it is there for accepted tokens alone."""
        return not (self.speculative or self.chunk or self.hint)

    @property
    def cancelled(self) -> bool:
        """Whether it was found to be of no use while it was in flight."""
        return not self.useful

    @property
    def alive(self) -> bool:
        """Whether any of its rows can still matter."""
        if self.hint or not self.nodes:
            return not self.owners[0].done
        return any(node.alive for node in self.nodes)

    @property
    def lanes(self) -> list[Lane]:
        """The lanes that have rows in the run, each once, in order of their rows."""
        return list(dict.fromkeys(self.owners))


class Lane(Struct, eq=False):
    """One causal thread of one request.

    The fields from `thread` to `path_id` matter for responses with threads.

    lane: its number
    ticket: the request, and what it has brought before
    tree: tokens behind the accepted ones, issued or planned
    accepted: tokens of the prompt and the output
    block: the last chunk of the prompt whose cells are shared with others
    next_row: position of the first row that is neither issued nor copied
    reused: prompt tokens that were taken from the cache
    last_chunk_run: the run of the last prompt chunk
    root_issued: whether the newest accepted token was issued
    reserve: guesses that wait for room
    waiting_tip: an accepted token that waits for guesses to travel with
    unsent: whether the accepted token waits for room in the pipeline
    job: the drafting job that is under way
    job_node: the node that the draft works below
    warm_up: the job that brings the draft up to the prompt
    empty: nodes below which the draft named nothing, until a result
    runs_since_accept: runs issued since the last acceptance
    empty_since_accept: empty drafts since the last acceptance
    useful: its useful runs in flight
    done: whether it has ended
    thread: which thread of the response it is, 0 for the main one
    own: the request of a forked thread; None: the response's
    base: tokens whose cells it shares with its parent
    given: tokens up to here were inserted, not chosen by the model
    jumps: (index, by how much positions exceed indices from there on)
    joined: cells that it got from other threads
    closing: whether no further token is wanted
    path_id: names its path to proposers
    step: passes through the pipeline, one after the other, that its tokens took
    """

    lane: int
    ticket: QueuedRequest
    tree: Tree
    accepted: list[int]
    block: Block
    next_row: int = 0
    reused: int = 0
    last_chunk_run: int = NO_RUN
    root_issued: bool = False
    reserve: GuessQueue = field(default_factory=GuessQueue)
    waiting_tip: Node | None = None
    unsent: bool = False
    job: StartDraft | None = None
    job_node: Node | None = None
    warm_up: StartDraft | None = None
    empty: list[Node] = field(default_factory=list)
    runs_since_accept: int = 0
    empty_since_accept: int = 0
    useful: int = 0
    done: bool = False
    thread: int = 0
    own: Request | None = None
    base: int = 0
    given: int = 0
    jumps: list[tuple[int, int]] = field(default_factory=list)
    joined: int = 0
    closing: bool = False
    path_id: int = -1
    step: int = 0

    def __post_init__(self) -> None:
        self.given = max(self.given, len(self.request.prompt))
        if self.path_id < 0:
            self.path_id = self.lane

    @property
    def request(self) -> Request:
        """The request that the lane works for: its own, or the whole response's."""
        return self.own or self.ticket.request

    @property
    def has_threads(self) -> bool:
        """Whether it is a thread of a response that is decomposed."""
        return self.ticket.decompose is not None

    @property
    def issued(self) -> int:
        """How many of its tokens have been issued, counted from the first."""
        if not self.root_issued:
            return self.next_row
        return len(self.accepted) - (self.tree.frontier.run_id == NO_RUN)

    def position(self, index: int) -> int:
        """The position of its token number `index`."""
        if not self.jumps:
            return index
        return index + next((shift for at, shift in reversed(self.jumps) if at <= index), 0)

    @property
    def stats(self) -> LaneStats:
        """Counters of the response; the lanes of one response share them."""
        return self.ticket.stats

    @property
    def main_id(self) -> int:
        """The sequence id that holds all accepted tokens; which one that is changes."""
        return self.tree.frontier.seq_ids[0]

    @property
    def n_output(self) -> int:
        """How many output tokens have been accepted."""
        return len(self.accepted) - len(self.request.prompt)

    @property
    def private_cells(self) -> int:
        """Cells that it needs for itself alone, prompt still to be computed included."""
        return len(self.accepted) - max(self.block.stop, self.base) + self.joined

    def next_piece(self, chunk: int, width: int) -> tuple[int, int]:
        """Indices `[start, stop)` of the next run that brings its cache up to date.

        Chunks of what nobody chose are cut at multiples of `chunk`; output that is replayed goes
        in runs of at most `width` rows, as it was made.
        """
        start = self.next_row
        if start < self.given:
            return start, min(start - start % chunk + chunk, self.given)
        return start, min(start + width, len(self.accepted))
