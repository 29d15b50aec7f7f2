"""The hosts of a job: those in the hostfile, those that answer, and the launcher's hostfile of
these.

`doctor_hosts` contacts the hosts; this module stores the results.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeinfer.cli import doctor_hosts
from pipeinfer.cli.doctor_hosts import Finding
from pipeinfer.cluster import cleanup
from pipeinfer.errors import UsageError
from pipeinfer.nodes import HostEntry, nodes_file_beside, read_hostfile

_CLEAN = 15.0  #: seconds for a host to end what is left there


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where a job runs.

    asked: requested number of ranks, 0 for one per slot.
    hosts: that answer, none for this host alone. gone: the others, and the problem of each.
    """

    asked: int
    hosts: tuple[HostEntry, ...] = ()
    gone: Mapping[str, Finding] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks: one per slot, at most the requested number."""
        slots = sum(entry.slots for entry in self.hosts)
        return min(self.asked or slots, slots) if self.hosts else self.asked

    @property
    def used(self) -> list[HostEntry]:
        """The hosts that get ranks."""
        found, free = [], self.ranks
        for entry in self.hosts:
            if free > 0:
                found.append(entry)
            free -= entry.slots
        return found


class Roster:
    """The hosts of `hostfile`.

    kind: of the launcher, openmpi or hydra.
    out: path of the launcher's hostfile.
    asked: requested number of ranks, 0 for one per slot.
    place: of the present or next job.
    agent: the program that the launcher calls in place of ssh, "" for ssh.
    waits: whether a job that its hosts cannot hold waits for more hosts.
    """

    agent, waits = "", False

    def __init__(self, hostfile: str, kind: str, out: Path, asked: int = 0) -> None:
        self.hostfile, self.kind, self.out = hostfile, kind, out
        self.place = JobPlace(asked)

    def found(self, asked: int) -> JobPlace:
        """Check every host; return where a job with so many ranks would run now.

        Raises UsageError when the file cannot be used, or rank 0's host does not answer.
        """
        entries, gone = doctor_hosts.living(self.hostfile)
        return JobPlace(asked, tuple(entries), gone)

    def take(self, place: JobPlace) -> None:
        """Use these hosts for the next job. Raises UsageError if the hostfile cannot be written."""
        write = (doctor_hosts.hydra_hostfile if self.kind == "hydra"
                 else doctor_hosts.openmpi_hostfile)
        replacement = self.out.with_name(f"{self.out.name}.new")
        try:
            replacement.write_text(write(place.hosts), encoding="utf-8")
            replacement.replace(self.out)
        except OSError as error:  # a full disk; the hosts of before are still in the file
            raise UsageError(f"cannot write {self.out}: {error.strerror}") from error
        self.place = place

    def ask(self) -> list[str]:
        """Use the hosts that answer; return notes for the user. Raises as `found` and `take`."""
        self.take(self.found(self.place.asked))
        return self.notes(self.place)

    def rest(self) -> None:
        """Let the hosts sleep, if their owners have it so; `ask` wakes them."""

    def notes(self, place: JobPlace) -> list[str]:
        """Return notes for the user about the hosts that a place lacks."""
        lines = [f"note: {one.what} {one.detail}: going on without it"
                 + (f" ({one.remedy})" if one.remedy else "") for one in place.gone.values()]
        if place.ranks != (wanted := self._slots(place.asked)):
            lines.append(f"{place.ranks} ranks instead of {wanted}")
        return lines

    @property
    def missing(self) -> list[HostEntry]:
        """The hosts that the job would use if they answered, according to the file's present
        content."""
        entries = self._entries()
        if self.place.asked and self.place.ranks >= self.place.asked:
            return []
        used = {entry.host for entry in self.place.used}
        return [entry for entry in entries if entry.host not in used]

    @property
    def wanted(self) -> int:
        """The ranks that the job would have with all hosts."""
        return self._slots(self.place.asked)

    def _slots(self, asked: int) -> int:
        return JobPlace(asked, tuple(self._entries())).ranks or asked or self.place.ranks

    def _entries(self) -> Sequence[HostEntry]:
        """Return all hosts that there may be, () while the file is being edited."""
        try:
            return read_hostfile(self.hostfile)
        except UsageError:
            return ()

    def called(self, host: str) -> str:
        """Return what users call a host."""
        return host

    def troubles(self, entries: Sequence[HostEntry]) -> dict[str, str]:
        """Return the problem of each of these hosts, "" if it can run ranks."""
        return doctor_hosts.troubles(entries)

    def clean(self, host: str, job: str) -> None:
        """End the processes that a job has left on another host, of those in `out`."""
        clean_by_ssh(host, job)

    @property
    def network(self) -> str:
        """The network of this host that contains all used hosts."""
        return doctor_hosts.common_network(self.place.used)

    @property
    def address(self) -> str:
        """The address of this host, "" where the others resolve its name."""
        return ""

    @property
    def nodes(self) -> str:
        """The path of the nodes file next to the hostfile, or ""."""
        nodes = nodes_file_beside(self.hostfile)
        return str(nodes.resolve()) if nodes else ""


def clean_by_ssh(host: str, job: str) -> None:
    """End the processes that a job has left on another host, which has a time limit for it."""
    ssh = ["ssh", "-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5",
           *shlex.split(os.environ.get("PIPEINFER_SSH_ARGS", "")), host,
           shlex.join([sys.executable, "-P", "-m", "pipeinfer.cluster.cleanup", job])]
    environ = {k: v for k, v in os.environ.items() if k != cleanup.VARIABLE}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(ssh, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environ,
                       timeout=_CLEAN, check=False)


def others(hostfile: str) -> list[str]:
    """Return the ssh names of the hosts of a launcher's hostfile that are not this one."""
    here = (socket.gethostname(), "localhost")
    try:
        entries = read_hostfile(hostfile)
    except UsageError:
        return []
    return [f"{one.user}@{one.host}" if one.user else one.host
            for one in entries if one.host not in here]
