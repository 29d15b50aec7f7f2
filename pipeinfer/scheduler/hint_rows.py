"""Hint rows in flight: rows of the target's runs that are there for what a proposer learns.

Stands between the drafting half of the scheduler and an `InlineProposer`: makes nodes of its hints,
keeps what was asked until the results are back, and tells it how the path has grown. It knows
neither policies nor what a proposer does with a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.scheduler.lanes import Lane, Run
from pipeinfer.scheduler.state import SchedulerState
from pipeinfer.scheduler.token_tree import PLANNED, Node
from pipeinfer.strategies.proposers.base import Anchor, InlineProposer


@dataclass(slots=True)
class _Asked:
    """key: how the proposer knows the lane. told: tokens that it has been told. nodes, run: of the
    hints that are out, anchors first. at: position of the last token that had hints."""

    key: int
    told: int
    nodes: list[Node] = field(default_factory=list)
    run: Run | None = None
    at: int = -1


class HintRows:
    """At most one batch of hints per lane is in flight."""

    def __init__(self, proposer: InlineProposer) -> None:
        self.proposer = proposer
        self._lanes: dict[int, _Asked] = {}

    def propose(self, lane: Lane, job: StartDraft) -> tuple[Proposal, ...]:
        """What the proposer knows below the job's path."""
        self._tell(lane)
        return self.proposer.propose(job)

    def out(self, lane: Lane) -> bool:
        """Whether results are on their way."""
        asked = self._lanes.get(lane.lane)
        return asked is not None and asked.run is not None

    def due(self, lane: Lane) -> bool:
        """Whether new hints may go out below the frontier: none are out, and it has moved."""
        asked = self._lanes.get(lane.lane)
        return asked is None or (asked.run is None and lane.tree.frontier.pos > asked.at)

    def plan(self, lane: Lane, anchors: Sequence[Node], last: int) -> list[Node]:
        """Nodes for new hints below rows that are verified, parents first, none issued yet.

        anchors: the tip or frontier, then guesses below it. last: the highest position there is.
        """
        asked = self._tell(lane)
        index = {id(node): k for k, node in enumerate(anchors)}
        rows = self.proposer.hints(asked.key, [
            Anchor(-1 if k == 0 else index[id(node.parent)], node.token)
            for k, node in enumerate(anchors)], self.proposer.rows)
        nodes = list(anchors)
        for row in rows:
            parent = nodes[row.parent]
            nodes.append(Node(row.token, parent.next_pos, parent, (), PLANNED, speculative=False,
                              hint=True, wanted=row.wanted, sees=row.sees))
        asked.nodes, asked.at = nodes, anchors[0].pos
        return [node for node in nodes[len(anchors):] if node.pos <= last]

    def sent(self, lane: Lane, run: Run) -> None:
        """The planned hints went out with this run (or none was left, and their anchors did)."""
        self._lanes[lane.lane].run = run

    def send(self, lane: Lane, planned: list[Node], state: SchedulerState) -> None:
        """Issue planned hints in a run of their own, behind that of the rows they hang below."""
        ready: list[Node] = []
        for node in planned:  # a guess that they hang below may have found no room
            assert node.parent is not None
            if node.parent.run_id != PLANNED or node.parent in ready:
                ready.append(node)
        nodes = lane.tree.issue(ready, state.next_run)
        if nodes:
            assert nodes[0].parent is not None
            self.sent(lane, state.send([(lane, node) for node in nodes], nodes[0].parent.run_id,
                                        speculative=True, hint=True))

    def back(self, lane: Lane) -> None:
        """A run of the lane is back: if it had the hints, the proposer hears what came of them."""
        asked = self._lanes.get(lane.lane)
        if asked is None or asked.run is None or asked.run.in_flight:
            return
        asked.run = None
        self.proposer.learn(asked.key, [node.choice for node in asked.nodes])
        asked.nodes = []

    def closed(self, lane: Lane) -> None:
        """Forget a lane that has ended, here and in the proposer."""
        asked = self._lanes.pop(lane.lane, None)
        if asked is not None:
            self.proposer.closed(asked.key)

    def _tell(self, lane: Lane) -> _Asked:
        """Let the proposer know the whole path."""
        asked, tokens = self._lanes.get(lane.lane), lane.accepted
        if asked is not None and asked.key != lane.path_id:  # it goes on from another past
            self.closed(lane)
            asked = None
        if asked is None:
            asked = self._lanes[lane.lane] = _Asked(lane.path_id, len(tokens))
            self.proposer.opened(asked.key, tokens)
        elif len(tokens) > asked.told:
            self.proposer.accepted(asked.key, tokens[asked.told:])
            asked.told = len(tokens)
        return asked
