"""Bi-directional tuning (BiTA, arXiv 2401.12522): a frozen model learns to guess ahead.

M mask tokens behind a context learn what comes 2, 3, ... tokens later; P prompt tokens, whose keys
and values stand before every layer and which masks alone see, help them. The text is the model's
own: it continues pieces of a corpus greedily. Context rows see neither masks nor prompts, so they
are computed once without gradients, and many groups of masks share them (docs/algorithms.md 11.5,
the published code's reading: a group behind token s learns the tokens s+2, ..., s+M+1).

Does not know: decoding (`strategies.bita`), runs, other kinds of training.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeinfer.host import multiplies_bfloat16
from pipeinfer.models.bita_adapter import BitaAdapter, save_bita
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer_lab.training.adapt.chats import Chat
from pipeinfer_lab.training.bita.frozen import (
    Contexts,
    Frozen,
    How,
    attention,
    continue_greedily,
    load_frozen,
)
from pipeinfer_lab.training.bita.own_answers import Samples, answered, even
from pipeinfer_lab.training.checkpoint import load_state, save_state
from pipeinfer_lab.training.corpus import library
from pipeinfer_lab.training.minimise import Progress, Schedule, adamw, minimise
from pipeinfer_lab.training.work_folder import claim

KINDS = ("deep", "shallow", "none")
_CHECKPOINT = "bita-checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class Plan:
    """How to tune. batch: samples per step; groups: cut points of each; tokens: of a sample, of
    which the first `given` are the corpus's."""

    steps: int = 600
    batch: int = 8
    groups: int = 24
    samples: int = 1024
    tokens: int = 192
    given: int = 64
    masks: int = 3
    prompts: int = 16
    rate: float = 1e-2
    warmup: int = 30
    seed: int = 0
    #: where the processor multiplies it in hardware; elsewhere float32 is several times as fast
    bfloat16: bool = field(default_factory=multiplies_bfloat16)

    def __post_init__(self) -> None:
        if self.tokens - self.given < self.masks + 2:
            raise ValueError("a sample needs more tokens of the model's own than there are masks")

    @property
    def schedule(self) -> Schedule:
        """The learning rate over the steps."""
        return Schedule(steps=self.steps, warmup_steps=self.warmup, cosine=True)


# --- text -----------------------------------------------------------------------------------------


def pieces_of(texts: Sequence[str], encode: Callable[[str], list[int]], plan: Plan
              ) -> Iterator[list[int]]:
    """Beginnings of samples: `given` tokens from the start of a line somewhere in the texts, as the
    tokenizer starts a text; the same ones for the same seed."""
    chance = np.random.default_rng([plan.seed, 1])
    while True:
        text = texts[int(chance.integers(len(texts)))]
        start = text.rfind("\n", 0, int(chance.integers(len(text)))) + 1
        tokens = encode(text[start : start + 10 * plan.given])[: plan.given]
        if len(tokens) == plan.given:
            yield tokens


def make_samples(model: Frozen, pieces: Iterator[list[int]], plan: Plan, path: Path,
                 report: Callable[[str], None], batch: int = 128) -> Samples:
    """Pieces, continued; kept at `path`, where another run goes on."""
    made = np.zeros((0, plan.tokens), np.int32)
    if path.exists():
        made = np.load(path, allow_pickle=False)
    for _ in range(min(len(made), plan.samples)):
        next(pieces)
    while len(made) < plan.samples:
        starts = np.array([next(pieces) for _ in range(min(batch, plan.samples - len(made)))])
        with _precision(plan, model):
            more = continue_greedily(model, torch.from_numpy(starts).to(model.device),
                                     plan.tokens - plan.given)
        made = np.concatenate([made, more.cpu().numpy().astype(np.int32)])
        np.save(path.with_suffix(".partial.npy"), made)
        os.replace(path.with_suffix(".partial.npy"), path)
        report(f"{len(made)} of {plan.samples} samples")
    return even(torch.from_numpy(made[: plan.samples].astype(np.int64)), plan.given)


