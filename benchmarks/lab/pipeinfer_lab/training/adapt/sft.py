"""Fine-tunes a model that somebody has: rows, training, and what is left in the output folder.

Does not know: the command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeinfer.errors import UsageError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer_lab.training.adapt import apar_rows
from pipeinfer_lab.training.adapt.chats import read_chats
from pipeinfer_lab.training.adapt.lora import LoraAdapter, LoraSettings, save_adapter
from pipeinfer_lab.training.adapt.merged import Merged, first_free
from pipeinfer_lab.training.adapt.rows import rows_of
from pipeinfer_lab.training.adapt.trainee import Arithmetic, Trainee
from pipeinfer_lab.training.adapt.tune import Tuning, tune
from pipeinfer_lab.training.adapt.wording import TAGS, Wording
from pipeinfer_lab.training.adapt.write_folder import write_folder
from pipeinfer_lab.training.pasta.pasta import trained_spacing

CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class Sft:
    """One run. method: "pasta", "apar", or "plain" without marks. lora: None learns all weights.
    tags: "text", or "tokens" of their own. positions: PASTA's rule for them. context: longest row
    (0: what the model knows)."""

    model: Path
    data: Path
    out: Path
    method: str
    lora: LoraSettings | None
    tuning: Tuning
    tags: str = "text"
    positions: str = "pred-10x"
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    context: int = 0


def run(sft: Sft, report: Callable[[str], None] = print, stop_after: int | None = None
        ) -> list[float]:
    """Losses of every step. Leaves a LoRA adapter in peft's format in `out`, or the whole model;
    also where it was interrupted; its checkpoint goes on with the same command. Raises UsageError
    and ModelError."""
    spacing = trained_spacing(sft.positions)
    torch.set_num_threads(sft.threads)
    arithmetic = Arithmetic.of(sft.device, sft.dtype, all_weights=sft.lora is None)
    trainee = Trainee(sft.model, arithmetic, sft.lora, seed=sft.tuning.seed)
    tokenizer = open_tokenizer(sft.model)
    try:
        texts: dict[str, int] = {}
        tags = {"pasta": TAGS, "apar": apar_rows.TAGS}.get(sft.method, ())
        known = [tag for tag in tags if len(tokenizer.split(tag, special=True)) == 1]
        # another round of APAR begins with the model that the first has left
        if sft.tags == "tokens" and tags and not (sft.method == "apar" and len(known) == len(tags)):
            plain = Wording(tokenizer)
            first = first_free(sft.model)
            if known:
                raise UsageError(f"{sft.model} has a token for {known[0]!r} already: --tags text "
                                 "uses it")
            texts = {tag: first + k for k, tag in enumerate(tags)}
            trainee.add_tokens({tag: plain.tagged(tag) for tag in tags}, first)
        rows = rows_of(Wording(tokenizer, texts, spacing), read_chats(sft.data),
                       min(trainee.context, sft.context or trainee.context),
                       method=sft.method, report=report)
    finally:
        tokenizer.close()
    count = sum(p.numel() for p in trainee.learnt.values())
    report(f"learns {count / 1e6:.2f} M weights on {arithmetic.device}, products in "
           f"{'bfloat16' if arithmetic.bfloat16 else 'float32'}")
    length = sft.tuning.length(len(rows))
    losses = tune(trainee, rows, sft.tuning, sft.out / CHECKPOINT, report=report,
                  stop_after=stop_after)
    if stop_after is None and losses:
        _leave(sft, trainee, {"rows": len(rows), "steps": f"{len(losses)} of {length}",
                              "method": sft.method, "tags": sft.tags,
                              "positions": sft.positions})
        (sft.out / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
        report(f"wrote {sft.out}: loss {_mean(losses[:10]):.3f} at first, "
               f"{_mean(losses[-10:]):.3f} at last")
    return losses


def _leave(sft: Sft, trainee: Trainee, about: dict[str, Any]) -> None:
    weights = {name: p.detach() for name, p in trainee.learnt.items()
               if not name.startswith("tokens.")}
    if sft.lora is not None:
        save_adapter(sft.out, LoraAdapter(sft.lora, weights, str(sft.model), trainee.tokens, about))
        return
    tokens = None if trainee.tokens is None else LoraAdapter(LoraSettings(), {}, "",
                                                             trainee.tokens)
    write_folder(sft.out, Merged(sft.model, tokens, weights))


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
