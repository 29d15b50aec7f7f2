"""How a model's own tokenizer writes conversations, answers and PASTA's tags.

Tags are plain text, or tokens that the vocabulary gets for them; then text around them is split as
the grown tokenizer would. Does not know: what is learnt, models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.strategies.decomposers.pasta import Spacing
from pipeinfer_lab.training.pasta import annotate, pasta
from pipeinfer_lab.training.pasta.pasta import Block, Flat
from pipeinfer_lab.training.tasks import markup

#: what gets a token of its own, if tags are to be tokens
TAGS = (markup.PROMISE, markup.TOKENS, markup.ASYNC, markup.ASYNC_END, markup.SYNC)


class Wording:
    """tags: ids of the tags that are to become tokens (none: they are text); spacing: how many
    positions the main thread leaves free for a block (paper section 6.2)."""

    def __init__(self, tokenizer: Tokenizer, tags: Mapping[str, int] | None = None,
                 spacing: Spacing | None = None) -> None:
        self._spacing = spacing or Spacing()
        self._tokenizer, self._tags = tokenizer, dict(tags or {})
        self._pattern = re.compile("|".join(map(re.escape, self._tags)) or "(?!)")

    @cached_property
    def _spaced(self) -> bool:
        """Whether the tokenizer puts a space before whatever it is given."""
        first = self._tokenizer.split("a", special=False)[:1]
        return bool(first) and self._tokenizer.piece(first[0]).startswith(b" ")

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation up to where the assistant begins, by the model's own template."""
        return self._tokenizer.encode_chat(messages)

    def text(self, text: str) -> list[int]:
        """Text that goes on behind other text: nothing in it becomes a tag."""
        if not self._spaced or not text:
            return self._tokenizer.split(text, special=False)
        anchor = self._tokenizer.split("\n", special=False)
        whole = self._tokenizer.split(f"\n{text}", special=False)
        return whole[len(anchor):] if whole[: len(anchor)] == anchor else whole

    def tagged(self, text: str) -> list[int]:
        """Text in which tags are what they are to the interpreter."""
        if not self._tags:
            return self._tokenizer.split(text, special=True) if not self._spaced \
                else self.text(text)
        out: list[int] = []
        at = 0
        for found in self._pattern.finditer(text):
            out += [*self.text(text[at : found.start()]), self._tags[found[0]]]
            at = found.end()
        return out + self.text(text[at:])

    @cached_property
    def begin(self) -> list[int]:
        """`<async>` as the interpreter feeds it."""
        if self._tags:
            return [self._tags[markup.ASYNC]]
        return self._tokenizer.split(markup.ASYNC, special=True)

    @cached_property
    def end(self) -> int:
        """The token that ends an answer: what the template puts behind it."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        after = self._tokenizer.encode_chat(messages, add_generation_prompt=False)
        found = [token for token in after if token in self._tokenizer.eog_ids]
        if found:
            return found[-1]
        eos = self._tokenizer.eos_id
        if eos is None:
            raise ValueError("the model has no token that ends an answer")
        return eos

    def flat(self, messages: Sequence[Mapping[str, str]], pieces: Sequence[annotate.Piece]
             ) -> Flat:
        """The layout of an answer in parts."""
        ids = self.prompt(messages)
        start, syncs, text = len(ids), [], 0
        blocks: list[Block] = []
        for piece in pieces:
            text += len(self.text(piece.text))
            if piece.kind == "text":
                ids += self.text(piece.text)
            elif piece.kind == "sync":
                ids += self.tagged(markup.SYNC)
                syncs.append(len(ids) - 1)
            else:
                block = [*self.begin, *self.text(piece.text), *self.tagged(markup.ASYNC_END)]
                said = pasta.attribute_of(len(block), self._spacing)
                room = self._spacing.after(len(blocks), said)
                topic = re.sub(r'["<>]', "", piece.topic)
                ids += self.tagged(
                    f"{markup.PROMISE}{topic}{markup.TOKENS}{said}{markup.CLOSE}")
                blocks.append(Block(len(ids) - 1, len(ids), len(ids) + len(block) - 1, room))
                ids += block
        return Flat((*ids, self.end), start, tuple(blocks), tuple(syncs), len(self.begin),
                    len(ids) + 1 - start - text)
