"""Makes the embedded task model: tokenizer, training on generated tasks, GGUF file, report.

Every step leaves its result in the work directory and is skipped when that is there, so the same
command resumes after an interruption.

Does not know: how examples are built or a step computes (see their modules).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from pipeinfer.lab.training.minimise import Progress
from pipeinfer.lab.training.pair import loop
from pipeinfer.lab.training.pair.export import ModelCard, write_gguf
from pipeinfer.lab.training.pair.loop import Plan, optimise
from pipeinfer.lab.training.pair.model import Llama, LlamaConfig
from pipeinfer.lab.training.pair.restore import load_model, restore
from pipeinfer.lab.training.pair.tokenizer import load
from pipeinfer.lab.training.tasks import (
    batches,
    circuits,
    formats,
    markup,
    programs,
    reference,
    tasks,
    words,
)
from pipeinfer.lab.training.tasks.markup import Codec

#: Of the tasks and formats; files of another version were trained on other texts.
VERSION = "1"
#: Eight layers, since it is cut into up to eight pipeline stages.
SHAPE = LlamaConfig(
    n_layer=8, n_embd=192, n_head=3, n_head_kv=3, n_ff=384, n_ctx=1024, rope_base=1e6
)
#: More than the words of the tasks ever need; the tokenizer stops when nothing is left to merge.
MAX_VOCAB = 4096
#: Tasks that the tokenizer reads: every word occurs many times in them.
TOKENIZER_TASKS = 6000
PLAN = Plan(steps=1, matrix_lr=0.008, other_lr=1e-3)


@dataclass(frozen=True, slots=True)
class Settings(loop.Settings):
    """Settings of one run of the `tasks` command."""

    plan: Plan = PLAN
    shape: LlamaConfig = SHAPE
    batch_tokens: int = 2048
    #: Fraction of the budget by which lists grow to their full length.
    ramp: float = 0.4
    #: Begin with attention heads that look facts up.
    circuits: bool = True
    #: A task model to go on from, with tasks of full size; None: begin anew.
    start: Path | None = None
    #: PASTA's examples with one item to a promise.
    one_each: bool = False
    #: Held-out tasks to decode per kind.
    held_out: Mapping[str, int] = field(
        default_factory=lambda: {"retrieval": 200} | dict.fromkeys(tuple(tasks.KINDS)[1:], 60)
    )


def texts(seed: int, count: int) -> Iterator[str]:
    """What the tokenizer learns from: questions, answers, titles, templates of training tasks."""
    source = tasks.stream([seed, 2])
    yield from (f"{name}\n" for name in ("system", "user", "assistant"))
    for _ in range(count):
        task = next(source)
        yield f"{task.question}\n"
        yield task.answer
        yield "\n".join(f"{n}. {item.title}" for n, item in enumerate(task.items, 1))
        yield " ".join(item.title for item in task.items)
        yield f"{markup.SOT_POINT}\n{markup.SOT_OUTLINE}\n{words.PREAMBLE}\n\n"
        yield from markup.SYSTEM.values()


def codec_at(work: Path, seed: int) -> Codec:
    """The tokenizer of a work directory, trained when it is not there."""
    path = work / "tokenizer.json"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        markup.train_tokenizer(texts(seed, TOKENIZER_TASKS), MAX_VOCAB).save(str(path))
    return Codec(load(path))


def titles(codec: Codec) -> tuple[list[int], list[int]]:
    """Ids of the words that open a sentence, without and with a leading blank."""
    pools = (*words.NAMES, *words.GOODS, *words.SEGMENTS, *words.ASPECTS)
    return [codec.one(word) for word in pools], [codec.one(f" {word}") for word in pools]


def fit(
    settings: Settings,
    codec: Codec,
    report: Callable[[str], None],
    *,
    stop_after: int | None = None,
) -> tuple[Llama, Progress]:
    """Train, or go on training, the model of the work directory."""
    torch.set_num_threads(settings.threads)
    model = _begun(settings, codec)
    report(f"{model.parameter_count() / 1e6:.2f} M parameters, {model.config.n_vocab} tokens")
    plan = replace(
        settings.plan, minutes=settings.minutes, steps=settings.steps, seed=settings.seed
    )
    if plan.compile:
        for block in model.blk:
            block.compile(dynamic=True)
    objective = batches.objective(
        model,
        codec,
        settings.seed,
        settings.batch_tokens,
        ramp=0.0 if settings.start else settings.ramp,
        bfloat16=plan.bfloat16,
        one_each=settings.one_each,
    )
    checkpoint = settings.work / "task.safetensors"
    progress = optimise(model, plan, checkpoint, objective, report=report, stop_after=stop_after)
    return model, progress


def _begun(settings: Settings, codec: Codec) -> Llama:
    """What training begins with."""
    if settings.start is not None:
        return restore(settings.start)[0]
    model = Llama(replace(settings.shape, n_vocab=codec.tokenizer.get_vocab_size()))
    model.reset(settings.seed, embedding_scale=0.04)
    if settings.circuits:
        circuits.lay_out(model, *titles(codec), settings.seed)
    return model


def evaluate(
    model: Llama, codec: Codec, seed: int, counts: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Greedy reference decoding of held-out tasks, by ``format/kind``: ``exact`` match, mean
    ``score``, mean ``steps``, and ``speedup`` (geometric mean of plain steps over steps)."""
    result: dict[str, dict[str, float]] = {}
    for kind, count in counts.items():
        source = tasks.stream([seed, 4], held_out=True, kind=kind)
        asked = [next(source) for _ in range(count)]
        base: np.ndarray | None = None
        for name in formats.FORMATS:
            started = [programs.start(name, codec, task.question) for task in asked]
            outcomes = reference.run(model, started)
            pairs = list(zip(asked, outcomes, strict=True))
            steps = np.array([outcome.steps for outcome in outcomes])
            base = steps if base is None else base
            result[f"{name}/{kind}"] = {
                "exact": float(np.mean([tasks.exact_match(t, o.text) for t, o in pairs])),
                "score": float(np.mean([tasks.score(t, o.text) for t, o in pairs])),
                "steps": float(steps.mean()),
                "speedup": float(np.exp(np.log(base / steps).mean())),
            }
    return result


