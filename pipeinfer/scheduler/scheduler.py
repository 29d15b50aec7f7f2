"""The scheduler: events in, instructions out, and nothing else.

`handle(event)` returns the instructions that the head has to execute, in order. The scheduler does
not depend on clocks, threads, transports or models. Every policy is a rule for what to issue next
over the same token tree. Tokens come only from the tree's walk, so no policy, ablation or timing
can change them (docs/algorithms.md 2.1).

    iterative    issue the accepted token, wait
    speculative  draft while nothing is in flight, issue tip and tree in one run (SpecInfer)
    pipeinfer    issue the accepted token at once, draft meanwhile, keep issuing micro-batches
                 below the tip while results are out (docs/algorithms.md 4)
    published    the same by the paper's own rules (docs/algorithms.md 4.10)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from pipeinfer.core.control import DraftStop
from pipeinfer.core.drafting import FeedDraft
from pipeinfer.core.messages import NO_RUN, CacheOps, LaneClose, LaneOpen
from pipeinfer.core.types import NO_TOKEN, REPLAYED_ROWS, Choice, Request, make_rows
from pipeinfer.errors import ContextOverflow, InvariantError, ProtocolError, RequestError
from pipeinfer.scheduler import events
from pipeinfer.scheduler.admission import Admission
from pipeinfer.scheduler.lanes import Chunk, Lane, QueuedRequest, Run
from pipeinfer.scheduler.loading import Loading
from pipeinfer.scheduler.pictures import Pictures
from pipeinfer.scheduler.published import repeat_tip
from pipeinfer.scheduler.response_threads import Threads
from pipeinfer.scheduler.sequence_pool import SequencePool
from pipeinfer.scheduler.settings import Limits, Tuning
from pipeinfer.scheduler.speculation import Speculation
from pipeinfer.scheduler.state import SchedulerState
from pipeinfer.scheduler.story import Story
from pipeinfer.scheduler.token_tree import Node
from pipeinfer.scheduler.validation import validate
from pipeinfer.strategies.decomposers.base import MAIN, Decomposer
from pipeinfer.strategies.proposers.base import InlineProposer


class Scheduler:
    """Owns every lane, run and sequence id; see the module docstring.

    limits: the settings
    rows: an inline proposer, which adds hint rows to runs; None: none
    drafts: whether drafting jobs can be executed
    validate: whether to check the whole state after every event, see `validate_state`
    """

    def __init__(self, limits: Limits, rows: InlineProposer | None = None, *, drafts: bool = True,
                 validate: bool = False) -> None:
        self._validate = validate
        self.state = SchedulerState(limits)
        self.speculation = Speculation(self.state, rows, drafts=drafts)
        self.lanes, self.runs = self.state.lanes, self.state.runs
        self.calibration = self.speculation.calibration
        self.totals = events.LaneStats()  # of all requests; only the counters of tokens are used
        self.most_cells: int | None = None  # peak of cells in use; None: not recorded
        self._filling: deque[Lane] = deque()  # lanes whose prompt is not issued in full
        self._loading = Loading(self.state, self._filling.append)
        self.story = Story(self.state)
        self.threads = Threads(self.state, self.speculation, self._filling.append, self._close)
        self._next_order = 0
        self._pictures = Pictures()

    @property
    def limits(self) -> Limits:
        """The settings in use."""
        return self.state.limits

    @property
    def admission(self) -> Admission:
        """The part that admits requests and manages the prefix cache."""
        return self.state.admission

    @property
    def pool(self) -> SequencePool:
        """The sequence ids."""
        return self.admission.pool

    @property
    def next_run(self) -> int:
        """The id of the run that is issued next."""
        return self.state.next_run

    @next_run.setter
    def next_run(self, run_id: int) -> None:
        self.state.next_run = run_id

    def validate_state(self) -> None:
        """Raise InvariantError if the state contradicts itself; walks over all of it."""
        validate(self.state, self._filling)

    @property
    def waiting(self) -> deque[QueuedRequest]:
        """The queue of requests without a lane."""
        return self.admission.waiting

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting, running or in flight."""
        return not (self.lanes or self.runs or self.waiting)

    def reconfigure(self, limits: Limits) -> None:
        """Use other settings from now on; run ids keep increasing. Raises ProtocolError unless
        idle.
        """
        if not self.idle:
            raise ProtocolError("the scheduler can be reconfigured only while it is idle")
        self.state.limits = limits
        self.admission.forget_all()
        ops = self.pool.take_ops()
        self.state.admission = Admission(limits)
        self.pool.ops.extend(ops)

    def tune(self, tuning: Tuning) -> None:
        """Use other sizes, credits and cutoffs from now on, at any time."""
        self.state.limits = self.admission.limits = self.limits.tuned(tuning)

    def handle(self, event: events.Event) -> list[events.Instruction]:
        """Advance by one event; return the instructions to execute, in order.

        Raises ProtocolError for an unknown event, and for a run that was not in flight, was skipped
        although it was needed, or returned with another number of choices than it has output rows.
        Such an error, and InvariantError, carry what happened to the lanes before.
        """
        self.story.event(event)
        try:
            self._advance(event)
        except (ProtocolError, InvariantError) as error:
            error.story = self.story.lines()
            raise
        instructions = self.state.take()
        self.story.instructions(instructions)
        return instructions

    def _advance(self, event: events.Event) -> None:
        match event:
            case events.Enqueue(request, output, decompose):
                self._submit(request, output, decompose)
            case events.RunDone(run_id, choices, taps, loaded):
                self._run_done(run_id, choices, taps, loaded)
            case events.Drafted(job_id, proposals, rows):
                self.speculation.drafted(job_id, proposals, rows)
            case events.AbortRequest(request_id, reason):
                self._abort(request_id, reason)
            case events.Restart(limits, reason):
                self._restart(limits, reason)
            case _:
                raise ProtocolError(f"unknown event {event!r}")
        ended = True
        while ended:  # a response that ends frees room for waiting requests
            self._make_room()
            self._admit()
            self._issue_tips()
            self.threads.advance()
            self._prefill()
            self.threads.advance()
            if self.most_cells is not None:
                self.most_cells = max(self.most_cells, self.admission.at_work(
                    self.lanes.values()))
            ended = self._hand_out()
        self.speculation.speculate()
        self.speculation.ask_draft()
        if self._validate:
            self.validate_state()

    @property
    def decoding(self) -> int:
        """The number of lanes past their prompts; 0 while prompts are being computed."""
        return 0 if self.state.chunks or self._filling else len(self.lanes)

    def snapshot(self) -> dict[str, Any]:
        """Return the present state for display: counts, and one entry per lane."""
        limits, admission = self.limits, self.admission
        return {
            "waiting": len(self.waiting), "runs": len(self.runs), "useful_runs": self.state.useful,
            "cells_used": admission.used(self.lanes.values()), "cells": limits.cells or
            limits.n_ctx * limits.parallel, "kept_prefixes": len(admission.prefixes.kept),
            "free_ids": len(self.pool.free),
            "credit": limits.credit, "draft_max": limits.draft_max,
            "acceptance": self.calibration.acceptance,
            "speculating": limits.speculates and self.speculation.room_to_guess(),
            "totals": {
                "accepted": self.totals.accepted, "guesses_tested": self.totals.guesses_tested,
                "accepted_speculative": self.totals.accepted_speculative},
            "lanes": [{
                "lane": lane.lane, "request": lane.request.request_id,
                "prompt": len(lane.request.prompt), "prefilled": lane.next_row,
                "reused": lane.reused, "output": lane.n_output, "in_flight": lane.useful,
                "guesses_tested": lane.stats.guesses_tested,
                "accepted_speculative": lane.stats.accepted_speculative,
            } for lane in self.lanes.values()],
        }

    # --- events -------------------------------------------------------------------------------

    def _submit(self, request: Request, output: tuple[int, ...],
                decompose: Callable[[], Decomposer] | None) -> None:
        n = len(request.prompt)
        if n + 1 > self.limits.n_ctx:
            self.state.emit(events.Refuse(request.request_id, ContextOverflow(
                f"the prompt has {n} tokens, but the context holds {self.limits.n_ctx}: shorten "
                f"the prompt or raise the context with -c {n + max(request.max_tokens, 1)}"
            )))
            return
        if reason := self._pictures.refusal(request, self.limits):
            self.state.emit(events.Refuse(request.request_id, RequestError(reason)))
            return
        request = self._pictures.named(request)
        self._next_order += 1
        self.waiting.append(
            QueuedRequest(self._next_order, request, list(output), decompose=decompose)
        )

    def _admit(self) -> None:
        while (lane := self.admission.next_lane(self.lanes.values())) is not None:
            self.lanes[lane.lane] = lane
            if lane.has_threads:
                self.threads.start(lane)
            request = lane.request
            self.state.emit(LaneOpen(lane.lane, request.params))
            if lane.n_output >= request.max_tokens:
                self._finish(lane, "length")
                continue
            self._filling.append(lane)
            self.speculation.warm_up(lane)

    def _make_room(self) -> None:
        """Free cells while the cache is too full: first cached prompts, then the youngest requests.

        The oldest request always fits once it is alone, unless its threads together outgrow the
        cache.
        """
        while self.lanes and self.admission.over(self.lanes.values()):
            lane = max(self.lanes.values(), key=lambda lane: lane.ticket.order)
            if all(other.ticket is lane.ticket for other in self.lanes.values()):
                if lane.has_threads:
                    self._finish(lane, "context")
                return
            self._give_up(lane)
            lane.stats.preempted += 1
            self.waiting.appendleft(lane.ticket)

    def _give_up(self, lane: Lane) -> None:
        """Take a request out of the pipeline; its ticket retains its output."""
        if lane.has_threads:
            self.threads.give_up(self.threads.of(lane))
        else:
            self._close(lane)
            lane.ticket.output = lane.accepted[len(lane.request.prompt):]

    def _run_done(self, run_id: int, choices: tuple[Choice, ...] | None,
                  taps: npt.NDArray[Any] | None, loaded: int) -> None:
        run = self.runs.pop(run_id, None)
        if run is None:
            raise ProtocolError(f"run {run_id} came back twice or was never issued")
        was_useful, run.in_flight = run.useful, False
        self.state.retire(run)
        self.state.guess_rows -= run.guesses
        if choices is None:
            if was_useful:
                raise ProtocolError(f"run {run_id} was skipped although it has live rows")
            for lane in run.lanes:
                lane.stats.skipped_runs += 1
            return
        if len(choices) != len(run.nodes):
            raise ProtocolError(
                f"run {run_id} has {len(run.nodes)} output rows, but {len(choices)} choices came "
                "back"
            )
        if run.loads:
            self._loading.done(run, loaded)
            return
        if run.block is not None and was_useful:
            run.block.computed = True
        if run.saves and self.state.stored is not None:
            # where a stage could not, a read tells
            self.state.stored.names.update(one.key for one in run.saves)
        for node, choice in zip(run.nodes, choices, strict=True):
            node.choice = choice
        if taps is not None:
            self._tapped(run, taps)
        for lane in run.lanes:
            if not lane.done:
                self.speculation.result_back(lane)
                self._walk(lane)

    def _tapped(self, run: Run, taps: npt.NDArray[Any]) -> None:
        """Give a head the rows of a chunk now, and those of tokens as they are accepted."""
        if len(taps) != run.n_rows:
            raise ProtocolError(f"run {run.run_id} has {run.n_rows} rows, but {len(taps)} tapped "
                                "rows came back")
        if not run.chunk:
            for node, row in zip(run.nodes, run.outputs, strict=True):
                node.taps = taps[row : row + 1]
        elif not (lane := run.owners[0]).done:
            if lane.picture_at(run.start) is None:
                self.state.emit(FeedDraft(lane.path_id, lane.in_text(run.start), taps))
            self.speculation.warm_up(lane, min(run.start + len(taps) + 1, len(lane.accepted)))

    def _abort(self, request_id: int, reason: str) -> None:
        for ticket in self.waiting:
            if ticket.request.request_id == request_id:
                self.waiting.remove(ticket)
                self.state.emit(events.Finish(request_id, reason, ticket.stats))
                return
        for lane in list(self.lanes.values()):
            if lane.request.request_id == request_id and not lane.thread:
                self._finish(lane, reason)

    def _restart(self, limits: Limits, reason: str) -> None:
        """Return every request to the queue, in order of submission, with its output so far.

        With a reason, those that have a lane end instead.
        """
        tickets = {lane.ticket.order: lane.ticket for lane in self.lanes.values()}
        for lane in list(self.lanes.values()):
            if lane.lane in self.lanes:  # giving up one thread of a response gives up all
                self._give_up(lane)
        for ticket in tickets.values():
            ticket.stats.recovered += 1
        stops = [o for o in self.state.take() if isinstance(o, DraftStop)]  # the stages are gone
        ended = list(tickets.values()) if reason else []
        if reason:
            tickets.clear()
        waiting = sorted([*tickets.values(), *self.waiting], key=lambda ticket: ticket.order)
        self.state.restart(limits)
        self.waiting.extend(waiting)
        for stop in stops:
            self.state.emit(stop)
        for ticket in ended:
            self.state.emit(events.Finish(ticket.request.request_id, reason, ticket.stats))

    # --- the walk -----------------------------------------------------------------------------

    def _walk(self, lane: Lane) -> None:
        dead: list[Node] = []
        before, stats, totals = lane.tree.frontier, lane.stats, self.totals
        request, threaded = lane.request, lane.has_threads
        while not (lane.done or lane.closing) and (choice := lane.tree.frontier.choice) is not None:
            if threaded:
                choice = self.threads.of(lane).choice(lane.thread, choice)
            if choice.token in request.stop_ids:
                self._end(lane, "stop")
                break
            if choice.token == NO_TOKEN:
                self._refuse(lane)
                break
            frontier = lane.tree.frontier
            had_guess = any(c.speculative for c in frontier.children)
            self.speculation.learn(frontier, choice.token)
            lane.step = max(lane.step, frontier.step + 1)
            stats.steps = max(stats.steps, lane.step)
            if frontier.taps is not None:
                self.state.emit(FeedDraft(lane.path_id, len(lane.text) - 1, frontier.taps))
            survivor, died = lane.tree.step(choice.token)
            dead += died
            lane.accepted.append(choice.token)
            lane.runs_since_accept = lane.empty_since_accept = 0
            for counts in (stats, totals):
                counts.accepted += 1
                counts.guesses_tested += had_guess
                counts.accepted_speculative += survivor is not None
            if threaded:
                self.threads.accepted(lane, choice, survivor, self._miss)
            else:
                self.state.emit(events.Emit(request.request_id, choice, survivor is not None,
                                            reused=stats.reused))
            if lane.done or lane.closing:
                pass
            elif self._n_chosen(lane) >= request.max_tokens:
                self._end(lane, "length")
            elif lane.position(len(lane.accepted)) >= self.limits.n_ctx:
                self._end(lane, "context")
            elif threaded:
                pass
            elif survivor is None:
                self._miss(lane, choice.token)
            elif lane.job_node is not None and not lane.job_node.open:
                self.speculation.drop_job(lane)
        if not lane.done:
            self._loading.accepted(lane)
        self.state.cancel(self.runs[n.run_id] for n in dead if n.run_id in self.runs)
        if self.limits.buffered and lane.tree.frontier is not before:
            repeat_tip(self.state, lane)

    def _refuse(self, lane: Lane) -> None:
        self._give_up(lane)
        self.state.emit(events.Refuse(lane.request.request_id, RequestError(
            f"after {lane.n_output} tokens nothing may follow: the grammar admits no token of the "
            "vocabulary, or became too complex")))

    def _miss(self, lane: Lane, token: int) -> None:
        """Make an accepted token that is not in flight the frontier and the new tip."""
        node = lane.tree.add(token, NO_RUN)
        if not self.speculation.missed(lane, node):
            self.state.wait(lane, node)

    def _n_chosen(self, lane: Lane) -> int:
        """The number of tokens that the model chose in this lane."""
        if lane.has_threads:
            return len(self.threads.of(lane).chosen[lane.thread])
        return lane.n_output

    def _end(self, lane: Lane, reason: str) -> None:
        """End a lane that has all its tokens."""
        if lane.has_threads:
            self.threads.ended(lane)
        else:
            self._finish(lane, reason)

    def _hand_out(self) -> bool:
        """Emit text of decomposed responses in reading order, and finish them; return whether one
        ended.
        """
        ended = False
        for response in list(self.threads.responses.values()):
            decomposer, most = response.decomposer, response.ticket.request.max_tokens
            self.threads.hand_out(response, decomposer.take())
            if len(response.ticket.output) >= most:
                self._finish(response.lanes[MAIN], "length")
            elif decomposer.complete:
                self._finish(response.lanes[MAIN], "stop")
            else:
                continue
            ended = True
        return ended

    def _finish(self, lane: Lane, reason: str) -> None:
        ticket = lane.ticket
        if lane.has_threads and lane.thread == MAIN and ticket.order in self.threads.responses:
            response = self.threads.of(lane)
            if reason != "length":
                self.threads.hand_out(response, response.decomposer.flush())
        self._give_up(lane)
        self.state.emit(events.Finish(ticket.request.request_id, reason, ticket.stats))

    def _close(self, lane: Lane, useless: bool = True) -> None:
        """Take a lane out of the pipeline; with `useless`, cancel all that it has in flight."""
        lane.done = True
        self.speculation.drop_job(lane)
        if lane.warm_up is not None:
            self.state.emit(DraftStop(lane.warm_up.job_id))
        if useless:
            lane.tree.kill()
            self.state.cancel(run for run in self.runs.values() if lane in run.owners)
        del self.lanes[lane.lane]
        if lane in self._filling:
            self._filling.remove(lane)
        if lane.unsent:
            self.state.withdraw(lane)
        self.admission.leave(lane)
        self.state.emit(CacheOps(self.pool.take_ops()))
        self.state.emit(LaneClose(lane.lane))

    # --- what to issue next -------------------------------------------------------------------

    def _issue_tips(self) -> None:
        """Issue accepted tokens: at once where every lane has a run of its own, else in decode
        groups.

        A lane that finds all groups in flight waits for the next one that returns. Lanes are spread
        over the runs that fill the pipeline: all in one would leave its other stages idle. Where
        stages share their cores, there is one run at a time.
        """
        if not self.state.tips:
            return
        lanes = self.state.decoding
        size = self.limits.group(lanes)
        runs = 1 if self.limits.same_cores else -(-lanes // size)
        while self.state.tips and self.state.plain < runs:
            tips = [self.state.tips.popleft() for _ in range(min(size, len(self.state.tips)))]
            for lane, _ in tips:
                lane.unsent = False
            self.state.send([(lane, row) for lane, node in tips
                             for row in (*lane.tree.repeated([node]), node)], NO_RUN,
                            speculative=False)
            for lane, node in tips:
                lane.tree.sent(node)

    def _prefill(self) -> None:
        """Issue chunks of prompts, one lane after the other.

        An accepted token behind chunks advances at their pace, whether there is one chunk or many.
        So many may be in flight, and tokens go between them.
        """
        limits, turns = self.limits, len(self._filling)
        while turns and self.state.chunks < limits.credit:
            lane = self._filling.popleft()
            if self.admission.catch_up(lane, self._loading.reach(lane)):
                turns -= 1
                self._filling.append(lane)
                continue
            if self._loading.begin(lane):
                turns = len(self._filling)
                continue
            self._issue_piece(lane)
            if not lane.root_issued:
                self._filling.append(lane)
            turns = len(self._filling)

    def _issue_piece(self, lane: Lane) -> None:
        limits, tokens, root = self.limits, lane.accepted, lane.tree.frontier
        start, stop = lane.next_piece(limits.chunk, min(limits.exact_width, REPLAYED_ROWS))
        last = stop == len(tokens)
        seq = root.seq_ids[:1]
        shown = lane.picture_at(start)
        media = shown and shown.part(start - shown.start, stop - shown.start)
        rows = make_rows([(tokens[i] if media is None else NO_TOKEN, lane.position(i), seq,
                           i == len(tokens) - 1) for i in range(start, stop)], media=media)
        saves = self._loading.saves(lane, start, stop)
        block = self.admission.shareable(lane, start, stop)
        run_id = self.state.launch([lane], rows, [root] if last else [], lane.last_chunk_run,
                                   speculative=False, chunk=Chunk(start, block, saves))
        if block is not None and limits.states:
            self.admission.keep_state(lane, block)
        lane.last_chunk_run = run_id
        lane.next_row = stop
        if last:
            root.run_id, root.step = run_id, lane.step
            lane.root_issued = True
            lane.reserve.add_leaf(root)
