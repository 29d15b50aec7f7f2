"""`pipeinfer env`: prints the environment variables for a plain mpirun."""

from __future__ import annotations

import contextlib
import os
import shlex

import click

from pipeinfer.errors import UsageError
from pipeinfer.supervise.launcher import LIBRARY, find
from pipeinfer.transport.settings import mpi_env, mpi_settings

_FOR_RANKS = ("OMPI_MCA_", "OMP_")


@click.command()
@click.option("--pass", "passed", is_flag=True,
              help="Print the options of mpirun that pass the settings on to other hosts instead.")
def env_command(passed: bool) -> None:
    """Print the settings for a plain mpirun of Open MPI 5, for a shell to take over.

    \b
        eval "$(pipeinfer env)"
        mpirun -np 4 pipeinfer serve
        mpirun $(pipeinfer env --pass) --hostfile lab -np 8 pipeinfer serve

    What is set already stays. `pipeinfer run` does this itself.
    """
    if passed:
        click.echo(" ".join(f"-x {name}" for name in mpi_settings()
                            if name.startswith(_FOR_RANKS)))
        return
    for line in mpi_env().splitlines():
        name, _, value = line.partition("=")
        setting = line and not line.startswith("#")
        click.echo(f'export {name}="${{{name}-{shlex.quote(value)}}}"' if setting else line)
    environ = dict(os.environ)
    with contextlib.suppress(UsageError):  # a launcher of another kind
        find(environ)
    if library := environ.get(LIBRARY):
        click.echo(f"export {LIBRARY}={shlex.quote(library)}")
