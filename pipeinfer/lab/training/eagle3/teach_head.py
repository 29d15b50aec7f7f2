"""Teaches a head to propose what the target would choose, over several steps of its chain.

EAGLE-3's training-time test: the head's own rows are its input for the next step, as they are when
it proposes, and the loss of every step counts. The loss is the cross-entropy against the target's
likeliest tokens at each position, with additional weight on the likeliest one.

Independent of where texts come from, GGUF files and the command line.
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

from pipeinfer.lab.training.draft.teach import Epochs, batches
from pipeinfer.lab.training.draft.teach import pack as pack_texts
from pipeinfer.lab.training.eagle3.head import EagleHead
from pipeinfer.lab.training.eagle3.shards import TappedLessons
from pipeinfer.lab.training.minimise import Progress
from pipeinfer.lab.training.network.loop import Plan, optimise
from pipeinfer.lab.training.network.model import Llama

_HARD = 0.3  #: weight of the likeliest token alone
_DECAY = 0.8  #: weight of a step's loss relative to the step before it, as in EAGLE-3
_DEEP_FROM = 0.3  #: spent fraction from which the chain has all its steps; before it, one
_QUANTISED_FROM = 0.5  #: spent fraction from which matrices are used as the file will have them
_SAMPLE = 20_000  #: positions from which scales are estimated


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """What the head takes from the target. embedding: float32[n_vocab, width]; tokens: int64[n],
    those that it can propose, ascending; output: the output matrix's rows of these."""

    embedding: Tensor
    tokens: Tensor
    output: Tensor

    @property
    def places(self) -> Tensor:
        """The place of every token of the vocabulary in `tokens`; -1: not there."""
        found = torch.full((len(self.embedding),), -1)
        found[self.tokens] = torch.arange(len(self.tokens))
        return found


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """Texts side by side. rows: float32[b, n, taps * width] of positions 0 .. n - 1; tokens:
    int64[b, n], of positions 1 .. n; learned: bool[b, n]; for the learned positions, in order,
    likely: places int64[m, k], and shares: float32[m, k], 0 where a token cannot be proposed."""

    rows: Tensor
    tokens: Tensor
    learned: Tensor
    likely: Tensor
    shares: Tensor


def chosen_tokens(taught: TappedLessons, count: int, vocabulary: int) -> npt.NDArray[np.int64]:
    """Return the tokens that the target chooses most often, at most `count`, ascending."""
    lessons = taught.lessons
    often = np.bincount(lessons.likely[:, 0], minlength=vocabulary).astype(np.float64)
    often += np.bincount(lessons.likely.ravel(), weights=lessons.shares.ravel(),
                         minlength=vocabulary)
    order = np.argsort(-often, kind="stable")[:count]
    return np.sort(order[often[order] > 0]).astype(np.int64)


def frozen_parts(target: Llama, tokens: npt.NDArray[np.int64]) -> FrozenParts:
    """Return the parts of the target that the head uses unchanged."""
    embedding, chosen = target.token_embd.weight.detach().float(), torch.from_numpy(tokens)
    return FrozenParts(embedding, chosen, embedding[chosen])


