"""``pipeinfer train bita``: its options. Torch is imported when it runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import click

from pipeinfer.errors import UsageError


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True,
              help="Model that is to guess ahead: a GGUF file, or a Hugging Face folder.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="Where the adapter goes (safetensors).")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False),
              default=Path(".work/bita"), show_default=True,
              help="Samples and checkpoint; a later run resumes from here.")
@click.option("--text", type=click.Path(path_type=Path, exists=True), multiple=True,
              help="Files whose pieces the model continues (repeatable) [default: the sources of "
                   "Python's standard library].")
@click.option("--steps", default=1000, show_default=True)
@click.option("--samples", default=1024, show_default=True,
              help="How many texts to generate and learn from.")
@click.option("--tokens", default=192, show_default=True,
              help="Tokens of a sample, 64 of them given.")
@click.option("--masks", default=3, show_default=True,
              help="How many tokens to guess beyond the next one.")
@click.option("--prompts", default=16, show_default=True, help="Number of learned prompt tokens.")
@click.option("--prompting", type=click.Choice(["deep", "shallow", "none"]), default="deep",
              show_default=True, help="Learned prompts before every layer, before the first layer, "
                                      "or none.")
@click.option("--rate", default=1e-2, show_default=True, help="Highest learning rate.")
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=1, show_default=True)
def bita(model: Path, out: Path, work: Path, text: tuple[Path, ...], prompting: str, threads: int,
         **given: Any) -> None:
    """Tune masks and prompts with which a model guesses ahead (BiTA)."""
    missing = [name for name in ("torch", "transformers", "safetensors")
               if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"tuning needs {' and '.join(missing)}: pip install 'pipeinfer[torch]' "
                         "provides it")
    from pipeinfer.training.bita.bita import Plan, run

    try:
        run(model, out, work, Plan(**given), kinds=(prompting,), threads=threads,
            texts=[path.read_text(encoding="utf-8") for path in text],
            report=lambda line: click.echo(line, err=True))
    except ValueError as error:
        raise UsageError(str(error)) from error
