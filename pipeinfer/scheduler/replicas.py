"""Lookahead parallelism: every node holds the whole model, and each computes a part of every step.

A step of lookahead decoding verifies candidates and continues the columns of a window
(docs/algorithms.md 6.8). Each replica gets a contiguous part of the columns and of the candidates.
It evaluates these, the current token, and the rows of level 0 that its columns need. Only token ids
travel: accepted tokens that a replica has not computed are rows of its next step. A step ends when
all replicas have returned; its tokens, the window and the pool are the same as with one node. When
a replica is lost, the others restart: they compute the prompt and the accepted tokens again.

`ReplicaScheduler` replaces `Scheduler` behind the head: the same events in, but each instruction is
for one node. Several requests share the replicas. Each has one step in flight at a time, so no
request waits for more than one step of each other one. Prompts go chunk by chunk for the same
reason. A part of a step that leaves room for another one in a run of exact width waits while its
replica computes; then all that wait there are issued together. Pure, like the scheduler.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec import Struct, field

from pipeinfer.core.calibration import Calibration
from pipeinfer.core.messages import NO_RUN
from pipeinfer.core.types import NO_TOKEN, Choice, Request, make_rows
from pipeinfer.errors import ContextOverflow, ProtocolError, RequestError
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
from pipeinfer.scheduler.settings import Limits, Tuning
from pipeinfer.scheduler.token_tree import PLANNED, Node, Tree
from pipeinfer.strategies.proposers.base import Anchor
from pipeinfer.strategies.proposers.lookahead import Lookahead, trie

_AHEAD = 2  #: chunks of a prompt that are in flight at a time


class _Replica(Struct):
    """The state of one request on one replica.

    tree: what the replica has computed, and the speculative tokens of this step
    length: number of accepted tokens that its frontier has reached
    tip: the accepted token that the step begins with
    tops: rows whose choices continue its columns
    """

    node: int
    pool: SequencePool
    tree: Tree
    length: int = 0
    tip: Node | None = None
    tops: list[Node] = field(default_factory=list)


class _Part(Struct):
    """A request's rows on one replica."""

    task: _Task
    replica: _Replica
    nodes: list[Node]
    rows: list[tuple[int, int, tuple[int, ...], bool]]


class _Sent(Struct):
    """A run that is out: its replica, its lanes, and whether it is a chunk of a prompt."""

    node: int
    lanes: tuple[int, ...]
    chunk: bool


class _Queued(Struct):
    """A waiting request, its output so far, which is not emitted again, and its counters."""

    request: Request
    output: tuple[int, ...] = ()
    stats: LaneStats = field(default_factory=LaneStats)


