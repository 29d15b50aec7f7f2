"""The prefix cache: which chunks of prompts the stages' caches hold, and for which holders.

Each chunk of a prompt is computed in a run of its own, cut at absolute positions. So its cells have
the same bits in every prompt that begins alike, and a later request copies them instead of
computing them. Chunks form a trie. Each lists its holders, which hold all chunks before it, too:
lanes, and prompts that stay cached after their request has ended (`kept`), least recently used
first out. A holder is a number with a meaning for the caller. Independent of lanes, sequence ids,
runs and cache operations.

The cache of a model whose layers keep a state of the text has whole texts instead of chunks: a
cached prompt serves a request that begins with all of it. States are kept where a later request is
likely to go on: behind the last whole chunk of a prompt, and behind what a prompt has in common
with a cached one, such as a system prompt.

Where a prompt has pictures, chunks end where these begin and end, too. Tokens of a picture's rows
stand for its contents, so prompts with equal tokens are cut in equal places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec import Struct, field
from typing_extensions import override

from pipeinfer.core.types import Media


def piece_end(media: Sequence[Media], start: int, chunk: int, *, shared: bool = False) -> int:
    """Return where the piece of a prompt that begins at `start` ends.

    media: pictures of the prompt, in order
    chunk: text is cut at multiples of this
    shared: whether it is for others, who cannot copy a part of some pictures (`Media.whole`);
        otherwise it is a run
    """
    stop = start - start % chunk + chunk
    for one in media:
        if start < one.start:
            return min(stop, one.start)
        if start < one.stop:
            return one.stop if not one.causal or (shared and one.whole) else min(stop, one.stop)
    return stop


class Block(Struct, eq=False):
    """One chunk of a prompt.

    tokens: of the chunk
    parent: the chunk before it; None for the root
    stop: index after its last token
    computed: whether every stage has its cells
    holders: that have its cells
    children: the chunks that follow, by their tokens
    salt: of its prompt, where it has no parent
    """

    tokens: tuple[int, ...]
    parent: Block | None
    stop: int
    computed: bool = False
    holders: set[int] = field(default_factory=set)
    children: dict[tuple[int, ...], Block] = field(default_factory=dict)
    salt: bytes = b""

    def chain(self) -> Iterator[Block]:
        """This block and those before it, the root excluded, last first."""
        block = self
        while block.parent is not None:
            yield block
            block = block.parent


class Prefixes:
    """The trie, and the cached prompts in it. Invariant: a block's holders also hold its parent."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self._roots: dict[bytes, Block] = {}
        self.kept: OrderedDict[int, Block] = OrderedDict()
        self._cells = 0

    @property
    def cells(self) -> int:
        """The number of cells of all blocks, each counted once."""
        return self._cells

    @property
    def idle_cells(self) -> int:
        """The number of cells of blocks that only cached prompts hold."""
        idle = {id(block): len(block.tokens) for last in self.kept.values()
                for block in last.chain() if block.holders <= self.kept.keys()}
        return sum(idle.values())

    def root_of(self, salt: bytes) -> Block:
        """Return the block before the first one of prompts with this salt."""
        if salt not in self._roots:
            self._roots[salt] = Block((), None, 0, computed=True)
        return self._roots[salt]

    def next(self, block: Block, prompt: Sequence[int], limit: int,
             media: Sequence[Media] = ()) -> Block | None:
        """Return the block of `prompt` after `block` if it exists and ends at `limit` or before.

        media: the prompt's pictures
        """
        stop = piece_end(media, block.stop, self.chunk, shared=True)
        if stop > limit:
            return None
        return block.children.get(tuple(prompt[block.stop : stop]))

    def match(self, block: Block, prompt: Sequence[int], limit: int,
              media: Sequence[Media] = ()) -> Block:
        """Return the last computed block of `prompt` that follows `block` (or `block` itself)."""
        while (child := self.next(block, prompt, limit, media)) is not None and child.computed:
            block = child
        return block

    def extend(self, block: Block, tokens: Sequence[int], holder: int) -> Block:
        """Add a block after `block` that `holder`, which holds `block`, is about to compute."""
        key = tuple(tokens)
        child = Block(key, block, block.stop + len(key))
        block.children[key] = child
        child.holders.add(holder)
        self._cells += len(key)
        return child

    def adopt(self, block: Block, holder: int) -> None:
        """Make `holder` a holder of `block` and all blocks before it."""
        for one in block.chain():
            if holder in one.holders:
                break
            one.holders.add(holder)

    def release(self, block: Block, holder: int, keep: Block | None = None) -> None:
        """Remove `holder` from the blocks after `keep` (None: from all), up to `block`."""
        for one in list(block.chain()):
            if one is keep:
                break
            one.holders.discard(holder)
            if not one.holders and one.parent is not None:
                one.parent.children.pop(one.tokens, None)
                self._cells -= len(one.tokens)

    def keep(self, block: Block, holder: int) -> list[int]:
        """Cache the blocks up to `block` for `holder`.

        Returns the cached holders that this makes superfluous; they are already removed.
        """
        covered = [other for other, last in self.kept.items()
                   if holder in last.holders]
        for other in covered:
            self.forget(other)
        self.kept[holder] = block
        return covered

    def touch(self, block: Block) -> None:
        """Mark the cached prompts that hold `block` as the most recently used."""
        for holder in block.holders & self.kept.keys():
            self.kept.move_to_end(holder)

    def forget(self, holder: int) -> None:
        """Remove a cached prompt."""
        self.release(self.kept.pop(holder), holder)

    def oldest(self) -> int | None:
        """Return the cached holder that was least recently used; None without any."""
        return next(iter(self.kept), None)


class StatePrefixes(Prefixes):
    """Cached prompts, each a block of its own with all tokens from the first one on."""

    @property
    @override
    def cells(self) -> int:
        return sum(block.stop for block in self.kept.values())

    @property
    @override
    def idle_cells(self) -> int:
        return self.cells

    @override
    def match(self, block: Block, prompt: Sequence[int], limit: int,
              media: Sequence[Media] = ()) -> Block:
        return block

    @override
    def next(self, block: Block, prompt: Sequence[int], limit: int,
             media: Sequence[Media] = ()) -> Block | None:
        return None

    @override
    def forget(self, holder: int) -> None:
        del self.kept[holder]

    def longest(self, prompt: tuple[int, ...], limit: int, salt: bytes) -> int | None:
        """Return the holder of the longest computed prompt of this salt with which this one begins,
        and mark it as the most recently used; None if there is none. limit: most tokens of it."""
        found = max((holder for holder, block in self.kept.items() if block.computed
                     and block.salt == salt and block.stop <= limit
                     and prompt[:block.stop] == block.tokens),
                    key=lambda holder: self.kept[holder].stop, default=None)
        if found is not None:
            self.kept.move_to_end(found)
        return found

    def places(self, prompt: tuple[int, ...], start: int, limit: int, salt: bytes) -> set[int]:
        """Return the lengths at which the state of a prompt is to be kept, after its first `start`
        tokens, which are cached. limit: the last of them."""
        shared = 0
        for block in (one for one in self.kept.values() if one.salt == salt):
            same = next((i for i, (a, b) in enumerate(zip(prompt, block.tokens, strict=False))
                         if a != b), min(len(prompt), block.stop))
            shared = max(shared, same // self.chunk * self.chunk)
        return {place for place in (shared, limit) if start < place <= limit}
