"""What development tools put around a rank: faults on purpose, and the pace of another machine.

A hook is loaded only where its option was given, by name, so a job without them needs none of the
lab. Knows neither faults nor paces.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from pipeinfer.backends.base import Backend
from pipeinfer.backends.exact_width import Widths
from pipeinfer.backends.team import Team
from pipeinfer.config import ClusterConfig
from pipeinfer.errors import UsageError
from pipeinfer.transport.base import Port

T = TypeVar("T")
Report = Callable[[str, int, int], None]

#: option -> the class that is loaded for it, and whether a config gives the option
_HOOKS: tuple[tuple[str, str, Callable[[ClusterConfig], bool]], ...] = (
    ("--pace-ms", "pipeinfer.lab.faults.hooks:PaceHook", lambda config: config.pace_ms > 0),
    ("--fault", "pipeinfer.lab.faults.hooks:FaultHook", lambda config: bool(config.fault)),
)


class Hook:
    """One tool's part in a rank; each method returns what it was given, or puts something around
    it. config: of the cluster; rank: of this process. Raises UsageError for a bad option."""

    def __init__(self, config: ClusterConfig, rank: int) -> None:
        self.config, self.rank = config, rank

    def port(self, port: Port) -> Port:
        """The port that a rank sends and receives by."""
        return port

    def progress(self, report: Report) -> Report:
        """The function that a stage reports its loading to: phase, done, total."""
        return report

    def widths(self, widths: Widths) -> Widths:
        """What a stage's rows cost."""
        return widths

    def backend(self, backend: Backend, *, in_team: bool) -> Backend:
        """A loaded backend, after its widths were measured. in_team: whether its sums wait for
        other members."""
        del in_team
        return backend

    def draft(self, backend: Backend) -> Backend:
        """The backend of a draft on a rank of its own."""
        return backend

    def team(self, team: Team, n_layers: int, n_embd: int) -> Team:
        """The members that a stage of `n_layers` layers sums up rows of `n_embd` floats with."""
        del n_layers, n_embd
        return team

    def cached(self, shard: Path) -> None:
        """Called before the cached file of a shard is looked for."""

    def recovering(self) -> None:
        """Called when a recovery begins, before anything else."""


class Hooks:
    """All hooks of a rank, in the order in which they are put around what they wrap."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = tuple(hooks)

    @classmethod
    def of(cls, config: ClusterConfig, rank: int) -> Hooks:
        """The hooks that this config asks for. Raises UsageError where one is not installed, or
        its option is wrong."""
        return cls([_load(option, where)(config, rank)
                    for option, where, wanted in _HOOKS if wanted(config)])

    def port(self, port: Port) -> Port:
        """See `Hook`, as for every method below."""
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
        """shard: gives the file's path, which takes a moment."""
        for hook in self._hooks:
            hook.cached(shard())

    def recovering(self) -> None:
        for hook in self._hooks:
            hook.recovering()

    def _through(self, wrap: Callable[[Hook, T], T], inner: T) -> T:
        return reduce(lambda known, hook: wrap(hook, known), self._hooks, inner)


def _load(option: str, where: str) -> Callable[[ClusterConfig, int], Hook]:
    module, _, name = where.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{option} needs pipeinfer's development tools, and {error.name} is not "
                         "installed: install pipeinfer from its wheel or its sources") from error
    made: Callable[[ClusterConfig, int], Hook] = found
    return made
