"""Prompts from the stages' disks: which chunks to write, and which to read instead of computing.

A read is a run: it carries the rows whose cells it brings, and returns how many of its pieces all
stages had. What is missing is computed; what only some had is removed again. The lane waits for
that run, because what to issue next depends on it. Memory comes first, then the disks, then
computing.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeinfer.core.messages import Piece
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

    def begin(self, lane: Lane) -> bool:
        """Issue a run that reads the next chunks of a lane's prompt; return whether there are any.
        """
        stored, names = self._state.stored, self._names(lane)
        if stored is None or not names:
            return False
        pieces, block = (self._whole if self._state.limits.states else self._chunks)(
            lane, stored, names)
        if not pieces:
            return False
        start, seq_id = lane.next_row, lane.main_id
        rows = make_rows([(lane.accepted[i], i, (seq_id,), False)
                          for i in range(start, block.stop)])
        lane.last_chunk_run = self._state.launch(
            [lane], rows, [], lane.last_chunk_run, speculative=False,
            chunk=Chunk(start, block, loads=tuple(pieces)))
        lane.next_row, lane.loading = block.stop, True
        return True

    def done(self, run: Run, loaded: int) -> None:
        """Handle a run that has read `loaded` of its pieces."""
        state, lane, block = self._state, run.owners[0], run.block
        stored, admission = state.stored, state.admission
        assert block is not None
        if stored is not None:
            stored.found += loaded
            stored.missed += loaded < len(run.loads)
            # the first that a stage lacks; later ones may be there
            stored.names.difference_update(one.key for one in run.loads[loaded : loaded + 1])
        if lane.done:
            return
        lane.loading = False
        whole = loaded == len(run.loads)
        if state.limits.states:
            lane.next_row = block.stop if whole else 0
            lane.kept_at = admission.places(lane) if whole else set()
            block.computed = whole
            if whole and state.limits.kept:
                admission.keep_state(lane, block)
        else:
            for _ in run.loads[loaded:]:
                assert block.parent is not None
                block = block.parent
            for one in block.chain():
                one.computed = True
            admission.prefixes.release(lane.block, lane.lane, keep=block)
            lane.block, lane.next_row = block, block.stop
        if not whole:
            state.pool.truncate(lane.main_id, lane.next_row)
        lane.reused += max(0, lane.next_row - run.start)
        lane.stats.reused = max(lane.stats.reused, lane.reused)
        lane.stats.restored += max(0, lane.next_row - run.start)
        self._fill(lane)

    def _names(self, lane: Lane) -> list[bytes]:
        """The names of the chunks of a lane's prompt; none if they are not to be kept."""
        stored = self._state.stored
        if lane.names is None:
            apart = lane.has_threads or lane.jumps or lane.request.params.reads_prompt \
                or not lane.request.stores
            lane.names = [] if stored is None or apart else stored.chain(
                lane.request.prompt, self._state.limits.chunk)
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
        block, count = Block(tuple(lane.request.prompt[:stop]), None, stop), stop // chunk
        if not count or lane.kept_at:
            return [], block
        pieces = [Piece(name, seq_id, i * chunk, (i + 1) * chunk)
                  for i, name in enumerate(names[:count])] if stored.ranges else []
        return [*pieces, Piece(stored.state(names[count - 1]), seq_id, 0, stop, state=True)], block
