"""The commands about machines that join: `join`, `leave`; on the head `hosts`, `tokens`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, get_args

import click

from pipeinfer.cluster.cleanup import clear_sessions
from pipeinfer.errors import RequestError, UsageError
from pipeinfer.files import parse_bytes, write_atomically
from pipeinfer.supervise.join.messages import OwnSettings, Role
from pipeinfer.supervise.join.tokens import JoinToken
from pipeinfer.supervise.state import JOINED, Folder, JoinedHosts, call, members, when

PORT = 7700
TOKEN = "PIPEINFER_JOIN_TOKEN"  #: variable with the token
SOURCE = "source"  #: folder with the head's source
TAKEN = "PIPEINFER_JOIN_SOURCE"  #: variable with the digest of the source that was taken last
_END = 20.0  #: seconds for an agent to end
_name = click.option("--name", default="default", show_default=True,
                     help="Which one, where this user has several up.")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def address_of(text: str, port: int = PORT) -> tuple[str, int]:
    """Return host and port of ADDRESS or ADDRESS:PORT; IPv6 in brackets. Raises UsageError."""
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, number = text, str(port)
    if not (number.isascii() and number.isdigit() and 0 <= int(number) < 1 << 16):
        raise UsageError(f"{text!r}: write ADDRESS or ADDRESS:PORT, such as 192.168.1.11:{port}")
    return host.strip("[]"), int(number)


@click.command("join")
@click.argument("head", metavar="ADDRESS[:PORT]")
@click.option("--token-file", type=click.Path(), help="File with the token. Without it: the "
              f"variable {TOKEN}, the token of the last time, or standard input.")
@click.option("--memory", help="What ranks may fill here, such as 12GiB. [default: what is free]")
@click.option("--threads", type=click.IntRange(1), help="Of a stage. [default: the cores]")
@click.option("--role", type=click.Choice(get_args(Role)), help="What ranks do here.")
@click.option("--sleep-command", "sleep", default="", help="Run this when the head's job sleeps "
              "(`up --sleep-after`), such as 'systemctl suspend'. The head wakes this machine.")
@click.option("--same-version", is_flag=True, help="If the head has another version, take its "
              "source, install it into a folder of its own, and join with that.")
def join_command(head: str, token_file: str | None, memory: str | None, threads: int | None,
                 role: Role | None, sleep: str, same_version: bool) -> None:
    """Give this machine to the cluster of another one, which runs `pipeinfer up --join`.

    \b
        pipeinfer join 192.168.1.11:7700

    It stays until Ctrl-C or `pipeinfer leave`, and comes back by itself after the head or the
    network was away. Its ranks end with it.
    """
    host, port = address_of(head)
    settings = OwnSettings(None if memory is None else parse_bytes(memory, "--memory"), threads,
                           role)
    on_sleep = _sleep_words(sleep)
    folder = Folder(f"{host}-{port}".replace(":", "_"), JOINED)
    folder.make()
    token = _token(folder, token_file)
    if not folder.lock():
        raise UsageError(f"this machine has joined {head} already (process "
                         f"{folder.read().get('pid', '?')}): `pipeinfer leave` ends that")
    folder.write({**folder.read(), "pid": os.getpid(), "head": head})
    data = _stay((host, port), token, folder, settings, on_sleep, same_version)
    if data is not None:
        _join_with(data, folder.path / SOURCE)


def _sleep_words(text: str) -> list[str]:
    """Return the words of --sleep-command. Raises UsageError if it cannot be run."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--sleep-command {text!r}: {error}: close it") from error
    if words and shutil.which(words[0]) is None:
        raise UsageError(f"--sleep-command {text!r}: there is no program {words[0]} here: give its "
                         "path")
    return words


def _token(folder: Folder, file: str | None) -> JoinToken:
    """Return the token, and store it for the next time. Raises UsageError."""
    kept = folder.path / "token"
    given = os.environ.pop(TOKEN, "")
    try:
        if file and file != "-":
            given = Path(file).read_text(encoding="utf-8-sig")
        elif not given and kept.exists() and file is None:
            given = kept.read_text(encoding="utf-8")
        elif not given:
            given = click.prompt("token", hide_input=True, err=True) if sys.stdin.isatty() \
                else sys.stdin.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token cannot be read: {error}") from error
    token = JoinToken.of(given)
    if token.text != _kept(kept):
        write_atomically(kept, token.text)
    return token


