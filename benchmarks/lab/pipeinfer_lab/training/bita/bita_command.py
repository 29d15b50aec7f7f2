"""``pipeinfer train bita``: its options. Torch is imported when it runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import click

from pipeinfer.errors import UsageError
from pipeinfer_lab.training.adapt.adapt_commands import arithmetic_options
from pipeinfer_lab.training.adapt.chats import Chat, made_up, read_chats
from pipeinfer_lab.training.commands import Positive, need_packages, say


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True,
              help="Model that is to draft: a GGUF file, or a Hugging Face folder.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="Where the adapter goes (safetensors).")
@click.option("--from", "source", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Train nothing: convert masks and prompts of BiTA's authors, as safetensors "
                   "(docs/bita.md), for this model.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False),
              default=Path(".work/bita"), show_default=True,
              help="Samples and checkpoint; a later run resumes from here.")
@click.option("--text", type=click.Path(path_type=Path, exists=True), multiple=True,
              help="Files whose pieces the model continues (repeatable), instead of answers.")
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="JSONL of conversations that the model answers by itself [default: made-up "
                   "questions, for a model with a chat template; else the sources of Python's "
                   "standard library are continued].")
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--samples", default=1024, show_default=True,
              help="How many texts to generate and learn from.")
@click.option("--tokens", default=192, show_default=True,
              help="Tokens of a sample: a prompt with its answer, or of a text 64 that are given "
                   "and the rest.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True,
              help="Samples per step.")
@click.option("--groups", type=click.IntRange(1), default=24, show_default=True,
              help="Places in each sample at which masks draft.")
@click.option("--masks", default=3, show_default=True,
              help="How many tokens to draft beyond the next one.")
@click.option("--prompts", default=16, show_default=True, help="Number of learned prompt tokens.")
@click.option("--prompting", type=click.Choice(["deep", "shallow", "none"]), default="deep",
              show_default=True, help="Learned prompts before every layer, before the first layer, "
                                      "or none.")
@click.option("--rate", type=Positive(), default=1e-2, show_default=True,
              help="Highest learning rate.")
@click.option("--seed", default=0, show_default=True)
@arithmetic_options(threads=1)
def bita(model: Path, out: Path, work: Path, text: tuple[Path, ...], data: Path | None,
         source: Path | None, prompting: str, threads: int, device: str, dtype: str,
         **given: Any) -> None:
    """Tune masks and prompts with which a model guesses ahead (BiTA).

    The model answers questions by itself, and the masks learn to foresee its answers.
    """
    need_packages()
    if source is not None:
        from pipeinfer.models.bita_adapter import save_bita
        from pipeinfer_lab.training.bita.authors_file import convert

        adapter = convert(source, model, given["masks"])
        save_bita(out, adapter)
        say(f"{out}: {adapter.n_masks} masks, {adapter.n_prompts} prompts")
        return
    if text and data is not None:
        raise UsageError("give either --text or --data")
    from pipeinfer_lab.training.adapt.trainee import Arithmetic
    from pipeinfer_lab.training.bita.bita import Plan, run

    arithmetic = Arithmetic.of(device, dtype)
    try:
        plan = Plan(bfloat16=arithmetic.bfloat16, **given)
        run(model, out, work, plan, kinds=(prompting,), threads=threads, device=arithmetic.device,
            texts=[path.read_text(encoding="utf-8") for path in text],
            chats=() if text else _chats(model, data, plan.samples, plan.seed), report=say)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _chats(model: Path, data: Path | None, count: int, seed: int) -> list[Chat]:
    """What the model is to answer; nothing for a model that does not chat."""
    from pipeinfer.models.locate import open_tokenizer

    if data is not None:
        return list(itertools.islice(read_chats(data), count))
    tokenizer = open_tokenizer(model)
    try:
        return made_up(count, seed) if tokenizer.chat_template is not None else []
    finally:
        tokenizer.close()