def metadata() -> dict[str, str]:
    """What the file tells a decomposer: the system message or template of each format."""
    keys = {name: f"pipeinfer.decompose.{name}" for name in ("plain", "pasta", "pdos", "apar")}
    keys["sot"] = "pipeinfer.decompose.sot.system"
    return {
        "pipeinfer.tasks.version": VERSION,
        "pipeinfer.decompose.sot.outline": markup.SOT_OUTLINE,
        "pipeinfer.decompose.sot.point": markup.SOT_POINT,
    } | {keys[name]: message for name, message in markup.SYSTEM.items()}


def export(path: Path, model: Llama, codec: Codec, name: str = "pipeinfer embedded tasks") -> None:
    """Write a task model as GGUF, formats included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    card = ModelCard(
        name=name,
        description="Answers generated tasks in formats that decode in parallel; nothing else.",
        license="MIT",
    )
    write_gguf(path, model, codec.tokenizer, card, tags=len(markup.TAGS), metadata=metadata())


def run(settings: Settings, report: Callable[[str], None] = print) -> dict[str, object]:
    """Train, write ``task.gguf``, evaluate, write ``tasks.json``; returns the report."""
    codec = restore(settings.start)[1] if settings.start else \
        codec_at(settings.work, settings.seed)
    _, progress = fit(settings, codec, report)
    model = load_model(settings.work / "task.safetensors").eval()
    export(settings.out / "task.gguf", model, codec)
    result: dict[str, object] = {
        "version": VERSION,
        "torch": torch.__version__,
        "seed": settings.seed,
        "parameters": model.parameter_count(),
        "shape": model.config.to_dict(),
        "training": asdict(progress),
        "held_out": evaluate(model, codec, settings.seed, settings.held_out),
    }
    text = json.dumps(result, indent=2)
    (settings.out / "tasks.json").write_text(text + "\n", encoding="utf-8")
    report(text)
    return result
