"""The server that `pipeinfer up` runs: `pipeinfer serve` with its options, on hosts or on this
one."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import click

from pipeinfer import host
from pipeinfer.cli.options import JOB, parse
from pipeinfer.cli.serve import PARALLEL
from pipeinfer.cluster import features
from pipeinfer.config import AUTO, Config
from pipeinfer.errors import UsageError
from pipeinfer.files import read_toml
from pipeinfer.nodes import HostEntry, ranks_of
from pipeinfer.supervise.hosts import JobPlace, Roster, clean_by_ssh
from pipeinfer.supervise.job import SupervisedJob
from pipeinfer.supervise.launcher import Launcher, needed, program
from pipeinfer.supervise.logs import Logs
from pipeinfer.supervise.rules import affects_tokens, fixed_options
from pipeinfer.supervise.supervisor import JobSource

COMMAND = "serve"
Complete: TypeAlias = Callable[[list[str]], list[str]]


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The options of a job, and where it runs. words: `serve` and its options."""

    words: list[str]
    place: JobPlace


class Serving(JobSource):
    """The options and ranks of a server.

    name: id of the job. words: `serve` and its options. environ: of its launcher.
    launcher: None for a single rank. roster: its hosts, None for this one.
    ranks: number of ranks without a roster.
    complete: adds the options with which these ranks share the model to `serve` and its options.
    logs_at: where the files of `logs` are.
    """

    serves = True

    def __init__(self, name: str, words: list[str], environ: dict[str, str],
                 launcher: Launcher | None, roster: Roster | None, ranks: int, logs: Logs,
                 complete: Complete = list) -> None:
        self.name, self.environ, self.launcher = name, environ, launcher
        self.complete = complete
        self.roster, self.logs, self.logs_at = roster, logs, str(logs.folder)
        self.waits = roster is not None and roster.waits
        self._ranks = ranks
        self._starts = 0  #: how many jobs there were
        self.served: tuple[list[str], int, list[HostEntry]] = ([], 0, [])  #: of the last job
        self.use(words)

    @property
    def ranks(self) -> int:
        return self.roster.place.ranks if self.roster else self._ranks

    @property
    def wanted(self) -> int:
        """The ranks of the job with all hosts."""
        return self.roster.wanted if self.roster else self._ranks

    @property
    def settings(self) -> JobSettings:
        place = self.roster.place if self.roster else JobPlace(self._ranks)
        return JobSettings(self.words, place)

    def take(self, settings: JobSettings) -> None:
        """Use these settings for the next job. Raises UsageError if the hostfile cannot be
        written."""
        if self.roster is not None:
            self.roster.take(settings.place)
        self._ranks = settings.place.asked
        self.use(settings.words)

    @property
    def hostfile(self) -> str:
        return str(self.roster.out) if self.roster else ""

    def use(self, words: list[str]) -> None:
        """Use these options of the server for the next job."""
        self.words, self.config = words, config_of(words)
        self.values = self.config.values()

    def affects_tokens(self, words: list[str]) -> list[str]:
        """Return the options of `words` on which tokens of an open request may depend.

        Raises UsageError for invalid options, and for those that need another HTTP process.
        """
        values = config_of(words).values()
        if why := fixed_options(self.values, values):
            raise UsageError(why)
        return affects_tokens(self.values, values)

    def found(self, ranks: int) -> JobPlace:
        """Ask the hosts; return where a job would run now.

        ranks: their number, 0 for as many as before.
        Raises UsageError if it cannot run, or if more ranks need a launcher.
        """
        if self.roster is not None:
            return self.roster.found(ranks or self.roster.place.asked)
        if self.launcher is None and ranks > 1:
            self.launcher = needed(self.environ)
        return JobPlace(ranks or self._ranks)

    def job(self) -> SupervisedJob:
        self._starts += 1
        self.served = (self.words, self.ranks, list(self.roster.place.used) if self.roster else [])
        environ = dict(self.environ)
        line = partial(self.logs.line, self._starts)
        if self.roster is None and self.ranks == 1:
            return SupervisedJob([*program(), *self.words], environ, lambda _, text: line(0, text),
                       alone=True)
        assert self.launcher is not None
        network = agent = own = ""
        if self.roster is not None:
            network, agent, own = self.roster.network, self.roster.agent, self.roster.address
            if "PIPEINFER_NODES" not in environ and self.roster.nodes:
                environ["PIPEINFER_NODES"] = self.roster.nodes
        return SupervisedJob(
            self.launcher.command(self.ranks, self.words, environ, self.hostfile, network,
                                  agent=agent, own=own), environ, line)

    def ask_hosts(self) -> list[str]:
        return [] if self.roster is None else self.roster.ask()

    def facts(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "words": self.words}

    def error(self) -> str:
        return self.logs.error(self._starts)

    def rest(self) -> None:
        if self.roster is not None:
            self.roster.rest()

    def clean(self, host: str, job: str) -> None:
        clean = clean_by_ssh if self.roster is None else self.roster.clean
        clean(host, job)

    def hosts_of(self, ranks: Sequence[int]) -> dict[str, HostEntry | None]:
        """Return the hosts of these ranks; None stands for this host, which needs no check."""
        if self.roster is None:
            return {"this host": None} if ranks else {}
        names = self._names(self.roster)
        entries = {entry.host: entry for entry in self.roster.place.used}
        return {names[rank]: entries[names[rank]] for rank in ranks if rank < len(names)}

    def work_of(self, work: Sequence[str]) -> dict[str, str]:
        """Return what each host does, "" if unknown. work: of each rank."""
        found: dict[str, str] = {}
        for name, one in zip(self._names(self.roster) if self.roster else (), work, strict=False):
            found[name] = "; ".join(filter(None, (found.get(name), one)))
        return found

    def _names(self, roster: Roster) -> tuple[str, ...]:
        return ranks_of(roster.place.used, self.ranks, roster.hostfile)


