"""``pipeinfer train annotate``, ``pasta-sft``, ``pasta-bonbon``: PASTA's stages as commands.

Does not know: how a stage computes; torch is imported when a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeinfer.errors import UsageError
from pipeinfer_lab.training.adapt.adapt_commands import (
    arithmetic_options,
    sft,
    tuning_options,
)
from pipeinfer_lab.training.commands import Positive, need_packages, say

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
    from pipeinfer_lab.training.pasta import annotate as stage
    from pipeinfer_lab.training.pasta.endpoint import Endpoint

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
              help="Model to start from: a Hugging Face folder or a GGUF file.")
@click.option("--out", type=_FOLDER, required=True, help="Adapter (or model) and checkpoint.")
@click.option("--tags", type=click.Choice(["text", "tokens"]), default="text", show_default=True,
              help="PASTA's tags in the vocabulary that is there, or as new tokens.")
@click.option("--pasta-positions", "positions", default="pred-10x", show_default=True,
              help="Positions that a block is given, for models that are decoded with the same "
                   "option: pred-10x, pred-1x, fixed or fixed:N.")
@tuning_options()
def pasta_sft(data: Path, model: Path, out: Path, tags: str, positions: str, **given: Any) -> None:
    """Fine-tune a model on annotated responses (stage 1).

    Leaves a LoRA adapter (see `merge`), or with --tune all the whole model as a folder.
    """
    sft(model, data, out, method="pasta", tags=tags, positions=positions, **given)


@click.command("pasta-bonbon")
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True,
              help="Stage 1's model, merged: a Hugging Face folder or a GGUF file.")
@click.option("--out", type=_FOLDER, required=True, help="Adapter.")
@click.option("--data", type=_FILE, required=True,
              help="What pipeinfer sample has written with this model.")
@click.option("--reference", type=click.Path(path_type=Path, exists=True),
              help="Model that the loss compares with: the paper's is Pasta-SFT in every round "
                   "[default: --model].")
@click.option(
    "--weight", type=click.FloatRange(0), default=2.0, show_default=True,
    help="Weight of quality against speed (lambda); 1e6: quality, and speed among equals."
)
@click.option("--term", type=click.Choice(["speedup", "harmonic", "arithmetic", "parallelism"]),
              default="speedup", show_default=True, help="What counts as speed: the speed-up over "
              "sequential answers, the answer's own tokens per step, or a mean of both.")
@click.option("--steps", type=click.IntRange(1), default=60, show_default=True)
@click.option("--rate", type=Positive(), default=1e-4, show_default=True,
              help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True)
@click.option("--rank", type=click.IntRange(1), default=16, show_default=True,
              help="Rank of LoRA's matrices.")
@click.option("--batch", type=click.IntRange(1), default=6, show_default=True,
              help="Pairs per step.")
@click.option("--context", type=click.IntRange(1), default=2048, show_default=True,
              help="Longest answer with its prompt, in tokens.")
@arithmetic_options(threads=2)
def pasta_bonbon(model: Path, out: Path, data: Path, rank: int, **given: Any) -> None:
    """Prefer fast and right responses over the others (stage 2).

    Learns from the file that `pipeinfer sample` has written, one round at a time, and leaves a LoRA
    adapter (see `merge`).
    """
    need_packages()
    from pipeinfer_lab.training.adapt.lora import LoraSettings
    from pipeinfer_lab.training.adapt.prefer import run
    from pipeinfer_lab.training.adapt.trainee import Arithmetic
    from pipeinfer_lab.training.pasta.bonbon import Round

    settings = Round(**{name: given[name]
                        for name in ("weight", "term", "steps", "rate", "seed", "batch")})
    run(model, data, out, settings, LoraSettings(rank, 2.0 * rank),
        Arithmetic.of(given["device"], given["dtype"]), threads=given["threads"],
        context=given["context"], reference=given["reference"], report=say)
