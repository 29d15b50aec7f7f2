"""Allocation of sequence ids, and the cache operations that prepare and clean them.

An id is *live* while a path of a token tree uses it and *free* otherwise. Free ids are allocated
first in, first out. A freed id is cleaned at once down to its *warm* prefix: the accepted tokens
that it already holds, so that a later branch of the same lane copies only what is new. This module
emits operations and is independent of stages, tokens and trees.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pipeinfer.core.types import END, SeqCopy, SeqJoin, SeqOp, SeqRemove

NO_LANE = -1  #: owner of an id that holds a cached prompt


@dataclass(slots=True)
class SequencePool:
    """The ids `0..size-1`, and the operations that were not sent yet (`ops`).

    reserved: free ids that branches must leave to lanes that may still start
    ops: the next run takes them with it
    Invariants: an id is in `free` or in `owner`, never in both; a free id's cells are exactly the
        first `warm[id]` accepted positions of lane `warm_lane[id]` once `ops` have run.
    """

    size: int
    reserved: int = 0
    free: deque[int] = field(init=False)
    owner: dict[int, int] = field(init=False, default_factory=dict)
    warm: dict[int, int] = field(init=False, default_factory=dict)
    warm_lane: dict[int, int] = field(init=False, default_factory=dict)
    ops: list[SeqOp] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.free = deque(range(self.size))

    @property
    def available(self) -> int:
        """The number of ids that branches may take."""
        return max(len(self.free) - self.reserved, 0)

    def acquire(self, lane: int) -> int:
        """Return an empty id for a new lane. The caller has to make sure that one is free."""
        seq_id = self.free.popleft()
        if self.warm.pop(seq_id, 0):
            self.ops.append(SeqRemove(seq_id, 0, END))
        self.owner[seq_id] = lane
        return seq_id

    def share(self, src: int, dst: int, start: int, stop: int) -> None:
        """Copy the cells of `src` in `[start, stop)` to `dst`, which must hold none there yet."""
        self.ops.append(SeqCopy(src, dst, start, stop))

    def keep(self, seq_id: int, length: int) -> None:
        """Take a live id away from its lane, with its first `length` positions.

        The id stays live, without a lane, until `release`.
        """
        self.truncate(seq_id, length)
        self.owner[seq_id] = NO_LANE

    def branch(self, lane: int, parent_id: int, length: int) -> int:
        """Return an id that holds the first `length` positions of `parent_id`, of the same lane."""
        seq_id = self._take(lane)
        start = self.warm.pop(seq_id, 0)
        if start and self.warm_lane[seq_id] != lane:
            self.ops.append(SeqRemove(seq_id, 0, END))
            start = 0
        elif start > length:
            self.ops.append(SeqRemove(seq_id, length, END))
            start = length
        if start < length:
            self.ops.append(SeqCopy(parent_id, seq_id, start, length))
        self.owner[seq_id] = lane
        return seq_id

    def propagate(self, lane: int, src: int, length: int) -> None:
        """Copy to the lane's warm ids what they lack of the first `length` positions of `src`."""
        for seq_id, warm in self.warm.items():
            if self.warm_lane[seq_id] == lane and warm < length:
                self.ops.append(SeqCopy(src, seq_id, warm, length))
                self.warm[seq_id] = length

    def truncate(self, seq_id: int, length: int) -> None:
        """Remove a live id from its cells at position `length` and after."""
        self.ops.append(SeqRemove(seq_id, length, END))

    def release(self, seq_id: int, warm: int) -> None:
        """Free an id of which the first `warm` positions are accepted tokens of its lane."""
        lane = self.owner.pop(seq_id)
        self.ops.append(SeqRemove(seq_id, warm, END))
        if warm:
            self.warm[seq_id] = warm
            self.warm_lane[seq_id] = lane
        self.free.append(seq_id)

    def cool(self, lane: int, length: int) -> None:
        """Shorten the lane's warm ids to `length` positions, because the cells after those have
        changed.
        """
        for seq_id in [i for i, warm in self.warm.items()
                       if self.warm_lane[i] == lane and warm > length]:
            self.ops.append(SeqRemove(seq_id, length, END))
            self.warm[seq_id] = length
            if not length:
                del self.warm[seq_id]

    def join(self, src: int, dst: int, order: int) -> None:
        """Make all cells of `src` visible through `dst`, whatever the positions; order: as in
        `SeqJoin`.
        """
        self.ops.append(SeqJoin(src, dst, order))

    def behead(self, seq_id: int, length: int) -> None:
        """Remove a live id from its cells before position `length`, and from cells joined to it."""
        self.ops.append(SeqRemove(seq_id, 0, length))

    def release_lane(self, lane: int) -> None:
        """Free and empty every id of a lane, warm ones included."""
        for seq_id in [i for i, owner in self.owner.items() if owner == lane]:
            self.release(seq_id, 0)
        for seq_id in [i for i in self.warm if self.warm_lane[i] == lane]:
            del self.warm[seq_id]
            self.ops.append(SeqRemove(seq_id, 0, END))

    def take_ops(self) -> tuple[SeqOp, ...]:
        """Return the operations to send before the next rows, in order, and clear them here."""
        ops = tuple(self.ops)
        self.ops.clear()
        return ops

    def _take(self, lane: int) -> int:
        """First in, first out, but a warm id of the lane before a cold one."""
        for seq_id in self.free:
            if self.warm.get(seq_id) and self.warm_lane[seq_id] == lane:
                self.free.remove(seq_id)
                return seq_id
        return self.free.popleft()
