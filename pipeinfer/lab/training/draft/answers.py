"""The target talks: conversations and texts of its own, with what it thought at every token.

Many texts grow side by side, one token each per step, so that weights are read once for all. A text
that has ended makes room for the next. Of every position the most likely next tokens are kept with
their probabilities: all that a draft has to learn. A head that reads the target's hidden rows needs
these as well; they cost nothing here.

Does not know: the draft, files, the command line.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeinfer.lab.training.draft import prompts
from pipeinfer.lab.training.network.model import Block, Llama

KEPT = 24  #: likeliest tokens kept of each position
_TOP = 50  #: tokens that are sampled from
#: how answers are drawn: most users take the likeliest token, or nearly so
_TEMPERATURES = (0.0, 0.0, 0.6, 0.8, 1.0)
_OF_USERS = 1.0  #: temperature of made-up questions
_KINDS = ("asked", "asked", "made up", "made up", "text")


@dataclass(frozen=True, slots=True)
class Marks:
    """The template's parts as token ids. before: up to the user's words; between: from there to the
    answer; ends: tokens that end a turn; opening: token ids of a text's beginning, by its words."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    ends: frozenset[int]
    encode: Callable[[str], list[int]]


@dataclass(slots=True)
class Text:
    """A text that grows. forced: tokens still to be read before one is drawn; asks: whether the
    user's words are being drawn."""

    temperature: float
    forced: list[int]
    asks: bool = False
    tokens: list[int] = field(default_factory=list)
    likely: list[npt.NDArray[np.int32]] = field(default_factory=list)
    shares: list[npt.NDArray[np.float16]] = field(default_factory=list)
    rows: list[npt.NDArray[np.float16]] = field(default_factory=list)
    quiet: float = 0.0  #: temperature once the answer begins


@dataclass(frozen=True, slots=True)
class Lesson:
    """A finished text: tokens int32[n]; the likeliest tokens after each, int32[n, KEPT], and their
    probabilities, float16[n, KEPT]; the hidden rows at the taps, float16[n, taps * width]."""

    tokens: npt.NDArray[np.int32]
    likely: npt.NDArray[np.int32]
    shares: npt.NDArray[np.float16]
    rows: npt.NDArray[np.float16]


def quickened(model: Llama) -> Llama:
    """The model with its matrices in bfloat16, for decoding; norms and tables stay float32."""
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            part.to(torch.bfloat16)
    return model


def begin(marks: Marks, rng: random.Random) -> Text:
    """A new text of a random kind."""
    kind, temperature = rng.choice(_KINDS), rng.choice(_TEMPERATURES)
    if kind == "text":
        return Text(max(temperature, 0.6), marks.encode(prompts.opening(rng)))
    if kind == "asked":
        words = marks.encode(prompts.question(rng))
        return Text(temperature, [*marks.before, *words, *marks.between])
    return Text(_OF_USERS, list(marks.before), True, quiet=temperature)


