"""Runs in flight: what is issued, what it takes of the pipeline's room, what is called off.

Everything that issues goes through here, so that counts are kept in one place. It does not know
why a run is issued, what a result means, or what a draft thinks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pipeinfer.core.policy import Ablation
from pipeinfer.core.types import Rows, make_rows
from pipeinfer.scheduler.admission import Admission
from pipeinfer.scheduler.events import CancelRuns, Instruction, IssueRun
from pipeinfer.scheduler.lanes import Lane, Run
from pipeinfer.scheduler.prefix_cache import Block
from pipeinfer.scheduler.sequence_pool import SequencePool
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.token_tree import Node


class SchedulerState:
    """Lanes, runs, and the instructions that the event at hand brings.

    tips: accepted tokens that are not issued yet. Of the useful runs: how many there are, plain
    ones (accepted tokens), chunks of prompts; guess_rows: guesses in flight, useful or not.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.admission = Admission(limits)
        self.lanes: dict[int, Lane] = {}
        self.runs: dict[int, Run] = {}
        self.tips: deque[tuple[Lane, Node]] = deque()
        self.useful = self.plain = self.chunks = self.guess_rows = 0
        self.next_run = 0
        self._out: list[Instruction] = []

    def emit(self, instruction: Instruction) -> None:
        """The event at hand wants this done; the only way in which anything is."""
        self._out.append(instruction)

    def take(self) -> list[Instruction]:
        """What the event at hand wants done, in order."""
        out, self._out = self._out, []
        return out

    @property
    def pool(self) -> SequencePool:
        """The sequence ids."""
        return self.admission.pool

    def restart(self, limits: Limits) -> None:
        """Nothing is in flight, no lane is open and no cache holds anything any more."""
        self.limits = limits
        self.admission = Admission(limits, self.admission.next_lane_id)
        self.lanes.clear()
        self.runs.clear()
        self.tips.clear()
        self.useful = self.plain = self.chunks = self.guess_rows = 0

    @property
    def decoding(self) -> int:
        """Lanes beyond their prompt, at least one."""
        return max(1, sum(lane.root_issued and not lane.closing for lane in self.lanes.values()))

    def send(self, parts: list[tuple[Lane, Node]], parent_id: int, *, speculative: bool,
             hint: bool = False) -> Run:
        """Issue rows of one or several lanes in one run. hint: results are hints, see `Run`."""
        views = tuple((*n.seq_ids, *n.sees) for _, n in parts) \
            if any([node.sees for _, node in parts]) else None
        rows = make_rows([(n.token, n.pos, n.seq_ids, n.wanted) for _, n in parts], views)
        run_id = self.launch([lane for lane, _ in parts], rows,
                             [node for _, node in parts if node.wanted], parent_id,
                             speculative=speculative, hint=hint)
        for lane, node in parts:
            node.run_id, node.step = run_id, lane.step
            lane.stats.issued_speculative += node.speculative
        return self.runs[run_id]

    def launch(self, owners: list[Lane], rows: Rows, nodes: list[Node], parent_id: int, *,
               speculative: bool, chunk: bool = False, block: Block | None = None,
               hint: bool = False) -> int:
        """Issue a run with the operations that wait; returns its id. nodes: of its output rows."""
        run_id, self.next_run = self.next_run, self.next_run + 1
        run = Run(run_id, owners, nodes, len(rows), speculative, chunk, block, hint)
        self.runs[run_id] = run
        self.useful += 1
        self.chunks += chunk
        self.plain += run.plain
        self.guess_rows += run.guesses
        for lane in run.lanes:
            lane.useful += 1
            lane.stats.runs += 1
            lane.stats.speculative_runs += speculative
        if not chunk:
            for lane, pos in zip(owners, rows.lists.positions, strict=True):
                lane.stats.rows += 1
                lane.stats.attended += pos + 1
        lanes = (owners[0].lane,) * len(rows) if chunk else tuple(lane.lane for lane in owners)
        self.emit(IssueRun(run_id, parent_id, lanes, rows, self.pool.take_ops(),
                                  speculative))
        return run_id

    def wait(self, lane: Lane, node: Node) -> None:
        """An accepted token is to be issued as soon as there is room."""
        lane.unsent = True
        self.tips.append((lane, node))

    def withdraw(self, lane: Lane) -> None:
        """The lane's accepted token is not to be issued after all."""
        lane.unsent = False
        self.tips = deque(tip for tip in self.tips if tip[0] is not lane)

    def cancel(self, runs: Iterable[Run]) -> None:
        """Signal those of `runs` that have no live row left and were not signalled before."""
        run_ids = []
        for run in runs:
            if run.useful and not run.alive:
                self.retire(run)
                for lane in run.lanes:
                    lane.stats.cancelled_runs += 1
                run_ids.append(run.run_id)
        if run_ids and Ablation.CANCEL not in self.limits.ablations:
            self.emit(CancelRuns(tuple(sorted(run_ids))))

    def retire(self, run: Run) -> None:
        """The run takes no room any more: it is back, or nobody needs it."""
        if run.useful:
            run.useful = False
            self.useful -= 1
            self.chunks -= run.chunk
            self.plain -= run.plain
            for lane in run.lanes:
                lane.useful -= 1
