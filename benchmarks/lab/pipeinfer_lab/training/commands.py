"""What the training commands share: checks, options and a voice.

Does not know: any command.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
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


def need_packages() -> None:
    """Raise UsageError with what to install where packages of the extra `torch` are missing."""
    missing = [name for name in ("torch", "safetensors", "transformers", "tokenizers")
               if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"training needs {' and '.join(missing)}: pip install 'pipeinfer[torch]' "
                         "provides it")


def say(line: str) -> None:
    """Progress goes to standard error."""
    click.echo(line, err=True)


def several(*options: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds some options."""
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def time_left(seconds: float) -> str:
    """About how long it still takes, in words."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{round(seconds)} s left"
    return f"{minutes} min left" if minutes < 100 else f"{minutes / 60:.1f} h left"
