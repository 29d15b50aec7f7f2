"""`pipeinfer train eagle3`.

Independent of how anything is trained; torch is imported when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeinfer.errors import UsageError
from pipeinfer.lab.training.commands import answer_options, need_torch, one_budget, run_options, say


@click.command()
@click.argument("target", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="The head, a GGUF file.")
@run_options(".work/eagle3", "Answers with hidden rows, checkpoint and report", threads=2)
@answer_options()
@click.option("--taps", help="Three layers of the target whose input rows the head reads, as "
              "2,15,29. Default: the third, the middle one and the third last.")
@click.option("--depths", type=click.IntRange(1, 8), default=3, show_default=True,
              help="Steps of the head's chain that are taught.")
@click.option("--vocabulary", type=click.IntRange(64), default=8192, show_default=True,
              help="Tokens that the head can propose, the most frequent ones of the answers.")
@click.option("--ff", type=click.IntRange(0), default=0,
              help="Columns of the head's feed-forward part. Default: the target's.")
def eagle3(**given: Any) -> None:
    """Train an EAGLE-3 head for TARGET, a GGUF file of the llama architecture with tied embeddings.

    The head is one layer that reads hidden rows of the target and proposes tokens. It learns from
    answers that the target gives here, so it needs no data. The file has no embedding, output
    matrix and vocabulary: they are the target's.
    """
    one_budget(given["minutes"], given["steps"])
    need_torch()
    if given["out"].suffix != ".gguf":
        raise UsageError("--out must end in .gguf")
    if given["taps"] is not None:
        given["taps"] = _numbers(given["taps"])
    from pipeinfer.lab.training.eagle3.own_head import HeadSettings, run

    run(HeadSettings(**given), report=say)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) != 3:
        raise UsageError(f"--taps {text}: give three numbers, as 2,15,29")
    return found
