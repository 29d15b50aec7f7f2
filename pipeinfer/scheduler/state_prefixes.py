"""The prefix cache of a model whose layers keep a state of the text.

A state is that behind one text, so a cached prompt serves a request that begins with all of it, and
not with a part. States are kept where a later request is likely to go on: behind the last whole
chunk of a prompt, as the next turn of a conversation begins with it, and behind what a prompt has
in common with a cached one, such as a system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from pipeinfer.scheduler.prefix_cache import Block, Prefixes


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
    def match(self, block: Block, prompt: Sequence[int], limit: int) -> Block:
        return block

    @override
    def next(self, block: Block, prompt: Sequence[int], limit: int) -> Block | None:
        return None

    @override
    def forget(self, holder: int) -> None:
        del self.kept[holder]

    def longest(self, prompt: tuple[int, ...], limit: int) -> int | None:
        """Return the holder of the longest computed prompt with which this one begins, and mark it
        as the most recently used; None if there is none. limit: most tokens of it."""
        found = max((holder for holder, block in self.kept.items() if block.computed
                     and block.stop <= limit and prompt[:block.stop] == block.tokens),
                    key=lambda holder: self.kept[holder].stop, default=None)
        if found is not None:
            self.kept.move_to_end(found)
        return found

    def places(self, prompt: tuple[int, ...], start: int, limit: int) -> set[int]:
        """Return the lengths at which the state of a prompt is to be kept, after its first `start`
        tokens, which are cached. limit: the last of them."""
        shared = 0
        for block in self.kept.values():
            same = next((i for i, (a, b) in enumerate(zip(prompt, block.tokens, strict=False))
                         if a != b), min(len(prompt), block.stop))
            shared = max(shared, same // self.chunk * self.chunk)
        return {place for place in (shared, limit) if start < place <= limit}