def _kept(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _member(folder: Folder) -> str:
    """Return the random id of this machine."""
    found = str(folder.read().get("member", "")) or secrets.token_hex(16)
    folder.write({**folder.read(), "member": found})
    return found


def _stay(head: tuple[str, int], token: JoinToken, folder: Folder, settings: OwnSettings,
          sleep: list[str], same_version: bool) -> bytes | None:
    """Be a member until the end. Return the head's source if this machine needs it first."""
    from pipeinfer.supervise import launcher as launchers
    from pipeinfer.supervise.join.agent import Agent, JoinRefused
    from pipeinfer.supervise.join.offers import own_offer, words_of

    def say(text: str) -> None:
        click.echo(f"pipeinfer: {text}", err=True)

    environ = launchers.settings()
    environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environ["PATH"]))
    launcher = launchers.needed(environ, "joining")
    clear_sessions()
    offer = own_offer(launcher, settings)
    say(f"this machine offers {words_of(offer)}")

    async def run() -> bytes | None:
        agent = Agent(head, token, _member(folder), offer, launcher, environ, say, sleep)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, agent.stop)
        try:
            await agent.run()
        except JoinRefused as refusal:
            if refusal.token:  # the next time asks for another one
                (folder.path / "token").unlink(missing_ok=True)
            if not (same_version and refusal.version):
                raise
            say(f"{refusal}. Taking the head's source")
            digest, data = await agent.source(os.environ.get(TAKEN, ""))
            os.environ[TAKEN] = digest
            return data
        return None

    data = asyncio.run(run())
    if data is None:
        say("this machine has left")
    return data


def _words() -> list[str]:
    """Return this command's words without those that are for its start alone."""
    words = sys.argv[1:]
    return [word for i, word in enumerate(words)
            if not word.startswith("--token-file") and words[i - 1:i] != ["--token-file"]]


def _join_with(data: bytes, folder: Path) -> NoReturn:
    """Go on as a process of the head's source, which installs what it needs first."""
    from pipeinfer.supervise.join.source import unpack

    own = str(Path(sys.executable).parent)
    path = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part != own]
    environ = {"PIPEINFER_PYTHON": sys.executable, **os.environ, "PATH": os.pathsep.join(path)}
    environ.pop("PYTHONPATH", None)  # else it would import this version again
    os.execvpe("bash", ["bash", str(unpack(data, folder)), *_words()[1:]], environ)


@click.command("leave")
@click.argument("head", metavar="[ADDRESS[:PORT]]", required=False)
def leave_command(head: str | None) -> None:
    """Take this machine out of the cluster that it has joined. Its ranks end; the others go on."""
    names = ["{}-{}".format(*address_of(head)).replace(":", "_")] if head else members()
    if len(names) != 1:
        raise UsageError("this machine has joined no cluster" if not names else
                         f"name one of the heads that it has joined: {', '.join(names)}")
    folder = Folder(names[0], JOINED)
    deadline = time.monotonic() + _END
    # until its ranks have ended, too: only then is the machine free
    while folder.alive:
        if pid := _agent(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() > deadline or (not pid and folder.alive):
            raise RequestError(f"process {pid or '?'} has not ended: Ctrl-C where it runs ends it")
        time.sleep(0.2)
    click.echo("pipeinfer: this machine has left", err=True)


def _agent(folder: Folder) -> int:
    """Return the process id of `pipeinfer join`, 0 if unknown: a full disk has that of an earlier
    one."""
    pid = folder.read().get("pid", 0)
    with contextlib.suppress(OSError):
        return int(pid) if b"\0join\0" in Path(f"/proc/{pid}/cmdline").read_bytes() else 0
    return 0


# --- on the head ------------------------------------------------------------------------------


@click.command("hosts")
@_name
@_as_json
def hosts_command(name: str, as_json: bool) -> None:
    """List the machines that have joined: since when, and what they have."""
    found = _ask(name, JoinedHosts())
    if as_json:
        click.echo(json.dumps(found["hosts"]))
        return
    for host in found["hosts"]:
        does = (host["work"] or "has ranks") if host["used"] else "waits"
        state = f"gone since {when(host['since'])}: {host['gone']}" if host["gone"] else (
            f"since {when(host['since'])}, {does}")
        click.echo(f"{host['name']}  {host['address']}  {host['has']}  {state}")
    if not found["hosts"]:
        click.echo(f"no machine has joined yet; there: {found['line']}")


@click.command("tokens")
@_name
@click.option("--new", is_flag=True, help="Make a token and print it.")
@click.option("--ttl", metavar="HOURS", type=click.FloatRange(min=0, min_open=True),
              help="Hours until it admits no further machines. [default: no end]")
@click.option("--revoke", metavar="ID", default="", help="End a token; machines that have joined "
                                                         "by it are sent away.")
@_as_json
def tokens_command(name: str, new: bool, ttl: float | None, revoke: str, as_json: bool) -> None:
    """List the tokens by which machines join, make one or end one."""
    found = _ask(name, JoinedHosts(new=new, seconds=3600 * (ttl or 0.0), revoke=revoke))
    if as_json:
        click.echo(json.dumps({"tokens": found["tokens"], "new": found["new"]}))
        return
    for one in found["tokens"]:
        until = f"until {when(one['until'])}" if one["until"] else "without end"
        click.echo(f"{one['id']}  made {when(one['made'])}, {until}, "
                   f"{one['machines']} machines joined by it")
    if found["new"]:
        click.echo(found["new"])


def _ask(name: str, command: JoinedHosts) -> dict[str, Any]:
    return call(Folder(name), lambda text: click.echo(f"pipeinfer: {text}", err=True), 20.0,
                command)
