"""Rank program: `pipeinfer ARGS...` in which ranks above 0 leave MPI_Init late.

Usage: slow_start.py SECONDS ARGS...
"""

from __future__ import annotations

import sys
import time

from pipeinfer import host
from pipeinfer.cli.main import main

if host.launched_rank() > 0:
    host.choose_transports()
    from mpi4py import MPI

    assert MPI.Is_initialized()
    time.sleep(float(sys.argv[1]))
main(args=sys.argv[2:], prog_name="pipeinfer")