# --- what is learnt -------------------------------------------------------------------------------


class Adapter(nn.Module):
    """Masks, and prompts: deep (keys and values per layer), shallow (vectors that enter the first
    layer) or none."""

    def __init__(self, kind: str, model: Frozen, plan: Plan) -> None:
        super().__init__()
        shard = model.shard
        generator = torch.Generator().manual_seed(plan.seed)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.02 * torch.randn(shape, generator=generator))

        self.kind = kind
        self.masks = normal(plan.masks, shard.n_embd)
        heads = shard.heads(0)
        if kind == "deep":
            self.keys = normal(model.layers, plan.prompts, *heads)
            self.values = normal(model.layers, plan.prompts, *heads)
        elif kind == "shallow":
            self.vectors = normal(plan.prompts, shard.n_embd)
        elif kind != "none":
            raise ValueError(f"prompts must be one of {', '.join(KINDS)}, not {kind}")

    def prefix(self, model: Frozen) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values [kv heads, P, d] per layer; prompts see each other alone, unrotated."""
        if self.kind == "deep":
            return {layer: (self.keys[layer].transpose(0, 1), self.values[layer].transpose(0, 1))
                    for layer in range(model.layers)}
        if self.kind == "shallow":
            contexts, count = Contexts(), len(self.vectors)
            positions = torch.zeros(1, count, dtype=torch.int64, device=self.vectors.device)
            model.run(self.vectors[None], positions, contexts.hook)
            return {layer: (k[0], v[0]) for layer, (k, v) in contexts.kept.items()}
        heads, size = model.shard.heads(0)
        nothing = self.masks.new_zeros(heads, 0, size)
        return {layer: (nothing, nothing) for layer in range(model.layers)}

    @torch.no_grad()
    def export(self, model: Frozen, about: Mapping[str, Any]) -> BitaAdapter:
        """The adapter as inference wants it; shallow prompts become keys and values."""
        pairs = [self.prefix(model)[layer] for layer in range(model.layers)]
        keys, values = (np.stack([pair[k].transpose(0, 1).float().cpu().numpy()
                                  for pair in pairs]) for k in range(2))
        return BitaAdapter(self.masks.detach().cpu().numpy().copy(), keys, values,
                           {"prompts": self.kind, **about})


def mask_logits(model: Frozen, adapter: Adapter, contexts: Contexts, cuts: Tensor) -> Tensor:
    """Logits [b, groups, M, n_vocab] of groups of masks behind tokens `cuts` [b, groups].

    Mask r (from 1) of a group behind position s is at s + r; it sees the prompts, the context up to
    s and the masks before it in its group.
    """
    (b, groups), m, device = cuts.shape, len(adapter.masks), cuts.device
    positions = (cuts[:, :, None] + torch.arange(1, m + 1, device=device)).flatten(1)
    stream = adapter.masks.repeat(groups, 1).expand(b, -1, -1)
    prefix = adapter.prefix(model)
    n_prefix, n_context = prefix[0][0].shape[1], contexts.kept[0][0].shape[2]
    own = torch.block_diag(*[torch.ones(m, m, device=device).tril()] * groups).bool()
    context = torch.arange(n_context, device=device) <= cuts.repeat_interleave(m, 1)[:, :, None]
    prompts = torch.ones(b, groups * m, n_prefix, dtype=torch.bool, device=device)
    seen = torch.cat([prompts, context, own.expand(b, -1, -1)], 2)[:, None]

    def hook(layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        keys, values = (
            torch.cat([p.to(x.dtype).expand(b, -1, -1, -1), c.to(x.dtype), x], 2)
            for p, c, x in zip(prefix[layer], contexts.kept[layer], (key, value), strict=True))
        return attention(query, keys, values, seen, how)

    return model.logits(model.run(stream, positions, hook)).unflatten(1, (groups, m))


def labels_of(tokens: Tensor, cuts: Tensor, masks: int) -> Tensor:
    """[b, groups, M]: the tokens 2, ..., M + 1 behind each cut."""
    at = cuts[:, :, None] + torch.arange(2, masks + 2, device=cuts.device)
    return tokens.gather(1, at.flatten(1)).unflatten(1, (cuts.shape[1], masks))


@torch.no_grad()
def read_contexts(model: Frozen, tokens: Tensor) -> Contexts:
    """Keys and values of whole samples [b, n]."""
    contexts = Contexts()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    model.run(model.embed(tokens), positions, contexts.hook)
    return contexts


# --- the loop -------------------------------------------------------------------------------------


def batch_of(samples: Samples, plan: Plan, step: int) -> tuple[Tensor, Tensor]:
    """Tokens [b, n] and cuts [b, groups] of a step: a pure function of seed and step. Behind a cut
    are as many tokens of the model's own as masks learn."""
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    some = samples.of(torch.randint(len(samples), (plan.batch,), generator=generator))
    low, high = some.given[:, None] - 1, some.length[:, None] - plan.masks - 1
    share = torch.rand(plan.batch, plan.groups, generator=generator)
    return some.tokens[:, : int(some.length.max())], (low + share * (high - low)).long()


