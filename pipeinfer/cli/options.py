"""Command-line options from the declarations of `config`.

The command line has precedence over the environment (`PIPEINFER_<NAME>`), the environment over a
TOML file (`--config`), the file over defaults; click records the origin of each value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from pipeinfer import host, nodes
from pipeinfer.cluster import features
from pipeinfer.config import BASIC, SECTIONS, Config, Option, Resolved, options
from pipeinfer.errors import UsageError
from pipeinfer.files import read_toml
from pipeinfer.host import host_name
from pipeinfer.strategies import registry

ENV_PREFIX = "PIPEINFER_"
JOB = ("model", "cluster", "speculation")
_TITLES = {
    "model": "Models", "cluster": "Ranks and hosts", "speculation": "Speculation and scheduling",
    "sampling": "Sampling", "grammar": "Grammar", "request": "Prompt and output",
    "serve": "Server",
}
_FILE = "pipeinfer.config_file"
_KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "int": (int, "a whole number"), "float": ((int, float), "a number"), "str": (str, "a text"),
    "flag": (bool, "true or false"), "list": (list, "a list of texts"),
}


def config_options(*sections: str, **defaults: Any
                   ) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command with all options of these sections; it receives them as `resolved:
    Resolved`.

    defaults: this command's own defaults. Replaces `click.command`.
    """

    def wrap(function: Callable[..., Any]) -> click.Command:
        def inner(show_config: bool, **values: Any) -> Any:
            resolved = resolve(click.get_current_context(), sections, values)
            if not show_config:
                return function(resolved=resolved, **values)
            if host.launched_rank() == 0:
                if "cluster" in sections:  # as each rank does at its start
                    resolved = nodes.apply(resolved, host_name())
                click.echo(resolved.show())
            return None

        inner.__doc__ = function.__doc__
        name = function.__name__.removesuffix("_command").replace("_", "-")
        own = list(getattr(function, "__click_params__", ()))[::-1]
        params = [*own, *_params(sections, defaults), *_common()]
        return _Command(name, callback=inner, params=params, help=function.__doc__,
                        sections=sections)

    return wrap


def parse(arguments: Sequence[str], *sections: str, **defaults: Any) -> Resolved:
    """Parse arguments as a command with these sections would (with all, if none are named).

    Raises click.UsageError, and UsageError for a config file that cannot be read.
    """
    sections = sections or tuple(SECTIONS)
    command = _Command("pipeinfer", params=[*_params(sections, defaults), *_common()],
                       sections=sections)
    context = command.make_context("pipeinfer", list(arguments))
    return resolve(context, sections, context.params)


def resolve(context: click.Context, sections: Sequence[str], values: dict[str, Any]) -> Resolved:
    """Move the options of `sections` out of `values` into a config, with their origins.

    Raises UsageError for options that exclude each other.
    """
    names = list(declared(*sections))
    origin = {name: _origin(context, name) for name in names}
    given = frozenset(name for name in names if origin[name] == "command line")
    found = {name: values.pop(name) for name in names}
    everyone = {name: found.pop(name) for name in registry.own_options() if name in found}
    own = {name: value for name, value in everyone.items() if origin[name] != "default"}
    config = Config.of(given=given, own=own, **found)
    features.check(config)
    return Resolved(config, origin, everyone)


def words_of(resolved: Resolved, *sections: str) -> list[str]:
    """Return the words that give another command the options of these sections that this one's
    command line has; of a config file its name. Variables are inherited."""
    values, words = {**resolved.config.values(), **resolved.own}, []
    if file := next((origin.removeprefix("file ") for origin in resolved.origin.values()
                     if origin.startswith("file ")), ""):
        words += ["--config", file]
    for name, option in declared(*sections).items():
        if resolved.origin[name] != "command line":
            continue
        if option.kind == "flag" and option.flags:
            words.append(option.flags[-1] if values[name] else str(option.off_flag))
            continue
        for value in values[name] if option.kind == "list" else (values[name],):
            words += [option.flags[-1], str(value)] if option.flags else [
                "--set", f"{name}={value}"]
    return words