def begin(head: EagleHead, target: Llama, taught: TappedLessons, seed: int) -> None:
    """Set the weights to begin with.

    The hidden row is the highest tapped row with its columns scaled to equal size, which keeps
    large columns from spoiling the blocks that quantisation rounds together; the norms after it
    undo the scale. The feed-forward part is that of the target's last layer.
    """
    rows = torch.from_numpy(np.concatenate(
        [one[: _SAMPLE // len(taught.rows) + 1] for one in taught.rows]).astype(np.float32))
    each = rows.square().mean(1, keepdim=True).sqrt()
    size = rows.div(each).square().mean(0).sqrt().clamp_min(1e-6)  # relative, as after the norm
    high, last = size[-head.config.n_embd :], target.blk[-1]
    undone = high / high.square().mean().sqrt()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for matrix in head.matrices().values():
            matrix.weight.normal_(0.0, 0.5 * matrix.weight.shape[1] ** -0.5, generator=generator)
        head.enc_norm.weight.copy_(size.reciprocal())
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -head.config.n_embd :].add_(torch.eye(head.config.n_embd))
        head.attn_output.weight.mul_(0.1)
        head.ffn_norm.weight.copy_(last.ffn_norm.weight * undone)
        if head.config.n_ff == target.config.n_ff:
            head.ffn_gate.weight.copy_(last.ffn_gate.weight)
            head.ffn_up.weight.copy_(last.ffn_up.weight)
            head.ffn_down.weight.copy_(last.ffn_down.weight / (each.median() * high[:, None]))
        head.attn_norm.weight.fill_(1.0)
        head.attn_norm_2.weight.fill_(1.0)
        head.output_norm.weight.copy_(target.output_norm.weight * undone)


def as_rounded(matrix: Tensor) -> Tensor:
    """The matrix as Q4_0 stores it, with the gradient of the matrix itself."""
    blocks = matrix.detach().unflatten(-1, (-1, 32))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).half().float()
    inverse = torch.where(largest == 0, 0.0, -8 / largest)
    steps = torch.trunc(blocks * inverse + 8.5).clamp(0, 15) - 8
    return matrix + ((steps * scale).flatten(-2) - matrix.detach())


def pack(taught: TappedLessons, spans: Sequence[tuple[int, int]], places: Tensor) -> HeadBatch:
    """Return one batch of these texts."""
    texts = pack_texts(taught.lessons, spans)
    length = texts.x.shape[1]
    width = taught.rows[0].shape[1]
    rows = np.zeros((len(spans), length - 1, width), np.float32)
    for k, (start, stop) in enumerate(spans):
        rows[k, : stop - start - 1] = taught.rows_of(start, stop - 1)
    # position p proposes what follows the text's token p + 1
    after_first = texts.learned.nonzero()[:, 1] > 0
    likely = places[texts.likely[after_first]]
    shares = texts.shares[after_first].masked_fill(likely < 0, 0.0)
    return HeadBatch(torch.from_numpy(rows), texts.x[:, 1:], texts.learned[:, 1:],
                     likely.clamp_min(0), shares)


def steps_of(head: EagleHead, frozen: FrozenParts, batch: HeadBatch, depths: int
             ) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each step of the chain the logits at the learned positions that have it, and which
    of the learned positions these are."""
    tokens = F.embedding(batch.tokens, frozen.embedding)
    place = batch.learned.nonzero()[:, 1]
    for depth, rows in enumerate(head.unroll(tokens, head.encode(batch.rows), depths)):
        has = place >= depth
        yield head.logits(rows[batch.learned][has], frozen.output), has


def loss_of(head: EagleHead, frozen: FrozenParts, batch: HeadBatch, depths: int, *,
            bfloat16: bool) -> Tensor:
    """Return nats per learned position, the mean over the steps by their weights."""
    total, weights = torch.zeros(()), 0.0
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        for depth, (logits, has) in enumerate(steps_of(head, frozen, batch, depths)):
            likely, shares = batch.likely[has], batch.shares[has]
            logits = logits.float()
            scores = logits.gather(1, likely) - logits.logsumexp(-1, keepdim=True)
            mass = shares.sum(1)
            soft = -(scores * shares).sum(1) / mass.clamp_min(1e-3)
            hard = -scores[:, 0] * (shares[:, 0] > 0)
            weight = _DECAY ** depth
            weights += weight
            total = total + weight * ((1 - _HARD) * soft * (mass > 1e-3) + _HARD * hard).mean()
    return total / weights


@torch.no_grad()
def agreement(head: EagleHead, frozen: FrozenParts, taught: TappedLessons, depths: int,
              most: int = 10_000) -> list[float]:
    """Return how often each step's likeliest token is the target's, on texts that were not learned
    from, whatever the steps before it proposed."""
    right, count = np.zeros(depths), np.zeros(depths)
    places = frozen.places
    for group in batches(taught.lessons.spans(held_out=True), 2048, np.random.default_rng(0)):
        batch = pack(taught, group, places)
        for depth, (logits, has) in enumerate(steps_of(head, frozen, batch, depths)):
            able = batch.shares[has][:, 0] > 0
            right[depth] += int(((logits.argmax(-1) == batch.likely[has][:, 0]) & able).sum())
            count[depth] += len(able)
        if count[0] >= most:
            break
    return [round(float(share), 4) for share in right / np.maximum(count, 1)]


def teach(head: EagleHead, frozen: FrozenParts, taught: TappedLessons, plan: Plan, depths: int,
          checkpoint: Path, report: Callable[[str], None]) -> Progress:
    """Train until the plan's budget is spent; resumes from `checkpoint`."""
    epochs = Epochs(taught.lessons.spans(held_out=False), plan.batch_tokens, plan.seed)
    places = frozen.places

    def objective(step: int, spent: float) -> Iterator[tuple[Tensor, int]]:
        batch = pack(taught, epochs.group(step), places)
        if spent >= _QUANTISED_FROM:
            head.quantise = as_rounded
        yield loss_of(head, frozen, batch, depths if spent >= _DEEP_FROM else 1,
                      bfloat16=plan.bfloat16), batch.tokens.numel()

    return optimise(head, plan, checkpoint, objective, report=report)
