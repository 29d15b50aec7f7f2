"""Teaches a thinned copy of the target to say what the target says next.

The loss is the cross-entropy against the target's own likeliest tokens at every position, with
additional weight on the likeliest one: with greedy decoding that is what acceptance counts. Texts
of about one length share a batch; what all texts begin with is read, not learned.

Does not know: where texts come from, GGUF, the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeinfer.lab.training.minimise import Progress
from pipeinfer.lab.training.network.loop import Plan, optimise
from pipeinfer.lab.training.network.model import Llama

_HARD = 0.3  #: weight of the likeliest token alone
_BESIDE = 4096  #: tokens of the vocabulary, drawn anew for each step, that no position wants
_ALL_FROM = 0.85  #: spent fraction from which the whole vocabulary is weighed up
HELD_OUT = 20  #: every so many-th text is not learned from


@dataclass(frozen=True, slots=True)
class Lessons:
    """Finished texts one after the other: tokens int32[n]; ends of texts int64[t]; the likeliest
    tokens after each position, [n, k], and their probabilities, float16[n, k]. skip: tokens at a
    text's beginning that are not learned, if it begins with all of them."""

    tokens: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]
    likely: npt.NDArray[np.integer]
    shares: npt.NDArray[np.float16]
    skip: tuple[int, ...] = ()

    def spans(self, *, held_out: bool) -> list[tuple[int, int]]:
        """Where the texts begin and end that are (not) learned from."""
        starts = [0, *self.ends[:-1].tolist()]
        return [span for k, span in enumerate(zip(starts, self.ends.tolist(), strict=True))
                if (k % HELD_OUT == HELD_OUT - 1) == held_out and span[1] - span[0] > 1]

    def save(self, path: Path) -> None:
        """Write them whole or not at all."""
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, tokens=self.tokens, ends=self.ends, likely=self.likely,
                 shares=self.shares, skip=np.array(self.skip, np.int32))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Lessons:
        """What `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            return cls(file["tokens"], file["ends"], file["likely"], file["shares"],
                       tuple(file["skip"].tolist()))


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side: x int64[b, length]; which positions are learned, bool[b, length]; for
    those, in order, the likeliest tokens int64[m, k] and their probabilities float32[m, k]."""

    x: Tensor
    learned: Tensor
    likely: Tensor
    shares: Tensor


def batches(spans: Sequence[tuple[int, int]], size: int, rng: np.random.Generator
            ) -> list[list[tuple[int, int]]]:
    """Groups of texts of about one length, `size` tokens or a little less each; a new order."""
    noise = rng.uniform(0.9, 1.1, len(spans))
    order = np.argsort([(stop - start) * n for (start, stop), n in zip(spans, noise, strict=True)])
    groups: list[list[tuple[int, int]]] = []
    longest = 0
    for k in order.tolist():
        longest = max(longest, spans[k][1] - spans[k][0])
        if not groups or longest * (len(groups[-1]) + 1) > size:
            groups.append([])
            longest = spans[k][1] - spans[k][0]
        groups[-1].append(spans[k])
    return [groups[k] for k in rng.permutation(len(groups))]


class Epochs:
    """Which texts each training step has. An epoch has every text once, in an order that depends on
    the seed and the epoch alone, so that a resumed run has the same steps."""

    def __init__(self, spans: Sequence[tuple[int, int]], size: int, seed: int) -> None:
        self._spans, self._size, self._seed = spans, size, seed
        self._epoch, self._first = 0, 0  # the current epoch and its first step
        self._groups = self._shuffled()

    def group(self, step: int) -> list[tuple[int, int]]:
        """Return the spans of this step; steps are asked for in ascending order."""
        while step - self._first >= len(self._groups):
            self._first += len(self._groups)
            self._epoch += 1
            self._groups = self._shuffled()
        return self._groups[step - self._first]

    def _shuffled(self) -> list[list[tuple[int, int]]]:
        return batches(self._spans, self._size, np.random.default_rng([self._seed, self._epoch]))


