"""The scheduler's state: waiting requests, open lanes, runs in flight. Plain data."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from pipeinfer.core.drafting import StartDraft
from pipeinfer.core.messages import NO_RUN, Piece
from pipeinfer.core.types import Choice, Media, Request
from pipeinfer.scheduler.events import LaneStats
from pipeinfer.scheduler.guess_queue import GuessQueue
from pipeinfer.scheduler.prefix_cache import Block, piece_end
from pipeinfer.scheduler.token_tree import Node, Tree
from pipeinfer.strategies.decomposers.base import Decomposer


class QueuedRequest(Struct, eq=False):
    """A request that waits for a lane, or has one.

    order: of submission
    request: of the client
    output: tokens that it has produced already: its lane was preempted, or its cluster was lost
    stats: its counters, over all lanes that it had
    decompose: makes the decomposer of a response with threads; None for a plain one
    past: choices that its threads have produced already, by thread
    """

    order: int
    request: Request
    output: list[int] = field(default_factory=list)
    stats: LaneStats = field(default_factory=LaneStats)
    decompose: Callable[[], Decomposer] | None = None
    past: dict[int, list[Choice]] = field(default_factory=dict)


class Chunk(Struct, frozen=True):
    """The part of a prompt that a run computes or reads.

    start: index of its first token
    block: the chunk that can be shared when the run is back
    saves: what the stages write to their disks
    loads: what the stages read from their disks instead of computing it
    """

    start: int = 0
    block: Block | None = None
    saves: tuple[Piece, ...] = ()
    loads: tuple[Piece, ...] = ()


class Run(Struct, eq=False):
    """A run in flight.

    run_id: its number
    owners: the lane of each output row (of a prompt chunk without outputs: its lane)
    nodes: its output rows, in row order
    n_rows: number of all rows
    outputs: which of them are output rows, by number
    speculative: whether all rows are speculative tokens
    chunk: whether it is a chunk of a prompt
    start, block, saves, loads: of a chunk, as in `Chunk`
    hint: whether its results are input for a proposer, wanted as long as the lane is open even if
        all rows are dead
    useful: whether it is neither back nor cancelled
    in_flight: whether it is not back
    """

    run_id: int
    owners: list[Lane]
    nodes: list[Node]
    n_rows: int
    speculative: bool
    outputs: list[int] = field(default_factory=list)
    start: int = 0
    chunk: bool = False
    block: Block | None = None
    hint: bool = False
    saves: tuple[Piece, ...] = ()
    loads: tuple[Piece, ...] = ()
    useful: bool = True
    in_flight: bool = True

    @property
    def guesses(self) -> int:
        """The number of rows that are speculative tokens, or that are repeated for speculative
        tokens.
        """
        if self.speculative and not self.hint:
            return self.n_rows
        return sum(node.speculative for node in self.nodes)

    @property
    def plain(self) -> bool:
        """Whether it holds accepted tokens only."""
        return not (self.speculative or self.chunk or self.hint)

    @property
    def cancelled(self) -> bool:
        """Whether it was found useless while it was in flight."""
        return not self.useful

    @property
    def alive(self) -> bool:
        """Whether the result of any of its rows can still be used."""
        if self.hint or not self.nodes:
            return not self.owners[0].done
        return any(node.alive for node in self.nodes)

    @property
    def lanes(self) -> list[Lane]:
        """The lanes that have rows in the run, each once, in order of their rows."""
        return list(dict.fromkeys(self.owners))


class Lane(Struct, eq=False):
    """One causal sequence of one choice of one request.

    The fields from `thread` to `path_id` matter for responses with threads.

    lane: its number
    ticket: the request, and what it has produced before
    tree: tokens behind the accepted ones, issued or planned
    accepted: tokens of the prompt and the output
    block: the last chunk of the prompt whose cells are shared with others
    next_row: index of the first token that is neither issued nor copied
    reused: prompt tokens that were taken from the cache
    last_chunk_run: the run of the last prompt chunk
    root_issued: whether the newest accepted token was issued
    reserve: speculative tokens that wait to be issued
    waiting_tip: an accepted token that waits for speculative tokens to share its run
    unsent: whether the accepted token waits for room in the pipeline
    job: the drafting job in progress
    job_node: the node that the draft works below
    warm_up: the job that prefills the draft's cache
    empty: nodes below which the draft proposed nothing, until a result
    runs_since_accept: runs issued since the last acceptance
    empty_since_accept: empty drafts since the last acceptance
    useful: number of its useful runs in flight
    done: whether it has ended
    thread: number of its response thread, 0 for the main one
    own: the request of a forked thread; None: the response's
    base: number of tokens whose cells it shares with its parent
    given: tokens up to here were inserted, not chosen by the model
    jumps: (index, by how much positions exceed indices from there on)
    joined: number of cells that it got from other threads
    closing: whether no further token is wanted
    path_id: number of its path, for proposers
    step: passes through the pipeline, one after the other, that its tokens took
    asked_at: number of its tokens when the draft's models were last queried
    kept_at: lengths of the prompt behind which its state is kept
    states: holders of the states that it has left in the prefix cache
    names: of the chunks of its prompt on the stages' disks; None: not computed yet
    loading: whether a run reads cells from there
    answered: chunks of its answer that were sent there
    plain, read: `text` where there are pictures, and how many accepted tokens are in it
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
    asked_at: int = 0
    kept_at: set[int] = field(default_factory=set)
    states: list[int] = field(default_factory=list)
    names: list[bytes] | None = None
    loading: bool = False
    answered: int = 0
    plain: list[int] = field(default_factory=list)
    read: int = 0

    def __post_init__(self) -> None:
        self.given = max(self.given, len(self.request.prompt))
        if self.path_id < 0:
            self.path_id = self.lane

    @property
    def request(self) -> Request:
        """The request of the lane: its own, or that of the whole response."""
        return self.own or self.ticket.request

    @property
    def has_threads(self) -> bool:
        """Whether it belongs to a decomposed response."""
        return self.ticket.decompose is not None

    @property
    def text(self) -> list[int]:
        """Its accepted tokens without rows of pictures, for proposers, which read text only. Tokens
        are only ever appended."""
        if not self.request.media:
            return self.accepted
        self.plain.extend(token for token in self.accepted[self.read:] if token >= 0)
        self.read = len(self.accepted)
        return self.plain

    def in_text(self, index: int) -> int:
        """Return how many of its first `index` tokens are in `text`."""
        return index - sum(min(index, one.stop) - one.start for one in self.request.media
                           if one.start < index)

    def picture_at(self, index: int) -> Media | None:
        """Return the picture whose rows are at `index` of the prompt."""
        return next((one for one in self.request.media if one.start <= index < one.stop), None)

    @property
    def issued(self) -> int:
        """The number of its tokens that have been issued, counted from the first."""
        if not self.root_issued:
            return self.next_row
        return len(self.accepted) - (self.tree.frontier.run_id == NO_RUN)

    def position(self, index: int) -> int:
        """Return the position of the token at `index` of the accepted tokens."""
        if not self.jumps:
            return index
        return index + next((shift for at, shift in reversed(self.jumps) if at <= index), 0)

    @property
    def stats(self) -> LaneStats:
        """The counters of the response, which its lanes share."""
        return self.ticket.stats

    @property
    def main_id(self) -> int:
        """The sequence id that holds all accepted tokens; it changes as tokens are accepted."""
        return self.tree.main_id

    @property
    def n_output(self) -> int:
        """The number of accepted output tokens."""
        return len(self.accepted) - len(self.request.prompt)

    @property
    def private_cells(self) -> int:
        """The number of cells that it needs for itself alone, those of a prompt still to be
        computed included.
        """
        return len(self.accepted) - max(self.block.stop, self.base) + self.joined

    def next_piece(self, chunk: int, width: int) -> tuple[int, int]:
        """Return the indices `[start, stop)` of the next run that prefills the lane's cache up to
        date.

        chunk: given tokens are cut at multiples of this, and where pictures begin and end
        width: most rows of a run of replayed output, which is computed in exact runs as at first
        """
        start = self.next_row
        if start < self.given:
            return start, min(piece_end(self.request.media, start, chunk), self.given)
        return start, min(start + width, len(self.accepted))
