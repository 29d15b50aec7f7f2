"""The first messages between ranks, where MPI itself does not return."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("mpi4py")

from pipeinfer.errors import ClusterError

#: a communicator that blocks in its first send, as Open MPI did for a rank that had just died
BLOCKED = """
import sys, time
from pipeinfer.transport import (mpi_job)

class Comm:
    def Get_rank(self):
        return 0

    def Get_size(self):
        return 4

    def Isend(self, *args, dest, **options):
        if dest < 3:
            return self
        time.sleep(120)

    def Test(self):
        return True

mpi_job._GRACE = 0.5
if sys.argv[1] == "say":
    mpi_job.send_json(Comm(), 3, "{}", timeout=0.5)
mpi_job.dismiss(Comm(), timeout=0.5)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["say", "dismiss"])
def test_a_send_that_does_not_return_ends_the_rank_and_names_its_peer(what):
    done = subprocess.run([sys.executable, "-c", BLOCKED, what], capture_output=True, text=True,
                          timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == ClusterError.exit_code
    assert "rank 0 could not send to rank 3 in 1 s" in done.stderr
    assert "start the job again" in done.stderr