def pack(lessons: Lessons, spans: Sequence[tuple[int, int]]) -> Batch:
    """One batch of these texts."""
    length = max(stop - start for start, stop in spans)
    x = np.zeros((len(spans), length), np.int64)
    learned = np.zeros((len(spans), length), np.bool_)
    skip = np.array(lessons.skip, np.int64)
    at: list[npt.NDArray[np.int64]] = []
    for k, (start, stop) in enumerate(spans):
        n = stop - start
        x[k, :n] = lessons.tokens[start:stop]
        first = len(skip) - 1 if len(skip) and n > len(skip) and (
            x[k, : len(skip)] == skip).all() else 0
        learned[k, first:n] = True
        at.append(np.arange(start + first, stop))
    rows = np.concatenate(at)
    return Batch(torch.from_numpy(x), torch.from_numpy(learned),
                 torch.from_numpy(lessons.likely[rows].astype(np.int64)),
                 torch.from_numpy(lessons.shares[rows].astype(np.float32)))


def loss_of(model: Llama, batch: Batch, *, bfloat16: bool, beside: Tensor | None = None) -> Tensor:
    """Nats per learned position. beside: int64[n], other tokens than the likeliest ones of this
    batch that are weighed up; None: all. Most of a small model's time goes into its output."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        length = batch.x.shape[1]
        states = model.hidden(batch.x, model.cos[:length], model.sin[:length])[batch.learned]
        if beside is None:
            logits, wanted = model.logits(states), batch.likely
        else:
            tokens = torch.cat((batch.likely.flatten(), beside)).unique()
            wanted = torch.searchsorted(tokens, batch.likely)
            logits = F.linear(model.output_norm(states), model.token_embd.weight[tokens])
    scores = logits.float().log_softmax(-1).gather(1, wanted)
    soft = -(scores * batch.shares).sum(1) / batch.shares.sum(1)
    return ((1 - _HARD) * soft - _HARD * scores[:, 0]).mean()


@torch.no_grad()
def agreement(model: Llama, lessons: Lessons, most: int = 40_000) -> dict[str, float]:
    """On texts that were not learned from: how often the model's likeliest token is the target's,
    and nats per token."""
    right = n = 0
    nats = 0.0
    for group in batches(lessons.spans(held_out=True), 2048, np.random.default_rng(0)):
        batch = pack(lessons, group)
        length = batch.x.shape[1]
        states = model.hidden(batch.x, model.cos[:length], model.sin[:length])
        scores = model.logits(states[batch.learned]).float().log_softmax(-1)
        right += int((scores.argmax(-1) == batch.likely[:, 0]).sum())
        nats -= float((scores.gather(1, batch.likely) * batch.shares).sum(1).div(
            batch.shares.sum(1)).sum())
        n += len(scores)
        if n >= most:
            break
    return {"positions": n, "agreement": right / max(n, 1), "nats": nats / max(n, 1)}


def teach(draft: Llama, lessons: Lessons, plan: Plan, checkpoint: Path,
          report: Callable[[str], None]) -> Progress:
    """Train until the plan's budget is spent; resumes from `checkpoint`."""
    epochs = Epochs(lessons.spans(held_out=False), plan.batch_tokens, plan.seed)

    def objective(step: int, spent: float) -> Iterator[tuple[Tensor, int]]:
        batch, beside = pack(lessons, epochs.group(step)), None
        if spent < _ALL_FROM:
            chance = np.random.default_rng([plan.seed, step, 1])
            beside = torch.from_numpy(chance.integers(draft.config.n_vocab, size=_BESIDE))
        yield loss_of(draft, batch, bfloat16=plan.bfloat16, beside=beside), batch.x.numel()

    return optimise(draft, plan, checkpoint, objective, report=report)