class _Command(click.Command):
    """Shows the basic options under --help and all, by section, under --help-all."""

    def __init__(self, *args: Any, sections: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, and the basic ones or all of the sections."""
        known = declared(*self._sections)
        everything = ctx.meta.get("pipeinfer.help_all", False)
        records = {p.name: r for p in self.get_params(ctx) if (r := p.get_help_record(ctx))}
        for section in self._sections:
            rows = [records[name] for name in declared(section)
                    if name in records and (everything or name in BASIC)]
            if rows:
                with formatter.section(_TITLES[section]):
                    formatter.write_dl(rows)
        with formatter.section("Other"):
            formatter.write_dl([r for name, r in records.items() if name not in known])
        hidden = len([name for name in known if name not in BASIC])
        if hidden and not everything:
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more options: {ctx.command_path} --help-all")


class _Option(click.Option):
    """Reports where a bad value came from, and never shows a secret one."""

    secret = False

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Convert a value; name its origin if it is bad. Raises click.BadParameter."""
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            message = "this value cannot be used." if self.secret else error.message
            origin = _origin(ctx, self.name or "")
            if origin != "command line":
                message += f" (from {origin})"
            raise click.BadParameter(message, ctx, self) from None


class _Setting(_Option):
    """A value that is given as `--set name=value`, in the environment or in a file."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]
                      ) -> tuple[Any, ParameterSource]:
        """Return the value and its origin: the last word of --set that has this name wins."""
        for word in reversed(opts.get("set") or ()):
            name, _, value = word.partition("=")
            if name.replace("-", "_") == self.name:
                return value, ParameterSource.COMMANDLINE
        return super().consume_value(ctx, opts)


def declared(*sections: str) -> Mapping[str, Option]:
    """Return the declarations of these sections, or of all, by name, with the strategies' own
    options."""
    found = dict(options(*sections))
    if not sections or "speculation" in sections:
        found |= {name: own.option for name, own in registry.own_options().items()}
    return found


def _settings(*sections: str) -> Mapping[str, Option]:
    """Return what --set takes, by name."""
    return {name: option for name, option in declared(*sections).items() if not option.flags}


def _params(sections: Sequence[str], defaults: Mapping[str, Any]) -> list[click.Parameter]:
    found: list[click.Parameter] = [
        _option(name, option, defaults) for name, option in declared(*sections).items()]
    if known := _settings(*sections):
        found.append(click.Option(
            ["--set"], metavar="NAME=VALUE", multiple=True, expose_value=False,
            callback=partial(_check_set, known),
            help="Set a value that experiments or rare cases need (repeatable). docs/options.md "
                 f"has their table: {', '.join(known)}."))
    return found


def _check_set(known: Collection[str], ctx: click.Context, param: click.Parameter,
               words: Sequence[str]) -> None:
    """Raise click.BadParameter for a word of --set that names no setting, or has no value."""
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("-", "_") not in known:
            meant = nodes.near(name.replace("-", "_"), known)
            raise click.BadParameter(f"there is no setting {name!r}" + (
                meant or f": choose from {', '.join(known)}"), ctx, param)
        if not equals or not value:
            raise click.BadParameter(f"write {name}=VALUE.", ctx, param)


def _option(name: str, option: Option, defaults: Mapping[str, Any]) -> _Option:
    default = defaults.get(name, default_of(name))
    text, choices = option.help, option.choices
    if option.registered:
        listed: Mapping[str, Any] = {
            "proposers": registry.proposers(), "decomposers": registry.decomposers(),
        }[option.registered]
        choices = ("", *listed) if option.kind == "str" else tuple(listed)
        text += " " + "; ".join(f"{name}: {spec.help}" for name, spec in listed.items()) + "."
    if option.kind != "flag" and default not in ("", ()) and "[default" not in text:
        text += f" [default: {default}]"
    more: dict[str, Any] = {"default": default, "envvar": ENV_PREFIX + name.upper(), "help": text}
    if not option.flags:  # the flag has a space, so that it cannot be typed as a word
        return _Setting([f"--set {name}", name], hidden=True, type=_type(option, choices), **more)
    if not choices:
        more["metavar"] = {"int": "N", "float": "X"}.get(option.kind, "TEXT")
    if option.kind == "flag":
        more.pop("metavar")
        flags = "/".join(filter(None, (" ".join(option.flags), option.off_flag or "")))
        return _Option([*flags.split(" "), name], is_flag=True, **more)
    made = _Option(
        [*option.flags, name], type=_type(option, choices), multiple=option.kind == "list", **more
    )
    made.secret = option.secret
    return made


def default_of(name: str) -> Any:
    """Return the default of an option. Raises KeyError if there is none of this name."""
    if name in registry.own_options():
        return registry.own_options()[name].default
    for kind in SECTIONS.values():
        if name in kind.__dataclass_fields__:  # type: ignore[attr-defined]
            return kind.__dataclass_fields__[name].default  # type: ignore[attr-defined]
    raise KeyError(name)


def _common() -> list[click.Parameter]:
    def read(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
        del param
        if path is not None:
            ctx.meta[_FILE] = path
            ctx.default_map = {**(ctx.default_map or {}), **_from_file(path)}

    def show(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
        del param
        if wanted:
            ctx.meta["pipeinfer.help_all"] = True
            click.echo(ctx.get_help())
            ctx.exit()

    return [
        click.Option(["--config"], metavar="FILE", is_eager=True, expose_value=False,
                     callback=read, help="TOML file with option values."),
        click.Option(["--show-config"], is_flag=True,
                     help="Print every value and where it came from."),
        click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False,
                     callback=show, help="Show every option."),
    ]


def _origin(ctx: click.Context, name: str) -> str:
    match ctx.get_parameter_source(name):
        case ParameterSource.COMMANDLINE:
            return "command line"
        case ParameterSource.ENVIRONMENT:
            return f"environment {ENV_PREFIX}{name.upper()}"
        case ParameterSource.DEFAULT_MAP:
            return f"file {ctx.meta[_FILE]}"
        case _:
            return "default"


def _from_file(path: str) -> dict[str, Any]:
    known_options = declared()
    names = {name: name for name in known_options}
    for name, option in known_options.items():
        names |= {flag.lstrip("-").replace("-", "_"): name for flag in option.flags
                  if flag.startswith("--")}
    found = {}
    for key, value in read_toml(path, "config file").items():
        known = names.get(key.replace("-", "_"))
        if known is None:
            raise UsageError(f"config file {path} has an unknown key {key!r}"
                             f"{nodes.near(key.replace('-', '_'), names)}")
        option = known_options[known]
        wanted, name = _KINDS[option.kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and option.kind != "flag") or (
                isinstance(value, list) and not all(isinstance(part, str) for part in value)):
            shown = "the value in the file" if option.secret else repr(value)[:200]
            raise UsageError(f"config file {path}: {key} must be {name}, not {shown}")
        found[known] = value
    return found


# --- types ------------------------------------------------------------------------------------


class _Text(click.ParamType[str]):
    name = "text"
    envvar_list_splitter = ","

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if "\0" in text:
            self.fail("it contains a NUL character.", param, ctx)
        return text

    def split_envvar_value(self, rv: str) -> list[str]:
        return [part for part in rv.split(",") if part]


class _Choice(click.Choice[str]):
    """One of several words; the empty one, if allowed, means "not given"."""

    def __init__(self, choices: Sequence[str], *, empty: bool) -> None:
        super().__init__([choice for choice in choices if choice])
        self._empty = empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return "" if self._empty and value == "" else super().convert(value, param, ctx)

    def split_envvar_value(self, rv: str) -> list[str]:
        return [part for part in rv.split(",") if part]


class _Real(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not a number.", param, ctx)
        return found


def _type(option: Option, choices: Sequence[str]) -> click.ParamType[Any]:
    if choices:
        return _Choice(choices, empty=option.kind == "str" and "" in choices)
    match option.kind:
        case "int":
            low, high = (None if x is None else int(x) for x in (option.low, option.high))
            return click.IntRange(low, high)
        case "float":
            return _Real(option.low, option.high)
        case "flag":
            return click.BOOL
        case _:
            return _Text()
