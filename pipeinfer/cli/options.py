"""Options of the command line from the declarations of `config`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import click

from pipeinfer import host, nodes
from pipeinfer.config import Config, Option, options, resolve


def config_options(*groups: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options of these groups, collected into one `given` mapping of values on the line."""

    def wrap(command: Callable[..., Any]) -> Callable[..., Any]:
        names = [n for n, o in options().items() if o.group in groups]

        def inner(config_file: str | None, show_config: bool, **values: Any) -> Any:
            given = {n: values.pop(n) for n in names if n in values}
            given = {n: v for n, v in given.items() if v is not None and v != ()}
            resolved = resolve(given, config_file=config_file)
            if show_config:
                if host.launched_rank() == 0:
                    if "runtime" in groups:  # every rank takes its settings when it starts
                        resolved = nodes.apply(resolved, socket.gethostname())
                    click.echo(resolved.show())
                return None
            return command(resolved=resolved, **values)

        inner.__doc__ = command.__doc__
        inner.__name__ = command.__name__
        decorated: Callable[..., Any] = inner
        for name in reversed(names):
            decorated = _click_option(name, options()[name])(decorated)
        decorated = click.option("--show-config", is_flag=True,
                                 help="Print every value and where it came from.")(decorated)
        return click.option("--config", "config_file", metavar="FILE",
                            help="TOML file with option values.")(decorated)

    return wrap


def _click_option(name: str, option: Option) -> Callable[[Any], Any]:
    default = {f.name: f.default for f in Config.__dataclass_fields__.values()}[name]
    text = option.help
    if option.kind != "flag" and default not in ("", ()) and "[default" not in text:
        text += f" [default: {default}]"
    if option.kind == "flag":
        flags = "/".join(filter(None, (" ".join(option.flags), option.off_flag or "")))
        return click.option(flags, name, default=None, is_flag=True, help=text)
    kind: Any = {"int": click.INT, "float": click.FLOAT}.get(option.kind, click.STRING)
    if option.choices:
        kind = click.Choice([c for c in option.choices if c])
    return click.option(*option.flags, name, default=None, type=kind,
                        multiple=option.kind == "list", help=text)
