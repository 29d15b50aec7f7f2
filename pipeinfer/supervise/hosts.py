"""The hosts of a job: those in the hostfile, those that answer, and the launcher's hostfile of
these.

`doctor_hosts` contacts the hosts; this module stores the results.
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
    """The hosts of `hostfile`.

    kind: of the launcher, openmpi or hydra.
    out: path of the launcher's hostfile.
    asked: requested number of ranks, 0 for one per slot.
    ranks: number of ranks of the present or next job.
    used: the hostfile's entries of that job.
    absent: the reason why each of the other hosts is not used.
    """

    hostfile: str
    kind: str
    out: Path
    asked: int = 0
    ranks: int = 0
    used: list[HostEntry] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def choose(self) -> list[Finding]:
        """Check every host; use those that answer.

        The job gets as many ranks as these have slots, at most the requested number. Returns the
        problems of the other hosts. Raises UsageError when the file cannot be used, or rank 0's
        host is not among them.
        """
        entries, gone = doctor_hosts.living(self.hostfile)
        self.take(entries)
        self.absent |= {f.what.removeprefix("host "): f.detail for f in gone}
        return gone

    def ask(self) -> list[str]:
        """See `choose`; return notes for the user."""
        lines = [f"note: {finding.what} {finding.detail}: going on without it"
                 + (f" ({finding.remedy})" if finding.remedy else "") for finding in self.choose()]
        if self.ranks != self.wanted:
            lines.append(f"{self.ranks} ranks instead of {self.wanted}")
        return lines

    def take(self, entries: Sequence[HostEntry]) -> None:
        """Use these hosts for the next job. Raises UsageError if the hostfile cannot be written."""
        write = (doctor_hosts.hydra_hostfile if self.kind == "hydra"
                 else doctor_hosts.openmpi_hostfile)
        replacement = self.out.with_name(f"{self.out.name}.new")
        try:
            replacement.write_text(write(entries), encoding="utf-8")
            replacement.replace(self.out)
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
        """The hosts that the job would use if they answered, according to the file's present
        content."""
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
        """The ranks that the job would have with all hosts."""
        try:
            slots = sum(entry.slots for entry in read_hostfile(self.hostfile))
        except UsageError:
            return self.asked or self.ranks
        return min(self.asked or slots, slots)

    @property
    def network(self) -> str:
        """The network of this host that contains all used hosts."""
        return doctor_hosts.common_network(self.used)

    @property
    def nodes(self) -> str:
        """The path of the nodes file next to the hostfile, or ""."""
        nodes = nodes_file_beside(self.hostfile)
        return str(nodes.resolve()) if nodes else ""


def others(hostfile: str) -> list[str]:
    """Return the ssh names of the hosts of a launcher's hostfile that are not this one."""
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
