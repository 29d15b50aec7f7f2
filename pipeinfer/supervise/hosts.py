"""The hosts of a job: which are asked for, which answer, and the launcher's hostfile of those.

Over `doctor_hosts`, which asks; this module keeps the books.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeinfer.cli import doctor_hosts
from pipeinfer.cli.findings import Finding
from pipeinfer.errors import UsageError
from pipeinfer.nodes import HostEntry, nodes_file_beside, read_hostfile


@dataclass(slots=True)
class Roster:
    """The hosts of `hostfile`. kind: of the launcher; out: where its hostfile goes; asked: ranks
    that the user wants, 0 for one per slot.

    used: the entries of the job that runs, or will; absent: why each of the others is not in it.
    """

    hostfile: str
    kind: str
    out: Path
    asked: int = 0
    ranks: int = 0
    used: list[HostEntry] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def choose(self) -> list[Finding]:
        """Ask every host; the job gets those that answer, and as many ranks as they have slots, at
        most what is wanted. What is wrong with the others. Raises UsageError when the file cannot
        be used, or rank 0's host is not among them."""
        entries, gone = doctor_hosts.living(self.hostfile)
        self.take(entries)
        self.absent |= {f.what.removeprefix("host "): f.detail for f in gone}
        return gone

    def take(self, entries: Sequence[HostEntry]) -> None:
        """Have the job on these hosts. Raises UsageError when they cannot be written down."""
        write = (doctor_hosts.hydra_hostfile if self.kind == "hydra"
                 else doctor_hosts.openmpi_hostfile)
        beside = self.out.with_name(f"{self.out.name}.new")
        try:
            beside.write_text(write(entries), encoding="utf-8")
            beside.replace(self.out)
        except OSError as error:  # a full disk; the hosts of before are still in the file
            raise UsageError(f"cannot write {self.out}: {error.strerror}") from error
        slots = sum(entry.slots for entry in entries)
        self.ranks = min(self.asked or slots, slots)
        self.used, free = [], self.ranks
        for entry in entries:
            if free > 0:
                self.used.append(entry)
            free -= entry.slots
        self.absent = {}

    @property
    def missing(self) -> list[HostEntry]:
        """Hosts that the job would have if they were there, as the file names them now."""
        try:
            entries = read_hostfile(self.hostfile)
        except UsageError:
            return []  # it is being edited
        used = {entry.host for entry in self.used}
        if self.asked and self.ranks >= self.asked:
            return []
        return [entry for entry in entries if entry.host not in used]

    @property
    def wanted(self) -> int:
        """Ranks that the job would have with all hosts there."""
        try:
            slots = sum(entry.slots for entry in read_hostfile(self.hostfile))
        except UsageError:
            return self.asked or self.ranks
        return min(self.asked or slots, slots)

    @property
    def network(self) -> str:
        """The one network of this host that holds all of them."""
        return doctor_hosts.common_network(self.used)

    @property
    def nodes(self) -> str:
        """Settings of single hosts beside the hostfile, or an empty text."""
        beside = nodes_file_beside(self.hostfile)
        return str(beside.resolve()) if beside else ""


def others(hostfile: str) -> list[str]:
    """How ssh reaches the hosts of a launcher's hostfile that are not this one."""
    here = (socket.gethostname(), "localhost")
    try:
        lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        first, _, rest = line.partition(" ")
        name = first.split(":")[0]
        if "user=" in rest:
            name = f"{rest.partition('user=')[2].split()[0]}@{name}"
        if name and name.rpartition("@")[2] not in here:
            found.append(name)
    return found
