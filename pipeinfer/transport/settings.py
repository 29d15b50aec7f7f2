"""The settings for a launch with Open MPI 5, with their reasons: the file `mpi.env` in this
folder.

This module reads the file only; it uses neither MPI nor this process's environment.
"""

from __future__ import annotations

from importlib import resources


def mpi_env() -> str:
    """Return the file's text: comments, and lines of NAME=VALUE without quotes."""
    return resources.files("pipeinfer.transport").joinpath("mpi.env").read_text(encoding="utf-8")


def mpi_settings() -> dict[str, str]:
    """Return the variables of `mpi_env`."""
    return dict(line.split("=", 1) for line in mpi_env().splitlines()
                if line and not line.startswith("#"))
