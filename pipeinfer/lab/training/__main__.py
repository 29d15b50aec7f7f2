"""``pipeinfer train``: the training commands.

Does not know: what a command does; torch is imported when one runs.
"""

from __future__ import annotations

from pathlib import Path

import click

from pipeinfer.lab.training.adapt.adapt_commands import baseline_sft, merge
from pipeinfer.lab.training.bita.bita_command import bita
from pipeinfer.lab.training.commands import need_torch, one_budget, say
from pipeinfer.lab.training.draft.draft_command import draft
from pipeinfer.lab.training.pasta.pasta_commands import annotate, pasta_bonbon, pasta_sft


@click.group()
def main() -> None:
    """Train the models that pipeinfer ships or adapts."""


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Where task.gguf and tasks.json go.",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".work/tasks"),
    show_default=True,
    help="Checkpoint and tokenizer; a later run resumes from here.",
)
@click.option("--minutes", type=float, help="Budget for training.")
@click.option("--steps", type=int, help="Budget in steps instead (exactly repeatable).")
@click.option("--start", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Task model to go on from (GGUF), at a quarter of the learning rates.")
@click.option("--one-each", is_flag=True,
              help="In PASTA's examples every independent item has a promise of its own.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option(
    "--compile/--no-compile",
    "compile_blocks",
    default=False,
    show_default=True,
    help="Compile the layers: about a third faster, needs a C++ compiler.",
)
def tasks(
    out: Path,
    work: Path,
    minutes: float | None,
    steps: int | None,
    start: Path | None,
    one_each: bool,
    seed: int,
    threads: int,
    compile_blocks: bool,
) -> None:
    """Train the model for generated tasks and write it as GGUF."""
    one_budget(minutes, steps)
    need_torch()
    from dataclasses import replace

    from pipeinfer.lab.training.tasks.task_model import Settings, run

    settings = Settings(out=out, work=work, minutes=minutes, steps=steps, seed=seed,
                        threads=threads, start=start, one_each=one_each)
    plan, slower = settings.plan, 4 if start else 1
    run(replace(settings, plan=replace(
        plan, compile=compile_blocks, matrix_lr=plan.matrix_lr / slower,
        other_lr=plan.other_lr / slower)), report=say)


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Where target.gguf and draft.gguf go.",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".work/embedded"),
    show_default=True,
    help="Checkpoints and token streams; a later run resumes from here.",
)
@click.option("--minutes", type=float, help="Budget for all training together.")
@click.option("--steps", type=int, help="Budget in steps instead (exactly repeatable).")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=int, default=2, show_default=True)
@click.option(
    "--compile/--no-compile",
    "compile_blocks",
    default=False,
    show_default=True,
    help="Compile the layers: about a sixth faster, needs a C++ compiler.",
)
@click.option(
    "--eval-tokens", type=int, default=131072, show_default=True, help="Held-out tokens to score."
)
@click.option(
    "--stdlib",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Standard library to learn from. Default: that of this interpreter.",
)
def embedded(
    out: Path,
    work: Path,
    minutes: float | None,
    steps: int | None,
    seed: int,
    threads: int,
    compile_blocks: bool,
    eval_tokens: int,
    stdlib: Path | None,
) -> None:
    """Train the embedded target and draft and write them as GGUF."""
    one_budget(minutes, steps)
    need_torch()
    from pipeinfer.lab.training.pair.embedded import Settings, run
    from pipeinfer.lab.training.pair.loop import Plan

    settings = Settings(
        out=out,
        work=work,
        minutes=minutes,
        steps=steps,
        seed=seed,
        threads=threads,
        root=stdlib,
        eval_tokens=eval_tokens,
        plan=Plan(steps=1, compile=compile_blocks),
    )
    run(settings, report=say)


for _command in (annotate, pasta_sft, baseline_sft, pasta_bonbon, merge, bita, draft):
    main.add_command(_command)

if __name__ == "__main__":
    main()
