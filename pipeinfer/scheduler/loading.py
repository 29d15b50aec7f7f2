"""Prompts from the stages' disks: which chunks to write, and which to read instead of computing.

A read is a run: it carries the rows whose cells it brings, and returns how many of its pieces all
stages had. What is missing is computed; what only some had is removed again. The lane waits for
that run, because what to issue next depends on it. Memory comes first, then the disks, then
computing.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeinfer.core.messages import CacheOps, Piece
from pipeinfer.core.types import make_rows
from pipeinfer.scheduler.lanes import Chunk, Lane, Run
from pipeinfer.scheduler.prefix_cache import Block
from pipeinfer.scheduler.state import SchedulerState
from pipeinfer.scheduler.stored import STATE_CHUNKS, Stored


class Loading:
    """Issues runs that read, and handles their results.

    fill: called with a lane that goes on computing its prompt
    """

    def __init__(self, state: SchedulerState, fill: Callable[[Lane], None]) -> None:
        self._state, self._fill = state, fill

    def saves(self, lane: Lane, start: int, stop: int) -> tuple[Piece, ...]:
        """Return what the stages are to store of the chunk `[start, stop)` of a lane's prompt."""
        stored, limits = self._state.stored, self._state.limits
        names = self._names(lane)
        if stored is None or not names or stop - start != limits.chunk or stop > len(
                lane.request.prompt):
            return ()
        seq_id, index = lane.main_id, start // limits.chunk
        found = [Piece(names[index], seq_id, start, stop)] if stored.ranges else []
        last = self._state.admission.limit(len(lane.request.prompt))
        if limits.states and (stop in {*lane.kept_at, last} or not (index + 1) % STATE_CHUNKS):
            found.append(Piece(stored.state(names[index]), seq_id, 0, stop, state=True))
        return tuple(one for one in found if one.key not in stored.names)

    def reach(self, lane: Lane) -> int:
        """Return how many tokens of a prompt that was not begun have a stored state."""
        stored, names, limits = self._state.stored, self._names(lane), self._state.limits
        if stored is None or not limits.states or lane.next_row:
            return 0
        limit = self._state.admission.limit(len(lane.request.prompt))
        return stored.longest_state(names[: limit // limits.chunk]) * limits.chunk

    def accepted(self, lane: Lane) -> None:
        """Let the stages store the chunks of a lane's answer that have become whole."""
        stored, chunk, n = self._state.stored, self._state.limits.chunk, len(lane.request.prompt)
        # the newest token has no cells yet, nor have those that a replay has still to compute
        whole = (min(lane.issued, len(lane.accepted) - 1) - n) // chunk
        if stored is None or lane.loading or whole <= lane.answered or not (
                stored.answers and self._may_store(lane)):
            return
        names = self._answer(lane, stored)
        pieces = [Piece(names[i], lane.main_id, n + i * chunk, n + (i + 1) * chunk)
                  for i in range(lane.answered, whole) if names[i] not in stored.names]
        lane.answered = whole
        stored.names.update(one.key for one in pieces)  # where a stage could not, a read tells
        if pieces:
            self._state.emit(CacheOps(self._state.pool.take_ops(), tuple(pieces)))

    def begin(self, lane: Lane) -> bool:
        """Issue a run that reads the next chunks of a lane's text; return whether there are any.
        """
        stored = self._state.stored
        if stored is None or not self._may_store(lane):
            return False
        block: Block | None = None
        if lane.next_row >= len(lane.request.prompt):
            pieces = self._of_answer(lane, stored)
        else:
            pieces, block = (self._whole if self._state.limits.states else self._chunks)(
                lane, stored, self._names(lane))
        if not pieces:
            return False
        start, stop, seq_id = lane.next_row, pieces[-1].stop, lane.main_id
        rows = make_rows([(lane.accepted[i], i, (seq_id,), False) for i in range(start, stop)])
        lane.last_chunk_run = self._state.launch(
            [lane], rows, [], lane.last_chunk_run, speculative=False,
            chunk=Chunk(start, block, loads=tuple(pieces)))
        lane.next_row, lane.loading = stop, True
        return True

    def done(self, run: Run, loaded: int) -> None:
        """Handle a run that has read `loaded` of its pieces."""
        state, lane, block = self._state, run.owners[0], run.block
        stored, pieces = state.stored, run.loads
        if stored is not None:
            stored.found += loaded
            stored.missed += loaded < len(pieces)
            # the first that a stage lacks; later ones may be there
            stored.names.difference_update(one.key for one in pieces[loaded : loaded + 1])
        if lane.done:
            return
        lane.loading = False
        if loaded < len(pieces):
            lane.next_row = pieces[0].start if state.limits.states else pieces[loaded].start
            state.pool.truncate(lane.main_id, lane.next_row)
        if block is not None:
            self._settle(lane, block, pieces, loaded)
            lane.reused += lane.next_row - run.start
            lane.stats.reused = max(lane.stats.reused, lane.reused)
            lane.stats.restored += lane.next_row - run.start
        self._fill(lane)

    def _settle(self, lane: Lane, block: Block, pieces: tuple[Piece, ...], loaded: int) -> None:
        """Let the prefix cache hold what was read of a prompt up to `block`."""
        admission, whole = self._state.admission, loaded == len(pieces)
        if self._state.limits.states:
            lane.kept_at = admission.places(lane) if whole else set()
            block.computed = whole
            if whole and self._state.limits.kept:
                admission.keep_state(lane, block)
            return
        for _ in pieces[loaded:]:
            assert block.parent is not None
            block = block.parent
        for one in block.chain():
            one.computed = True
        admission.prefixes.release(lane.block, lane.lane, keep=block)
        lane.block = block

    @staticmethod
    def _may_store(lane: Lane) -> bool:
        return lane.request.stores and not (
            lane.has_threads or lane.jumps or lane.request.params.reads_prompt)

    def _answer(self, lane: Lane, stored: Stored) -> list[bytes]:
        return stored.answer(self._names(lane), lane.accepted, len(lane.request.prompt),
                             self._state.limits.chunk, lane.request.salt) if stored.answers else []

    def _of_answer(self, lane: Lane, stored: Stored) -> list[Piece]:
        """The stored chunks of an answer that is replayed, up to its newest token."""
        n, chunk, pieces = len(lane.request.prompt), self._state.limits.chunk, []
        if (lane.next_row - n) % chunk:
            return []
        names = self._answer(lane, stored)[: (len(lane.accepted) - 1 - n) // chunk]
        for i in range((lane.next_row - n) // chunk, len(names)):
            if names[i] not in stored.names:
                break
            pieces.append(Piece(names[i], lane.main_id, n + i * chunk, n + (i + 1) * chunk))
        return pieces

    def _names(self, lane: Lane) -> list[bytes]:
        """The names of the chunks of a lane's prompt; none if they are not to be kept."""
        stored = self._state.stored
        if lane.names is None:
            lane.names = [] if stored is None or not self._may_store(lane) else stored.chain(
                lane.request.prompt, self._state.limits.chunk, lane.request.salt)
        return lane.names

    def _chunks(self, lane: Lane, stored: Stored, names: list[bytes]) -> tuple[list[Piece], Block]:
        """The stored chunks behind what a lane has, and the block of the last one."""
        state, prompt, pieces, block = self._state, lane.request.prompt, [], lane.block
        if lane.next_row != block.stop:
            return [], block
        chunk, limit = state.limits.chunk, state.admission.limit(len(prompt))
        for name in names[block.stop // chunk : limit // chunk]:
            tokens = prompt[block.stop : block.stop + chunk]
            if name not in stored.names or tuple(tokens) in block.children:
                break  # of the latter, another lane has them or is about to
            pieces.append(Piece(name, lane.main_id, block.stop, block.stop + chunk))
            block = state.admission.prefixes.extend(block, tokens, lane.lane)
        lane.block = block
        return pieces, block

    def _whole(self, lane: Lane, stored: Stored, names: list[bytes]) -> tuple[list[Piece], Block]:
        """The longest stored beginning of a lane's prompt, whose state is the last piece."""
        stop, chunk, seq_id = self.reach(lane), self._state.limits.chunk, lane.main_id
        block, count = Block(tuple(lane.request.prompt[:stop]), None, stop,
                             salt=lane.request.salt), stop // chunk
        if not count or lane.kept_at:
            return [], block
        pieces = [Piece(name, seq_id, i * chunk, (i + 1) * chunk)
                  for i, name in enumerate(names[:count])] if stored.ranges else []
        return [*pieces, Piece(stored.state(names[count - 1]), seq_id, 0, stop, state=True)], block
