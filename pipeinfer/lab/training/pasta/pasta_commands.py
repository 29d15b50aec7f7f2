"""``pipeinfer train annotate``, ``pasta-sft``, ``pasta-bonbon``: PASTA's stages as commands.

Does not know: how a stage computes; torch is imported when a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeinfer.errors import UsageError
from pipeinfer.lab.training.adapt.adapt_commands import (
    arithmetic_options,
    need_transformers,
    sft,
    tuning_options,
)
from pipeinfer.lab.training.commands import Positive, need_torch, say

if TYPE_CHECKING:
    from pipeinfer.lab.training.pair.model import Llama
    from pipeinfer.lab.training.tasks.markup import Codec

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.option("--data", type=_FILE, help="JSONL of messages, or prompt and response.")
@click.option("--tasks", "count", type=click.IntRange(1),
              help="Annotate this many generated tasks instead.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSONL to append to.")
@click.option("--rules", is_flag=True, help="Annotate lines by rules, without a model.")
@click.option("--endpoint", help="OpenAI-compatible address, ending in /v1.")
@click.option("--model", default="default", show_default=True, help="Model to use at the endpoint.")
@click.option("--tries", type=click.IntRange(1), default=3, show_default=True,
              help="Answers to request per response.")
@click.option("--seed", default=0, show_default=True, help="Seed of the generated tasks.")
def annotate(
    data: Path | None,
    count: int | None,
    out: Path,
    rules: bool,
    endpoint: str | None,
    model: str,
    tries: int,
    seed: int,
) -> None:
    """Mark what in responses can be written in parallel (stage 1's data)."""
    from pipeinfer.lab.training.pasta import annotate as stage
    from pipeinfer.lab.training.pasta.endpoint import Endpoint

    if rules == (endpoint is not None):
        raise UsageError("give either --rules or --endpoint")
    if (data is None) == (count is None):
        raise UsageError("give either --data or --tasks")
    if data is None:
        data = out.with_suffix(".tasks.jsonl")
        stage.write_tasks(data, count or 0, seed)
    annotator = (
        stage.by_rules
        if endpoint is None
        else stage.by_endpoint(Endpoint(endpoint, model), tries=tries)
    )
    stage.annotate_file(data, out, annotator, report=say)


@click.command("pasta-sft")
@click.option("--data", type=_FILE, required=True, help="Annotated JSONL.")
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True,
              help="Model to start from: a Hugging Face folder or a GGUF file (or a checkpoint of "
                   "the task model's kind).")
@click.option("--out", type=_FOLDER, required=True, help="Adapter (or model) and checkpoint.")
@click.option("--tags", type=click.Choice(["text", "tokens"]), default="text", show_default=True,
              help="PASTA's tags in the vocabulary that is there, or as new tokens.")
@click.option("--pasta-positions", "positions", default="pred-10x", show_default=True,
              help="Positions that a block is given, for models that are decoded with the same "
                   "option: pred-10x, pred-1x, fixed or fixed:N.")
@tuning_options()
def pasta_sft(data: Path, model: Path, out: Path, tags: str, positions: str, **given: Any) -> None:
    """Fine-tune a model on annotated responses (stage 1).

    Leaves a LoRA adapter (see `merge`), or with --tune all the whole model as a folder. A GGUF file
    of the embedded task model's kind is trained whole and stays a GGUF file.
    """
    if _own_kind(model):
        if positions != "pred-10x":
            raise UsageError("models of the task model's kind are trained by pred-10x alone: leave "
                             "out --pasta-positions")
        return _sft_own_kind(data, model, out, **given)
    sft(model, data, out, method="pasta", tags=tags, positions=positions, **given)


def _sft_own_kind(data: Path, model: Path, out: Path, *, steps: int | None, batch: int,
                  rate: float | None, seed: int, **_: Any) -> None:
    need_torch()
    from pipeinfer.lab.training.pair.restore import restore
    from pipeinfer.lab.training.pasta import finetune

    network, codec = restore(model)
    _check_tags(codec, model)
    rows = finetune.examples_of(codec, data, network.config.n_ctx, say)
    plan = finetune.plan_for(steps or 200, seed, rate or 3e-4)
    finetune.finetune(network, rows, plan, out / "pasta-sft.safetensors", say, batch=batch)
    _write(out / "pasta-sft.gguf", network, codec)


def _own_kind(model: Path) -> bool:
    """Whether all tags of the task model are in the vocabulary: such a model is small."""
    if model.is_dir():
        return False
    if model.suffix != ".gguf":
        return True
    from pipeinfer.lab.training.tasks.markup import TAGS
    from pipeinfer.models.gguf import ModelFile

    known = set(ModelFile(model).texts("tokenizer.ggml.tokens"))
    return {tag.encode() for tag in TAGS} <= known


@click.command("pasta-bonbon")
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True,
              help="Stage 1's model, merged: a Hugging Face folder or GGUF; or one of the task "
                   "model's kind.")