class Talk:
    """`slots` texts of up to `length` tokens side by side.

    taps: layers whose input rows are noted, too
    """

    def __init__(self, model: Llama, marks: Marks, slots: int, length: int, seed: int,
                 taps: Sequence[int] = ()) -> None:
        config = model.config
        self._model, self._marks, self._length, self._taps = model, marks, length, tuple(taps)
        self._tapped = torch.zeros(slots, 0)
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        shape = (config.n_layer, slots, config.n_head_kv, length, config.head_size)
        dtype = model.token_embd.weight.dtype
        self._keys, self._values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self._texts = [begin(marks, self._rng) for _ in range(slots)]
        self._at = torch.zeros(slots, dtype=torch.long)
        self._next = torch.tensor([text.forced.pop(0) for text in self._texts])

    @torch.no_grad()
    def step(self) -> Iterator[Lesson]:
        """Every text grows by a token; those that have ended."""
        with torch.autocast("cpu", torch.bfloat16,
                            enabled=self._keys.dtype == torch.bfloat16):
            logits = self._decode().float()
        rows = self._tapped.numpy().astype(np.float16)
        shares, likely = torch.topk(logits.log_softmax(-1), _TOP)
        drawn = self._draw(likely, shares)
        for k, text in enumerate(self._texts):
            text.tokens.append(int(self._next[k]))
            text.likely.append(likely[k, :KEPT].numpy().astype(np.int32))
            text.shares.append(shares[k, :KEPT].exp().numpy().astype(np.float16))
            text.rows.append(rows[k])
            token = self._after(text, int(drawn[k]))
            if token is None or len(text.tokens) >= self._length:
                yield _finished(text)
                text = self._texts[k] = begin(self._marks, self._rng)
                self._at[k], token = -1, text.forced.pop(0)
            self._next[k] = token
        self._at += 1

    def rest(self) -> list[Lesson]:
        """The texts that have not ended, as far as they have got."""
        return [_finished(text) for text in self._texts if text.tokens]

    def _after(self, text: Text, drawn: int) -> int | None:
        """The token that follows; None at the text's end."""
        if text.forced:
            return text.forced.pop(0)
        if drawn not in self._marks.ends:
            return drawn
        if not text.asks:
            return None
        text.asks, text.temperature = False, text.quiet
        text.forced = list(self._marks.between)
        return text.forced.pop(0)

    def _draw(self, likely: Tensor, scores: Tensor) -> Tensor:
        heat = torch.tensor([text.temperature for text in self._texts])[:, None]
        noise = -torch.empty_like(scores).exponential_(generator=self._generator).log()
        best = (scores + heat * noise).argmax(-1)
        return likely.gather(1, best[:, None])[:, 0]

    def _decode(self) -> Tensor:
        model = self._model
        length = int(self._at.max()) + 1
        cos, sin = model.cos[self._at][:, None], model.sin[self._at][:, None]
        visible = torch.arange(length)[None] <= self._at[:, None]
        x = model.token_embd(self._next)[:, None].float()
        inputs = {}
        for layer, block in enumerate(model.blk):
            assert isinstance(block, Block)
            inputs[layer] = x[:, 0]
            x = self._layer(layer, block, x, cos, sin, visible)
        self._tapped = torch.cat([inputs[tap] for tap in self._taps] or [x[:, 0, :0]], 1)
        return model.logits(x[:, 0])

    def _layer(self, layer: int, block: Block, x: Tensor, cos: Tensor, sin: Tensor,
               visible: Tensor) -> Tensor:
        q, k, v = block.project(x, cos, sin)  # [slots, heads, 1, head size], repeated
        groups = block.config.n_head // block.config.n_head_kv
        slots = torch.arange(len(x))
        keys, values = self._keys[layer], self._values[layer]
        keys[slots, :, self._at] = k[:, ::groups, 0]
        values[slots, :, self._at] = v[:, ::groups, 0]
        length = visible.shape[1]
        heads = q[:, :, 0].unflatten(1, (-1, groups))
        y = F.scaled_dot_product_attention(
            heads, keys[:, :, :length], values[:, :, :length], visible[:, None, None])
        return block.finish(x, y.flatten(1, 2)[:, :, None])


def _finished(text: Text) -> Lesson:
    return Lesson(np.array(text.tokens, np.int32), np.stack(text.likely), np.stack(text.shares),
                  np.stack(text.rows))


def collect(talk: Talk, minutes: float | None, texts: int | None, report: Callable[[str], None]
            ) -> list[Lesson]:
    """What is said within a time, or so many texts."""
    found: list[Lesson] = []
    start = told = time.monotonic()
    n_tokens = 0
    while True:
        for lesson in talk.step():
            found.append(lesson)
            n_tokens += len(lesson.tokens)
        now = time.monotonic()
        if now - told >= 30.0:
            told = now
            report(f"answers: {len(found)} texts, {n_tokens} tokens, "
                   f"{n_tokens / (now - start):.0f} tokens/s")
        if texts is not None and len(found) >= texts:
            return found[:texts]
        if minutes is not None and now - start >= 60 * minutes:
            return found
