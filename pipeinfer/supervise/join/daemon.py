"""The launcher's daemon on a machine that has joined: which arguments of the head are accepted, and
the command line of this machine's own daemon.

The head says of what kind the daemon is and gives its arguments; program, paths and environment
are those of this machine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeinfer.errors import UsageError
from pipeinfer.host import MPI_PREFIX
from pipeinfer.supervise.launcher import Kind, Launcher

_PROGRAMS: dict[Kind, str] = {"openmpi": "prted", "hydra": "hydra_pmi_proxy"}
_MOST = 64  #: arguments
_VALUE = re.compile(r"[\w.,:;@/\[\]%+-]{0,4096}", re.ASCII)
_ADDRESSES = "prte_hnp_uri"  #: the one value with semicolons
#: parameters of PRRTE that a daemon gets from its launcher; none names a file or a program
_PARAMETERS = re.compile(
    r"PREFIXES|ess|ess_base_(?:nspace|vpid|num_procs)|prte_hnp_uri|prte_if_include|"
    r"hwloc_default_binding_policy|rmaps_default_(?:mapping|ranking)_policy|"
    r"state_base_\w+|pmix_session_server|plm|plm_ssh_no_tree_spawn|prte_keep_fqdn_hostnames")
#: this machine starts no further daemons
_LEFT_OUT = ("plm_ssh_agent", "plm_ssh_args", "--launcher-exec")
_PLAIN = ("--allow-run-as-root", "--leave-session-attached", "--debug-daemons")
_HYDRA = {"--control-port", "--rmk", "--launcher", "--demux", "--pgid", "--retries", "--usize",
          "--pmi-port", "--gpus-per-proc", "--gpu-subdevs-per-proc", "--proxy-id", "--iface"}


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
    """Return the command line of this machine's daemon. Raises UsageError for arguments that are
    none of a daemon."""
    if kind != launcher.kind:
        raise UsageError(f"the head's launcher is of the kind {kind}, this machine's of the kind "
                         f"{launcher.kind}")
    wrong = [one for one in arguments if not _VALUE.fullmatch(one)]
    if len(arguments) > 3 * _MOST or wrong:
        raise UsageError(f"arguments that no launcher's daemon takes: {wrong[:3] or 'too many'}")
    checked = _openmpi if launcher.kind == "openmpi" else _hydra
    return [str(prefix_of(launcher) / "bin" / _PROGRAMS[launcher.kind]), *checked(arguments)]


def prefix_of(launcher: Launcher) -> Path:
    """Return the folder in which a launcher is installed."""
    return Path(launcher.path).resolve().parent.parent


def environment_of(launcher: Launcher, environ: dict[str, str]) -> dict[str, str]:
    """Return the variables of a daemon: it finds its own parts, and ranks this pipeinfer."""
    prefix = str(prefix_of(launcher))
    libraries = [f"{prefix}/lib", *filter(None, [environ.get("LD_LIBRARY_PATH", "")])]
    return environ | {"PRTE_PREFIX": prefix, "PMIX_PREFIX": prefix, "OPAL_PREFIX": prefix,
                      MPI_PREFIX: prefix, "LD_LIBRARY_PATH": ":".join(libraries)}


def _openmpi(arguments: Sequence[str]) -> list[str]:
    found: list[str] = []
    rest = list(arguments)
    while rest:
        match rest:
            case ["--daemonize", *rest]:  # it stays this process's child, and ends with it
                pass
            case [word, *rest] if word in _PLAIN:
                found.append(word)
            case ["--prtemca", name, _, *rest] if name in _LEFT_OUT:
                pass
            case ["--prtemca", name, value, *rest] if _PARAMETERS.fullmatch(name) and (
                    ";" not in value or name == _ADDRESSES):
                found += ["--prtemca", name, value]
            case wrong:
                raise UsageError(f"a daemon of a joined machine does not take {wrong[:3]}")
    return found


def _hydra(arguments: Sequence[str]) -> list[str]:
    found: list[str] = []
    rest = list(arguments)
    while rest:
        match rest:
            case [name, _, *rest] if name in _LEFT_OUT:
                pass
            case [name, value, *rest] if name in _HYDRA:
                found += [name, value]
            case wrong:
                raise UsageError(f"a daemon of a joined machine does not take {wrong[:2]}")
    return found
