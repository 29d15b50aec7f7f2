"""Decomposed responses: a lane for each response thread, and execution of a decomposer's actions.

A thread is a lane like any other, with a path, a tree, speculative tokens and runs of its own. This
module opens lanes for threads, inserts tokens that the model did not choose, holds threads back,
joins their cells, and emits text in reading order. The decomposer (`decomposers`) decides which
threads there are. Independent of clocks, CPU threads, models and tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct, field, structs

from pipeinfer.core.messages import LaneOpen
from pipeinfer.core.sampling import thread_key
from pipeinfer.core.types import Choice
from pipeinfer.errors import ProtocolError
from pipeinfer.scheduler.events import Emit
from pipeinfer.scheduler.lanes import Lane, QueuedRequest
from pipeinfer.scheduler.speculation import Speculation
from pipeinfer.scheduler.state import SchedulerState
from pipeinfer.scheduler.token_tree import Node
from pipeinfer.strategies.decomposers import base


class Response(Struct, eq=False):
    """One response and its threads.

    ticket: its request
    decomposer: decides on forks and joins
    lanes: open lanes by thread
    pending: forks that have no lane yet, each with the step in which it was requested
    chosen: by thread, the tokens that the model chose, with whether they were speculative
    past: by thread, choices of an earlier lane of this response, which are chosen again
    muted: number of pieces that were emitted before and are not emitted again
    settling: threads whose last row was not issued yet
    kept: the lane that holds the cells of ended threads until they are joined
    kept_threads: the threads whose cells it has
    step: the latest `Lane.step` of ended threads
    """

    ticket: QueuedRequest
    decomposer: base.Decomposer
    lanes: dict[int, Lane] = field(default_factory=dict)
    pending: list[tuple[base.Fork, int]] = field(default_factory=list)
    chosen: dict[int, list[tuple[Choice, bool]]] = field(default_factory=dict)
    past: dict[int, list[Choice]] = field(default_factory=dict)
    muted: int = 0
    settling: list[int] = field(default_factory=list)
    kept: Lane | None = None
    kept_threads: set[int] = field(default_factory=set)
    step: int = 0

    def choice(self, thread: int, choice: Choice) -> Choice:
        """Return the thread's next choice: an earlier one from `past`, else `choice`."""
        past = self.past.get(thread)
        return past[len(self.chosen.get(thread, ()))] \
            if past and len(self.chosen.get(thread, ())) < len(past) else choice