def command_of(words: Sequence[str]) -> list[str]:
    """Return `serve` and its options, whether or not the word was given.

    Raises UsageError for another command, and where options stand before it.
    """
    found = list(words)
    if COMMAND in found[1:]:
        raise UsageError(f"{found[0]} stands before `{COMMAND}`: give options of the server after "
                         f"it, as in pipeinfer up ... -- {COMMAND} {found[0]} ...")
    if not found or found[0].startswith("-"):
        found.insert(0, COMMAND)
    if found[0] != COMMAND:
        raise UsageError(f"`pipeinfer up` keeps a server running, not {found[0]}: "
                         f"pipeinfer up ... -- {COMMAND} OPTIONS")
    return found


def models_of(path: str, words: list[str]) -> dict[str, list[str]]:
    """Return `serve` and its options for each model of a file, by the name for clients.

    path: of a TOML file with lines such as `qwen = "-m qwen.gguf -md small.gguf"`
    words: `serve` and the options that all have
    Raises UsageError.
    """
    table, found, first = read_toml(path, "file of models"), {}, config_of(words).values()
    for name, options in table.items():
        where = f"file of models {path}: {name}"
        if not isinstance(options, str) or not name.strip():
            raise UsageError(f"{where}: write a name and its options, such as "
                             'qwen = "-m qwen.gguf -md small.gguf"')
        try:
            found[name] = [*words, *shlex.split(options), "--alias", name]
            values = config_of(found[name]).values()
        except (UsageError, ValueError) as error:  # shlex raises the latter: an open quote
            raise UsageError(f"{where}: {error}") from None
        if why := fixed_options(first, values):
            raise UsageError(f"{where}: {why}: give such options to all models, behind "
                             f"`{COMMAND}`")
    if not found:
        raise UsageError(f"file of models {path} names none")
    return found


def ranks_here(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Return how many ranks share this host: one on each NUMA node, unless an option or a container
    decides where threads run. say: prints their number for the user. Raises UsageError."""
    config, nodes = config_of(words).job, host.numa_nodes()
    model = config.model
    withheld = sum(one.cores for one in nodes) > len(os.sched_getaffinity(0))
    if len(nodes) < 2 or withheld or model.numa or model.gpu_layers:
        return 1
    how = "" if not config.cluster.kv_disk else (
        ", with whole layers, since --kv-disk has no files of slices,")
    say(f"one rank on each of {len(nodes)} NUMA nodes{how} (-np 1: one process for all of them)")
    return len(nodes)


def on_numa_nodes(words: list[str]) -> list[str]:
    """Return `serve` and its options with those by which all NUMA nodes compute layers. Raises
    UsageError."""
    cluster, words = config_of(words).job.cluster, [*words, "--head-stage"]
    if not (cluster.grid or cluster.kv_disk):  # files of prompts are of whole layers
        with contextlib.suppress(UsageError):  # another option needs whole layers
            features.check(config_of([*words, "--grid", "auto"]))
            words += ["--grid", "auto"]
    return words


def config_of(words: Sequence[str]) -> Config:
    """Return the config of a server with these options. Raises UsageError."""
    try:
        return parse(words[1:], *JOB, "sampling", "serve", parallel=PARALLEL, model=AUTO).config
    except click.exceptions.Exit:
        raise UsageError(f"`pipeinfer {COMMAND} --help-all` shows its options") from None
    except click.ClickException as error:
        raise UsageError(f"{COMMAND}: {error.format_message()}") from None
