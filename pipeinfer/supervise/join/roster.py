"""The hosts of a job whose machines have joined: this one first, then the members that are here."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import click

from pipeinfer.cli import doctor_hosts
from pipeinfer.cli.doctor_hosts import Finding
from pipeinfer.files import write_atomically
from pipeinfer.host import host_name
from pipeinfer.nodes import HostEntry
from pipeinfer.supervise.hosts import JobPlace, Roster
from pipeinfer.supervise.join.commands import PORT, address_of
from pipeinfer.supervise.join.messages import OwnSettings, Sleep
from pipeinfer.supervise.join.offers import own_offer
from pipeinfer.supervise.join.server import Joiner, JoinServer
from pipeinfer.supervise.join.tokens import JoinTokens
from pipeinfer.supervise.launcher import Kind, Launcher
from pipeinfer.supervise.state import Folder

_NODES = "joined.toml"
_CLEAN = 15.0  #: seconds for a member to end what a job has left


class JoinedRoster(Roster):
    """The hosts that have joined at `server`.

    folder: of the supervisor's files. name: of the supervisor.
    """

    waits = True

    def __init__(self, server: JoinServer, kind: Kind, folder: Path, name: str) -> None:
        super().__init__("the machines that have joined", kind, folder / "hosts")
        self._server, self._folder = server, folder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._resting: list[str] = []  #: ids of members that were let sleep
        agent = folder / "launch-agent"
        words = [sys.executable, "-P", "-m", "pipeinfer.supervise.join.daemon", name]
        write_atomically(agent, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        agent.chmod(0o700)
        self.agent = str(agent)
        self.take(self.found(0))

    def start(self) -> None:
        """Let threads reach the members through the running event loop."""
        self._loop = asyncio.get_running_loop()

    def found(self, asked: int) -> JobPlace:
        """Return where a job with so many ranks would run now; 0 for one rank on each NUMA node of
        each machine."""
        gone = {one.address: Finding("fail", f"host {one.address}", one.gone)
                for one in self._server.members.values() if one.gone}
        there = map(_entry, self._server.present)
        return JobPlace(asked, (self._own(), *there), gone)

    def _own(self) -> HostEntry:
        return HostEntry(host_name(), self._server.own.numa_nodes, 0)

    def _entries(self) -> Sequence[HostEntry]:
        return [self._own(), *map(_entry, self._server.members.values())]

    def notes(self, place: JobPlace) -> list[str]:
        """Return no notes: the server says who comes and goes."""
        del place
        return []

    def called(self, host: str) -> str:
        """Return the name of the machine at an address."""
        names = {one.address: one.name for one in self._server.members.values()}
        return names.get(host, host_name())

    def rest(self) -> None:
        """Let the members sleep whose owners have it so; called in a thread."""
        assert self._loop is not None
        self._resting = [one.id for one in self._server.present if one.offer.mac]
        for id in self._resting:
            self._loop.call_soon_threadsafe(self._server.members[id].send, Sleep())

    def ask(self) -> list[str]:
        """Wake the members that were let sleep, then use those that are here."""
        deadline = time.monotonic() + doctor_hosts.WAKE_SECONDS
        # again each second: a packet may be lost, or come while a machine goes down
        while time.monotonic() < deadline and self._server.listens and (away := [
                one for one in self._server.members.values()
                if one.gone and one.id in self._resting]):
            for one in away:
                doctor_hosts.wake(one.offer.mac)
            time.sleep(1.0)
        self._resting = []
        return super().ask()

    def troubles(self, entries: Sequence[HostEntry]) -> dict[str, str]:
        """Return the reason why each of these hosts cannot run ranks, "" if it can."""
        gone = {one.address: one.gone for one in self._server.members.values()}
        return {entry.host: gone.get(entry.host, "") for entry in entries}

    def clean(self, host: str, job: str) -> None:
        """End the processes that a job has left on a member; called in a thread."""
        assert self._loop is not None
        if self._server.at(host) is not None:
            work = asyncio.run_coroutine_threadsafe(self._server.end_job(host, job), self._loop)
            try:
                work.result(_CLEAN)
            except TimeoutError:
                work.cancel()

    @property
    def network(self) -> str:
        """The network of this host over which the members have joined."""
        return doctor_hosts.network_of(self.address) if self.address else ""

    @property
    def address(self) -> str:
        """The address of this host at which the members have joined."""
        return self._server.address

    def take(self, place: JobPlace) -> None:
        """Use these hosts for the next job, and its members' own settings."""
        lines = [f'[node."{one.name}"]\n' + "".join(
            f"{name} = {json.dumps(value)}\n" for name, value in one.offer.settings.given.items())
            for one in self._server.present if one.offer.settings.given]
        write_atomically(self._folder / _NODES, "".join(lines))
        self._nodes = str(self._folder / _NODES) if lines else ""
        super().take(place)

    @property
    def nodes(self) -> str:
        """The path of a nodes file with the members' own settings, "" if they have none."""
        return self._nodes


def _entry(member: Joiner) -> HostEntry:
    return HostEntry(member.address, member.offer.numa_nodes, 0)


#: options of `serve` that make the machines hold the model together, and get its layers by itself
_TOGETHER = ("--head-stage", "--distribute")


def together(words: list[str]) -> list[str]:
    """Return `serve` and its options with those by which members share the model."""
    return [*words, *(word for word in _TOGETHER if word not in words)]


class Joining:
    """Accepts machines while it is entered as an asynchronous context.

    at: [ADDRESS][:PORT], "" for all addresses. say: prints a line for the user.
    """

    def __init__(self, at: str, launcher: Launcher, folder: Folder,
                 say: Callable[[str], None]) -> None:
        """Raises UsageError if the token, the certificate or the hostfile cannot be used."""
        self._host, self._port = address_of(at) if at else ("", PORT)
        self._folder, self._say = folder, say
        self.server = JoinServer(JoinTokens(folder.path), own_offer(launcher, OwnSettings()), say)
        self.roster = JoinedRoster(self.server, launcher.kind, folder.path, folder.name)

    async def __aenter__(self) -> Joining:
        await self.server.start(self._host, self._port)
        self.roster.start()
        self._say(f"on each other machine: {self.server.line}")
        if sys.stderr.isatty():
            show_token(self._folder)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.server.close()


def show_token(folder: Folder) -> None:
    """Print the token by which machines join, on the terminal alone: no log has it."""
    tokens = JoinTokens(folder.path)
    click.echo(f"pipeinfer: it asks for this token: {tokens.token(tokens.usable()).text}", err=True)
