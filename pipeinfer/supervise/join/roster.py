"""The hosts of a job whose machines have joined: this one first, then the members that are here."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeinfer.cli import doctor_hosts
from pipeinfer.cli.findings import Finding
from pipeinfer.files import write_atomically
from pipeinfer.host import host_name
from pipeinfer.nodes import HostEntry
from pipeinfer.supervise.hosts import JobPlace, Roster
from pipeinfer.supervise.join.server import JoinServer
from pipeinfer.supervise.launcher import Kind

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
        agent = folder / "launch-agent"
        words = [sys.executable, "-P", "-m", "pipeinfer.supervise.join.launch_agent", name]
        write_atomically(agent, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        agent.chmod(0o700)
        self.agent = str(agent)
        self.take(self.found(0))

    def start(self) -> None:
        """Let threads reach the members through the running event loop."""
        self._loop = asyncio.get_running_loop()

    def found(self, asked: int) -> JobPlace:
        """Return where a job with so many ranks would run now; 0 for one rank per machine."""
        gone = {one.address: Finding("fail", f"host {one.address}", one.gone)
                for one in self._server.members.values() if one.gone}
        there = (_entry(one.address) for one in self._server.present)
        return JobPlace(asked, (self._own(), *there), gone)

    def _own(self) -> HostEntry:
        return HostEntry(host_name(), 1, 0)

    def _entries(self) -> Sequence[HostEntry]:
        return [self._own(), *(_entry(one.address) for one in self._server.members.values())]

    def notes(self, place: JobPlace) -> list[str]:
        """Return no notes: the server says who comes and goes."""
        del place
        return []

    def called(self, host: str) -> str:
        """Return the name of the machine at an address."""
        names = {one.address: one.name for one in self._server.members.values()}
        return names.get(host, host_name())

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


def _entry(address: str) -> HostEntry:
    return HostEntry(address, 1, 0)
