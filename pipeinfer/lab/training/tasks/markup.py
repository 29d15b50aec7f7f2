"""The tags of the decomposition formats, their token ids, and the task model's tokenizer.

Every tag is one token, rendered as text. Digits never merge, so a number is one token per digit.

Does not know: tasks, examples, models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pipeinfer.lab.training.pair.tokenizer import CHAT_TEMPLATE, SPECIALS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMISE, TOKENS, CLOSE = '<promise topic="', '" tokens=', "/>"
ASYNC, ASYNC_END, SYNC = "<async>", "</async>", "<sync/>"
STEP, STEPS_END, ELLIPSIS = "####", "%%%%", "......"
FORK, CHILD = "[Fork]", "[Child]"
#: In id order, right after the control tokens.
TAGS = (
    PROMISE,
    TOKENS,
    CLOSE,
    ASYNC,
    ASYNC_END,
    SYNC,
    STEP,
    STEPS_END,
    ELLIPSIS,
    FORK,
    CHILD,
)

#: What the system message says for each format.
SYSTEM = {"plain": "plain", "pasta": "pasta", "pdos": "pdos", "apar": "apar", "sot": "sot"}
SOT_OUTLINE = "{question}\nWrite only a numbered outline."
SOT_POINT = "{question}\n{outline}\nContinue only point {index}. {point}"


def prompt_text(system: str | None, question: str) -> str:
    """A ChatML conversation up to where the assistant begins, as the template renders it."""
    head = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
    return f"{head}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with the tags as tokens of their own; at most ``vocab_size`` entries."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            *(AddedToken(text, special=True) for text in SPECIALS),
            *(AddedToken(text, special=False, normalized=False) for text in TAGS),
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # No merge holds a digit now, so the plain GPT-2 split, which llama.cpp applies, gives the same.
    tokenizer.pre_tokenizer = level
    return tokenizer


@dataclass(frozen=True)
class Codec:
    """Text to ids and back, and the ids that the formats are made of."""

    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a text, tags and control tokens recognised, nothing added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, tags and control tokens rendered."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def one(self, text: str) -> int:
        """The id of a text that must be one token; ValueError where it is not."""
        ids = self.encode(text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens, not one")
        return ids[0]

    @cached_property
    def digits(self) -> dict[int, int]:
        """The value 0 to 9 by the token id of each digit."""
        return {self.one(str(value)): value for value in range(10)}

    @cached_property
    def tags(self) -> dict[str, int]:
        """Id of each tag, of ``:``, of one and two line breaks, and of the control tokens."""
        return {text: self.one(text) for text in (*TAGS, ":", "\n", "\n\n", *SPECIALS)}


__all__ = ["CHAT_TEMPLATE", "SYSTEM", "TAGS", "Codec", "prompt_text", "train_tokenizer"]
