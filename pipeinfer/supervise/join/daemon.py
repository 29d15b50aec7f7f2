"""The launcher's daemon on a machine that has joined: its command line, and what a launcher on the
head calls in place of ssh to start it:

    python -m pipeinfer.supervise.join.daemon NAME [OPTIONS] HOST COMMAND...

NAME is that of the supervisor, which passes the order on. Options of ssh are ignored. The head says
of what kind the daemon is and gives its arguments; program, paths and environment are those of
this machine. Who controls the head can run programs here through the daemon.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeinfer.errors import PipeinferError, UsageError
from pipeinfer.host import MPI_PREFIX
from pipeinfer.supervise.launcher import Kind, Launcher
from pipeinfer.supervise.state import Folder, LaunchDaemon, call

_PROGRAMS: dict[Kind, str] = {"openmpi": "prted", "hydra": "hydra_pmi_proxy"}
#: this machine starts no further daemons, and its own stays this process's child
_LEFT_OUT = {"--daemonize": 1, "--launcher-exec": 2}
_SECONDS = 40.0
_LEFT_OUT_PARAMETERS = ("plm_ssh_agent", "plm_ssh_args")


def arguments_of(command: str) -> tuple[Kind, list[str]]:
    """Return the daemon's kind and arguments from the shell line that a launcher would run over
    ssh.

    Raises UsageError if it starts no daemon.
    """
    words = shlex.split(command)
    for number, word in enumerate(words):
        for kind, program in _PROGRAMS.items():
            if word.rpartition("/")[2] == program:
                # a user of sh gets the line as ( . ./.profile; ... )
                return kind, words[number + 1:len(words) - (words[-1] == ")")]
    raise UsageError(f"the launcher starts no daemon that a joined machine has: {command[:200]}")


def command_of(launcher: Launcher, kind: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of this machine's daemon. Raises UsageError for another kind."""
    if kind != launcher.kind:
        raise UsageError(f"the head's launcher is of the kind {kind}, this machine's of the kind "
                         f"{launcher.kind}")
    found, rest = [str(prefix_of(launcher) / "bin" / _PROGRAMS[launcher.kind])], list(arguments)
    while rest:
        count = _LEFT_OUT.get(rest[0], 0)
        if rest[0] == "--prtemca" and rest[1:2] and rest[1] in _LEFT_OUT_PARAMETERS:
            count = 3
        if not count:
            found.append(rest[0])
        del rest[:count or 1]
    return found


def prefix_of(launcher: Launcher) -> Path:
    """Return the folder in which a launcher is installed."""
    return Path(launcher.path).resolve().parent.parent


def environment_of(launcher: Launcher, environ: dict[str, str]) -> dict[str, str]:
    """Return the variables of a daemon: it finds its own parts, and ranks this pipeinfer."""
    prefix = str(prefix_of(launcher))
    libraries = [f"{prefix}/lib", *filter(None, [environ.get("LD_LIBRARY_PATH", "")])]
    return environ | {"PRTE_PREFIX": prefix, "PMIX_PREFIX": prefix, "OPAL_PREFIX": prefix,
                      MPI_PREFIX: prefix, "LD_LIBRARY_PATH": ":".join(libraries)}


def main() -> int:
    """Start the daemon; return the exit status for the launcher."""
    name, *words = sys.argv[1:]
    while words and words[0].startswith("-"):
        words.pop(0)
    try:
        kind, arguments = arguments_of(" ".join(words[1:]))
        call(Folder(name), lambda _: None, _SECONDS, LaunchDaemon(words[0], kind, arguments))
    except PipeinferError as error:
        sys.stderr.write(f"pipeinfer: {words[0] if words else 'a host'}: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
