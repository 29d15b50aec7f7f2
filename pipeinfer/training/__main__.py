"""``python -m pipeinfer.training``: the training commands."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def main() -> None:
    """Train the models that pipeinfer ships or adapts."""


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
    from pipeinfer.training.embedded import Settings, run
    from pipeinfer.training.loop import Plan

    if (minutes is None) == (steps is None):
        raise click.UsageError("give either --minutes or --steps")
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
    run(settings, report=lambda line: click.echo(line, err=True))


if __name__ == "__main__":
    main()
