"""The first messages between ranks, where MPI itself does not return."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("mpi4py")

from pipeinfer.errors import ClusterError

#: a communicator that blocks in its first send, as Open MPI did for a rank that had just died
BLOCKED = """
import time
from pipeinfer.transport import mpi_startup

class Comm:
    def Get_rank(self):
        return 0

    def Isend(self, *args, **options):
        time.sleep(120)

mpi_startup._GRACE = 0.5
mpi_startup.send_json(Comm(), 3, "{}", timeout=0.5)
"""


@pytest.mark.mpi
def test_a_send_that_does_not_return_ends_the_rank_and_names_its_peer():
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True,
                          timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == ClusterError.exit_code
    assert "rank 0 could not send to rank 3 in 1 s" in done.stderr
    assert "start the job again" in done.stderr
