"""The rules that only `--policy published` has (docs/algorithms.md 4.10).

They decide about single runs; the tree manages ids and copies.
"""

from __future__ import annotations

from pipeinfer.core.messages import NO_RUN
from pipeinfer.scheduler.lanes import Lane
from pipeinfer.scheduler.state import SchedulerState
from pipeinfer.scheduler.token_tree import BufferedTree, Node


def repeat_tip(state: SchedulerState, lane: Lane) -> None:
    """Issue the paper's run of the last accepted token where that is in flight as a speculative
    token.

    The run is computed in full and is of no use, because the speculative run is ahead of it.
    """
    tree, tip = lane.tree, lane.tree.frontier
    in_flight = tip.run_id >= 0 and tip.choice is None
    if lane.done or lane.closing or not in_flight or not isinstance(tree, BufferedTree):
        return
    if (node := tree.again()) is not None:
        state.send([(lane, node)], NO_RUN, speculative=False, hint=True)
        tree.drop(node)


def reads_prompt(lane: Lane) -> bool:
    """Return whether the result of the lane's prompt is not back.

    The paper excludes speculation until then (its definition of the time to the first token).
    """
    tip = lane.tree.frontier
    return tip.choice is None and tip.run_id == lane.last_chunk_run


def buffer_free(state: SchedulerState, lane: Lane, best: Node) -> bool:
    """Return whether a speculative run below `best` has a free id, and room for the rows it
    repeats.
    """
    if not state.limits.buffered:
        return True
    if not state.pool.available or best.parent is None:
        return False
    return state.limits.shares_early or \
        lane.tree.rows_left(best.parent, state.limits.exact_width) > 0