@click.option("--out", type=_FOLDER, required=True,
              help="Adapter; or each round's model of the task model's kind.")
@click.option("--data", type=_FILE, help="What pipeinfer sample has written. For the task model's "
              "kind: JSONL with prompts [default: generated tasks].")
@click.option("--prompts", type=click.IntRange(1), default=64, show_default=True,
              help="Prompts per round.")
@click.option("--samples", default=8, show_default=True, help="Responses per prompt.")
@click.option(
    "--weight", default=2.0, show_default=True,
    help="Weight of quality against speed (lambda); 1e6: quality, and speed among equals (inf, for "
         "the task model's kind alone: quality only)."
)
@click.option("--term", type=click.Choice(["speedup", "harmonic", "arithmetic", "parallelism"]),
              default="speedup", show_default=True, help="What counts as speed: the speed-up over "
              "sequential answers, the answer's own tokens per step, or a mean of both.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=60, show_default=True,
              help="Steps per round.")
@click.option("--rate", type=Positive(), default=1e-4, show_default=True,
              help="Peak learning rate.")
@click.option("--endpoint", help="Address of a judge model; not needed for generated tasks.")
@click.option("--judge", default="default", show_default=True, help="Model to use at the endpoint.")
@click.option("--seed", default=0, show_default=True)
@click.option("--rank", type=click.IntRange(1), default=16, show_default=True,
              help="Rank of LoRA's matrices.")
@click.option("--batch", type=click.IntRange(1), default=6, show_default=True,
              help="Pairs per step.")
@click.option("--context", type=click.IntRange(1), default=2048, show_default=True,
              help="Longest answer with its prompt, in tokens.")
@arithmetic_options(threads=2)
def pasta_bonbon(  # noqa: PLR0913
    model: Path,
    out: Path,
    data: Path | None,
    prompts: int,
    samples: int,
    weight: float,
    term: str,
    rounds: int,
    steps: int,
    rate: float,
    endpoint: str | None,
    judge: str,
    seed: int,
    **given: Any,
) -> None:
    """Prefer fast and right responses over the others (stage 2).

    A model of your own learns from the file that `pipeinfer sample` has written, one round at a
    time, and leaves a LoRA adapter (see `merge`). A model of the task model's kind is sampled here.
    """
    if not weight >= 0:
        raise UsageError("--weight must not be negative")
    if not _own_kind(model):
        return _prefer(model, data, out, {
            "weight": weight, "term": term, "steps": steps, "rate": rate, "seed": seed,
            "batch": given["batch"]}, given)
    need_torch()
    from pipeinfer.lab.training.pair.restore import restore
    from pipeinfer.lab.training.pasta import rounds as stage
    from pipeinfer.lab.training.pasta.endpoint import Endpoint
    from pipeinfer.lab.training.pasta.preference import Preference

    if data is not None and endpoint is None:
        raise UsageError("--data needs a judge: give --endpoint")
    if samples < 2:
        raise UsageError("--samples must be at least 2")
    network, codec = restore(model)
    _check_tags(codec, model)
    source = (
        stage.generated(prompts, seed)
        if data is None
        else stage.judged(network, codec, data, prompts, Endpoint(str(endpoint), judge))
    )
    settings = Preference(
        weight=weight, term=term, samples=samples, steps=steps, rate=rate, seed=seed)
    for number in range(1, rounds + 1):
        stage.one_round(network, codec, source, settings, number, report=say)
        _write(out / f"pasta-bonbon-{number}.gguf", network, codec)


def _prefer(model: Path, data: Path | None, out: Path, round_: dict[str, Any],
            given: dict[str, Any]) -> None:
    need_transformers()
    from pipeinfer.lab.training.adapt.lora import LoraSettings
    from pipeinfer.lab.training.adapt.prefer import run
    from pipeinfer.lab.training.adapt.trainee import Arithmetic
    from pipeinfer.lab.training.pasta.bonbon import Round

    if data is None:
        raise UsageError("--data is needed: a file that pipeinfer sample has written with this "
                         "model")
    run(model, data, out, Round(**round_), LoraSettings(given["rank"], 2.0 * given["rank"]),
        Arithmetic.of(given["device"], given["dtype"]), threads=given["threads"],
        context=given["context"], report=say)


def _check_tags(codec: Codec, path: Path) -> None:
    try:
        codec.tags, codec.digits  # noqa: B018
    except ValueError as error:
        raise UsageError(f"{path} has no PASTA tags in its vocabulary: {error}") from error


def _write(path: Path, model: Llama, codec: Codec) -> None:
    """The model as GGUF, and the tokenizer for going on from a checkpoint."""
    from pipeinfer.lab.training.tasks.task_model import export

    export(path, model.eval(), codec, name=path.stem)
    codec.tokenizer.save(str(path.with_name("tokenizer.json")))
    say(f"wrote {path}")
