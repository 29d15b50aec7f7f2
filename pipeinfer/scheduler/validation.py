"""The invariants of the scheduler's state between two events.

The error of each check states what it found. Used by the tests after every event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from pipeinfer.core.messages import NO_RUN
from pipeinfer.errors import InvariantError
from pipeinfer.scheduler.lanes import Lane
from pipeinfer.scheduler.sequence_pool import NO_LANE, SequencePool
from pipeinfer.scheduler.state import SchedulerState
from pipeinfer.scheduler.token_tree import Node


def validate(state: SchedulerState, filling: Collection[Lane]) -> None:
    """Raise InvariantError for the first violated invariant.

    state: the scheduler's state
    filling: lanes whose prompt is not issued in full
    """
    _counts(state)
    _sequence_ids(state)
    for lane in state.lanes.values():
        _lane(state, lane, filling)
    _cells(state)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(f"the scheduler's state contradicts itself: {what}")


def _counts(state: SchedulerState) -> None:
    """The counters equal a count of the runs."""
    runs = state.runs.values()
    useful = [run for run in runs if run.useful]
    _check(all(run.in_flight for run in runs), "a run that is back is still listed")
    _check(all(run_id == run.run_id < state.next_run for run_id, run in state.runs.items()),
           "a run is listed under another id, or one from the future")
    for name, kept, counted in (
        ("useful runs", state.useful, len(useful)),
        ("chunks", state.chunks, sum(run.chunk for run in useful)),
        ("plain runs", state.plain, sum(run.plain for run in useful)),
        ("draft tokens in flight", state.guess_rows, sum(run.guesses for run in runs)),
    ):
        _check(kept == counted, f"{kept} {name} are noted and {counted} are there")
    per_lane = Counter(lane.lane for run in useful for lane in run.lanes)
    for lane in state.lanes.values():
        _check(lane.useful == per_lane[lane.lane],
               f"lane {lane.lane} notes {lane.useful} useful runs and has {per_lane[lane.lane]}")
    for run in useful:
        _check(any(lane.lane in state.lanes or lane.has_threads for lane in run.owners),
               f"run {run.run_id} is useful to no lane that is there")


def _sequence_ids(state: SchedulerState) -> None:
    """Each id is free or has an owner, and warm ids are free."""
    pool: SequencePool = state.pool
    free = list(pool.free)
    _check(len(set(free)) == len(free), "a sequence id is free twice")
    _check(not set(free) & set(pool.owner), "a sequence id is free and taken")
    _check(set(free) | set(pool.owner) == set(range(pool.size)), "a sequence id is lost")
    _check(set(pool.warm) <= set(free), "an id that is taken counts as warm")
    lanes = {*state.lanes, NO_LANE}
    _check(set(pool.owner.values()) <= lanes, "a sequence id belongs to a lane that has ended")
    kept = sum(owner == NO_LANE for owner in pool.owner.values())
    _check(kept == len(state.admission.prefixes.kept),
           f"{kept} ids keep prompts and {len(state.admission.prefixes.kept)} are remembered")


def _lane(state: SchedulerState, lane: Lane, filling: Collection[Lane]) -> None:
    """A lane's tree hangs at its last accepted token, under ids that are its own."""
    who = f"lane {lane.lane}"
    _check(not lane.done, f"{who} has ended and is listed")
    frontier = lane.tree.frontier
    _check(state.pool.owner.get(lane.main_id) == lane.lane,
           f"{who}'s accepted tokens lie under id {lane.main_id}, which is not its own")
    waiting = sum(tip[0] is lane for tip in state.tips)
    _check(waiting == lane.unsent, f"{who} has {waiting} accepted tokens that wait for room")
    if not lane.has_threads:  # a thread may be held, fed or cut between two tokens
        _check(frontier.token == lane.accepted[-1], f"{who}'s frontier is not its last token")
        _check(frontier.pos == lane.position(len(lane.accepted) - 1),
               f"{who}'s frontier is at position {frontier.pos}")
        _check(all(state.pool.owner.get(i) == lane.lane for i in frontier.seq_ids),
               f"{who}'s last token lies under ids {frontier.seq_ids} that are not its own")
        _check(frontier.run_id == NO_RUN or lane.root_issued,
               f"{who}'s frontier is issued and its prompt is not")
        known = frontier.run_id in state.runs or frontier.choice is not None
        _check(known or lane.unsent or lane.waiting_tip is frontier
               or lane.loading or lane in filling,
               f"{who} waits for nothing: its last token is not issued, and nothing will issue it")
    _tree(state, lane, frontier)


def _tree(state: SchedulerState, lane: Lane, frontier: Node) -> None:
    """Below the frontier: children follow their parents, and what is in flight is alive."""
    left = list(frontier.children)
    while left:
        node = left.pop()
        left += node.children
        _check(node.parent is not None and node in node.parent.children,
               f"lane {lane.lane} has a node that its parent does not know")
        _check(node.pos > (node.parent.pos if node.parent is not None else -1),
               f"lane {lane.lane} has a node at {node.pos} that does not follow its parent")
        if node.run_id >= 0 and node.run_id in state.runs:
            _check(node.run_id < state.next_run, f"node of lane {lane.lane} in an unknown run")


def _cells(state: SchedulerState) -> None:
    """The cells in use fit, unless one request is alone.

    Threads of a response that fork during an event get their room in the next one.
    """
    limits, lanes = state.limits, list(state.lanes.values())
    several = len({id(lane.ticket) for lane in lanes}) > 1
    if limits.cells and several and not any(lane.has_threads for lane in lanes):
        used = state.admission.used(lanes)
        _check(used <= limits.cells, f"{used} cells are used and {limits.cells} are there")
