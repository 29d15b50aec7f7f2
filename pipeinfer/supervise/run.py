"""`pipeinfer run`: any command over several ranks, on this host or on those of a hostfile; and
`pipeinfer env`, the settings for a plain mpirun."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import click

from pipeinfer.cli.doctor_hosts import check_hosts
from pipeinfer.cluster.cleanup import VARIABLE
from pipeinfer.errors import UsageError
from pipeinfer.nodes import read_hostfile
from pipeinfer.supervise import launcher as launchers
from pipeinfer.supervise.hosts import JobPlace, Roster
from pipeinfer.supervise.http_door import HttpDoor
from pipeinfer.supervise.job import SupervisedJob
from pipeinfer.supervise.launcher import LIBRARY, Launcher, find
from pipeinfer.supervise.supervisor import JobSource, Supervisor
from pipeinfer.transport.settings import mpi_env, mpi_settings

#: gets the environment of a job, to which it may add; returns the launcher's command line
Line: TypeAlias = Callable[[dict[str, str]], list[str]]


class _Command(JobSource):
    """The jobs of one command line. name: id of the job. roster: its hosts, None for this one.
    serves: as in `JobSource`."""

    def __init__(self, name: str, line: Line, environ: dict[str, str], roster: Roster | None,
                 *, serves: bool) -> None:
        self.name, self._line, self._environ, self._roster = name, line, environ, roster
        self.serves = serves

    @property
    def hostfile(self) -> str:
        return str(self._roster.out) if self._roster else ""

    def job(self) -> SupervisedJob:
        environ = dict(self._environ)
        return SupervisedJob(self._line(environ), environ)

    def ask_hosts(self) -> list[str]:
        return [] if self._roster is None else self._roster.ask()


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("-np", "ranks", type=click.IntRange(1), metavar="N",
              help="Number of ranks  [default: one per slot of the hosts, 2 without hosts].")
@click.option("--hosts", metavar="HOSTFILE",
              help="Run on these hosts, which are checked over ssh before the start.")
@click.option("--restarts", type=click.IntRange(0), default=0, envvar="PIPEINFER_RESTARTS",
              metavar="N", help="Start a job that has failed again, N times at most.")
@click.option("--job", "name", hidden=True, default="")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def run_command(ranks: int | None, hosts: str | None, restarts: int, name: str,
                words: tuple[str, ...]) -> None:
    """Run a command over several ranks.

    \b
        pipeinfer run -np 4 generate -m big.gguf -md small.gguf -p "..."
        pipeinfer run --hosts lab -np 8 -- serve -m big.gguf

    It does the same as mpirun with the settings of `pipeinfer env`, and more: it checks the hosts
    first, keeps keys from the launcher, lets the text end cleanly after Ctrl-C, and reads a prompt
    from standard input (`-f -`).
    """
    if words[0] == "chat":  # has the terminal, and starts its ranks itself
        over = [*(("--ranks", str(ranks)) if ranks else ()), *(("--hosts", hosts) if hosts else ())]
        command = [*launchers.program(), "chat", *over, *words[1:]]
        os.execv(command[0], command)
    environ = launchers.settings()
    launcher = launchers.needed(environ)
    with _spooled(words) as words, tempfile.TemporaryDirectory(prefix="pipeinfer-hosts-") as folder:
        roster = _checked(hosts, ranks or 0, launcher, Path(folder) / "hosts") if hosts else None
        if roster and roster.nodes:
            environ.setdefault("PIPEINFER_NODES", roster.nodes)
        serves = words[0] == "serve" and not {"--help", "--help-all"} & {*words}
        raise SystemExit(supervised(partial(_line, launcher, roster, ranks or 2, words), environ,
                                    roster, restarts, name, serves=serves))


def supervised(line: Line, environ: dict[str, str], roster: Roster | None = None,
               restarts: int = 0, name: str = "", *, serves: bool = False) -> int:
    """Run the jobs of a command until one has ended for good; return its exit status.

    serves: whether the command ends only if it is asked to
    """
    environ[VARIABLE] = name or f"{socket.gethostname()}-{os.getpid()}-{time.time():.0f}"
    launchers.name_terminal(environ)
    door = HttpDoor(environ, _say) if restarts and serves else None
    try:
        return asyncio.run(Supervisor(
            _Command(environ[VARIABLE], line, environ, roster, serves=serves), restarts, door,
            _say).run())
    except ChildProcessError as error:
        _say(str(error))
        return 127


def _line(launcher: Launcher, roster: Roster | None, ranks: int, words: Sequence[str],
          environ: dict[str, str]) -> list[str]:
    if roster is None:
        return launcher.command(ranks, words, environ, tagged=False)
    return launcher.command(roster.place.ranks, words, environ, str(roster.out), roster.network,
                            tagged=False)


def _checked(hostfile: str, ranks: int, launcher: Launcher, out: Path) -> Roster:
    """Return the hosts, all of which can run ranks. Prints what is wrong with them.

    Raises UsageError for a hostfile that cannot be used, and exits when a host cannot.
    """
    bad = [found for found in check_hosts(hostfile, ranks) if found.level != "ok"]
    for found in bad:
        level = "error" if found.level == "fail" else "note"
        _say(f"{level}: {found.what}: {found.detail}"
             + (f"\n    -> {found.remedy}" if found.remedy else ""))
    if any(found.level == "fail" for found in bad):
        raise SystemExit(UsageError.exit_code)
    roster = Roster(hostfile, launcher.kind, out, ranks)
    roster.take(JobPlace(ranks, tuple(read_hostfile(hostfile))))
    return roster


@contextlib.contextmanager
def _spooled(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Put standard input into a file if the prompt is read from there (`-f -`): mpirun of Open MPI
    5.0 does not return after forwarding a pipe, and damages input over 64 KB."""
    at = next((i for i, word in enumerate(words) if word in ("-f-", "--file=-") or (
        word == "-" and words[i - 1] in ("-f", "--file"))), None)
    if at is None:
        yield words
        return
    with tempfile.NamedTemporaryFile(prefix="pipeinfer-prompt-") as file:
        file.write(sys.stdin.buffer.read())
        file.flush()
        yield (*words[:at], words[at].removesuffix("-") + file.name, *words[at + 1:])


def _say(text: str) -> None:
    click.echo(f"pipeinfer: {text}", err=True)


_FOR_RANKS = ("OMPI_MCA_", "OMP_")


@click.command()
@click.option("--pass", "passed", is_flag=True,
              help="Print the options of mpirun that pass the settings on to other hosts instead.")
def env_command(passed: bool) -> None:
    """Print the settings for a plain mpirun of Open MPI 5, for a shell to take over.

    \b
        eval "$(pipeinfer env)"
        mpirun -np 4 pipeinfer serve
        mpirun $(pipeinfer env --pass) --hostfile lab -np 8 pipeinfer serve

    What is set already stays. `pipeinfer run` does this itself.
    """
    if passed:
        click.echo(" ".join(f"-x {name}" for name in mpi_settings()
                            if name.startswith(_FOR_RANKS)))
        return
    for line in mpi_env().splitlines():
        name, _, value = line.partition("=")
        setting = line and not line.startswith("#")
        click.echo(f'export {name}="${{{name}-{shlex.quote(value)}}}"' if setting else line)
    environ = dict(os.environ)
    with contextlib.suppress(UsageError):  # a launcher of another kind
        find(environ)
    if library := environ.get(LIBRARY):
        click.echo(f"export {LIBRARY}={shlex.quote(library)}")
