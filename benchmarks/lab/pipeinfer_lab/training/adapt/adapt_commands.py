"""``pipeinfer train baseline-sft``, ``apar-sft``, ``merge``, and options of training own models.

Does not know: how anything is computed; torch is imported when a command runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeinfer.errors import UsageError
from pipeinfer.files import check_writable
from pipeinfer_lab.training.commands import Positive, need_packages, say, several

_PATH = click.Path(path_type=Path, exists=True)
_FOLDER = click.Path(path_type=Path, file_okay=False)


def arithmetic_options(threads: int) -> Callable[..., Any]:
    """Where and in what numbers is computed, by how many threads."""
    return several(
        click.option("--device", default="auto", show_default=True,
                     help="cpu, cuda or cuda:N; auto: a GPU that torch sees."),
        click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto",
                     show_default=True,
                     help="Of products; auto: bfloat16 where the processor multiplies it."),
        click.option("--threads", type=click.IntRange(1), default=threads, show_default=True))


def tuning_options() -> Callable[..., Any]:
    """The options that `sft` takes."""
    return several(
        click.option("--tune", type=click.Choice(["lora", "all"]), default="lora",
                     show_default=True, help="LoRA with frozen weights, or all weights."),
        click.option("--rank", type=click.IntRange(1), default=16, show_default=True,
                     help="Rank of LoRA's matrices; they are scaled by 2."),
        click.option("--epochs", type=Positive(), default=4.0,
                     show_default=True, help="How often every answer is learnt."),
        click.option("--steps", type=click.IntRange(1), help="Budget in steps instead."),
        click.option("--batch", type=click.IntRange(1), default=8, show_default=True,
                     help="Answers per step."),
        click.option("--rate", type=Positive(),
                     help="Highest learning rate [default: 5e-4 for LoRA, 1e-5 for all weights]."),
        click.option("--context", type=click.IntRange(0), default=2048, show_default=True,
                     help="Longest answer with its prompt, in tokens; 0: what the model knows."),
        click.option("--micro", type=click.IntRange(1), default=4096, show_default=True,
                     help="Tokens computed at once: bounds memory."),
        click.option("--seed", default=0, show_default=True),
        arithmetic_options(threads=2))


def _conversation_options() -> Callable[..., Any]:
    """What a model is fine-tuned on, what it starts from, and where it goes."""
    return several(
        click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False),
                     required=True, help="JSONL of conversations; PASTA's marks are left out."),
        click.option("--model", type=_PATH, required=True,
                     help="Model to start from: a Hugging Face folder, or a GGUF file."),
        click.option("--out", type=_FOLDER, required=True,
                     help="Adapter (or model) and checkpoint."))


def sft(model: Path, data: Path, out: Path, *, method: str, tags: str = "text",
        positions: str = "pred-10x", **given: Any) -> None:
    """Fine-tune a folder or a GGUF file; given: what `tuning_options` gives."""
    need_packages()
    from pipeinfer_lab.training.adapt.lora import LoraSettings
    from pipeinfer_lab.training.adapt.sft import Sft, run
    from pipeinfer_lab.training.adapt.tune import Tuning

    lora = LoraSettings(given["rank"], 2.0 * given["rank"]) if given["tune"] == "lora" else None
    rate = given["rate"] or (1e-5 if lora is None else 5e-4)
    tuning = Tuning(batch=given["batch"], epochs=given["epochs"], steps=given["steps"], rate=rate,
                    seed=given["seed"], tokens=given["micro"])
    run(Sft(model, data, out, method, lora, tuning, tags, positions, given["device"],
            given["dtype"], given["threads"], given["context"]), report=say)


@click.command("baseline-sft")
@_conversation_options()
@tuning_options()
def baseline_sft(model: Path, data: Path, out: Path, **given: Any) -> None:
    """Fine-tune on the same answers without marks: what PASTA is compared with."""
    sft(model, data, out, method="plain", **given)


@click.command("apar-sft")
@_conversation_options()
@tuning_options()
def apar_sft(model: Path, data: Path, out: Path, **given: Any) -> None:
    """Fine-tune for APAR: details of list items and paragraphs are written by children.

    The vocabulary gets two tokens. Leaves a LoRA adapter (see `merge`), or with --tune all the
    whole model as a folder.
    """
    sft(model, data, out, method="apar", tags="tokens", **given)


@click.command()
@click.option("--model", type=_PATH, required=True,
              help="Hugging Face folder or GGUF file that the adapter was trained for.")
@click.option("--adapter", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="LoRA folder; without one the model is only converted.")
@click.option("--out", type=click.Path(path_type=Path), required=True,
              help="A new folder, or a file that ends in .gguf.")
@click.option("--like", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="For a .gguf: file of the same model whose metadata and vocabulary are taken "
                   "[default: --model, if that is one].")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16", "float32"]),
              help="Of the matrices [default: float16 in a .gguf; in a folder what the model's "
                   "has, float32 if that is a GGUF file].")
def merge(model: Path, adapter: Path | None, out: Path, like: Path | None, dtype: str | None
          ) -> None:
    """Write a model with an adapter added, as a folder or as GGUF; also converts GGUF to a folder.

    Quantised weights are dequantised first, so a merged file is larger than the one it came from.
    """
    need_packages()
    import torch

    from pipeinfer_lab.training.adapt.lora import load_adapter
    from pipeinfer_lab.training.adapt.merged import Merged
    from pipeinfer_lab.training.adapt.write_folder import write_folder
    from pipeinfer_lab.training.adapt.write_gguf import write_gguf

    if out.suffix == ".gguf":
        like = like or (None if model.is_dir() else model)
        if like is None:
            raise UsageError("a .gguf needs its vocabulary from one: give --like with a GGUF file "
                             "of this model before training, or write a folder")
    elif like is not None:
        raise UsageError("--like is for an --out that ends in .gguf")
    if out.resolve() in [path.resolve() for path in (model, adapter, like) if path is not None]:
        raise UsageError(f"--out {out} would overwrite what is read: give another name")
    if like is not None:
        check_writable(out)
    merged = Merged(model, None if adapter is None else load_adapter(adapter))
    if like is not None:
        write_gguf(out, merged, like, dtype or "float16")
    else:
        write_folder(out, merged, None if dtype is None else getattr(torch, dtype))
    say(f"wrote {out}")
