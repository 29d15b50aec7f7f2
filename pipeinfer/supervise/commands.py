"""The command `pipeinfer up`, and those that control it: `status`, `down`, `rescale`, `reload`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeinfer.cluster.cleanup import VARIABLE
from pipeinfer.errors import RequestError, UsageError, ending
from pipeinfer.supervise.state import VARIABLE as STATE
from pipeinfer.supervise.state import (
    Down,
    Folder,
    JoinedHosts,
    Reload,
    Rescale,
    SocketStatus,
    call,
    when,
)

if TYPE_CHECKING:
    from pipeinfer.supervise.launcher import Launcher
    from pipeinfer.supervise.serving import Complete, Serving

_LOGS = "logs"
_WORDS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_DETACHED = 30.0  #: seconds for a supervisor in the background to be there
_name = click.option("--name", default="default", show_default=True,
                     help="Which one, where this user has several up.")
_wait = click.option("--wait", type=click.FloatRange(min=0), default=120.0, show_default=True,
                     help="Seconds for open requests to end first, where answers could change.")


class _Up(click.Command):
    """Takes `--join` with and without a value, which stands behind `=`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args[:args.index("--")] if "--" in args else args
        return super().parse_args(ctx, ["--join=" if word == "--join" and i < len(own) else word
                                        for i, word in enumerate(args)])


@click.command("up", cls=_Up, context_settings=_WORDS)
@click.option("--hosts", metavar="FILE", help="Hostfile; this host comes first. Without it: only "
                                              "this host.")
@click.option("-np", "ranks", type=click.IntRange(1), help="Ranks. [default: one per slot of the "
                                                           "hostfile; without, one on each NUMA "
                                                           "node]")
@click.option("--restarts", type=click.IntRange(0), default=20, show_default=True,
              help="How often a job that failed is started again; the count begins again after "
                   "ten minutes.")
@click.option("--all-hosts", is_flag=True, help="Refuse to start while a host is missing.")
@click.option("--ask-hosts-every", "every", type=click.FloatRange(0), default=60.0,
              show_default=True, help="Seconds between two times that missing hosts are asked; "
                                      "0: never.")
@click.option("--stay", is_flag=True, help="Move to hosts that are back only on `pipeinfer "
                                           "rescale`, not at a quiet moment.")
@click.option("--sleep-after", "sleeps", metavar="MINUTES", type=click.FloatRange(0, min_open=True),
              help="End the job after so long without a request, until the next one.")
@click.option("--join", "joined", metavar="[=ADDRESS:PORT]",
              help="Let other machines join (`pipeinfer join` there), at this address. [default: "
                   "all addresses of this machine, port 7700]")
@click.option("--models", metavar="FILE",
              help="Serve the models of this file, one at a time: the one that a request names. "
                   "Lines such as  qwen = \"-m qwen.gguf -md small.gguf\"; the first one starts.")
@click.option("--detach", is_flag=True, help="Go into the background.")
@_name
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] [serve OPTIONS]")
def up_command(hosts: str | None, ranks: int | None, joined: str | None, detach: bool, name: str,
               words: tuple[str, ...], **more: Any) -> None:
    """Keep a server up: start it over hosts, start it again when it fails, move it to hosts that
    are back. Clients keep their streams meanwhile.

    \b
        pipeinfer up -np 4 -- serve -m smollm2
        pipeinfer up --join -- serve -m big.gguf
        pipeinfer up --hosts hostfiles/xeon -- serve -m big.gguf --port 8080

    Ctrl-C lets running requests end; a second one ends it. See also `pipeinfer status`, `down`,
    `rescale` and `reload`.
    """
    from pipeinfer.supervise.serving import command_of

    folder = Folder(name)
    if joined == "" and words[:1] and re.fullmatch(r"[\d.:\[].*", words[0]):
        raise UsageError(f"an address follows --join after an equals sign: --join={words[0]}")
    serve = command_of(words)
    if joined is not None and (hosts or ranks):
        raise UsageError("--join takes the machines that join, one rank on each of their NUMA "
                         "nodes: leave out --hosts and -np")
    folder.make()
    if detach:
        if folder.alive:
            raise UsageError(_taken(folder))
        _go_into_the_background(folder, joined=joined is not None)
        return
    if not folder.lock():
        raise UsageError(_taken(folder))
    raise SystemExit(_keep(folder, serve, hosts, ranks, joined, **more))


