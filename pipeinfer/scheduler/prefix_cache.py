"""Which prompts the stages' caches hold, in chunks, and who holds them.

A chunk of a prompt is computed in a run of its own, cut at absolute positions, so its cells have
the same bits in every prompt that starts alike: a later request copies them instead of computing
them. Chunks form a trie; each knows its holders (which hold all chunks before it, too): lanes,
and prompts that are *kept* after their request has ended, least recently used first out. A holder
is a number that means something to the caller. This module knows no lanes, sequence ids, runs or
cache operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec import Struct, field


class Block(Struct, eq=False):
    """One chunk of a prompt. stop: position behind it. computed: every stage has its cells."""

    tokens: tuple[int, ...]
    parent: Block | None
    stop: int
    computed: bool = False
    holders: set[int] = field(default_factory=set)
    children: dict[tuple[int, ...], Block] = field(default_factory=dict)

    def chain(self) -> Iterator[Block]:
        """This block and those before it, the root excluded, last first."""
        block = self
        while block.parent is not None:
            yield block
            block = block.parent


class Prefixes:
    """The trie, and what is kept of it. Invariant: a block's holders hold its parent, too."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.root = Block((), None, 0, computed=True)
        self.kept: OrderedDict[int, Block] = OrderedDict()
        self._count = 0

    @property
    def cells(self) -> int:
        """Cells of all blocks, each counted once."""
        return self._count * self.chunk

    @property
    def idle_cells(self) -> int:
        """Cells of blocks that only kept prompts hold."""
        idle = {id(block) for last in self.kept.values() for block in last.chain()
                if block.holders <= self.kept.keys()}
        return len(idle) * self.chunk

    def next(self, block: Block, prompt: Sequence[int], limit: int) -> Block | None:
        """The block of `prompt` behind `block`, if it is known; it has to end by `limit`."""
        stop = block.stop + self.chunk
        if stop > limit:
            return None
        return block.children.get(tuple(prompt[block.stop : stop]))

    def match(self, block: Block, prompt: Sequence[int], limit: int) -> Block:
        """The last computed block of `prompt` that follows `block` (or `block` itself)."""
        while (child := self.next(block, prompt, limit)) is not None and child.computed:
            block = child
        return block

    def extend(self, block: Block, tokens: Sequence[int], holder: int) -> Block:
        """A new block behind `block` that `holder`, which holds `block`, is going to compute."""
        key = tuple(tokens)
        child = Block(key, block, block.stop + len(key))
        block.children[key] = child
        child.holders.add(holder)
        self._count += 1
        return child

    def adopt(self, block: Block, holder: int) -> None:
        """`holder` holds `block` and all before it from now on."""
        for one in block.chain():
            if holder in one.holders:
                break
            one.holders.add(holder)

    def release(self, block: Block, holder: int, keep: Block | None = None) -> None:
        """`holder`, which held up to `block`, holds only up to `keep` (None: nothing) now."""
        for one in list(block.chain()):
            if one is keep:
                break
            one.holders.discard(holder)
            if not one.holders and one.parent is not None:
                one.parent.children.pop(one.tokens, None)
                self._count -= 1

    def keep(self, block: Block, holder: int) -> list[int]:
        """Remember `holder` for its blocks up to `block`; returns kept holders that this makes
        superfluous, already forgotten."""
        covered = [other for other, last in self.kept.items()
                   if holder in last.holders]
        for other in covered:
            self.forget(other)
        self.kept[holder] = block
        return covered

    def touch(self, block: Block) -> None:
        """Somebody uses `block`: what is kept of it is the last to go."""
        for holder in block.holders & self.kept.keys():
            self.kept.move_to_end(holder)

    def forget(self, holder: int) -> None:
        """A kept prompt is not kept any more."""
        self.release(self.kept.pop(holder), holder)

    def oldest(self) -> int | None:
        """The kept holder that was not used for the longest time."""
        return next(iter(self.kept), None)
