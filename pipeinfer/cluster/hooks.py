"""Hooks by which development tools wrap the parts of a rank: injected faults, and the pace of
another machine.

A hook is an entry point of the group `pipeinfer.hooks`, a `Hook` class. It is loaded only if --hook
names it. This module contains no fault and no pace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import TypeVar

from pipeinfer.backends.base import Backend
from pipeinfer.backends.exact_width import Widths
from pipeinfer.backends.team import Team
from pipeinfer.config import ClusterConfig
from pipeinfer.errors import UsageError
from pipeinfer.loading import LAB, plug_ins
from pipeinfer.transport.base import Port

T = TypeVar("T")
Report = Callable[[str, int, int], None]

GROUP = "pipeinfer.hooks"  #: entry points


class Hook:
    """Base of a tool's hooks. Each method returns its argument, or a wrapper around it.

    values: what --hook gives after its name, once or several times. rank: of this process. Raises
    UsageError for a bad value.
    """

    def __init__(self, values: Sequence[str], rank: int) -> None:
        self.values, self.rank = values, rank

    def port(self, port: Port) -> Port:
        """Wrap the port of a rank."""
        return port

    def progress(self, report: Report) -> Report:
        """Wrap the function to which a stage reports its loading: phase, done, total."""
        return report

    def widths(self, widths: Widths) -> Widths:
        """Replace the measured costs of a stage's rows."""
        return widths

    def backend(self, backend: Backend, *, in_team: bool) -> Backend:
        """Wrap a loaded backend, after its widths were measured.

        in_team: whether its sums wait for other members.
        """
        del in_team
        return backend

    def draft(self, backend: Backend) -> Backend:
        """Wrap the backend of a draft that has ranks of its own."""
        return backend

    def team(self, team: Team, n_layers: int, n_embd: int) -> Team:
        """Wrap the team with which a stage of `n_layers` layers sums up rows of `n_embd` floats."""
        del n_layers, n_embd
        return team

    def cached(self, shard: Path) -> None:
        """Called before the cached file of a shard is opened."""

    def recovering(self) -> None:
        """Called when a recovery begins, before anything else."""


class Hooks:
    """All hooks of a rank; each wraps the result of the one before."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = tuple(hooks)

    @classmethod
    def of(cls, config: ClusterConfig, rank: int) -> Hooks:
        """Return the hooks that a config names, in its order. Raises UsageError for one that is
        not installed, or whose value is wrong."""
        values: dict[str, list[str]] = {}
        for word in config.hook:
            name, _, value = word.partition("=")
            values.setdefault(name, []).append(value)
        return cls([_load(name)(found, rank) for name, found in values.items()])

    def port(self, port: Port) -> Port:
        """Wrap a port. Each method below calls the method of that name of every hook."""
        return self._through(lambda hook, inner: hook.port(inner), port)

    def progress(self, report: Report) -> Report:
        return self._through(lambda hook, inner: hook.progress(inner), report)

    def widths(self, widths: Widths) -> Widths:
        return self._through(lambda hook, inner: hook.widths(inner), widths)

    def backend(self, backend: Backend, *, in_team: bool = False) -> Backend:
        return self._through(lambda hook, inner: hook.backend(inner, in_team=in_team), backend)

    def draft(self, backend: Backend) -> Backend:
        return self._through(lambda hook, inner: hook.draft(inner), backend)

    def team(self, team: Team, n_layers: int, n_embd: int) -> Team:
        return self._through(lambda hook, inner: hook.team(inner, n_layers, n_embd), team)

    def cached(self, shard: Callable[[], Path]) -> None:
        """shard: returns the file's path; it is called only if there is a hook."""
        for hook in self._hooks:
            hook.cached(shard())

    def recovering(self) -> None:
        for hook in self._hooks:
            hook.recovering()

    def _through(self, wrap: Callable[[Hook, T], T], inner: T) -> T:
        return reduce(lambda known, hook: wrap(hook, known), self._hooks, inner)


def _load(name: str) -> Callable[[Sequence[str], int], Hook]:
    known = {one.name: one for one in plug_ins(GROUP)}
    if name == "fault" and name not in known:
        raise UsageError(f"--hook fault is not installed: {LAB}")
    if name not in known:
        raise UsageError(f"--hook: there is no {name!r}: write NAME=VALUE with one of "
                         f"{', '.join(sorted(known))}")
    try:
        found: Callable[[Sequence[str], int], Hook] = known[name].load()
    except ModuleNotFoundError as error:
        raise UsageError(f"--hook {name} needs {error.name}, which is not installed: install its "
                         "package again") from error
    return found
