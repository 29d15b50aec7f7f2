"""PASTA stage 2: sample responses, score them by speed and quality, prefer the best (section 4).

Does not know: files, the command line, what a quality function asks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeinfer.host import multiplies_bfloat16
from pipeinfer.lab.training.minimise import Schedule, adamw, minimise
from pipeinfer.lab.training.pair.model import Llama
from pipeinfer.lab.training.pasta import bonbon, pasta
from pipeinfer.lab.training.pasta.bonbon import Round, Scored
from pipeinfer.lab.training.tasks import batches, formats, programs, reference
from pipeinfer.lab.training.tasks.formats import prompt_ids
from pipeinfer.lab.training.tasks.markup import SYSTEM, Codec

#: prompt, response text -> quality
Quality = Callable[[str, str], float]


@dataclass(frozen=True, slots=True)
class Preference(Round):
    """A round that samples as well: ``samples`` responses to each prompt."""

    samples: int = 8
    #: where the processor multiplies it in hardware; elsewhere float32 is several times as fast
    bfloat16: bool = field(default_factory=multiplies_bfloat16)


@dataclass(frozen=True, slots=True)
class Pool:
    """All scored samples of one prompt (ids of the rendered prompt)."""

    prompt: tuple[int, ...]
    samples: tuple[Scored, ...]


def flat_of(codec: Codec, prompt: Sequence[int], tokens: Sequence[int]) -> pasta.Flat:
    """The layout of a decoded response; ValueError where it is malformed."""
    return pasta.parse([*prompt, *tokens], len(prompt), codec.tags, codec.digits)


def sample(
    model: Llama,
    codec: Codec,
    prompts: Sequence[str],
    quality: Quality,
    *,
    samples: int,
    seed: int,
    baseline: Sequence[int] | None = None,
    group: int = 64,
) -> list[Pool]:
    """``samples`` responses per prompt at temperature 1, with their scores.

    ``baseline`` gives the sequential model's response lengths; without it the model's own greedy
    sequential answers are taken.
    """
    if baseline is None:
        baseline = sequential_lengths(model, codec, prompts)
    asked = [prompt for prompt in prompts for _ in range(samples)]
    started = [programs.start("pasta", codec, prompt) for prompt in asked]
    outcomes = reference.run(model, started, reference.sampler(seed), group=group)
    pools = []
    for number, prompt in enumerate(prompts):
        ids = prompt_ids(codec, SYSTEM["pasta"], prompt)
        mine = outcomes[number * samples : (number + 1) * samples]
        scored = [
            Scored(o.tokens, baseline[number] / o.steps, quality(prompt, o.text),
                   pasta.parallelism(flat))
            for o in mine
            if (flat := _trainable(codec, ids, o.tokens)) is not None
        ]
        pools.append(Pool(tuple(ids), tuple(scored)))
    return pools


def _trainable(codec: Codec, prompt: Sequence[int], tokens: Sequence[int]) -> pasta.Flat | None:
    """A response's layout; None for one that was cut off inside a tag."""
    try:
        return flat_of(codec, prompt, tokens)
    except ValueError:
        return None


def sequential_lengths(model: Llama, codec: Codec, prompts: Sequence[str]) -> list[int]:
    """Tokens of the greedy sequential answers."""
    started = [programs.start("plain", codec, prompt) for prompt in prompts]
    return [outcome.steps for outcome in reference.run(model, started)]


def pairs_of(pools: Sequence[Pool], weight: float, term: str = "speedup"
             ) -> list[tuple[tuple[int, ...], Scored, Scored]]:
    """Prompt, best and worst of every pool whose samples differ in score."""
    found = []
    for pool in pools:
        chosen = bonbon.pair(pool.samples, weight, term) if len(pool.samples) > 1 else None
        if chosen is not None:
            found.append((pool.prompt, *chosen))
    return found


def prefer(
    model: Llama,
    codec: Codec,
    pools: Sequence[Pool],
    settings: Preference,
    report: Callable[[str], None] = print,
) -> list[float]:
    """Train ``model`` on best and worst of each pool, against itself as it comes in; returns the
    loss of every step. AdamW, the rate falls linearly to 0."""
    pairs = pairs_of(pools, settings.weight, settings.term)
    if not pairs:
        report("no two samples of a prompt differ in score: nothing to learn")
        return []
    initial = copy.deepcopy(model).eval()

    def objective(step: int, spent: float) -> Iterator[tuple[Tensor, int]]:  # noqa: ARG001
        some = batches.chosen(pairs, settings.batch, settings.seed, step, whole=True)
        tokens = sum(len(prompt) + len(s.tokens) for prompt, *both in some for s in both)
        yield _pair_loss(model, initial, codec, some, settings), tokens

    parameters = list(model.parameters())
    model.train()
    losses = minimise(objective, Schedule(steps=settings.steps),
                      [adamw(parameters, settings.rate)], [parameters], report=report)
    model.eval()
    return losses


def _pair_loss(
    model: Llama,
    initial: Llama,
    codec: Codec,
    chosen: Sequence[tuple[tuple[int, ...], Scored, Scored]],
    settings: Preference,
) -> Tensor:
    """BoNBoN's loss of some pairs under the masks of the training layout."""
    examples = [
        formats.pasta_example(flat_of(codec, prompt, scored.tokens))
        for number in (0, 1)
        for prompt, *both in chosen
        for scored in [both[number]]
    ]
    batch = batches.collate(examples)
    with torch.no_grad():
        before = batches.log_probabilities(initial, batch, bfloat16=settings.bfloat16)
    now = batches.log_probabilities(model, batch, bfloat16=settings.bfloat16)
    half = len(chosen)
    return bonbon.loss(
        now[:half], now[half:], before[:half] - before[half:], settings.samples, settings.alpha
    )
