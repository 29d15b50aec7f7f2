"""Hint rows in flight: rows of the target's runs whose results are input for a proposer.

This module connects the drafting half of the scheduler with an `InlineProposer`. It makes nodes of
the proposer's hints, stores them until their results are back, and passes accepted tokens on.
Independent of policies and of what a proposer does with the results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct, field

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.scheduler.lanes import Lane, Run
from pipeinfer.scheduler.state import SchedulerState
from pipeinfer.scheduler.token_tree import PLANNED, Node
from pipeinfer.strategies.proposers.base import Anchor, InlineProposer


class _Batch(Struct):
    """Hints that were planned together.

    nodes: anchors first
    run: the run that they are issued with
    """

    number: int
    nodes: list[Node]
    run: Run | None = None


class _Asked(Struct):
    """The state of one lane.

    key: the proposer's number of the lane
    passed: number of tokens that were passed on to the proposer
    planned: the last batch
    batches: in flight, the oldest first
    at: position of the last token that had hints
    fresh: whether results have come in since the last proposals
    """

    key: int
    passed: int
    planned: _Batch | None = None
    batches: deque[_Batch] = field(default_factory=deque)
    at: int = -1
    fresh: bool = False


class HintRows:
    """The hint rows of all lanes: one batch per lane in flight, or several for a `chained`
    proposer.
    """

    def __init__(self, proposer: InlineProposer) -> None:
        self.proposer = proposer
        self._lanes: dict[int, _Asked] = {}
        self._next_batch = 0

    def propose(self, lane: Lane, job: StartDraft) -> tuple[Proposal, ...]:
        """Return the proposer's proposals below the job's path."""
        self._tell(lane).fresh = False
        return self.proposer.propose(job)

    def out(self, lane: Lane) -> bool:
        """Whether hints of the lane are in flight."""
        asked = self._lanes.get(lane.lane)
        return asked is not None and bool(asked.batches)

    def fresh(self, lane: Lane) -> bool:
        """Whether results have come in since the last call of `propose`."""
        asked = self._lanes.get(lane.lane)
        return asked is not None and asked.fresh

    def due(self, lane: Lane) -> bool:
        """Whether new hints may be issued below the frontier.

        They may where the frontier has none, and no other hints are in flight or the proposer is
        `chained`.
        """
        asked, frontier = self._lanes.get(lane.lane), lane.tree.frontier
        if self.proposer.chained:
            return not frontier.hinted
        return asked is None or (not asked.batches and frontier.pos > asked.at)

    def plan(self, lane: Lane, anchors: Sequence[Node], last: int) -> list[Node]:
        """Return nodes for new hints below rows that are verified, parents first, none issued yet.

        anchors: the tip or frontier, then speculative tokens below it
        last: the highest position there is
        """
        return self._plan(lane, anchors, self.proposer.rows, last, None)

    def plan_below(self, lane: Lane, guesses: Sequence[Node], room: int, last: int) -> list[Node]:
        """Return nodes for new hints below a run of speculative tokens, parents first, none issued
        yet.

        guesses: the tokens of the run, parents first; those whose parents are not among them have
            parents of the same run
        room: most hints
        last: the highest position there is
        """
        parent = guesses[0].parent
        assert parent is not None
        same = [node for node in guesses if node.parent is parent]
        inside = {id(node) for node in same}
        for node in guesses:  # hints need anchors that one path leads to
            if id(node.parent) in inside and id(node) not in inside:
                inside.add(id(node))
                same.append(node)
        return self._plan(lane, same, min(room, self.proposer.rows), last,
                          tuple(parent.path_from(lane.tree.frontier)))

    def _plan(self, lane: Lane, anchors: Sequence[Node], room: int, last: int,
              below: tuple[int, ...] | None) -> list[Node]:
        asked = self._tell(lane)
        index = {id(node): k for k, node in enumerate(anchors)}
        number, self._next_batch = self._next_batch, self._next_batch + 1
        rows = self.proposer.hints(
            asked.key, [Anchor(index.get(id(node.parent), -1) if k or below is not None else -1,
                               node.token) for k, node in enumerate(anchors)],
            room, batch=number, below=below)
        nodes = list(anchors)
        if below is None:
            anchors[0].hinted = True
            asked.at = anchors[0].pos
        for row in rows:
            parent = nodes[row.parent]
            parent.hinted = True
            nodes.append(Node(row.token, parent.next_pos, parent, (), PLANNED, speculative=False,
                              hint=True, wanted=row.wanted, sees=row.sees))
        asked.planned = _Batch(number, nodes)
        return [node for node in nodes[len(anchors):] if node.pos <= last]

    def sent(self, lane: Lane, run: Run) -> None:
        """Record that the planned hints, or their anchors alone where none was left, went out with
        `run`.
        """
        asked = self._lanes[lane.lane]
        assert asked.planned is not None
        if asked.planned.run is None:
            asked.batches.append(asked.planned)
        asked.planned.run = run

    def send(self, lane: Lane, planned: list[Node], state: SchedulerState) -> None:
        """Issue planned hints in a run of their own, after the run of the rows that they hang
        below. Not where that run would have to repeat these rows (`BufferedTree.repeated`).
        """
        if planned and planned[0].parent is not None and \
                not lane.tree.rows_left(planned[0].parent, 1):
            return
        ready: list[Node] = []
        for node in planned:  # their parent may have found no room in its run
            assert node.parent is not None
            if node.parent.run_id != PLANNED or node.parent in ready:
                ready.append(node)
        nodes = lane.tree.issue(ready, state.next_run)
        if nodes:
            assert nodes[0].parent is not None
            self.sent(lane, state.send([(lane, node) for node in nodes], nodes[0].parent.run_id,
                                        speculative=True, hint=True))

    def back(self, lane: Lane) -> None:
        """Pass the results of a run that is back to the proposer, and those of earlier skipped
        batches.
        """
        asked = self._lanes.get(lane.lane)
        while asked is not None and asked.batches and (
                run := asked.batches[0].run) is not None and not run.in_flight:
            batch = asked.batches.popleft()
            asked.fresh = True
            self.proposer.learn(asked.key, [node.choice for node in batch.nodes],
                                batch=batch.number)

    def closed(self, lane: Lane) -> None:
        """Delete a lane that has ended, here and in the proposer."""
        asked = self._lanes.pop(lane.lane, None)
        if asked is not None:
            self.proposer.closed(asked.key)

    def _tell(self, lane: Lane) -> _Asked:
        """Pass the tokens that the proposer has not received yet on to it."""
        asked, tokens = self._lanes.get(lane.lane), lane.text
        if asked is not None and asked.key != lane.path_id:  # the lane was cut back meanwhile
            self.closed(lane)
            asked = None
        if asked is None:
            asked = self._lanes[lane.lane] = _Asked(lane.path_id, len(tokens))
            self.proposer.opened(asked.key, tokens)
        elif len(tokens) > asked.passed:
            self.proposer.accepted(asked.key, tokens[asked.passed:])
            asked.passed = len(tokens)
        return asked
