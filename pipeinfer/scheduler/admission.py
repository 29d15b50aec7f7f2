"""Admission and eviction: sequence ids, cells, and the prefix cache.

A request starts when a lane, a sequence id and cells for its prompt are free. When output grows
beyond the free cells, prompts in the prefix cache are dropped, least recently used first. After
them the youngest lane is preempted and replayed later, so the oldest request always ends.
Independent of runs and speculation; emits cache operations through the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from pipeinfer.core.messages import NO_RUN
from pipeinfer.core.types import Media, Request
from pipeinfer.scheduler.lanes import Lane, QueuedRequest
from pipeinfer.scheduler.prefix_cache import Block, Prefixes, StatePrefixes, piece_end
from pipeinfer.scheduler.sequence_pool import NO_LANE, SequencePool
from pipeinfer.scheduler.settings import Limits
from pipeinfer.scheduler.state_tree import StateTree
from pipeinfer.scheduler.token_tree import BufferedTree, Node, Tree


class Admission:
    """Owns the sequence ids, the prefix cache and the queue of waiting requests.

    limits: settings of the scheduler
    next_lane_id: the number of the lane that is opened next
    """

    def __init__(self, limits: Limits, next_lane_id: int = 0) -> None:
        self.limits = limits
        self.pool = SequencePool(limits.n_ids, limits.parallel + limits.kept)
        self.prefixes = StatePrefixes(limits.chunk) if limits.states else Prefixes(limits.chunk)
        self.waiting: deque[QueuedRequest] = deque()
        self.next_lane_id = next_lane_id
        self._running: dict[int, Lane] = {}

    def used(self, lanes: Collection[Lane]) -> int:
        """The number of cells of `lanes` and of cached prompts, without those of speculative
        tokens.
        """
        return self.prefixes.cells + sum(lane.private_cells for lane in lanes)

    def at_work(self, lanes: Collection[Lane]) -> int:
        """The number of cells of `lanes`, shared ones counted once, without prompts that are only
        cached.
        """
        return self.used(lanes) - self.prefixes.idle_cells

    def over(self, lanes: Collection[Lane]) -> bool:
        """Drop cached prompts until the cells suffice; return whether they do not, even without
        any.
        """
        while self.limits.cells and self.used(lanes) > self.limits.cells:
            if not self._evict():
                return True
        return False

    def next_lane(self, lanes: Collection[Lane]) -> Lane | None:
        """Open a lane for the request that has waited longest.

        lanes: the open lanes
        Returns None when no request waits, or when the first one has to go on waiting.
        """
        if not self.waiting or sum(not lane.thread for lane in lanes) >= self.limits.parallel:
            return None
        ticket = self.waiting[0]
        prompt = ticket.request.prompt
        accepted = [*prompt, *(() if ticket.decompose else ticket.output)]
        block = self._known(ticket, accepted[:len(prompt)])
        self.prefixes.touch(block)
        margin = self.limits.chunk * (len(lanes) + 1) if lanes else 0
        need = self.used(lanes) + len(accepted) + margin - self.limits.cells
        if self.limits.cells and need > block.stop:
            if lanes and need > self.prefixes.idle_cells:
                return None
            # Evict even what the request could share: else it might never fit.
            while self.used(lanes) + len(accepted) - self._known(ticket, prompt).stop + margin \
                    > self.limits.cells and self._evict():
                pass
        self.waiting.popleft()
        lane = self._open(ticket, accepted)
        if not self.limits.states:  # these begin once, with the longest text that is anywhere
            self.catch_up(lane)
        return lane

    def fork(self, parent: Lane, own: Request, thread: int, keep: int) -> Lane:
        """Open a lane for a response thread.

        parent: the lane whose first `keep` tokens the thread shares
        own: the thread's request; its prompt is the thread's path
        thread: number of the thread
        keep: number of shared tokens; 0: none
        """
        lane = self._open(parent.ticket, list(own.prompt), own, thread,
                          [jump for jump in parent.jumps if jump[0] < keep], keep)
        if keep:
            self.pool.share(parent.main_id, lane.main_id, 0, parent.position(keep - 1) + 1)
        else:
            self.catch_up(lane)
        return lane

    def new_path(self) -> int:
        """Return a number that no lane has, as the new `path_id` of a lane that was cut back."""
        self.next_lane_id += 1
        return self.next_lane_id - 1

    def _open(self, ticket: QueuedRequest, accepted: list[int], own: Request | None = None,
              thread: int = 0, jumps: list[tuple[int, int]] | None = None, base: int = 0) -> Lane:
        lane_id, self.next_lane_id = self.next_lane_id, self.next_lane_id + 1
        seq_id = self.pool.acquire(lane_id)
        jumps = jumps or []
        last = len(accepted) - 1
        root = Node(accepted[-1], last + (jumps[-1][1] if jumps else 0), None, (seq_id,), NO_RUN,
                    speculative=False)
        kind = StateTree if self.limits.states else Tree
        tree = BufferedTree(lane_id, self.pool, root, branching=self.limits.branches > 1,
                            shares=self.limits.shares_early) \
            if self.limits.buffered else kind(lane_id, self.pool, root)
        lane = Lane(lane_id, ticket, tree, accepted,
                    self.prefixes.root_of(ticket.request.salt),
                    next_row=base, thread=thread, own=own, base=base, jumps=jumps)
        self._running[lane_id] = lane
        self._reserve()
        return lane

    def catch_up(self, lane: Lane, stored: int = 0) -> bool:
        """Copy the chunks of the lane's prompt that are already in the cache.

        stored: tokens of it whose state can be read from disks
        Returns whether another lane is computing the chunk that follows, so that waiting for it is
        cheaper than computing it.
        """
        if not self.shares(lane.ticket) or lane.next_row != lane.block.stop:
            return False
        if isinstance(self.prefixes, StatePrefixes):
            self._copy_state(lane, self.prefixes, stored)
            return False
        prompt, media = lane.request.prompt, lane.request.media
        limit = self._shared(prompt, media)
        block = self.prefixes.match(lane.block, prompt, limit, media)
        if block is not lane.block:
            self.pool.share(self._id_of(next(iter(block.holders))), lane.main_id, lane.next_row,
                            block.stop)
            self.prefixes.adopt(block, lane.lane)
            lane.reused += block.stop - lane.next_row
            lane.stats.reused = max(lane.stats.reused, lane.reused)
            lane.block, lane.next_row = block, block.stop
        return self.prefixes.next(block, prompt, limit, media) is not None

    def shareable(self, lane: Lane, start: int, stop: int) -> Block | None:
        """Return the new block for a chunk that `lane` is about to compute.

        start, stop: the chunk is `[start, stop)` of the lane's prompt
        None where the chunk cannot be shared, or where another lane is already computing it.
        """
        if self.limits.states:
            return Block(tuple(lane.request.prompt[:stop]), None, stop, salt=lane.request.salt) \
                if stop in lane.kept_at and self.limits.kept else None
        begin, media = lane.block.stop, lane.request.media
        whole = stop <= len(lane.request.prompt) and stop == piece_end(
            media, begin, self.limits.chunk, shared=True)
        # of text, one run; a picture may take several
        if not self.limits.kept or not whole or (start != begin and not media):
            return None
        key = lane.request.prompt[begin:stop]
        if key in lane.block.children:  # another lane computes it, so these cells are not shared
            return None
        lane.block = self.prefixes.extend(lane.block, key, lane.lane)
        return lane.block

    def _copy_state(self, lane: Lane, prefixes: StatePrefixes, stored: int) -> None:
        """Begin with the state of the longest cached prompt, once; choose where to keep others.
        Where a longer one is stored, leave the lane as it is."""
        prompt = tuple(lane.request.prompt)
        if lane.next_row or lane.kept_at:
            return
        holder = prefixes.longest(prompt, self.limit(len(prompt)), lane.request.salt)
        if stored > (0 if holder is None else prefixes.kept[holder].stop):
            return
        if holder is not None:
            lane.reused = lane.next_row = prefixes.kept[holder].stop
            self.pool.share(self._id_of(holder), lane.main_id, 0, lane.next_row)
            lane.stats.reused = max(lane.stats.reused, lane.reused)
        lane.kept_at = self.places(lane)

    def places(self, lane: Lane) -> set[int]:
        """Return the lengths of a lane's prompt, behind what it has, at which to keep the state."""
        prompt = tuple(lane.request.prompt)
        assert isinstance(self.prefixes, StatePrefixes)
        return self.prefixes.places(prompt, lane.next_row, self.limit(len(prompt)),
                                    lane.request.salt)

    def keep_state(self, lane: Lane, block: Block) -> None:
        """Cache the state of a prompt behind a run that was issued just now, if there is room."""
        limits, lanes = self.limits, self._running.values()
        while len(self.prefixes.kept) >= limits.kept:
            self._evict()
        while limits.cells and self.used(lanes) + block.stop > limits.cells:
            if not self._evict():
                return
        seq_id = self.pool.acquire(NO_LANE)
        self.pool.share(lane.main_id, seq_id, 0, block.stop)
        self.prefixes.kept[_kept(seq_id)] = block
        lane.states.append(_kept(seq_id))
        self._reserve()

    def leave(self, lane: Lane) -> None:
        """Close a lane and release its ids, except one that stays to cache the computed part of its
        prompt.
        """
        known, main = lane.block, lane.main_id
        while not known.computed and known.parent is not None:
            known = known.parent
        if self.limits.kept and known.stop and not lane.joined:  # joined cells would stay with it
            self.prefixes.adopt(known, _kept(main))
            for other in self.prefixes.keep(known, _kept(main)):
                self.pool.release(self._id_of(other), 0)
            self.pool.keep(main, known.stop)
        for holder in lane.states:  # a run that was cancelled leaves no state behind
            if (own := self.prefixes.kept.get(holder)) and not own.computed:
                self.prefixes.forget(holder)
                self.pool.release(self._id_of(holder), 0)
        self.prefixes.release(lane.block, lane.lane)
        del self._running[lane.lane]
        self.pool.release_lane(lane.lane)
        self._reserve()
        while len(self.prefixes.kept) > self.limits.kept:
            self._evict()

    def forget_all(self) -> None:
        """Drop every cached prompt."""
        while self._evict():
            pass

    def _evict(self) -> bool:
        oldest = self.prefixes.oldest()
        if oldest is None:
            return False
        self.prefixes.forget(oldest)
        self.pool.release(self._id_of(oldest), 0)
        self._reserve()
        return True

    def _id_of(self, holder: int) -> int:
        """The sequence id under which a holder of a block has its cells now."""
        return -1 - holder if holder < 0 else self._running[holder].main_id

    def shares(self, ticket: QueuedRequest) -> bool:
        """Whether a request may use chunks that are in the cache."""
        return self.limits.kept > 0 and not ticket.request.params.reads_prompt

    def _known(self, ticket: QueuedRequest, prompt: list[int] | tuple[int, ...]) -> Block:
        root, media = self.prefixes.root_of(ticket.request.salt), ticket.request.media
        return self.prefixes.match(root, prompt, self._shared(prompt, media), media) \
            if self.shares(ticket) else root

    def _shared(self, prompt: Sequence[int], media: Sequence[Media]) -> int:
        """The index where chunks that can be shared end at the latest."""
        return len(prompt) - 1 if media else self.limit(len(prompt))

    def limit(self, n_prompt: int) -> int:
        """The index where sharing ends: the last row has to be computed, because its choice is
        needed.
        """
        return (n_prompt - 1) // self.limits.chunk * self.limits.chunk

    def _reserve(self) -> None:
        """Reserve ids for lanes that may start and for prompts that may be cached."""
        limits, kept = self.limits, len(self.prefixes.kept)
        self.pool.reserved = limits.lanes - len(self._running) + limits.kept - kept


def _kept(seq_id: int) -> int:
    """The holder number of a cached prompt's id; lanes have the numbers from 0 on."""
    return -1 - seq_id