def tune(model: Frozen, adapters: Mapping[str, Adapter], samples: Samples, plan: Plan, work: Path,
         report: Callable[[str], None] = print, stop_after: int | None = None
         ) -> dict[str, list[float]]:
    """Tune several adapters on the same batches; the loss of each step by adapter.

    Goes on from the checkpoint in `work`. stop_after: leave after so many further steps.
    """
    learnt = {name: list(adapter.parameters()) for name, adapter in adapters.items()}
    optimizers = {name: adamw(parameters, plan.rate) for name, parameters in learnt.items()}
    losses: dict[str, list[float]] = {name: [] for name in adapters}
    stored = work / _CHECKPOINT
    if stored.exists():
        state = load_state(stored)
        losses = state["losses"]
        for name, adapter in adapters.items():
            adapter.load_state_dict(state["adapters"][name])
            optimizers[name].load_state_dict(state["optimizers"][name])

    def save() -> None:
        save_state(stored, {
            "losses": losses, "adapters": {k: a.state_dict() for k, a in adapters.items()},
            "optimizers": {k: o.state_dict() for k, o in optimizers.items()}})

    def objective(step: int, spent: float) -> Iterator[tuple[Tensor, int]]:  # noqa: ARG001
        tokens, cuts = (part.to(model.device) for part in batch_of(samples, plan, step))
        wanted = labels_of(tokens, cuts, plan.masks)
        with _precision(plan, model):
            contexts = read_contexts(model, tokens)
        for name, adapter in adapters.items():
            with _precision(plan, model):
                logits = mask_logits(model, adapter, contexts, cuts)
            loss = F.cross_entropy(logits.float().flatten(0, 2), wanted.flatten())
            losses[name].append(float(loss.detach()))
            yield loss, tokens.numel()

    minimise(objective, plan.schedule, list(optimizers.values()), list(learnt.values()),
             progress=Progress(len(next(iter(losses.values())))), save=save, report=report,
             stop_after=stop_after)
    return losses


