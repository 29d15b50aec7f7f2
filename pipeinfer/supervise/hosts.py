"""The hosts of a job: those in the hostfile, those that answer, and the launcher's hostfile of
these.

`doctor_hosts` contacts the hosts; this module stores the results.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.cli import doctor_hosts
from pipeinfer.cli.findings import Finding
from pipeinfer.errors import UsageError
from pipeinfer.nodes import HostEntry, nodes_file_beside, read_hostfile


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where a job runs.

    asked: requested number of ranks, 0 for one per slot.
    hosts: that answer, none for this host alone. gone: the problems of the others.
    """

    asked: int
    hosts: tuple[HostEntry, ...] = ()
    gone: tuple[Finding, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks: one per slot, at most the requested number."""
        slots = sum(entry.slots for entry in self.hosts)
        return min(self.asked or slots, slots) if self.hosts else self.asked

    @property
    def absent(self) -> dict[str, str]:
        """The reason why each of the other hosts is not used, by its name."""
        return {one.what.removeprefix("host "): one.detail for one in self.gone}

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
    """

    def __init__(self, hostfile: str, kind: str, out: Path, asked: int = 0) -> None:
        self.hostfile, self.kind, self.out = hostfile, kind, out
        self.place = JobPlace(asked)

    def found(self, asked: int) -> JobPlace:
        """Check every host; return where a job with so many ranks would run now.

        Raises UsageError when the file cannot be used, or rank 0's host does not answer.
        """
        entries, gone = doctor_hosts.living(self.hostfile)
        return JobPlace(asked, tuple(entries), tuple(gone))

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

    def notes(self, place: JobPlace) -> list[str]:
        """Return notes for the user about the hosts that a place lacks."""
        lines = [f"note: {finding.what} {finding.detail}: going on without it"
                 + (f" ({finding.remedy})" if finding.remedy else "") for finding in place.gone]
        if place.ranks != (wanted := self._slots(place.asked)):
            lines.append(f"{place.ranks} ranks instead of {wanted}")
        return lines

    @property
    def missing(self) -> list[HostEntry]:
        """The hosts that the job would use if they answered, according to the file's present
        content."""
        try:
            entries = read_hostfile(self.hostfile)
        except UsageError:
            return []  # it is being edited
        if self.place.asked and self.place.ranks >= self.place.asked:
            return []
        used = {entry.host for entry in self.place.used}
        return [entry for entry in entries if entry.host not in used]

    @property
    def wanted(self) -> int:
        """The ranks that the job would have with all hosts."""
        return self._slots(self.place.asked)

    def _slots(self, asked: int) -> int:
        try:
            return JobPlace(asked, tuple(read_hostfile(self.hostfile))).ranks
        except UsageError:
            return asked or self.place.ranks

    @property
    def network(self) -> str:
        """The network of this host that contains all used hosts."""
        return doctor_hosts.common_network(self.place.used)

    @property
    def nodes(self) -> str:
        """The path of the nodes file next to the hostfile, or ""."""
        nodes = nodes_file_beside(self.hostfile)
        return str(nodes.resolve()) if nodes else ""


def others(hostfile: str) -> list[str]:
    """Return the ssh names of the hosts of a launcher's hostfile that are not this one."""
    here = (socket.gethostname(), "localhost")
    try:
        entries = read_hostfile(hostfile)
    except UsageError:
        return []
    return [f"{one.user}@{one.host}" if one.user else one.host
            for one in entries if one.host not in here]
