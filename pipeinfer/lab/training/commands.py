"""What the training commands share: checks, options and a voice.

Does not know: any command.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from pipeinfer.errors import UsageError


class Positive(click.FloatRange):
    """A finite number above 0."""

    def __init__(self) -> None:
        super().__init__(0, min_open=True)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


def need_torch(extra: str = "train", *further: str) -> None:
    """Raise UsageError with what to install where torch, safetensors or `further` packages, which
    the extra installs, are missing."""
    missing = [name for name in ("torch", "safetensors", *further)
               if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"training needs {' and '.join(missing)}: pip install "
                         f"'pipeinfer[{extra}]' provides it")


def say(line: str) -> None:
    """Progress goes to standard error."""
    click.echo(line, err=True)


def run_options(work: str, stored: str, threads: int) -> Callable[..., Any]:
    """The options of a run with a budget; work, threads: defaults; stored: what is in `work`."""
    return several(
        click.option("--work", type=click.Path(path_type=Path, file_okay=False),
                     default=Path(work), show_default=True,
                     help=f"{stored}; a later run resumes from here."),
        click.option("--minutes", type=Positive(), help="Budget for all training together."),
        click.option("--steps", type=click.IntRange(1),
                     help="Budget in steps instead (exactly repeatable)."),
        click.option("--seed", type=int, default=0, show_default=True),
        click.option("--threads", type=click.IntRange(1), default=threads, show_default=True))


def answer_options() -> Callable[..., Any]:
    """The options of a run that learns from the target's answers."""
    return several(
        click.option("--answer-minutes", type=Positive(), default=30.0, show_default=True,
                     help="How long the target generates answers."),
        click.option("--texts", type=click.IntRange(1),
                     help="So many texts instead (exactly repeatable)."),
        click.option("--length", type=click.IntRange(64), default=384, show_default=True,
                     help="Tokens of a text, at most."),
        click.option("--slots", type=click.IntRange(1), default=128, show_default=True,
                     help="Texts that grow at once; each takes memory for its keys and values."))


def several(*options: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds some options."""
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def one_budget(minutes: float | None, steps: int | None) -> None:
    """Exactly one kind of budget."""
    if (minutes is None) == (steps is None):
        raise UsageError("give either --minutes or --steps")


def time_left(seconds: float) -> str:
    """About how long it still takes, in words."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{round(seconds)} s left"
    return f"{minutes} min left" if minutes < 100 else f"{minutes / 60:.1f} h left"
