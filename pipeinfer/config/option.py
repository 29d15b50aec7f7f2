"""How an option is declared, and how configs are made of their sections."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Option:
    """How one field is given.

    flags: empty for a setting, which is given as `--set name=value`
    kind: int, float, str, flag or list. registered: what kind of strategies its choices are.
    secret: never shown. changes_tokens: False if no token depends on it, but only placement, timing
    or speculation. fixed: for the life of the HTTP process.
    """

    flags: tuple[str, ...]
    kind: str
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    off_flag: str | None = None
    secret: bool = False
    registered: str = ""
    changes_tokens: bool = True
    fixed: bool = False

    def called(self, name: str) -> str:
        """Return what messages call the option with this name."""
        return self.flags[-1] if self.flags else f"--set {name}"

    def given(self, name: str, value: Any) -> str:
        """Return the words that give it this value."""
        return f"{self.called(name)}{' ' if self.flags else '='}{value or repr(value)}"


@dataclass(frozen=True, slots=True)
class OwnOption:
    """An option of one strategy, declared in its file."""

    default: Any
    option: Option


def opt(default: Any, *flags: str, kind: str = "int", help: str, **extra: Any) -> Any:
    """Declare a field that flags give."""
    return field(default=default, metadata={"option": Option(flags, kind, help, **extra)})


def setting(default: Any, *, kind: str = "int", help: str, **extra: Any) -> Any:
    """Declare a field that is given as `--set name=value`: for experiments and rare cases."""
    return opt(default, kind=kind, help=help, **extra)


class Sections:
    """What `JobConfig` and `Config` have in common: making and changing them by options' names."""

    __slots__ = ()

    @classmethod
    def of(cls, **values: Any) -> Self:
        """With these options, the others at their defaults. Raises TypeError for unknown ones."""
        return cls().replace(**values)

    def replace(self, **values: Any) -> Self:
        """A copy with other values of these options. Raises TypeError for unknown ones."""
        parts: dict[str, Any] = {}
        for part in dataclasses.fields(self):  # type: ignore[arg-type]
            old: Any = getattr(self, part.name)
            kind: Any = type(old)
            if part.name == "given":
                if part.name in values:
                    parts[part.name] = values.pop(part.name)
            elif mine := {n: values.pop(n) for n in names_of(kind) & set(values)}:
                parts[part.name] = (old.replace(**mine) if isinstance(old, Sections)
                                    else dataclasses.replace(old, **mine))
        if values:
            raise TypeError(f"{type(self).__name__} has no option {', '.join(values)}")
        return dataclasses.replace(self, **parts)  # type: ignore[type-var]

    def values(self) -> dict[str, Any]:
        """Every option of every section by its name."""
        found: dict[str, Any] = {}
        for part in dataclasses.fields(self):  # type: ignore[arg-type]
            section = getattr(self, part.name)
            if isinstance(section, Sections):
                found |= section.values()
            elif dataclasses.is_dataclass(section):
                found |= {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
        own: dict[str, Any] = found.pop("own", {})
        return found | own


@cache
def names_of(kind: Any) -> frozenset[str]:
    names = set()
    for part in dataclasses.fields(kind):
        if "option" in part.metadata:
            names.add(part.name)
        elif dataclasses.is_dataclass(part.default_factory):
            names |= names_of(part.default_factory)
        else:
            names.add(part.name)
    return frozenset(names)
