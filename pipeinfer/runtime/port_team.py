"""All-reduce between the members of a wide stage by messages between ranks.

    every member    Part(round, run, place, GO, numbers) to each other member, at each sum
    the leader      Part(.., SKIP or STOP) instead, to leave a run out or to stop it
    a failed one    Part(.., FAILED)

Every member receives all partial results and adds them itself, in the order of the slices: one
latency per sum. With three or more members and large partial results, each member adds a share of
the numbers and sends the result to the others: two latencies, fewer bytes, the same bits. Several
slices of one member exchange their partial results in memory; the thread of the first one, which
is the stage's thread, sends and receives. Of runs, this module uses only the ids.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.backends.team import (
    GATHER,
    PeerFailed,
    TeamShape,
    add_up,
    check_logits,
    lengthen,
    shorten,
)
from pipeinfer.core.messages import Part, Tag, Verdict
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import ClusterError, ProtocolError
from pipeinfer.transport.base import Port

_NOTHING: npt.NDArray[np.float32] = np.zeros(0, np.float32)
_NAP = 0.05
_MANY = 256
_MUCH = 16 << 10  #: bytes of a part from which on each member adds up a share of it
_LEFT_BEHIND = 60.0  #: seconds that a slice waits for the first slice of its process


class PortTeam:
    """A team (`backends.team.Team`) over a port.

    nodes: the members, in order.
    watch: called repeatedly while waiting, with the index of the slice that is awaited; raises
        what ends the wait.
    early: parts that arrived before the team was made.
    """

    shares_memory = False

    def __init__(self, shape: TeamShape, port: Port, nodes: Sequence[int],
                 watch: Callable[[int], None], early: Sequence[Part] = ()) -> None:
        self.shape = shape
        self.waited, self.count = 0.0, 0
        self._port, self._nodes, self._watch = port, tuple(nodes), watch
        self._round, self.run_id = 0, -1
        self._arrived = {(part.round, part.member): part for part in early}
        self._should_stop: Callable[[], bool] | None = None
        self._error: BaseException | None = None
        self._meeting = _Meeting(shape.own)

    def begin(self, run_id: int, *, cancelled: bool) -> bool:
        """Begin a run; return whether to skip it."""
        self.run_id, self._error = run_id, None
        if self.shape.leads:
            if cancelled:
                self._round += 1
                self._say(Verdict.SKIP)
            return cancelled
        self._collect()
        said = self._arrived.get((self._round + 1, 0))
        if said is None or said.verdict is not Verdict.SKIP or said.run_id != run_id:
            return False
        self._round += 1
        return True

    def part(self, index: int) -> _PortPart:
        """Return the object that sums the partial results of slice `index`, which this member
        holds."""
        return _PortPart(self, index)

    def arm(self, should_stop: Callable[[], bool] | None) -> None:
        """Set the function by which the leader may stop the decode that follows; None: no stop."""
        self._should_stop = should_stop if self.shape.leads else None
        self._meeting.open()

    def gather(self, index: int, logits: FloatArray) -> FloatArray | None:
        """Concatenate the slices' logits after a decode."""
        check_logits(self.shape, index, logits)
        if index != self.shape.own[0]:
            self._meeting.bring(index, logits)
            return None
        try:
            return self._gather(self._meeting.collect(index, logits, self._watch))
        except BaseException as error:
            self._error = error
            return None

    def fail(self, index: int) -> None:
        """Notify the other members that slice `index` cannot go on; called by the thread of that
        slice."""
        if index == self.shape.own[0]:
            self._round += 1
            self._say(Verdict.FAILED)
        self._meeting.give_up()

    def check(self) -> None:
        """Raise the reason for which the last decode ended early, unless the leader stopped it."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Do nothing: no memory is shared."""

    # --- sums ---------------------------------------------------------------------------------

    def add(self, index: int, part: FloatArray, place: int) -> bool:
        """Replace `part` by the sum, for one of the slices held here."""
        own = shorten(part, self.shape.kind)
        if index != self.shape.own[0]:
            total = self._meeting.bring(index, own)
        else:
            total = self._add(own, place)
        if total is None:
            return False
        part[:] = total
        return True

    def _add(self, own: npt.NDArray[Any], place: int) -> npt.NDArray[np.float32] | None:
        try:
            total = self._sum(own, place)
        except BaseException as error:  # it cannot cross C: raised by `check`
            self._error = error
            total = None
        if total is None:
            self._meeting.give_up()
        else:
            self._meeting.hand_out(total)
        return total

    def _sum(self, own: npt.NDArray[Any], place: int) -> npt.NDArray[np.float32] | None:
        shape = self.shape
        self._round += 1
        if self._stops(place):
            self._say(Verdict.STOP)
            return None
        mine = self._meeting.collect(shape.own[0], own, self._watch)
        if len(self._nodes) > 2 and own.nbytes >= _MUCH:
            return self._sum_by_shares(mine, place)
        # the caller overwrites this buffer with the sum, perhaps before the message has left
        self._send(Part(shape.member, self._round, self.run_id, place, Verdict.GO,
                        mine[0].copy() if len(mine) == 1 else np.concatenate(mine)))
        parts: dict[int, npt.NDArray[Any]] = dict(zip(shape.own, mine, strict=True))
        for member, held in enumerate(shape.holders):
            if member == shape.member:
                continue
            heard = self._await(member, place, len(held) * own.size)
            if heard is None:
                return None
            if len(held) == 1:
                parts[held[0]] = heard.data
            else:
                parts |= zip(held, np.split(heard.data, len(held)), strict=True)
        self.count += 1
        return add_up([parts[index] for index in range(shape.n_slices)], shape.kind)

    def _sum_by_shares(self, mine: Sequence[npt.NDArray[Any]], place: int
                       ) -> npt.NDArray[np.float32] | None:
        shape, size = self.shape, mine[0].size
        cuts = [size * i // len(self._nodes) for i in range(len(self._nodes) + 1)]
        ranges = list(itertools.pairwise(cuts))
        for member, (low, high) in enumerate(ranges):
            if member != shape.member:
                self._port.send(self._nodes[member], Tag.SUM, Part(
                    shape.member, self._round, self.run_id, place, Verdict.GO,
                    np.concatenate([part[low:high] for part in mine])))
        low, high = ranges[shape.member]
        parts = {index: part[low:high] for index, part in zip(shape.own, mine, strict=True)}
        for member, held in enumerate(shape.holders):
            if member != shape.member:
                heard = self._await(member, place, len(held) * (high - low))
                if heard is None:
                    return None
                parts |= zip(held, np.split(heard.data, len(held)), strict=True)
        share = add_up([parts[index] for index in range(shape.n_slices)], shape.kind)
        self._round += 1
        self._send(Part(shape.member, self._round, self.run_id, place, Verdict.GO,
                        shorten(share, shape.kind)))
        total = np.empty(size, np.float32)
        total[low:high] = share
        for member, (low, high) in enumerate(ranges):
            if member != shape.member:
                heard = self._await(member, place, high - low)
                if heard is None:
                    return None
                total[low:high] = lengthen(heard.data, shape.kind)
        self.count += 1
        return total

    def _gather(self, mine: Sequence[FloatArray]) -> FloatArray | None:
        shape = self.shape
        self._round += 1
        if not shape.leads:
            flat = np.concatenate([one.ravel() for one in mine])
            self._port.send(self._nodes[0], Tag.SUM, Part(
                shape.member, self._round, self.run_id, GATHER, Verdict.GO, flat))
            return None
        n = len(mine[0])
        columns = dict(zip(shape.own, mine, strict=True))
        for member, held in enumerate(shape.holders):
            if member == shape.member:
                continue
            widths = [shape.vocabulary[i][1] - shape.vocabulary[i][0] for i in held]
            heard = self._await(member, GATHER, n * sum(widths))
            if heard is None:
                return None
            cuts = n * np.cumsum(widths)[:-1]
            columns |= {i: one.reshape(n, width) for i, width, one in zip(
                held, widths, np.split(heard.data, cuts), strict=True)}
        return np.concatenate([columns[i] for i in range(shape.n_slices)], axis=1)

    def _stops(self, place: int) -> bool:
        layer, feed_forward = divmod(place, 2)
        every = max(1, self.shape.layers_between_looks)
        return bool(self._should_stop is not None and feed_forward and (layer + 1) % every == 0
                    and self._should_stop())

    # --- messages -----------------------------------------------------------------------------

    def _say(self, verdict: Verdict) -> None:
        self._send(Part(self.shape.member, self._round, self.run_id, 0, verdict, _NOTHING))

    def _send(self, part: Part) -> None:
        for member, node in enumerate(self._nodes):
            if member != self.shape.member:
                self._port.send(node, Tag.SUM, part)

    def _collect(self) -> None:
        """Receive all parts that have arrived; drop those of rounds that are over."""
        # a faster member may be a round ahead: its part is kept until this one gets there
        while (envelope := self._port.take(Tag.SUM)) is not None:
            part = envelope.message
            if not isinstance(part, Part) or not 0 <= part.member < len(self._nodes):
                raise ProtocolError(f"a member of a stage was sent {type(part).__name__} as a part "
                                    "of a sum")
            if part.round >= self._round:
                self._arrived[part.round, part.member] = part
            if len(self._arrived) > _MANY:  # verdicts of rounds that were never awaited
                self._arrived = {k: one for k, one in self._arrived.items() if k[0] >= self._round}

    def _await(self, member: int, place: int, count: int) -> Part | None:
        """Wait for a member's part of this round; None if the leader skips or stops the run.

        Raises PeerFailed if the member has failed, ProtocolError if it is at another sum.
        """
        key, leader = (self._round, member), (self._round, 0)
        start = time.monotonic()
        # the leader may skip or stop the run meanwhile, and a member may die: both end the wait
        while True:
            self._collect()
            said = self._arrived.get(leader)
            if said is not None and said.verdict in (Verdict.SKIP, Verdict.STOP):
                found = said
                break
            if (heard := self._arrived.get(key)) is not None:
                found = heard
                break
            if time.monotonic() - start > _NAP:
                self._watch(self.shape.holders[member][0])
            self._port.wait(_NAP, tag=Tag.SUM)
        self.waited += time.monotonic() - start
        self._arrived.pop(key, None)
        if found.verdict is Verdict.FAILED:
            raise PeerFailed(f"member {member} of this stage has failed in run {self.run_id}")
        if found.run_id != self.run_id or (found.verdict is Verdict.GO and (
                found.place != place or found.data.size != count)):
            raise ProtocolError(
                f"members {self.shape.member} and {member} of a stage are not at the same sum of "
                f"run {self.run_id}: all hosts must run the same version with the same options")
        return found if found.verdict is Verdict.GO else None


class _PortPart:
    """A `eval_callback.PartSum` whose sums are computed in Python."""

    address: int | None = None

    def __init__(self, team: PortTeam, index: int) -> None:
        self._team, self._index = team, index

    def add(self, part: FloatArray, place: int) -> bool:
        """Replace `part`, float32[n], by the sum; return False where the decode has to be left."""
        return self._team.add(self._index, part, place)


class _Meeting:
    """The exchange between the slices of one member, each of which has its own thread. The first
    slice collects the partial results and hands out the sum."""

    def __init__(self, own: Sequence[int]) -> None:
        self._own = tuple(own)
        # one lock for all: a slice sees either the sum of this place or none
        self._changed = threading.Condition()
        self._brought: dict[int, npt.NDArray[Any]] = {}
        self._total: npt.NDArray[np.float32] | None = None
        self._takers = 0
        self._over = False

    def open(self) -> None:
        """Reset before a decode."""
        with self._changed:
            self._brought.clear()
            self._total, self._takers, self._over = None, 0, False

    def bring(self, index: int, part: npt.NDArray[Any]) -> npt.NDArray[np.float32] | None:
        """Hand in the partial result of a further slice and wait for the sum.

        Returns None if the decode ended early, and at once for logits, which have no sum (see
        `collect`). Raises ClusterError if there is no sum within a minute.
        """
        with self._changed:
            self._brought[index] = part
            self._changed.notify_all()
            if part.ndim > 1:
                return None
            if not self._changed.wait_for(
                    lambda: self._over or (self._takers > 0 and index not in self._brought),
                    _LEFT_BEHIND):
                raise ClusterError(f"slice {index} waited {_LEFT_BEHIND:.0f} s for the sum of its "
                                   "own process")
            if self._over:
                return None
            total = self._total
            self._takers -= 1
            self._changed.notify_all()
            return total

    def collect(self, index: int, part: npt.NDArray[Any], watch: Callable[[int], None]
                ) -> list[npt.NDArray[Any]]:
        """First slice: wait for and return all partial results of this member, in order.

        Raises what `watch` raises, and PeerFailed if another slice has failed.
        """
        if len(self._own) == 1:
            return [part]
        with self._changed:
            # short waits, as another member may have failed while this one's slices compute
            while not self._changed.wait_for(
                    lambda: self._over or (not self._takers and len(self._brought)
                                           == len(self._own) - 1), _NAP):
                watch(index)
            if self._over:
                raise PeerFailed("another slice of this process has failed")
            found = [part, *(self._brought[other] for other in self._own[1:])]
            self._brought.clear()
            return found

    def hand_out(self, total: npt.NDArray[np.float32]) -> None:
        """First slice: give the sum to the slices that wait for it."""
        if len(self._own) > 1:
            with self._changed:
                self._total, self._takers = total, len(self._own) - 1
                self._changed.notify_all()

    def give_up(self) -> None:
        """End all waits: there will be no more sums in this decode."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
