"""The scheduler: events in, instructions out, and nothing else.

`handle(event)` returns the instructions that a shell has to execute, in order. The scheduler
knows no clock, thread, transport or model; every policy is a rule for what to issue next over
the same token tree, and tokens come only from the tree's walk, so no policy, ablation or timing
can change them (DESIGN section 3).

    iterative    issue the accepted token, wait
    speculative  draft while nothing is in flight, issue tip and tree in one run (SpecInfer)
    pipeinfer    issue the accepted token at once, draft meanwhile, keep issuing micro-batches
                 below the tip while results are out (ALGORITHMS 1.4 to 1.8)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from pipeinfer.admission import Admission
from pipeinfer.calibration import Calibration
from pipeinfer.core import NO_TOKEN, Choice, Request, Rows, make_rows
from pipeinfer.errors import ContextOverflow, ProtocolError, RequestError
from pipeinfer.events import (
    Abort,
    CancelRuns,
    CloseLane,
    Drafted,
    Emit,
    Event,
    Finish,
    Instruction,
    IssueRun,
    LaneStats,
    OpenLane,
    Refuse,
    RunDone,
    SendOps,
    StartDraft,
    StopDraft,
    Submit,
)
from pipeinfer.lanes import Lane, Run, Ticket
from pipeinfer.policy import Ablation, Limits
from pipeinfer.prefixes import Block
from pipeinfer.protocol import NO_RUN
from pipeinfer.reserve import probability
from pipeinfer.sequences import SequencePool
from pipeinfer.tree import Node, Proposal

_MOST_JOBS = 2  #: draft jobs that are out at a time: the draft does one after the other


class Scheduler:
    """Owns every lane, run and sequence id; see the module docstring."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.admission = Admission(limits)
        self.calibration = Calibration()
        self.totals = LaneStats()  # of all requests: tokens and how many were guessed
        self.lanes: dict[int, Lane] = {}
        self.runs: dict[int, Run] = {}
        self._tips: deque[tuple[Lane, Node]] = deque()  # accepted tokens not issued yet
        self._filling: deque[Lane] = deque()  # lanes whose prompt is not issued in full
        self._useful = self._plain = self._chunks = self._guess_rows = 0
        self._next_run = 0
        self._next_job = 0
        self._next_order = 0
        self._out: list[Instruction] = []

    @property
    def pool(self) -> SequencePool:
        """The sequence ids."""
        return self.admission.pool

    @property
    def waiting(self) -> deque[Ticket]:
        """Requests without a lane."""
        return self.admission.waiting

    @property
    def idle(self) -> bool:
        """Nothing is waiting, running or in flight."""
        return not (self.waiting or self.lanes or self.runs)

    def reconfigure(self, limits: Limits) -> None:
        """Use other knobs from now on; only while idle, and run ids keep increasing."""
        if not self.idle:
            raise ProtocolError("the scheduler can be reconfigured only while it is idle")
        self.limits = limits
        self.admission.forget_all()
        ops = self.pool.take_ops()
        self.admission = Admission(limits)
        self.pool.ops.extend(ops)

    def tune(self, limits: Limits) -> None:
        """Use other sizes, credits and cutoffs from now on, at any time.

        Raises ProtocolError when something would change that runs in flight rely on.
        """
        old = self.limits
        fixed = ("n_ctx", "policy", "ablations", "chunk", "exact_width", "partitions", "parallel",
                 "cells", "kept")
        if any(getattr(limits, name) != getattr(old, name) for name in fixed):
            raise ProtocolError(f"only {', '.join(fixed)} are fixed while requests run")
        self.limits = self.admission.limits = limits

    def handle(self, event: Event) -> list[Instruction]:
        """Advance by one event; returns the instructions to execute, in order."""
        match event:
            case Submit(request, output):
                self._submit(request, output)
            case RunDone(run_id, choices):
                self._run_done(run_id, choices)
            case Drafted(job_id, proposals):
                self._drafted(job_id, proposals)
            case Abort(request_id, reason):
                self._abort(request_id, reason)
            case _:
                raise ProtocolError(f"unknown event {event!r}")
        self._make_room()
        self._admit()
        self._issue_tips()
        self._prefill()
        self._speculate()
        self._ask_draft()
        out, self._out = self._out, []
        return out

    @property
    def company(self) -> tuple[int, object]:
        """How many requests are past their prompts, 0 while prompts are on their way; and a value
        that changes when one comes or goes."""
        if self._chunks or self._filling or not self.lanes:
            return 0, None
        return len(self.lanes), tuple(self.lanes)

    def snapshot(self) -> dict[str, Any]:
        """What is going on, for people: counts, and one entry per lane."""
        limits, admission = self.limits, self.admission
        return {
            "waiting": len(self.waiting), "runs": len(self.runs), "useful_runs": self._useful,
            "cells_used": admission.used(self.lanes.values()), "cells": limits.cells or
            limits.n_ctx * limits.parallel, "kept_prefixes": len(admission.prefixes.kept),
            "credit": limits.credit, "draft_max": limits.draft_max,
            "acceptance": self.calibration.acceptance,
            "speculating": limits.speculates and self._room_to_guess(),
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

    def _submit(self, request: Request, output: tuple[int, ...]) -> None:
        n = len(request.prompt)
        if n + 1 > self.limits.n_ctx:
            self._out.append(Refuse(request.request_id, ContextOverflow(
                f"the prompt has {n} tokens and the context holds {self.limits.n_ctx}: shorten "
                f"the prompt or raise the context with -c {n + max(request.max_tokens, 1)}"
            )))
            return
        self._next_order += 1
        self.waiting.append(Ticket(self._next_order, request, list(output)))

    def _admit(self) -> None:
        while (lane := self.admission.next_lane(self.lanes.values())) is not None:
            self.lanes[lane.lane] = lane
            request = lane.request
            self._out.append(OpenLane(lane.lane, request.params))
            if lane.n_output >= request.max_tokens:
                self._finish(lane, "length")
                continue
            self._filling.append(lane)
            if self.limits.speculates and self.limits.path_min <= 1.0 and len(self.lanes) == 1:
                lane.warm_up = self._job(lane, (), max_tokens=0, max_depth=0)
                self._out.append(lane.warm_up)

    def _make_room(self) -> None:
        """While the cache is too full remembered prompts go, then the youngest lanes; the oldest
        always fits, once it is alone."""
        while self.admission.over(self.lanes.values()) and len(self.lanes) > 1:
            lane = max(self.lanes.values(), key=lambda lane: lane.ticket.order)
            self._close(lane)
            lane.ticket.output = lane.accepted[len(lane.request.prompt):]
            lane.stats.preempted += 1
            self.waiting.appendleft(lane.ticket)

    def _run_done(self, run_id: int, choices: tuple[Choice, ...] | None) -> None:
        run = self.runs.pop(run_id, None)
        if run is None:
            raise ProtocolError(f"run {run_id} came back twice or was never issued")
        was_useful, run.in_flight = run.useful, False
        self._retire(run)
        self._guess_rows -= run.guesses
        if choices is None:
            if was_useful:
                raise ProtocolError(f"run {run_id} was skipped although it has live rows")
            for lane in run.lanes:
                lane.stats.skipped_runs += 1
            return
        if len(choices) != len(run.nodes):
            raise ProtocolError(
                f"run {run_id} has {len(run.nodes)} output rows and brought {len(choices)} choices"
            )
        if run.block is not None and was_useful:
            run.block.computed = True
        for node, choice in zip(run.nodes, choices, strict=True):
            node.choice = choice
        for lane in run.lanes:
            if not lane.done:
                for node in lane.empty:
                    node.ranked = False
                    lane.reserve.add_leaf(node)
                lane.empty.clear()
                self._walk(lane)

    def _drafted(self, job_id: int, proposals: tuple[Proposal, ...]) -> None:
        lane = next((la for la in self.lanes.values() if la.job and la.job.job_id == job_id), None)
        if lane is None or lane.job is None or lane.job_node is None:
            return
        node, lane.job, lane.job_node = lane.job_node, None, None
        lane.stats.drafted += sum(not proposal.spare for proposal in proposals)
        planned = self._plan(lane, node, proposals)
        if node is lane.waiting_tip:
            self._issue_tree(lane, node, planned)
            return
        node.ranked = True
        lane.reserve.add(planned)
        if not proposals:
            self._empty(lane, node)

    def _plan(self, lane: Lane, tip: Node, proposals: tuple[Proposal, ...]) -> list[Node]:
        """Nodes for proposals, with what experience says of their confidence."""
        estimate = self.calibration.estimate
        nodes = lane.tree.plan(tip, [
            Proposal(p.parent, p.token, estimate(p.confidence, first=not p.spare), p.spare)
            for p in proposals
        ], self._spare_weight())
        for node, proposal in zip(nodes, proposals, strict=True):
            assert node.parent is not None
            node.parent.ranked = True
            node.parent.guesses.append(proposal)
        return nodes

    def _empty(self, lane: Lane, node: Node) -> None:
        """A draft brought nothing: wait for a result, or try again with a lower cutoff."""
        lane.empty_since_accept += 1
        lane.stats.empty_drafts += 1
        if self.limits.p_decay > 0.0 and self._cutoff(lane) > 0.0:
            node.ranked = False
            lane.reserve.add_leaf(node)
        else:
            lane.empty.append(node)

    def _abort(self, request_id: int, reason: str) -> None:
        for ticket in self.waiting:
            if ticket.request.request_id == request_id:
                self.waiting.remove(ticket)
                self._out.append(Finish(request_id, reason, ticket.stats))
                return
        for lane in list(self.lanes.values()):
            if lane.request.request_id == request_id:
                self._finish(lane, reason)

    # --- the walk -----------------------------------------------------------------------------

    def _walk(self, lane: Lane) -> None:
        dead: list[Node] = []
        while not lane.done and (choice := lane.tree.frontier.choice) is not None:
            if choice.token in lane.request.stop_ids:
                self._finish(lane, "stop")
                break
            if choice.token == NO_TOKEN:
                self._close(lane)
                self._out.append(Refuse(lane.request.request_id, RequestError(
                    f"after {lane.n_output} tokens nothing may follow: the grammar admits no "
                    "token of the vocabulary, or became too complex")))
                break
            frontier = lane.tree.frontier
            had_guess = any(c.speculative for c in frontier.children)
            self._learn(frontier, choice.token)
            survivor, died = lane.tree.step(choice.token)
            dead += died
            lane.accepted.append(choice.token)
            lane.runs_since_accept = lane.empty_since_accept = 0
            for stats in (lane.stats, self.totals):
                stats.accepted += 1
                stats.guesses_tested += had_guess
                stats.accepted_speculative += survivor is not None
            self._out.append(Emit(lane.request.request_id, choice, survivor is not None))
            if lane.n_output >= lane.request.max_tokens:
                self._finish(lane, "length")
            elif len(lane.accepted) >= self.limits.n_ctx:
                self._finish(lane, "context")
            elif survivor is None:
                self._miss(lane, choice.token)
            elif lane.job_node is not None and not lane.job_node.open:
                self._drop_job(lane)
        self._cancel(self.runs[n.run_id] for n in dead if n.run_id in self.runs)

    def _learn(self, node: Node, token: int) -> None:
        """What the target chose where the draft had named something, issued or not."""
        guesses = node.guesses
        for guess in guesses:
            self.calibration.learn(guess.confidence, guess.token == token, first=not guess.spare)
        if guesses and guesses[0].token != token:  # an alternative that is not named does not help
            self.calibration.learn_second(len(guesses) > 1 and guesses[1].token == token)

    def _miss(self, lane: Lane, token: int) -> None:
        """The accepted token is not in flight: it becomes the frontier and the new tip."""
        node = lane.tree.add(token, NO_RUN)
        lane.reserve.clear()
        lane.empty.clear()
        self._drop_job(lane)
        hopeful = self.limits.synchronous or self.limits.path_min < 1.0  # else no guess will do
        if self.limits.joins and hopeful and self._may_guess(lane) \
                and self._depth_left(lane, node) > 0:
            lane.waiting_tip = node
        else:
            lane.unsent = True
            self._tips.append((lane, node))
            lane.reserve.add_leaf(node)

    def _cancel(self, runs: Iterable[Run]) -> None:
        """Signal those of `runs` that have no live row left and were not signalled before."""
        run_ids = []
        for run in runs:
            if run.useful and not run.alive:
                self._retire(run)
                for lane in run.lanes:
                    lane.stats.cancelled_runs += 1
                run_ids.append(run.run_id)
        if run_ids and Ablation.CANCEL not in self.limits.ablations:
            self._out.append(CancelRuns(tuple(sorted(run_ids))))

    def _retire(self, run: Run) -> None:
        """The run takes no room any more: it is back, or nobody needs it."""
        if run.useful:
            run.useful = False
            self._useful -= 1
            self._chunks -= run.chunk
            self._plain -= not (run.speculative or run.chunk)
            for lane in run.lanes:
                lane.useful -= 1

    def _drop_job(self, lane: Lane) -> None:
        if lane.job is not None:
            self._out.append(StopDraft(lane.job.job_id))
            lane.job = lane.job_node = None

    def _finish(self, lane: Lane, reason: str) -> None:
        self._close(lane)
        self._out.append(Finish(lane.request.request_id, reason, lane.stats))

    def _close(self, lane: Lane) -> None:
        """Take a lane out of the pipeline, with all it has in flight."""
        lane.done = True
        self._drop_job(lane)
        if lane.warm_up is not None:
            self._out.append(StopDraft(lane.warm_up.job_id))
        lane.tree.kill()
        self._cancel(run for run in self.runs.values() if lane in run.owners)
        del self.lanes[lane.lane]
        if lane in self._filling:
            self._filling.remove(lane)
        if lane.unsent:
            self._tips = deque(tip for tip in self._tips if tip[0] is not lane)
        self.admission.leave(lane)
        self._out.append(SendOps(self.pool.take_ops()))
        self._out.append(CloseLane(lane.lane))

    # --- what to issue next -------------------------------------------------------------------

    @property
    def _decoding(self) -> int:
        """Lanes beyond their prompt, at least one."""
        return max(1, sum(lane.root_issued for lane in self.lanes.values()))

    def _issue_tips(self) -> None:
        """Accepted tokens: at once where every lane has a run of its own; else a group shares
        one, and who finds all groups under way waits for the next that is back.

        Lanes are spread over the runs that fill the pipeline: all in one would leave its other
        stages idle.
        """
        if not self._tips:
            return
        lanes = self._decoding
        size = self.limits.group(lanes)
        while self._tips and self._plain < -(-lanes // size):
            tips = [self._tips.popleft() for _ in range(min(size, len(self._tips)))]
            for lane, _ in tips:
                lane.unsent = False
            self._send(tips, NO_RUN, speculative=False)

    def _prefill(self) -> None:
        """Chunks of prompts, lane after lane.

        Behind a chunk an accepted token travels at the chunk's pace, behind one or behind many; so
        many may be on their way, and tokens go between them.
        """
        limits, turns = self.limits, len(self._filling)
        while turns and self._chunks < limits.credit:
            lane = self._filling.popleft()
            if self.admission.catch_up(lane):
                turns -= 1
                self._filling.append(lane)
                continue
            self._issue_piece(lane)
            if not lane.root_issued:
                self._filling.append(lane)
            turns = len(self._filling)

    def _issue_piece(self, lane: Lane) -> None:
        limits, tokens, root = self.limits, lane.accepted, lane.tree.frontier
        start, stop = lane.next_piece(limits.chunk, limits.exact_width)
        last = stop == len(tokens)
        seq = root.seq_ids[:1]
        rows = make_rows([(tokens[i], i, seq, i == len(tokens) - 1) for i in range(start, stop)])
        run_id = self._launch([lane], rows, [root] if last else [], lane.last_chunk_run,
                              speculative=False, chunk=True,
                              block=self.admission.shareable(lane, start, stop))
        lane.last_chunk_run = run_id
        lane.next_row = stop
        if last:
            root.run_id = run_id
            lane.root_issued = True
            lane.reserve.add_leaf(root)

    def _room_to_guess(self) -> bool:
        """Whether requests' own tokens leave stages idle."""
        if self.limits.alone or len(self.lanes) <= 1:
            return True
        lanes = self._decoding
        runs = max(-(-lanes // self.limits.group(lanes)), self._plain + len(self._tips))
        credit = self.limits.credit
        return runs < credit - 1 and runs + self._chunks < credit

    def _may_guess(self, lane: Lane) -> bool:
        """Whether the policy speculates at all in this lane now."""
        return self.limits.speculates and not lane.done and lane.root_issued \
            and self._room_to_guess()

    def _speculate(self) -> None:
        """Issue the best guesses of all lanes while there is room for them (ALGORITHMS 1.6)."""
        limits = self.limits
        if limits.synchronous or not limits.speculates or not self._room_to_guess():
            return
        alone = Ablation.CONTINUOUS in limits.ablations
        most = min(limits.tree_max if alone else limits.draft_max, limits.exact_width)
        open_lanes = {lane.lane: lane for lane in self.lanes.values()}
        while open_lanes:
            if limits.guess_rows and self._guess_rows + most > limits.guess_rows \
                    and self._guess_rows:
                return
            chances = {k: self._chance(lane) for k, lane in open_lanes.items()}
            best = max(chances, key=lambda k: chances[k])
            lane = open_lanes[best]
            if chances[best] <= 0.0:
                return
            nodes = lane.tree.issue(
                lane.reserve.take(most, self.pool.available, self._floor(lane)), self._next_run)
            if not nodes:
                del open_lanes[best]
                continue
            assert nodes[0].parent is not None
            self._send([(lane, node) for node in nodes], nodes[0].parent.run_id, speculative=True)
            lane.runs_since_accept += 1

    def _floor(self, lane: Lane) -> float:
        """The least priority of a guess that is issued."""
        return lane.tree.frontier.score + math.log(max(self.limits.path_min, 1e-12))

    def _chance(self, lane: Lane) -> float:
        """Probability of the guess that this lane would issue now, 0 when it should not."""
        limits, frontier = self.limits, lane.tree.frontier
        if lane.unsent or not self._may_guess(lane):
            return 0.0
        if (lane.useful if limits.alone else self._useful) >= limits.credit:
            return 0.0
        if Ablation.CONTINUOUS in limits.ablations and any(
                run.speculative and run.useful and lane in run.owners
                for run in self.runs.values()):
            return 0.0
        best = lane.reserve.best()
        if best is None or best.priority < self._floor(lane):
            return 0.0
        chance = probability(best.priority, frontier)
        if lane.job_node is not None and not limits.eager and \
                self._promise(lane.job_node, frontier) > chance:
            return 0.0
        return chance

    def _spare_weight(self) -> float:
        """What an accepted alternative is worth beside an accepted first guess.

        Nothing hangs below it yet, so the pipeline starts anew behind it all the same; it brings
        one slot, and where the next guess is wrong it shows that a whole latency earlier.
        """
        return min(1.0, 1.0 - self.calibration.acceptance + 1.0 / max(self.limits.credit, 1))

    def _promise(self, leaf: Node, frontier: Node) -> float:
        """Expected probability of acceptance of the best guess below a leaf."""
        return probability(leaf.score, frontier) * self.calibration.acceptance

    def _wanted_leaf(self, lane: Lane) -> Node | None:
        """Where a draft would bring the best new guess, None when none is worth its while."""
        limits, frontier = self.limits, lane.tree.frontier
        if self._cutoff(lane) >= 1.0:
            return None
        leaf = lane.reserve.best_leaf()
        while leaf is not None and self._depth_left(lane, leaf) <= 0:
            leaf.ranked = True
            leaf = lane.reserve.best_leaf()
        if leaf is None or probability(leaf.score, frontier) < limits.path_min:
            return None
        best = lane.reserve.best()
        if best is not None and \
                probability(best.priority, frontier) > self._promise(leaf, frontier):
            return None  # what is at hand comes first, and then a leaf may be better
        return leaf

    def _ask_draft(self) -> None:
        """Give the draft work: below tokens that wait for it, then where it promises most."""
        if not self.limits.speculates:
            return
        for lane in self.lanes.values():
            if lane.waiting_tip is not None:
                self._start_draft(lane, lane.waiting_tip)
        if self.limits.synchronous or not self._room_to_guess():
            return
        jobs = sum(lane.job is not None for lane in self.lanes.values())
        wanted = []
        for lane in self.lanes.values():
            if lane.job is None and self._may_guess(lane) and \
                    (leaf := self._wanted_leaf(lane)) is not None:
                wanted.append((-self._promise(leaf, lane.tree.frontier), lane.lane, lane, leaf))
        for _, _, lane, leaf in sorted(wanted, key=lambda entry: entry[:2])[
                :max(_MOST_JOBS - jobs, 0)]:
            self._start_draft(lane, leaf)

    def _start_draft(self, lane: Lane, node: Node) -> None:
        if lane.job is not None:
            return
        single = self.limits.synchronous or Ablation.CONTINUOUS in self.limits.ablations
        room = self.limits.exact_width - (node is lane.waiting_tip)
        size = min(self.limits.tree_max if single else self.limits.draft_max, room)
        suffix = tuple(node.path_from(lane.tree.frontier))
        lane.job = self._job(lane, suffix, size, self._depth_left(lane, node))
        lane.job_node = node
        self._out.append(lane.job)

    def _job(self, lane: Lane, suffix: tuple[int, ...], max_tokens: int, max_depth: int
             ) -> StartDraft:
        self._next_job += 1
        return StartDraft(
            self._next_job, lane.lane, lane.accepted, len(lane.accepted), suffix,
            lane.request.params, max_tokens, max_depth, self.limits.max_branches,
            self._cutoff(lane), self.limits.p_split, lane.request.stop_ids, self.limits.spares,
        )

    def _issue_tree(self, lane: Lane, tip: Node, planned: list[Node]) -> None:
        """Tip and tree in one run; guesses that find no room in it wait."""
        limits = self.limits
        lane.waiting_tip = None
        if not planned:
            lane.empty_since_accept += 1
            lane.stats.empty_drafts += 1
        size = limits.tree_max if limits.synchronous else limits.draft_max
        size = min(size, limits.exact_width - 1)
        if limits.guess_rows:
            size = min(size, max(limits.guess_rows - self._guess_rows, 0))
        first = sorted(planned, key=lambda node: -node.score)[:size]
        nodes = lane.tree.issue(first, self._next_run)
        lane.tree.widen(tip, nodes)
        self._send([(lane, node) for node in (tip, *nodes)], NO_RUN, speculative=False)
        if not limits.synchronous:
            lane.reserve.add_leaf(tip)
            lane.reserve.add(planned)

    def _send(self, parts: list[tuple[Lane, Node]], parent_id: int, *, speculative: bool) -> None:
        rows = make_rows([(n.token, n.pos, n.seq_ids, True) for _, n in parts])
        run_id = self._launch([lane for lane, _ in parts], rows, [node for _, node in parts],
                              parent_id, speculative=speculative)
        for lane, node in parts:
            node.run_id = run_id
            lane.stats.issued_speculative += node.speculative

    def _launch(self, owners: list[Lane], rows: Rows, nodes: list[Node], parent_id: int, *,
                speculative: bool, chunk: bool = False, block: Block | None = None) -> int:
        run_id, self._next_run = self._next_run, self._next_run + 1
        run = Run(run_id, owners, nodes, len(rows), speculative, chunk, block)
        self.runs[run_id] = run
        self._useful += 1
        self._chunks += chunk
        self._plain += not (speculative or chunk)
        self._guess_rows += run.guesses
        for lane in run.lanes:
            lane.useful += 1
            lane.stats.runs += 1
            lane.stats.speculative_runs += speculative
        lanes = (owners[0].lane,) * len(rows) if chunk else tuple(lane.lane for lane in owners)
        self._out.append(IssueRun(run_id, parent_id, lanes, rows, self.pool.take_ops(),
                                  speculative))
        return run_id

    # --- small questions ----------------------------------------------------------------------

    def _cutoff(self, lane: Lane) -> float:
        """Confidence a drafted token needs now (ALGORITHMS 1.6)."""
        limits = self.limits
        return (limits.p_min + lane.runs_since_accept * limits.p_recovery
                - lane.empty_since_accept * limits.p_decay)

    def _depth_left(self, lane: Lane, tip: Node) -> int:
        """Levels below `tip` that could still be part of the output."""
        last = len(lane.request.prompt) + lane.request.max_tokens
        return min(last, self.limits.n_ctx) - 1 - (tip.pos + 1)
