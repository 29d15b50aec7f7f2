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
from dataclasses import dataclass, field

from pipeinfer.calibration import Calibration
from pipeinfer.core import Choice, Request, Rows, make_rows
from pipeinfer.errors import ContextOverflow, ProtocolError
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
from pipeinfer.policy import Ablation, Limits
from pipeinfer.protocol import NO_RUN
from pipeinfer.reserve import Reserve, probability
from pipeinfer.sequences import SequencePool
from pipeinfer.tree import Node, Proposal, Tree

# --- state ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """A run in flight. nodes: its output rows, in row order."""

    run_id: int
    lane: Lane
    nodes: list[Node]
    speculative: bool
    cancelled: bool = False


@dataclass(slots=True)
class Lane:
    """One causal thread of one request. `accepted` holds prompt and output.

    waiting_tip: an accepted token that waits for guesses to travel with. job_node: the node that
    the draft works below. empty: nodes below which the draft named nothing, until a result.
    """

    lane: int
    request: Request
    tree: Tree
    accepted: list[int]
    next_chunk: int = 0
    last_chunk_run: int = NO_RUN
    root_issued: bool = False
    reserve: Reserve = field(default_factory=Reserve)
    waiting_tip: Node | None = None
    job: StartDraft | None = None
    job_node: Node | None = None
    empty: list[Node] = field(default_factory=list)
    runs_since_accept: int = 0
    empty_since_accept: int = 0
    done: bool = False
    stats: LaneStats = field(default_factory=LaneStats)

    @property
    def n_output(self) -> int:
        """Accepted output tokens."""
        return len(self.accepted) - len(self.request.prompt)