class Threads:
    """Executes the actions of decomposers; see the module docstring.

    state: lanes and runs, shared with the scheduler
    speculation: of the same scheduler
    filling: is called with lanes whose given tokens are not issued in full
    close: takes a lane out of the pipeline; its second argument is whether its runs have become
        useless
    """

    def __init__(
        self,
        state: SchedulerState,
        speculation: Speculation,
        filling: Callable[[Lane], None],
        close: Callable[[Lane, bool], None],
    ) -> None:
        self._state, self._speculation = state, speculation
        self._filling, self._close = filling, close
        self.responses: dict[int, Response] = {}  #: by order of submission

    def of(self, lane: Lane) -> Response:
        """The response that a lane belongs to."""
        return self.responses[lane.ticket.order]

    def start(self, lane: Lane) -> None:
        """Create the response whose main thread has the new lane `lane`."""
        ticket = lane.ticket
        assert ticket.decompose is not None
        response = Response(ticket, ticket.decompose(), past=ticket.past, muted=len(ticket.output))
        response.lanes[base.MAIN] = lane
        self.responses[ticket.order] = response
        ticket.stats.gave_up = 0  # a replay counts again
        lane.own = structs.replace(ticket.request, params=structs.replace(
            ticket.request.params, bans=response.decomposer.bans))

    def accepted(self, lane: Lane, choice: Choice, survivor: Node | None,
                 missed: Callable[[Lane, int], None]) -> None:
        """Pass an accepted token to the decomposer and execute its actions.

        lane: of the thread
        choice: the accepted token
        survivor: its node if it was in flight
        missed: is called to issue the token if it was not
        """
        response = self.of(lane)
        response.chosen.setdefault(lane.thread, []).append((choice, survivor is not None))
        actions = response.decomposer.accepted(lane.thread, choice.token)
        if any(_keeps_back(action, lane.thread) for action in actions):
            lane.next_row = len(lane.accepted) - 1
            self._restart(lane, choice.token, lane.position(lane.next_row))
        elif survivor is None:
            missed(lane, choice.token)
        self._execute(response, actions)

    def ended(self, lane: Lane) -> None:
        """End a thread, which gets no further token."""
        response = self.of(lane)
        lane.closing = True
        if lane.root_issued:  # else its newest token waits to be evaluated
            self._prune(lane)
            lane.next_row = lane.issued
        self._execute(response, response.decomposer.ended(lane.thread))

    def advance(self) -> None:
        """Settle threads whose last row was issued, and open the forks that have room."""
        for response in self.responses.values():
            for thread in [t for t in response.settling if _is_issued(response.lanes[t])]:
                response.settling.remove(thread)
                self._keep(response, thread)
                self._execute(response, response.decomposer.settled(thread))
            waiting, response.pending = response.pending, []
            response.pending[:0] = [(fork, step) for fork, step in waiting
                                    if not self._open(response, fork, step)]

    def hand_out(self, response: Response, pieces: Iterable[base.TextPiece]) -> None:
        """Emit the pieces that the client has not received yet."""
        for piece in pieces:
            choice, guessed = response.chosen[piece.thread][piece.number]
            if response.muted:
                response.muted -= 1
                continue
            if len(response.ticket.output) >= response.ticket.request.max_tokens:
                return
            response.ticket.output.append(choice.token)
            self._state.emit(Emit(response.ticket.request.request_id, choice, guessed,
                                         piece.thread, piece.text))

    def give_up(self, response: Response) -> None:
        """Close every lane of a response; the ticket retains the choices of its threads."""
        del self.responses[response.ticket.order]
        response.ticket.past = {thread: [choice for choice, _ in chosen]
                                for thread, chosen in response.chosen.items()} | {
            thread: past for thread, past in response.past.items()
            if len(past) > len(response.chosen.get(thread, ()))}
        for lane in [*response.lanes.values(), *([response.kept] if response.kept else [])]:
            self._close(lane, True)

    # --- actions ------------------------------------------------------------------------------

    def _execute(self, response: Response, actions: list[base.Action]) -> None:
        for action in actions:
            match action:
                case base.Fork():
                    parent = response.lanes[action.parent]
                    response.pending.append((action, parent.step))
                case base.Feed(thread, tokens, skip):
                    response.lanes[thread].step = max(response.lanes[thread].step, response.step)
                    self._feed(response.lanes[thread], tokens, skip)
                case base.Skip(thread, count):
                    self._skip(response.lanes[thread], count)
                case base.Halt():
                    pass
                case base.GiveUp():
                    response.ticket.stats.gave_up += 1
                case base.CutThread(thread, keep):
                    self._cut(response.lanes[thread], keep)
                case base.Join(thread, others):
                    self._join(response, response.lanes[thread], others)
                case base.Close(thread, True):
                    self._last_row(response.lanes[thread])
                    response.settling.append(thread)
                case base.Close(thread, _):
                    if thread in response.lanes:
                        lane = response.lanes.pop(thread)
                        response.step = max(response.step, lane.step)
                        self._close(lane, True)
                case _:
                    raise ProtocolError(f"unknown action {action!r}")

    def _restart(self, lane: Lane, token: int, pos: int) -> None:
        """Drop all that is in flight; a row at `pos` that is not issued becomes the frontier."""
        dead = lane.tree.restart(token, pos)
        lane.root_issued = False
        lane.waiting_tip = None
        if lane.unsent:
            self._state.withdraw(lane)
        self._speculation.drop(lane)
        self._call_off(dead)

    def _prune(self, lane: Lane) -> None:
        dead = lane.tree.prune()
        self._speculation.drop(lane)
        self._call_off(dead)

    def _call_off(self, dead: list[Node]) -> None:
        runs = self._state.runs
        self._state.cancel(runs[node.run_id] for node in dead if node.run_id in runs)

    def _last_row(self, lane: Lane) -> None:
        """Drop what follows the newest token, so that it is evaluated by itself."""
        self._prune(lane)
        lane.closing = True
        if lane.waiting_tip is not None:
            self._state.wait(lane, lane.waiting_tip)
            lane.waiting_tip = None

    def _feed(self, lane: Lane, tokens: tuple[int, ...], skip: int) -> None:
        if skip:
            index = lane.next_row
            lane.jumps.append((index, lane.position(index) - index + skip))
        if tokens:
            lane.accepted.extend(tokens)
            lane.given = len(lane.accepted)
        if tokens or skip:
            last = len(lane.accepted) - 1
            self._restart(lane, lane.accepted[last], lane.position(last))
        self._filling(lane)

    def _skip(self, lane: Lane, count: int) -> None:
        self._prune(lane)
        frontier = lane.tree.frontier
        frontier.skip = count
        index = len(lane.accepted)
        lane.jumps.append((index, lane.position(index) - index + count))
        frontier.ranked = False
        if lane.waiting_tip is None:
            lane.reserve.add_leaf(frontier)

    def _cut(self, lane: Lane, keep: int) -> None:
        pos = lane.position(keep)
        lane.accepted = lane.accepted[:keep]
        lane.jumps = [jump for jump in lane.jumps if jump[0] < keep]
        lane.given, lane.next_row = min(lane.given, keep), keep
        lane.path_id = self._state.admission.new_path()
        self._restart(lane, lane.accepted[-1], pos)
        self._state.pool.cool(lane.lane, pos)

    def _join(self, response: Response, lane: Lane, others: tuple[int, ...]) -> None:
        kept, response.kept = response.kept, None
        if kept is None or response.kept_threads != set(others):
            raise ProtocolError(f"threads {others} are joined, but {response.kept_threads} wait")
        response.kept_threads = set()
        self._state.pool.cool(lane.lane, 0)
        response.step = max(response.step, kept.step)
        self._merge(kept, lane)

    def _keep(self, response: Response, thread: int) -> None:
        """Move an ended thread's cells to the one lane that holds such cells until they are joined.

        One lane for all of them, so that waiting threads take no room from active ones.
        """
        lane = response.lanes.pop(thread)
        response.kept_threads.add(thread)
        if response.kept is None:
            response.kept = lane
            return
        response.kept.step = max(response.kept.step, lane.step)
        # what it shares with its parent stays the parent's: only its own tokens are joined
        self._state.pool.behead(lane.main_id, lane.position(lane.base))
        self._merge(lane, response.kept)

    def _merge(self, lane: Lane, into: Lane) -> None:
        """Join a lane's cells to another lane, ordered by thread and not by time."""
        self._state.pool.join(lane.main_id, into.main_id, lane.thread)
        into.joined += len(lane.accepted) - lane.base + lane.joined
        self._close(lane, False)

    def _open(self, response: Response, fork: base.Fork, step: int) -> bool:
        """Open a lane for a fork; False if its parent's rows are not issued or there is no room."""
        parent = response.lanes[fork.parent]
        limits, ticket = self._state.limits, response.ticket
        if parent.issued < fork.keep or len(response.lanes) > limits.threads:
            return False
        params = ticket.request.params
        if fork.keep + len(fork.tokens) >= limits.n_ctx:
            self._execute(response, response.decomposer.ended(fork.thread))
            return True
        own = structs.replace(
            ticket.request, prompt=(*parent.accepted[:fork.keep], *fork.tokens),
            params=structs.replace(params, key=thread_key(params.key, fork.thread),
                                       bans=fork.bans))
        lane = self._state.admission.fork(parent, own, fork.thread, fork.keep)
        lane.step = step
        response.lanes[fork.thread] = self._state.lanes[lane.lane] = lane
        self._state.emit(LaneOpen(lane.lane, own.params))
        self._filling(lane)
        return True


def _keeps_back(action: base.Action, thread: int) -> bool:
    """Whether the thread's newest token is not to be issued by itself."""
    return action.thread == thread and (
        isinstance(action, base.Halt | base.Feed | base.CutThread) or action == base.Close(thread))


def _is_issued(lane: Lane) -> bool:
    return lane.issued == len(lane.accepted)