def _keep(folder: Folder, words: list[str], hosts: str | None, ranks: int | None,
          joined: str | None, all_hosts: bool, stay: bool, models: str | None,
          **more: Any) -> int:
    from pipeinfer.supervise import launcher as launchers
    from pipeinfer.supervise.hosts import Roster, others
    from pipeinfer.supervise.join.roster import Joining
    from pipeinfer.supervise.keeper import Keeper
    from pipeinfer.supervise.logs import Logs
    from pipeinfer.supervise.serving import Serving, models_of

    logs = Logs(folder.path / _LOGS, _show)

    def say(text: str) -> None:
        logs.write("up", text)
        click.echo(f"pipeinfer: {text}", err=True)

    _keep_answers(folder, words, say)
    environ = launchers.settings()
    environ[VARIABLE] = f"{socket.gethostname()}-{os.getpid()}-{time.time():.0f}"
    launchers.name_terminal(environ)
    before = folder.read()
    left = (str(before.get("job", "")) if before.get("phase") != "ended" else "",
            others(str(folder.path / "hosts")))
    launcher, ranks, complete = _where(words, environ, hosts, ranks, joined, say)
    words, joining, roster = complete(words), None, None
    if hosts:
        assert launcher is not None
        roster = Roster(str(Path(hosts).absolute()), launcher.kind, folder.path / "hosts",
                        ranks or 0)
    if joined is not None:
        assert launcher is not None
        joining = Joining(joined, launcher, folder, say)
        roster = joining.roster
    table = models_of(models, words) if models else {}
    words = next(iter(table.values()), words)
    serving = Serving(environ[VARIABLE], words, environ, launcher, roster, ranks or 1, logs,
                      complete)
    if hosts:
        _ask_hosts(serving, hosts, ranks, all_hosts, say)

    async def run() -> int:
        async with joining or contextlib.nullcontext():
            return await Keeper(serving, folder, say, left=left, auto=not stay, models=table,
                                joins=joining.server if joining else None, **more).run()

    try:
        return asyncio.run(run())
    except ChildProcessError as error:
        raise UsageError(str(error)) from None
    finally:
        logs.close()


def _where(words: list[str], environ: dict[str, str], hosts: str | None, ranks: int | None,
           joined: str | None, say: Callable[[str], None]
           ) -> tuple[Launcher | None, int | None, Complete]:
    """Return the launcher, the ranks if they are known, and what adds the options with which they
    share the model."""
    from pipeinfer.supervise import launcher as launchers
    from pipeinfer.supervise.join.roster import together
    from pipeinfer.supervise.serving import on_numa_nodes, ranks_here

    if hosts or joined is not None or (ranks or 1) > 1:
        return launchers.needed(environ), ranks, list if joined is None else together
    launcher = launchers.find(environ)
    if launcher is not None and ranks is None and (count := ranks_here(words, say)) > 1:
        return launcher, count, on_numa_nodes
    return launcher, ranks, list


def _keep_answers(folder: Folder, words: list[str], say: Callable[[str], None]) -> None:
    """Give the server a journal in its private folder, unless it has one of its own."""
    from pipeinfer.server import journal
    from pipeinfer.supervise.serving import config_of

    if config_of(words).values()["journal"]:
        return
    try:
        # the environment, so that the options of a reload have it, too; --journal '' has none
        os.environ["PIPEINFER_JOURNAL"] = str(journal.check(
            str(folder.path / f"journal-{journal.VERSION}")))
    except UsageError as error:  # a full disk costs the journal, not the server
        say(f"answers do not outlive the HTTP process: {error}")


def _ask_hosts(serving: Serving, hosts: str, ranks: int | None, all_hosts: bool,
               say: Callable[[str], None]) -> None:
    """Use the hosts of a hostfile that answer. Raises UsageError if they are not enough."""
    from pipeinfer.cli.doctor_hosts import check_head

    check_head(hosts)
    for line in serving.ask_hosts():
        say(line)
    if ranks and serving.wanted < ranks:
        raise UsageError(f"{ranks} ranks were asked for, but the hosts of {hosts} have "
                         f"{serving.wanted} slots: give more slots, or fewer ranks")
    if all_hosts and serving.ranks < serving.wanted:
        raise UsageError("hosts are missing (--all-hosts)")


def _show(rank: int | None, text: str) -> None:
    """Print a line of the job in the format of launch/run."""
    click.echo(f"[rank {rank}] {text}" if rank else text, err=True)


def _taken(folder: Folder) -> str:
    more = "" if folder.name == "default" else f" --name {folder.name}"
    return (f"{folder.name!r} is up already (process {folder.read().get('pid', '?')}): `pipeinfer "
            f"down{more}` ends it, --name NAME starts another one")


def _go_into_the_background(folder: Folder, *, joined: bool) -> None:
    """Run the same command without --detach in a session of its own, with its output in the
    logs."""
    from pipeinfer.supervise.launcher import program

    words = [word for i, word in enumerate(sys.argv[1:]) if word != "--detach"
             or "--" in sys.argv[1:i + 1]]
    log = folder.path / _LOGS / "detached.log"
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write {log}: {error.strerror}; name another folder with {STATE}"
                         ) from error
    process = subprocess.Popen([*program(), *words], stdin=subprocess.DEVNULL, stdout=out,
                               stderr=out, start_new_session=True)
    os.close(out)
    deadline = time.monotonic() + _DETACHED
    # its errors come later, when who called would not see them
    while process.poll() is None and time.monotonic() < deadline:
        if folder.read().get("pid") == process.pid:
            click.echo(f"pipeinfer: {folder.name!r} is process {process.pid}; `pipeinfer status` "
                       f"shows it, its logs are in {folder.path / _LOGS}", err=True)
            if joined:
                from pipeinfer.supervise.join.roster import show_token

                line = call(folder, _report, 20.0, JoinedHosts())["line"]
                click.echo(f"pipeinfer: on each other machine: {line}", err=True)
                show_token(folder)
            return
        time.sleep(0.1)
    click.echo(log.read_text(encoding="utf-8", errors="replace"), err=True, nl=False)
    raise RequestError("it did not start")