class _Task(Struct):
    """A request in progress.

    replicas: its state on each replica
    pieces: chunks of the prompt that are not issued yet
    reading: runs of chunks in flight
    opened: whether the lookahead proposer has its lane
    waiting: runs that the step waits for
    held: how many parts of the step wait for their replicas
    """

    lane: int
    request: Request
    accepted: list[int]
    stats: LaneStats
    replicas: list[_Replica] = field(default_factory=list)
    pieces: deque[tuple[int, int]] = field(default_factory=deque)
    reading: set[int] = field(default_factory=set)
    opened: bool = False
    waiting: set[int] = field(default_factory=set)
    held: int = 0

    @property
    def most_cells(self) -> int:
        """The most tokens that it may have, without speculative ones."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def n_output(self) -> int:
        """The number of accepted output tokens."""
        return len(self.accepted) - len(self.request.prompt)


class ReplicaScheduler:
    """The scheduler of `--layout replicate`; see the module docstring.

    limits: settings of the scheduler
    rows: the lookahead proposer
    nodes: number of replicas, which are the nodes `1..nodes`
    runs: in flight, by id
    """

    def __init__(self, limits: Limits, rows: Lookahead, nodes: int) -> None:
        self.limits, self.rows, self.nodes = limits, rows, nodes
        self.runs: dict[int, Run] = {}
        self.totals, self.calibration = LaneStats(), Calibration()
        self.waiting: deque[_Queued] = deque()
        self.next_run = self._next_lane = 0
        self._pools = self._new_pools()
        self._tasks: dict[int, _Task] = {}  # by lane, in order of their opening
        self._sent: dict[int, _Sent] = {}
        self._held: list[deque[_Part]] = [deque() for _ in range(nodes)]
        self._out: list[Instruction | ToNode] = []

    def _new_pools(self) -> list[SequencePool]:
        return [SequencePool(self.limits.n_ids) for _ in range(self.nodes)]

    def _reserve(self) -> None:
        """Reserve an id for each request that may still start."""
        for pool in self._pools:
            pool.reserved = max(self.limits.parallel - len(self._tasks), 0)

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting, running or in flight."""
        return not (self.waiting or self._tasks or self.runs)

    @property
    def concurrency(self) -> tuple[int, object]:
        """The number of requests in progress, and a value that changes when one comes or goes."""
        return len(self._tasks), tuple(self._tasks)

    def tune(self, tuning: Tuning) -> None:
        """Raise ProtocolError: replicas have no settings that are tuned."""
        del tuning
        raise ProtocolError("replicas are not tuned")

    def reconfigure(self, limits: Limits) -> None:
        """Use other settings from now on. Raises ProtocolError unless idle."""
        if not self.idle:
            raise ProtocolError("the scheduler can be reconfigured only while it is idle")
        self.limits = limits
        self._pools = self._new_pools()

    def snapshot(self) -> dict[str, Any]:
        """Return the present state for display, as `Scheduler.snapshot`, with the number of
        replicas.

        Cells are those of one replica.
        """
        limits, totals = self.limits, self.totals
        return {
            "waiting": len(self.waiting), "runs": len(self.runs), "useful_runs": len(self.runs),
            "replicas": self.nodes, "cells_used": sum(len(task.accepted)
                                                         for task in self._tasks.values()),
            "cells": limits.cells or limits.n_ctx * limits.parallel, "kept_prefixes": 0,
            "free_ids": min(len(pool.free) for pool in self._pools), "credit": limits.credit,
            "draft_max": limits.draft_max, "acceptance": self.calibration.acceptance,
            "speculating": True,
            "totals": {
                "accepted": totals.accepted, "guesses_tested": totals.guesses_tested,
                "accepted_speculative": totals.accepted_speculative},
            "lanes": [{
                "lane": task.lane, "request": task.request.request_id,
                "prompt": len(task.request.prompt),
                "prefilled": task.pieces[0][0] if task.pieces else len(task.request.prompt),
                "reused": 0, "output": task.n_output, "in_flight": len(task.waiting | task.reading),
                "guesses_tested": task.stats.guesses_tested,
                "accepted_speculative": task.stats.accepted_speculative}
                for task in self._tasks.values()]}

    def handle(self, event: Event) -> list[Instruction | ToNode]:
        """Advance by one event; return the instructions to execute, in order.

        Raises ProtocolError for a decomposed request, and for events of runs that were never
        issued.
        """
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
        while self.waiting and self._has_room(self.waiting[0].request):
            self._open(self.waiting.popleft())
        self._issue_all_held()
        out, self._out = self._out, []
        return out

    # --- requests -----------------------------------------------------------------------------

    def _has_room(self, request: Request) -> bool:
        """Whether `request` may start now.

        All requests must fit at their longest, with the candidates of a step each. The oldest
        always may.
        """
        limits, n_ctx, cells = self.limits, self.limits.n_ctx, self.limits.cells
        wanted = min(len(request.prompt) + request.max_tokens, n_ctx) + sum(
            min(task.most_cells, n_ctx) for task in self._tasks.values())
        if limits.guess_rows:  # half of the cells that are planned for speculative tokens
            wanted += max((1 + len(self._tasks)) * limits.exact_width - 2 * limits.guess_rows, 0)
        return not self._tasks or (len(self._tasks) < self.limits.parallel
                                   and (not cells or wanted <= cells))

    def _submit(self, request: Request, output: tuple[int, ...]) -> None:
        if len(request.prompt) + 1 > self.limits.n_ctx:
            self._out.append(Refuse(request.request_id, ContextOverflow(
                f"the prompt has {len(request.prompt)} tokens, but the context holds "
                f"{self.limits.n_ctx}: shorten the prompt or raise the context with -c")))
        else:
            self.waiting.append(_Queued(request, output))

    def _restart(self, limits: Limits, reason: str) -> None:
        """Start `nodes` replicas with empty caches: requests in progress are replayed, or end with
        `reason`.
        """
        tasks, self._tasks = list(self._tasks.values()), {}
        self.runs.clear()
        self._sent.clear()
        self._held = [deque() for _ in range(self.nodes)]
        self.limits = limits
        self._pools = self._new_pools()
        for task in reversed(tasks):
            self.rows.closed(task.lane)
            task.stats.recovered += 1
            if reason:
                self._out.append(Finish(task.request.request_id, reason, task.stats))
            else:
                output = tuple(task.accepted[len(task.request.prompt):])
                self.waiting.appendleft(_Queued(task.request, output, task.stats))

    def _open(self, queued: _Queued) -> None:
        """Let every replica compute the whole prompt; the first one's choice is the first token.

        Earlier output follows in runs of at most the exact width, like those that verified it.
        """
        request, output = queued.request, queued.output
        lane, self._next_lane = self._next_lane, self._next_lane + 1
        task = self._tasks[lane] = _Task(lane, request, [*request.prompt, *output], queued.stats)
        last, chunk = len(request.prompt) - 1, self.limits.chunk
        self._reserve()
        for node, pool in enumerate(self._pools, 1):
            root = Node(request.prompt[-1], last, None, (pool.acquire(lane),), NO_RUN,
                        speculative=False, accepted=True)
            task.replicas.append(_Replica(node, pool, Tree(lane, pool, root), len(request.prompt),
                                          root))
            self._out.append(ToNode(node, OpenLane(lane, request.params)))
        if task.n_output >= request.max_tokens:
            self._finish(task, "length")
        elif len(task.accepted) >= self.limits.n_ctx:
            self._finish(task, "context")
        else:
            task.pieces.extend((start, min(start + chunk, last + 1))
                               for start in range(0, last + 1, chunk))
            for _ in range(min(_AHEAD, len(task.pieces))):
                self._issue_piece(task)

    def _issue_piece(self, task: _Task) -> None:
        """Issue the next chunk of the prompt to every replica.

        Only the end of a prompt without earlier output has a result, on the first replica.
        """
        start, stop = task.pieces.popleft()
        prompt = task.request.prompt
        for replica in task.replicas:
            assert replica.tip is not None
            wanted = stop == len(prompt) == len(task.accepted) and replica.node == 1
            rows = [(prompt[i], i, replica.tip.seq_ids, wanted and i == stop - 1)
                    for i in range(start, stop)]
            run_id = self._send([_Part(task, replica, [replica.tip] if wanted else [], rows)],
                                chunk=True)
            task.reading.add(run_id)
            if wanted:
                task.waiting.add(run_id)
        task.stats.runs += 1
        if not task.pieces and len(task.accepted) > len(prompt):
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
        for task in list(self._tasks.values()):
            if task.request.request_id == request_id:
                self._finish(task, reason)

    def _finish(self, task: _Task, reason: str) -> None:
        self._close(task)
        self._out.append(Finish(task.request.request_id, reason, task.stats))

    def _close(self, task: _Task) -> None:
        del self._tasks[task.lane]
        self._held = [deque(part for part in parts if part.task is not task)
                      for parts in self._held]
        self._reserve()
        for replica in task.replicas:
            replica.tree.kill()
            replica.pool.release_lane(task.lane)
            self._out.append(ToNode(replica.node, SendOps(replica.pool.take_ops())))
            self._out.append(ToNode(replica.node, CloseLane(task.lane)))
        self.rows.closed(task.lane)

    # --- results ------------------------------------------------------------------------------

    def _run_done(self, run_id: int, choices: tuple[Choice, ...] | None) -> None:
        run = self.runs.pop(run_id, None)
        if run is None or choices is None or len(choices) != len(run.nodes):
            raise ProtocolError(f"run {run_id} came back twice, was never issued, or has "
                                "unexpected results")
        run.useful = run.in_flight = False
        for node, choice in zip(run.nodes, choices, strict=True):
            node.choice = choice
        for lane in self._sent.pop(run_id).lanes:
            if (task := self._tasks.get(lane)) is None:
                continue
            task.reading.discard(run_id)
            if task.pieces and len(task.reading) <= (_AHEAD - 1) * len(task.replicas):
                self._issue_piece(task)
            elif run_id in task.waiting:
                task.waiting.remove(run_id)
                if not task.waiting and not task.held:
                    self._end_step(task)

    def _end_step(self, task: _Task) -> None:
        """Accept the longest match once all replicas have returned, and advance the window."""
        first = task.replicas[0].tip
        assert first is not None
        assert first.choice is not None
        best = max((self._matched(replica, first.choice) for replica in task.replicas), key=len)
        if any(replica.tops for replica in task.replicas):
            self.rows.advance(task.lane, task.accepted[-1], [
                node.choice for replica in task.replicas for node in replica.tops])
        start, tested = len(task.accepted), len(best) - 1 + self._was_wrong(task, best)
        for stats in (task.stats, self.totals):
            stats.guesses_tested += tested
        for k, choice in enumerate(best):
            if choice.token in task.request.stop_ids:
                return self._finish(task, "stop")
            if choice.token == NO_TOKEN:
                self._close(task)
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
                return self._finish(task, "length")
            if len(task.accepted) >= self.limits.n_ctx:
                return self._finish(task, "context")
        if not task.opened:
            return self._opened(task)
        self.rows.accepted(task.lane, task.accepted[start:])
        return self._step(task)

    @staticmethod
    def _matched(replica: _Replica, choice: Choice) -> list[Choice]:
        """The model's choices along the candidates of a replica, as far as they match."""
        found = [choice]
        node = replica.tip.child(choice.token) if replica.tip is not None else None
        while node is not None and node.choice is not None:
            found.append(node.choice)
            node = node.child(node.choice.token)
        return found

    @staticmethod
    def _was_wrong(task: _Task, best: list[Choice]) -> bool:
        """Whether a candidate continued after the last of these choices with another token."""
        for replica in task.replicas:
            node = replica.tip
            for choice in best[:-1]:
                node = None if node is None else node.child(choice.token)
            if node is not None and node.choice is not None and any(
                    child.speculative for child in node.children):
                return True
        return False

    # --- the next step ------------------------------------------------------------------------

    def _step(self, task: _Task) -> None:
        """Distribute candidates and columns over the replicas in contiguous parts."""
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
        for k, replica in enumerate(task.replicas):
            mine = range(min(k * width, columns), min((k + 1) * width, columns))
            own = tails[k * share : (k + 1) * share]
            replica.tops, replica.tip = [], None
            if own or mine or not k:
                self._issue(task, replica, own, mine)
        task.stats.runs += 1
        task.stats.steps += 1

    def _issue(self, task: _Task, replica: _Replica, tails: list[tuple[int, ...]],
               columns: range) -> None:
        """Issue a replica's part: what it lacks of the path, its candidates, its columns."""
        tree, width = replica.tree, self.limits.exact_width
        chain = []
        for token in task.accepted[replica.length:]:
            if tree.step(token)[0] is None:
                chain.append(tree.add(token, NO_RUN))
        replica.length = len(task.accepted)
        alone = len(chain) <= width
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
        count = len(chain) + len(guesses) + len(hints)
        if count <= width:
            self._verify(task, replica, chain, [*guesses, *hints],
                         waits=alone and 2 * count <= width)
            return
        self._verify(task, replica, chain, guesses)
        ready: list[Node] = []
        for node in hints:  # their parent may have found no free id
            assert node.parent is not None
            if node.parent.run_id != PLANNED or node.parent in ready:
                ready.append(node)
        issued = tree.issue(ready, self.next_run)
        task.waiting.add(self._send([_Part(task, replica, issued, [
            (node.token, node.pos, node.seq_ids, node.wanted) for node in issued])]))

    def _verify(self, task: _Task, replica: _Replica, chain: list[Node], below: list[Node], *,
                waits: bool = False) -> None:
        """Issue rows of accepted tokens, and the nodes below the last of them, in one run.

        waits: whether they may wait until the replica has computed what it has.
        """
        nodes = replica.tree.issue(below, self.next_run)
        replica.tree.widen(chain[-1], nodes)
        for node in chain[:-1]:
            node.seq_ids = chain[-1].seq_ids
        rows = [*chain, *nodes]
        task.stats.issued_speculative += sum(node.speculative for node in nodes)
        part = _Part(task, replica, rows, [
            (n.token, n.pos, n.seq_ids, n.wanted and n not in chain[:-1]) for n in rows])
        if waits:
            task.held += 1
            self._held[replica.node - 1].append(part)
        else:
            self._issue_held(replica.node)  # they came first
            task.waiting.add(self._send([part]))

    def _issue_all_held(self) -> None:
        """Issue what waits for replicas that have computed their steps."""
        busy = {sent.node for sent in self._sent.values() if not sent.chunk}
        for node in range(1, self.nodes + 1):
            if node not in busy:
                self._issue_held(node)

    def _issue_held(self, node: int) -> None:
        """Issue what waits for a replica, as many parts in a run as its width allows."""
        held = self._held[node - 1]
        while held:
            parts = [held.popleft()]
            room = self.limits.exact_width - len(parts[0].rows)
            while held and len(held[0].rows) <= room:
                room -= len(held[0].rows)
                parts.append(held.popleft())
            run_id = self._send(parts)
            for part in parts:
                part.task.held -= 1
                part.task.waiting.add(run_id)

    def _send(self, parts: list[_Part], *, chunk: bool = False) -> int:
        """Issue parts of one replica in a run, and return its id."""
        run_id, self.next_run = self.next_run, self.next_run + 1
        replica = parts[0].replica
        self._sent[run_id] = _Sent(replica.node, tuple(part.task.lane for part in parts), chunk)
        outputs: list[Node] = []
        for part in parts:
            outputs += part.nodes if chunk else [
                node for node, row in zip(part.nodes, part.rows, strict=True) if row[3]]
            for node in part.nodes:
                node.run_id = run_id
            if not chunk:
                part.task.stats.rows += len(part.rows)
                part.task.stats.attended += sum(row[1] + 1 for row in part.rows)
        rows = [row for part in parts for row in part.rows]
        self.runs[run_id] = Run(run_id, [], outputs, len(rows), speculative=False, chunk=chunk)
        self._out.append(ToNode(replica.node, IssueRun(
            run_id, NO_RUN, tuple(part.task.lane for part in parts for _ in part.rows),
            make_rows(rows), replica.pool.take_ops(), False)))
        return run_id
