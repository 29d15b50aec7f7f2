"""Lookahead parallelism: every node holds the whole model, and a step's rows are dealt out.

A step of lookahead decoding verifies candidates and continues the columns of a window
(docs/algorithms.md 6.8). Here each replica gets a chunk of the columns and of the candidates, and
evaluates the current token and the part of level 0 that its columns need besides. Only token ids
travel: accepted tokens that a replica has not computed are rows of its next step. A step ends when
all replicas have answered; its tokens, the window and the pool are those of one node that does it
all. When a replica is lost, the others begin again: they compute the prompt and what was accepted.

Takes the place of `Scheduler` before the head: the same events in; instructions out, each for one
node. One request at a time. Pure, like the scheduler.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.core.messages import NO_RUN
from pipeinfer.core.types import NO_TOKEN, Choice, Request, make_rows
from pipeinfer.errors import ContextOverflow, ProtocolError, RequestError
from pipeinfer.scheduler.calibration import Calibration
from pipeinfer.scheduler.events import (
    Abort,
    CloseLane,
    Emit,
    Event,
    Finish,
    Instruction,
    IssueRun,
    LaneStats,
    OpenLane,
    Refuse,
    Restart,
    RunDone,
    SendOps,
    Submit,
    ToNode,
)
from pipeinfer.scheduler.lanes import Run
from pipeinfer.scheduler.sequence_pool import SequencePool
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.token_tree import PLANNED, Node, Tree
from pipeinfer.strategies.proposers.base import Anchor
from pipeinfer.strategies.proposers.lookahead import Lookahead, trie


@dataclass(slots=True)
class _Replica:
    """tree: what it has computed of the request, and this step's guesses. length: accepted tokens
    that its frontier has reached. tops: rows whose choices continue its columns."""

    node: int
    pool: SequencePool
    tree: Tree
    length: int = 0
    tip: Node | None = None
    tops: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class _Queued:
    """A request, what it has brought by now, which is not emitted again, and its figures."""

    request: Request
    output: tuple[int, ...] = ()
    stats: LaneStats = field(default_factory=LaneStats)


@dataclass(slots=True)
class _Task:
    """The request at work. waiting: runs of every replica that are out. opened: `rows` knows it."""

    lane: int
    request: Request
    accepted: list[int]
    stats: LaneStats
    opened: bool = False
    waiting: set[int] = field(default_factory=set)

    @property
    def n_output(self) -> int:
        """Accepted output tokens."""
        return len(self.accepted) - len(self.request.prompt)


class ReplicaScheduler:
    """See the module docstring. nodes: how many replicas, `1..nodes`."""

    def __init__(self, limits: Limits, rows: Lookahead, nodes: int) -> None:
        self.limits, self.rows, self.nodes = limits, rows, nodes
        self.runs: dict[int, Run] = {}
        self.totals, self.calibration = LaneStats(), Calibration()
        self.waiting: deque[_Queued] = deque()
        self.next_run = self._next_lane = 0
        self._pools = [SequencePool(limits.n_ids) for _ in range(nodes)]
        self._task: _Task | None = None
        self._replicas: list[_Replica] = []
        self._out: list[Instruction | ToNode] = []

    @property
    def idle(self) -> bool:
        """Nothing is waiting, running or in flight."""
        return not (self.waiting or self._task or self.runs)

    @property
    def concurrency(self) -> tuple[int, object]:
        """See `Scheduler.concurrency`."""
        return int(self._task is not None), None

    def tune(self, limits: Limits) -> None:
        """Replicas have nothing that is tuned. Raises ProtocolError."""
        del limits
        raise ProtocolError("replicas are not tuned")

    def reconfigure(self, limits: Limits) -> None:
        """Use other knobs from now on; only while idle."""
        if not self.idle:
            raise ProtocolError("the scheduler can be reconfigured only while it is idle")
        self.limits = limits
        self._pools = [SequencePool(limits.n_ids) for _ in self._pools]

    def snapshot(self) -> dict[str, Any]:
        """What is going on, for people: as `Scheduler.snapshot`, and how many replicas there are.
        Cells are those of one replica."""
        task, limits, totals = self._task, self.limits, self.totals
        return {
            "waiting": len(self.waiting), "runs": len(self.runs), "useful_runs": len(self.runs),
            "replicas": self.nodes, "cells_used": 0 if task is None else len(task.accepted),
            "cells": limits.cells or limits.n_ctx, "kept_prefixes": 0,
            "free_ids": min(len(pool.free) for pool in self._pools), "credit": limits.credit,
            "draft_max": limits.draft_max, "acceptance": self.calibration.acceptance,
            "speculating": True,
            "totals": {
                "accepted": totals.accepted, "guesses_tested": totals.guesses_tested,
                "accepted_speculative": totals.accepted_speculative},
            "lanes": [] if task is None else [{
                "lane": task.lane, "request": task.request.request_id,
                "prompt": len(task.request.prompt), "prefilled": len(task.request.prompt),
                "reused": 0, "output": task.n_output, "in_flight": len(self.runs),
                "guesses_tested": task.stats.guesses_tested,
                "accepted_speculative": task.stats.accepted_speculative}]}

    def handle(self, event: Event) -> list[Instruction | ToNode]:
        """Advance by one event; returns what to execute, in order."""
        match event:
            case Submit(request, output, decompose):
                if decompose is not None:
                    raise ProtocolError("--layout replicate supports plain requests only")
                self._submit(request, output)
            case RunDone(run_id, choices):
                self._run_done(run_id, choices)
            case Abort(request_id, reason):
                self._abort(request_id, reason)
            case Restart(limits, reason):
                self._restart(limits, reason)
            case _:
                raise ProtocolError(f"unknown event {event!r}")
        while self._task is None and self.waiting:
            self._open(self.waiting.popleft())
        out, self._out = self._out, []
        return out

    # --- requests -----------------------------------------------------------------------------

    def _submit(self, request: Request, output: tuple[int, ...]) -> None:
        if len(request.prompt) + 1 > self.limits.n_ctx:
            self._out.append(Refuse(request.request_id, ContextOverflow(
                f"the prompt has {len(request.prompt)} tokens, but the context holds "
                f"{self.limits.n_ctx}: shorten the prompt or raise the context with -c")))
        else:
            self.waiting.append(_Queued(request, output))

    def _restart(self, limits: Limits, reason: str) -> None:
        """`nodes` replicas, with empty caches: the request at work begins again with what it has
        brought, or ends, where there is a reason."""
        task, self._task, self._replicas = self._task, None, []
        self.runs.clear()
        self.limits = limits
        self._pools = [SequencePool(limits.n_ids) for _ in range(self.nodes)]
        if task is None:
            return
        self.rows.closed(task.lane)
        task.stats.recovered += 1
        if reason:
            self._out.append(Finish(task.request.request_id, reason, task.stats))
        else:
            output = tuple(task.accepted[len(task.request.prompt):])
            self.waiting.appendleft(_Queued(task.request, output, task.stats))

    def _open(self, queued: _Queued) -> None:
        """Every replica computes the whole prompt; the first one's choice is the first token. What
        was brought before follows in runs of exact rows, as those that verified it."""
        request, output = queued.request, queued.output
        lane, self._next_lane = self._next_lane, self._next_lane + 1
        task = self._task = _Task(lane, request, [*request.prompt, *output], queued.stats)
        last, chunk = len(request.prompt) - 1, self.limits.chunk
        self._replicas = []
        for node, pool in enumerate(self._pools, 1):
            root = Node(request.prompt[-1], last, None, (pool.acquire(lane),), NO_RUN,
                        speculative=False, accepted=True)
            replica = _Replica(node, pool, Tree(lane, pool, root), len(request.prompt), root)
            self._replicas.append(replica)
            self._out.append(ToNode(node, OpenLane(lane, request.params)))
            if not request.max_tokens:
                continue
            for start in range(0, last + 1, chunk):
                stop = min(start + chunk, last + 1)
                rows = [(request.prompt[i], i, root.seq_ids, i == last and node == 1 and not output)
                        for i in range(start, stop)]
                self._send(replica, [root] if rows[-1][3] else [], rows, chunk=True)
            task.stats.runs += node == 1 and -(-(last + 1) // chunk)
        if task.n_output >= request.max_tokens:
            self._finish("length")
        elif len(task.accepted) >= self.limits.n_ctx:
            self._finish("context")
        elif output:
            self._opened(task)

    def _opened(self, task: _Task) -> None:
        self.rows.opened(task.lane, task.accepted)
        task.opened = True
        self._step(task)

    def _abort(self, request_id: int, reason: str) -> None:
        for queued in self.waiting:
            if queued.request.request_id == request_id:
                self.waiting.remove(queued)
                self._out.append(Finish(request_id, reason, queued.stats))
                return
        if self._task is not None and self._task.request.request_id == request_id:
            self._finish(reason)

    def _finish(self, reason: str) -> None:
        task = self._close()
        self._out.append(Finish(task.request.request_id, reason, task.stats))

    def _close(self) -> _Task:
        assert self._task is not None
        task, self._task = self._task, None
        for replica in self._replicas:
            replica.tree.kill()
            replica.pool.release_lane(task.lane)
            self._out.append(ToNode(replica.node, SendOps(replica.pool.take_ops())))
            self._out.append(ToNode(replica.node, CloseLane(task.lane)))
        self.rows.closed(task.lane)
        return task

    # --- results ------------------------------------------------------------------------------

    def _run_done(self, run_id: int, choices: tuple[Choice, ...] | None) -> None:
        run = self.runs.pop(run_id, None)
        if run is None or choices is None or len(choices) != len(run.nodes):
            raise ProtocolError(f"run {run_id} came back twice, was never issued, or has "
                                "unexpected results")
        run.useful = run.in_flight = False
        for node, choice in zip(run.nodes, choices, strict=True):
            node.choice = choice
        if self._task is not None and run_id in self._task.waiting:
            self._task.waiting.remove(run_id)
            if not self._task.waiting:
                self._end_step(self._task)

    def _end_step(self, task: _Task) -> None:
        """All replicas have answered: the longest match is accepted, the window moves on."""
        first = self._replicas[0].tip
        assert first is not None
        assert first.choice is not None
        best = max((self._matched(replica, first.choice) for replica in self._replicas), key=len)
        if any(replica.tops for replica in self._replicas):
            self.rows.advance(task.lane, task.accepted[-1], [
                node.choice for replica in self._replicas for node in replica.tops])
        start, tested = len(task.accepted), len(best) - 1 + self._was_wrong(best)
        for stats in (task.stats, self.totals):
            stats.guesses_tested += tested
        for k, choice in enumerate(best):
            if choice.token in task.request.stop_ids:
                return self._finish("stop")
            if choice.token == NO_TOKEN:
                self._close()
                self._out.append(Refuse(task.request.request_id, RequestError(
                    f"after {task.n_output} tokens nothing may follow: the grammar admits no "
                    "token of the vocabulary, or became too complex")))
                return None
            task.accepted.append(choice.token)
            for stats in (task.stats, self.totals):
                stats.accepted += 1
                stats.accepted_speculative += k < len(best) - 1
            self._out.append(Emit(task.request.request_id, choice, k < len(best) - 1))
            if task.n_output >= task.request.max_tokens:
                return self._finish("length")
            if len(task.accepted) >= self.limits.n_ctx:
                return self._finish("context")
        if not task.opened:
            return self._opened(task)
        self.rows.accepted(task.lane, task.accepted[start:])
        return self._step(task)

    @staticmethod
    def _matched(replica: _Replica, choice: Choice) -> list[Choice]:
        """The model's choices along the candidates of a replica, as far as they go."""
        found = [choice]
        node = replica.tip.child(choice.token) if replica.tip is not None else None
        while node is not None and node.choice is not None:
            found.append(node.choice)
            node = node.child(node.choice.token)
        return found

    def _was_wrong(self, best: list[Choice]) -> bool:
        """Whether a candidate went on where the last of these choices went elsewhere."""
        for replica in self._replicas:
            node = replica.tip
            for choice in best[:-1]:
                node = None if node is None else node.child(choice.token)
            if node is not None and node.choice is not None and any(
                    child.speculative for child in node.children):
                return True
        return False

    # --- the next step ------------------------------------------------------------------------

    def _step(self, task: _Task) -> None:
        """Deal out candidates and columns in contiguous chunks."""
        request, tokens = task.request, task.accepted
        last = min(len(request.prompt) + request.max_tokens, self.limits.n_ctx)
        depth = last - 1 - len(tokens)
        tails: list[tuple[int, ...]] = []
        columns = 0
        if depth > 0:
            tails = self.rows.tails(task.lane, tokens[-1], depth, request.stop_ids)
            window = self.rows.window_of(task.lane)
            fits = len(tokens) + window.columns + len(window.levels) < self.limits.n_ctx
            columns = window.columns if self.rows.window and fits else 0
        share, width = -(-len(tails) // self.nodes), -(-columns // self.nodes)
        for k, replica in enumerate(self._replicas):
            mine = range(min(k * width, columns), min((k + 1) * width, columns))
            own = tails[k * share : (k + 1) * share]
            replica.tops, replica.tip = [], None
            if own or mine or not k:
                self._issue(task, replica, own, mine)
        task.stats.runs += 1
        task.stats.steps += 1

    def _issue(self, task: _Task, replica: _Replica, tails: list[tuple[int, ...]],
               columns: range) -> None:
        """A replica's part: what it lacks of the path, its candidates, its columns."""
        tree, width = replica.tree, self.limits.exact_width
        chain = []
        for token in task.accepted[replica.length:]:
            if tree.step(token)[0] is None:
                chain.append(tree.add(token, NO_RUN))
        replica.length = len(task.accepted)
        while len(chain) > width:  # more than one run of exact rows
            self._verify(task, replica, chain[:width], [])
            chain = chain[width:]
        tip = replica.tip = chain[-1]
        guesses = tree.plan(tip, trie(tails, width - len(chain)))
        nodes = [tip, *guesses]
        tops: list[int] = []
        if columns:
            index = {id(node): k for k, node in enumerate(nodes)}
            rows, tops = self.rows.window_of(task.lane).rows([
                Anchor(-1 if k == 0 else index[id(node.parent)], node.token)
                for k, node in enumerate(nodes)], columns)
            for row in rows:
                parent = nodes[row.parent]
                nodes.append(Node(row.token, parent.next_pos, parent, (), PLANNED,
                                  speculative=False, hint=True, wanted=row.wanted))
        replica.tops = [nodes[top] for top in tops]
        hints = nodes[1 + len(guesses):]
        if len(chain) + len(guesses) + len(hints) <= width:
            self._verify(task, replica, chain, [*guesses, *hints])
            return
        self._verify(task, replica, chain, guesses)
        ready: list[Node] = []
        for node in hints:  # a guess that they hang below may have found no id
            assert node.parent is not None
            if node.parent.run_id != PLANNED or node.parent in ready:
                ready.append(node)
        issued = tree.issue(ready, self.next_run)
        task.waiting.add(self._send(replica, issued, [
            (node.token, node.pos, node.seq_ids, node.wanted) for node in issued]))

    def _verify(self, task: _Task, replica: _Replica, chain: list[Node], below: list[Node]
                ) -> None:
        """Rows of accepted tokens, and what hangs below the last of them, in one run."""
        nodes = replica.tree.issue(below, self.next_run)
        replica.tree.widen(chain[-1], nodes)
        for node in chain[:-1]:
            node.seq_ids = chain[-1].seq_ids
        rows = [*chain, *nodes]
        task.stats.issued_speculative += sum(node.speculative for node in nodes)
        task.waiting.add(self._send(replica, rows, [
            (n.token, n.pos, n.seq_ids, n.wanted and n not in chain[:-1]) for n in rows]))

    def _send(self, replica: _Replica, nodes: list[Node],
              rows: list[tuple[int, int, tuple[int, ...], bool]], *, chunk: bool = False) -> int:
        run_id, self.next_run = self.next_run, self.next_run + 1
        outputs = nodes if chunk else [n for n, row in zip(nodes, rows, strict=True) if row[3]]
        for node in nodes:
            node.run_id = run_id
        assert self._task is not None
        if chunk and outputs:
            self._task.waiting.add(run_id)
        if not chunk:
            self._task.stats.rows += len(rows)
            self._task.stats.attended += sum(row[1] + 1 for row in rows)
        self.runs[run_id] = Run(run_id, [], outputs, len(rows), speculative=False, chunk=chunk)
        self._out.append(ToNode(replica.node, IssueRun(
            run_id, NO_RUN, (self._task.lane,) * len(rows), make_rows(rows),
            replica.pool.take_ops(), False)))
        return run_id