# --- commands to a supervisor -----------------------------------------------------------------


@click.command("status")
@_name
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status_command(name: str, as_json: bool) -> None:
    """Show what `pipeinfer up` is at. Exit code 0: ready; 1: not ready; 2: nothing is up."""
    folder = Folder(name)
    found = call(folder, _report, 20.0, SocketStatus())
    found.pop("ok", None)
    if as_json:
        click.echo(json.dumps(found))
    else:
        for line in lines_of(found):
            click.echo(line)
    raise SystemExit(0 if found["ready"] else 1)


def lines_of(state: dict[str, Any]) -> list[str]:
    """Return the lines of a status as text."""
    starts, url = state["starts"], state["url"]
    about = f" at {url}, model {state['model']}, {state['open']} requests open" if url else ""
    if state["held"]:
        about += f", {state['held']} wait to be let in"
    ranks = f"{state['ranks']} ranks" if state["ranks"] != 1 else "1 rank"
    if state["wanted"] != state["ranks"]:
        ranks += f" of {state['wanted']}"
    if state["lost"]:
        ranks += f", lost: {', '.join(map(str, state['lost']))}"
    found = [f"{state['name']}: {state['phase']}{about}"]
    if state["reason"] and not state["ready"]:
        found.append(f"  why       {state['reason']}")
    found += [f"  command   {' '.join(state['words'])}",
              f"  process   {state['pid']}, since {when(state['since'])}; the HTTP process is "
              f"{state['door_pid'] or 'not there'}",
              f"  ranks     {ranks}"]
    width = max((len(host["host"]) for host in state["hosts"]), default=0)
    for host in state["hosts"]:
        why = f": {host['why']}" if host["why"] else ""
        found.append(f"  host      {host['host']:{width}}  {host['state']}{why}")
    if state.get("not_moved"):
        found.append(f"  not moved {state['not_moved']}")
    for start in starts[-5:]:
        how = "runs" if start["exit"] is None else (
            f"moved after {start['lived']:g} s" if start.get("moved")
            else f"slept after {start['lived']:g} s" if start.get("slept")
            else f"after {start['lived']:g} s " + (start.get("lost") or ending(start["exit"])
            + (f": {start['why']}" if start.get("why") else "")))
        found.append(f"  start     {when(start['at'])}, {start['ranks']} ranks, {how}")
    return [*found, f"  logs      {state['logs']}"]


@click.command("down")
@_name
@click.option("--now", is_flag=True, help="Do not let running requests end.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=300.0, show_default=True,
              help="Seconds to wait for the end.")
def down_command(name: str, now: bool, timeout: float) -> None:
    """End what `pipeinfer up` keeps: running requests end first (--drain-seconds of serve)."""
    folder = Folder(name)
    deadline = time.monotonic() + timeout
    call(folder, _report, timeout, Down(now))
    # the answer to Down comes before requests have ended
    while folder.alive:
        if time.monotonic() > deadline:
            raise RequestError(f"it has not ended within {timeout:g} s: `pipeinfer down --now` "
                               "does not wait for requests")
        time.sleep(0.2)
    click.echo("pipeinfer: down", err=True)


@click.command("rescale")
@_name
@click.option("-np", "ranks", type=click.IntRange(1), help="Another number of ranks than was given "
                                                           "to `up`.")
@_wait
def rescale_command(name: str, ranks: int | None, wait: float) -> None:
    """Move the job to the hosts that answer now, with lost ranks back and new lines of the
    hostfile. Open requests go on with the same tokens."""
    found = call(Folder(name), _report, wait + 900.0, Rescale(ranks, wait))
    click.echo(found["message"])


@click.command("reload", context_settings=_WORDS)
@_name
@_wait
@click.option("--force", is_flag=True, help="After --wait seconds do not wait for open requests: "
                                            "with another model they end with an error.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] [serve OPTIONS]")
def reload_command(name: str, wait: float, force: bool, words: tuple[str, ...]) -> None:
    """Start the server again: with other options, or because a file has changed.

    \b
        pipeinfer reload
        pipeinfer reload -- serve -m new.gguf --port 8080

    Clients keep their streams, with the same tokens. Where answers could differ (another model
    file, slices, types of caches) open requests end first and new ones wait. Options that do not
    work are taken back. Address, HTTPS and --journal cannot change; relative paths are those of
    `pipeinfer up`.
    """
    found = call(Folder(name), _report, wait + 900.0, Reload(list(words), wait, force))
    click.echo(found["message"])


def _report(text: str) -> None:
    click.echo(f"pipeinfer: {text}", err=True)


