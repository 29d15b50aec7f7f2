"""``pipeinfer train``: the training commands.

Does not know: what a command does; torch is imported when one runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeinfer.lab.training.adapt.adapt_commands import apar_sft, baseline_sft, merge
from pipeinfer.lab.training.bita.bita_command import bita
from pipeinfer.lab.training.commands import (
    compile_option,
    need_torch,
    one_budget,
    run_options,
    say,
)
from pipeinfer.lab.training.draft.draft_command import draft
from pipeinfer.lab.training.eagle3.eagle_command import eagle3
from pipeinfer.lab.training.pasta.pasta_commands import annotate, pasta_bonbon, pasta_sft

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group()
def main() -> None:
    """Train the models that pipeinfer ships or adapts."""


@main.command()
@click.option("--out", type=_FOLDER, required=True, help="Where task.gguf and tasks.json go.")
@run_options(".work/tasks", "Checkpoint and tokenizer", threads=1)
@click.option("--start", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Task model to go on from (GGUF), at a quarter of the learning rates.")
@click.option("--one-each", is_flag=True,
              help="In PASTA's examples every independent item has a promise of its own.")
@compile_option("about a third faster")
def tasks(compile_blocks: bool, **given: Any) -> None:
    """Train the model for generated tasks and write it as GGUF."""
    one_budget(given["minutes"], given["steps"])
    need_torch()
    from pipeinfer.lab.training.tasks.task_model import PLAN, Settings, run

    slower = 4 if given["start"] else 1
    run(Settings(**given, plan=replace(
        PLAN, compile=compile_blocks, matrix_lr=PLAN.matrix_lr / slower,
        other_lr=PLAN.other_lr / slower)), report=say)


@main.command()
@click.option("--out", type=_FOLDER, required=True, help="Where target.gguf and draft.gguf go.")
@run_options(".work/embedded", "Checkpoints and token streams", threads=2)
@compile_option("about a sixth faster")
@click.option("--eval-tokens", type=int, default=131072, show_default=True,
              help="Held-out tokens to score.")
@click.option("--stdlib", "root", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Standard library to learn from. Default: that of this interpreter.")
def embedded(compile_blocks: bool, **given: Any) -> None:
    """Train the embedded target and draft and write them as GGUF."""
    one_budget(given["minutes"], given["steps"])
    need_torch()
    from pipeinfer.lab.training.pair.embedded import Settings, run
    from pipeinfer.lab.training.pair.loop import Plan

    run(Settings(**given, plan=Plan(steps=1, compile=compile_blocks)), report=say)


for _command in (annotate, pasta_sft, apar_sft, baseline_sft, pasta_bonbon, merge, bita, draft,
                 eagle3):
    main.add_command(_command)

if __name__ == "__main__":
    main()
