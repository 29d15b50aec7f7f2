"""The bookkeeping of runs in flight: issue, counters of the pipeline's load, cancellation.

Every run is issued through this module, so that the counters are updated in one place. Independent
of why a run is issued, of the meaning of results, and of drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pipeinfer.core.messages import Cancel, Decode
from pipeinfer.core.policy import Ablation
from pipeinfer.core.types import Rows, make_rows
from pipeinfer.scheduler.admission import Admission
from pipeinfer.scheduler.events import Instruction
from pipeinfer.scheduler.lanes import Chunk, Lane, Run
from pipeinfer.scheduler.sequence_pool import SequencePool
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.stored import Stored
from pipeinfer.scheduler.token_tree import Node


class SchedulerState:
    """Lanes, runs, and the instructions of the present event.

    tips: accepted tokens that are not issued yet
    useful: number of useful runs
    plain: of these, runs of accepted tokens
    chunks: of these, chunks of prompts
    guess_rows: speculative tokens in flight, useful or not
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.admission = Admission(limits)
        self.lanes: dict[int, Lane] = {}
        self.runs: dict[int, Run] = {}
        self.tips: deque[tuple[Lane, Node]] = deque()
        self.useful = self.plain = self.chunks = self.guess_rows = 0
        self.next_run = 0
        self.stored: Stored | None = None  #: on the stages' disks; None: nothing is kept there
        self._out: list[Instruction] = []

    def emit(self, instruction: Instruction) -> None:
        """Append an instruction to those of the present event."""
        self._out.append(instruction)

    def take(self) -> list[Instruction]:
        """Return the instructions of the present event, in order, and clear them."""
        out, self._out = self._out, []
        return out

    @property
    def pool(self) -> SequencePool:
        """The sequence ids."""
        return self.admission.pool

    def restart(self, limits: Limits) -> None:
        """Reset to an empty state: nothing in flight, no open lane, empty caches."""
        self.limits = limits
        self.admission = Admission(limits, self.admission.next_lane_id)
        self.lanes.clear()
        self.runs.clear()
        self.tips.clear()
        self.useful = self.plain = self.chunks = self.guess_rows = 0

    @property
    def decoding(self) -> int:
        """The number of lanes past their prompt, at least one."""
        return max(1, sum(lane.root_issued and not lane.closing for lane in self.lanes.values()))

    def send(self, parts: list[tuple[Lane, Node]], parent_id: int, *, speculative: bool,
             hint: bool = False) -> Run:
        """Issue rows of one or several lanes in one run.

        parts: the rows, each with its lane
        parent_id: the run whose cells they continue; NO_RUN: none
        speculative: whether all rows are speculative tokens
        hint: whether the results are hints, see `Run`
        """
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
               speculative: bool, chunk: Chunk | None = None, hint: bool = False) -> int:
        """Issue a run with the sequence operations that wait; return its id.

        owners: the lane of each row; of a chunk: its lane
        rows: to evaluate
        nodes: of the output rows
        parent_id, speculative, hint: as for `send`
        chunk: what it is of a prompt; None: no part of one
        """
        run_id, self.next_run = self.next_run, self.next_run + 1
        outputs = [row for row, wanted in enumerate(rows.lists.outputs) if wanted]
        own = chunk or Chunk()
        run = Run(run_id, owners, nodes, len(rows), speculative, outputs, own.start,
                  chunk is not None, own.block, hint, own.saves, own.loads)
        self.runs[run_id] = run
        self.useful += 1
        self.chunks += run.chunk
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
        shown = None if rows.media is None else rows.media.rows
        self.emit(Decode(run_id, parent_id, rows, lanes, self.pool.take_ops(), speculative,
                         hidden=shown, saves=own.saves, loads=own.loads, loaded=len(own.loads)))
        return run_id

    def wait(self, lane: Lane, node: Node) -> None:
        """Queue an accepted token, which is issued as soon as there is room."""
        lane.unsent = True
        self.tips.append((lane, node))

    def withdraw(self, lane: Lane) -> None:
        """Remove the lane's accepted token from that queue."""
        lane.unsent = False
        self.tips = deque(tip for tip in self.tips if tip[0] is not lane)

    def cancel(self, runs: Iterable[Run]) -> None:
        """Cancel those of `runs` that have no live row left and were not cancelled before."""
        run_ids = []
        for run in runs:
            if run.useful and not run.alive:
                self.retire(run)
                for lane in run.lanes:
                    lane.stats.cancelled_runs += 1
                run_ids.append(run.run_id)
        if run_ids and Ablation.CANCEL not in self.limits.ablations:
            self.emit(Cancel(tuple(sorted(run_ids))))

    def retire(self, run: Run) -> None:
        """Stop counting a run as useful: it is back, or its results are not needed."""
        if run.useful:
            run.useful = False
            self.useful -= 1
            self.chunks -= run.chunk
            self.plain -= run.plain
            for lane in run.lanes:
                lane.useful -= 1
