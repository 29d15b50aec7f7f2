"""What the training commands share: checks and a voice.

Does not know: any command.
"""

from __future__ import annotations

import importlib.util

import click

from pipeinfer.errors import UsageError


def need_torch() -> None:
    """Say what to install where torch or the tokenizers package is missing."""
    missing = [name for name in ("torch", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"training needs {' and '.join(missing)}: pip install 'pipeinfer[train]' provides it"
        )


def say(line: str) -> None:
    """Progress goes to standard error."""
    click.echo(line, err=True)


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