@torch.no_grad()
def hit_rates(model: Frozen, adapter: Adapter, samples: Samples, plan: Plan, top: int = 5
              ) -> dict[str, list[float]]:
    """By mask: how often the token ahead is its first choice, and among its `top` first, behind
    every token of the model's own."""
    hits, count = torch.zeros(2, plan.masks), 0
    for start in range(0, len(samples), plan.batch):
        some = samples.of(slice(start, start + plan.batch)).to(model.device)
        last = some.length[:, None] - plan.masks - 1
        cuts = torch.arange(int(some.given.min()) - 1, int(last.max()), device=model.device)
        counts = (cuts >= some.given[:, None] - 1) & (cuts < last)
        cuts = torch.minimum(cuts.expand(len(some), -1), last - 1)
        with _precision(plan, model):
            logits = mask_logits(model, adapter, read_contexts(model, some.tokens), cuts)
        right = logits.topk(top).indices == labels_of(some.tokens, cuts, plan.masks)[..., None]
        right &= counts[..., None, None]
        hits += torch.stack([right[..., 0].sum((0, 1)), right.any(-1).sum((0, 1))]).cpu()
        count += int(counts.sum())
    return {"first": (hits[0] / count).tolist(), f"top_{top}": (hits[1] / count).tolist()}


@contextmanager
def _precision(plan: Plan, model: Frozen) -> Iterator[None]:
    with torch.autocast(model.device.type, torch.bfloat16, enabled=plan.bfloat16):
        yield


def _samples(model: Frozen, tokenizer: Tokenizer, plan: Plan, texts: Sequence[str],
             chats: Sequence[Chat], work: Path, report: Callable[[str], None]) -> Samples:
    """Answers to chats, else continued texts (none: the standard library's sources)."""
    if chats:
        prompts = [tokenizer.encode_chat(chat.messages) for chat in chats]
        return answered(
            model, prompts, tokens=plan.tokens, least=plan.masks + 2, report=report,
            ends=sorted(tokenizer.eog_ids), path=work / "answers.npy",
            autocast=lambda: _precision(plan, model))
    texts = texts or list(library(held_out=False))
    return make_samples(model, pieces_of(texts, tokenizer.encode, plan), plan,
                        work / "samples.npy", report)


def _digest(texts: Sequence[str], chats: Sequence[Chat]) -> str:
    """Tells apart what samples begin with; more of the same begins alike."""
    begun = repr([chat.messages for chat in chats[:8]]) if chats else "\0".join(texts)
    return hashlib.sha256(begun.encode("utf-8", "replace")).hexdigest()


def run(model_path: Path, out: Path, work: Path, plan: Plan, *, texts: Sequence[str] = (),
        chats: Sequence[Chat] = (), kinds: Sequence[str] = ("deep",), threads: int = 1,
        device: str = "cpu", report: Callable[[str], None] = print) -> dict[str, Any]:
    """Make samples, tune one adapter per kind, write the first to `out` and the others beside it;
    returns held-out hit rates by kind. chats: to answer; texts: to continue without those; neither:
    the standard library's sources. Raises ModelError where `work` is of another model or text."""
    claim(work, ("answers.npy", "samples.npy", _CHECKPOINT), model_path, tokens=plan.tokens,
          seed=plan.seed, text=_digest(texts, chats))
    model = load_frozen(model_path, threads, device)
    tokenizer = open_tokenizer(model_path)
    window = getattr(model.shard.config, "sliding_window", None)
    if window is not None and window < plan.tokens:
        raise ValueError(f"texts of {plan.tokens} tokens do not fit into the model's window of "
                         f"{window}: lower --tokens")
    samples = _samples(model, tokenizer, plan, texts, chats, work, report)
    tokenizer.close()
    aside = max(1, len(samples) // 16)
    held_out, samples = samples.of(slice(-aside, None)), samples.of(slice(None, -aside))
    adapters = {kind: Adapter(kind, model, plan).to(model.device) for kind in kinds}
    losses = tune(model, adapters, samples, plan, work, report)
    found = {}
    for kind, adapter in adapters.items():
        found[kind] = hit_rates(model, adapter, held_out, plan) | {
            "loss": float(np.mean(losses[kind][-50:]))}
        report(f"{kind}: {found[kind]}")
        about = {"plan": asdict(plan), "hit_rates": found[kind], "model": model_path.name}
        where = out if kind == kinds[0] else out.with_name(f"{out.stem}-{kind}{out.suffix}")
        save_bita(where, adapter.export(model, about))
    return found