class Scheduler:
    """Owns every lane, run and sequence id; see the module docstring."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = SequencePool(1 + limits.partitions)
        self.calibration = Calibration()
        self.waiting: deque[Request] = deque()
        self.lanes: dict[int, Lane] = {}
        self.runs: dict[int, Run] = {}
        self._next_run = 0
        self._next_job = 0
        self._next_lane = 0
        self._out: list[Instruction] = []

    @property
    def idle(self) -> bool:
        """Nothing is waiting, running or in flight."""
        return not (self.waiting or self.lanes or self.runs)

    def reconfigure(self, limits: Limits) -> None:
        """Use other knobs from now on; only while idle, and run ids keep increasing."""
        if not self.idle:
            raise ProtocolError("the scheduler can be reconfigured only while it is idle")
        self.limits = limits
        self.pool = SequencePool(1 + limits.partitions)

    def tune(self, limits: Limits) -> None:
        """Use other sizes, credits and cutoffs from now on, at any time.

        Raises ProtocolError when something would change that runs in flight rely on.
        """
        old = self.limits
        fixed = ("n_ctx", "policy", "ablations", "chunk", "exact_width", "partitions")
        if any(getattr(limits, name) != getattr(old, name) for name in fixed):
            raise ProtocolError(f"only {', '.join(fixed)} are fixed while requests run")
        self.limits = limits

    def handle(self, event: Event) -> list[Instruction]:
        """Advance by one event; returns the instructions to execute, in order."""
        match event:
            case Submit(request):
                self._submit(request)
            case RunDone(run_id, choices):
                self._run_done(run_id, choices)
            case Drafted(job_id, proposals):
                self._drafted(job_id, proposals)
            case Abort(request_id, reason):
                self._abort(request_id, reason)
            case _:
                raise ProtocolError(f"unknown event {event!r}")
        self._admit()
        for lane in list(self.lanes.values()):
            self._issue(lane)
        out, self._out = self._out, []
        return out

    # --- events -------------------------------------------------------------------------------

    def _submit(self, request: Request) -> None:
        n = len(request.prompt)
        if n + 1 > self.limits.n_ctx:
            self._out.append(Refuse(request.request_id, ContextOverflow(
                f"the prompt has {n} tokens and the context holds {self.limits.n_ctx}: shorten "
                f"the prompt or raise the context with -c {n + max(request.max_tokens, 1)}"
            )))
        else:
            self.waiting.append(request)

    def _admit(self) -> None:
        while self.waiting and not self.lanes:
            request = self.waiting.popleft()
            lane_id, self._next_lane = self._next_lane, self._next_lane + 1
            seq_id = self.pool.acquire(lane_id)
            root = Node(request.prompt[-1], len(request.prompt) - 1, None, (seq_id,), NO_RUN,
                        speculative=False)
            lane = Lane(lane_id, request, Tree(lane_id, self.pool, root), list(request.prompt))
            self.lanes[lane_id] = lane
            self._out.append(OpenLane(lane_id, request.params))
            if self.limits.speculates:
                self._out.append(self._job(lane, (), max_tokens=0, max_depth=0))
            if request.max_tokens <= 0:
                self._finish(lane, "length")

    def _run_done(self, run_id: int, choices: tuple[Choice, ...] | None) -> None:
        run = self.runs.pop(run_id, None)
        if run is None:
            raise ProtocolError(f"run {run_id} came back twice or was never issued")
        lane = run.lane
        if choices is None:
            if not run.cancelled:
                raise ProtocolError(f"run {run_id} was skipped although it has live rows")
            lane.stats.skipped_runs += 1
            return
        if len(choices) != len(run.nodes):
            raise ProtocolError(
                f"run {run_id} has {len(run.nodes)} output rows and brought {len(choices)} choices"
            )
        for node, choice in zip(run.nodes, choices, strict=True):
            node.choice = choice
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
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                self._out.append(Finish(request_id, reason, LaneStats()))
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
            frontier = lane.tree.frontier
            had_guess = any(c.speculative for c in frontier.children)
            self._learn(frontier, choice.token)
            survivor, died = lane.tree.step(choice.token)
            dead += died
            lane.accepted.append(choice.token)
            lane.runs_since_accept = lane.empty_since_accept = 0
            lane.stats.accepted += 1
            lane.stats.guesses_tested += had_guess
            lane.stats.accepted_speculative += survivor is not None
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
            self._send(lane, [node], NO_RUN, speculative=False)
            lane.reserve.add_leaf(node)

    def _cancel(self, runs: Iterable[Run]) -> None:
        """Signal those of `runs` that have no live row left and were not signalled before."""
        run_ids = []
        for run in runs:
            if not run.cancelled and not any(node.alive for node in run.nodes):
                run.cancelled = True
                run.lane.stats.cancelled_runs += 1
                run_ids.append(run.run_id)
        if run_ids and Ablation.CANCEL not in self.limits.ablations:
            self._out.append(CancelRuns(tuple(sorted(run_ids))))

    def _drop_job(self, lane: Lane) -> None:
        if lane.job is not None:
            self._out.append(StopDraft(lane.job.job_id))
            lane.job = lane.job_node = None

    def _finish(self, lane: Lane, reason: str) -> None:
        lane.done = True
        self._drop_job(lane)
        lane.tree.kill()
        self._cancel(run for run in self.runs.values() if run.lane is lane)
        del self.lanes[lane.lane]
        self.pool.release_lane(lane.lane)
        self._out.append(SendOps(self.pool.take_ops()))
        self._out.append(CloseLane(lane.lane))
        self._out.append(Finish(lane.request.request_id, reason, lane.stats))

    # --- what to issue next -------------------------------------------------------------------

    def _issue(self, lane: Lane) -> None:
        if lane.done:
            return
        if not lane.root_issued:
            self._prefill(lane)
        if not self._may_guess(lane):
            return
        if lane.waiting_tip is not None:
            self._start_draft(lane, lane.waiting_tip)
        elif not self.limits.synchronous:
            self._speculate(lane)
            if lane.job is None and (leaf := self._wanted_leaf(lane)) is not None:
                self._start_draft(lane, leaf)

    def _may_guess(self, lane: Lane) -> bool:
        """Whether the policy speculates at all in this lane now."""
        return self.limits.speculates and not lane.done and lane.root_issued

    def _speculate(self, lane: Lane) -> None:
        """Issue the best planned guesses while there is room for them (ALGORITHMS 1.6)."""
        limits, reserve, frontier = self.limits, lane.reserve, lane.tree.frontier
        alone = Ablation.CONTINUOUS in limits.ablations
        most = min(limits.tree_max if alone else limits.draft_max, limits.exact_width)
        floor = frontier.score + math.log(max(limits.path_min, 1e-12))
        while self._in_flight() < limits.credit:
            if alone and any(r.speculative and not r.cancelled for r in self.runs.values()):
                return
            best = reserve.best()
            if best is None or best.priority < floor:
                return
            if lane.job_node is not None and not limits.eager and \
                    self._promise(lane.job_node, frontier) > probability(best.priority, frontier):
                return
            nodes = lane.tree.issue(reserve.take(most, self.pool.available, floor), self._next_run)
            if not nodes:
                return
            assert nodes[0].parent is not None
            self._send(lane, nodes, nodes[0].parent.run_id, speculative=True)
            lane.runs_since_accept += 1

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

    def _prefill(self, lane: Lane) -> None:
        prompt, chunk = lane.request.prompt, self.limits.chunk
        root = lane.tree.frontier
        while lane.next_chunk < len(prompt) and self._in_flight() < self.limits.credit:
            start = lane.next_chunk
            stop = min(start + chunk, len(prompt))
            last = stop == len(prompt)
            seq = root.seq_ids[:1]
            rows = make_rows([(prompt[i], i, seq, i == len(prompt) - 1)
                              for i in range(start, stop)])
            run_id = self._launch(lane, rows, [root] if last else [], lane.last_chunk_run,
                                  speculative=False)
            lane.last_chunk_run = run_id
            lane.next_chunk = stop
            if last:
                root.run_id = run_id
                lane.root_issued = True
                lane.reserve.add_leaf(root)

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
        first = sorted(planned, key=lambda node: -node.score)[:min(size, limits.exact_width - 1)]
        nodes = lane.tree.issue(first, self._next_run)
        lane.tree.widen(tip, nodes)
        self._send(lane, [tip, *nodes], NO_RUN, speculative=False)
        if not limits.synchronous:
            lane.reserve.add_leaf(tip)
            lane.reserve.add(planned)

    def _send(self, lane: Lane, nodes: list[Node], parent_id: int, *, speculative: bool) -> None:
        rows = make_rows([(n.token, n.pos, n.seq_ids, True) for n in nodes])
        run_id = self._launch(lane, rows, nodes, parent_id, speculative=speculative)
        for node in nodes:
            node.run_id = run_id
        lane.stats.issued_speculative += sum(n.speculative for n in nodes)

    def _launch(self, lane: Lane, rows: Rows, nodes: list[Node], parent_id: int, *,
                speculative: bool) -> int:
        run_id, self._next_run = self._next_run, self._next_run + 1
        self.runs[run_id] = Run(run_id, lane, nodes, speculative)
        lane.stats.runs += 1
        lane.stats.speculative_runs += speculative
        self._out.append(IssueRun(run_id, parent_id, lane.lane, rows, self.pool.take_ops(),
                                  speculative))
        return run_id

    # --- small questions ----------------------------------------------------------------------

    def _in_flight(self) -> int:
        """Runs in flight that are still of use."""
        return sum(not run.cancelled for run in self.runs.values())

    def _cutoff(self, lane: Lane) -> float:
        """Confidence a drafted token needs now (ALGORITHMS 1.6)."""
        limits = self.limits
        return (limits.p_min + lane.runs_since_accept * limits.p_recovery
                - lane.empty_since_accept * limits.p_decay)

    def _depth_left(self, lane: Lane, tip: Node) -> int:
        """Levels below `tip` that could still be part of the output."""
        last = len(lane.request.prompt) + lane.request.max_tokens
        return min(last, self.limits.n_ctx) - 1 - (tip.pos + 1)
