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

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

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
    """One causal thread of one request. `accepted` holds prompt and output."""

    lane: int
    request: Request
    tree: Tree
    accepted: list[int]
    next_chunk: int = 0
    last_chunk_run: int = NO_RUN
    root_issued: bool = False
    job: StartDraft | None = None
    job_tip: Node | None = None
    tip: Node | None = None
    blocked: bool = False
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
            lane.tip = root
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
            lane.blocked = False
            self._walk(lane)

    def _drafted(self, job_id: int, proposals: tuple[Proposal, ...]) -> None:
        lane = next((la for la in self.lanes.values() if la.job and la.job.job_id == job_id), None)
        if lane is None or lane.job is None or lane.job_tip is None:
            return
        tip, lane.job, lane.job_tip = lane.job_tip, None, None
        lane.stats.drafted += len(proposals)
        if tip.run_id == NO_RUN:
            self._issue_tree(lane, proposals)
        elif proposals:
            run_id = self._next_run
            nodes = lane.tree.extend(tip, proposals, run_id)
            if not nodes:
                lane.blocked = True
                return
            self._send(lane, nodes, tip.run_id, speculative=True)
            lane.runs_since_accept += 1
            lane.tip = self._main_leaf(tip)
        else:
            self._empty(lane)

    def _empty(self, lane: Lane) -> None:
        """A draft brought nothing: wait for a result, or try again with a lower cutoff."""
        lane.empty_since_accept += 1
        lane.stats.empty_drafts += 1
        lane.blocked = self.limits.p_decay <= 0.0 or self._cutoff(lane) <= 0.0

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
            had_guess = any(c.speculative for c in lane.tree.frontier.children)
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
            elif lane.tip is not None and not lane.tip.alive:
                self._drop_job(lane)
                lane.tip = self._main_leaf(survivor)
        self._cancel(self.runs[n.run_id] for n in dead if n.run_id in self.runs)

    def _miss(self, lane: Lane, token: int) -> None:
        """The accepted token is not in flight: it becomes the frontier and the new tip."""
        node = lane.tree.add(token, NO_RUN)
        lane.tip = node
        self._drop_job(lane)
        if not self.limits.joins or not self._may_draft(lane):
            self._send(lane, [node], NO_RUN, speculative=False)

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
            lane.job = lane.job_tip = None

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
        if self._may_draft(lane):
            self._start_draft(lane)

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

    def _may_draft(self, lane: Lane) -> bool:
        """Whether the policy wants proposals below the lane's tip now."""
        limits, tip = self.limits, lane.tip
        if not limits.speculates or lane.done or lane.job or tip is None or not lane.root_issued:
            return False
        if self._depth_left(lane, tip) <= 0:
            return False
        if tip.run_id == NO_RUN:
            return limits.joins
        if limits.synchronous:
            return False
        if lane.blocked or self._in_flight() >= limits.credit or self._cutoff(lane) >= 1.0:
            return False
        if Ablation.CONTINUOUS in limits.ablations:
            return not any(r.speculative and not r.cancelled for r in self.runs.values())
        return True

    def _start_draft(self, lane: Lane) -> None:
        assert lane.tip is not None
        single = self.limits.synchronous or Ablation.CONTINUOUS in self.limits.ablations
        room = self.limits.exact_width - (lane.tip.run_id == NO_RUN)
        size = min(self.limits.tree_max if single else self.limits.draft_max, room)
        suffix = tuple(lane.tip.path_from(lane.tree.frontier))
        job = self._job(lane, suffix, size, self._depth_left(lane, lane.tip))
        lane.job, lane.job_tip = job, lane.tip
        self._out.append(job)

    def _job(self, lane: Lane, suffix: tuple[int, ...], max_tokens: int, max_depth: int
             ) -> StartDraft:
        self._next_job += 1
        return StartDraft(
            self._next_job, lane.lane, lane.accepted, len(lane.accepted), suffix,
            lane.request.params, max_tokens, max_depth, self.limits.max_branches,
            self._cutoff(lane), self.limits.p_split,
            lane.request.stop_ids,
        )

    def _issue_tree(self, lane: Lane, proposals: tuple[Proposal, ...]) -> None:
        """Tip and tree in one run."""
        tip = lane.tip
        assert tip is not None
        if not proposals:
            self._empty(lane)
        nodes = lane.tree.extend(tip, proposals, self._next_run)
        lane.tree.widen(tip, nodes)
        self._send(lane, [tip, *nodes], NO_RUN, speculative=False)
        lane.tip = None if self.limits.synchronous else self._main_leaf(tip)

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

    @staticmethod
    def _main_leaf(node: Node) -> Node:
        """The end of the chain of first children below `node`."""
        while node.children:
            node = node.children[0]
        return node

