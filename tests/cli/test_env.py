"""`pipeinfer env`: a shell takes over what it prints."""

from __future__ import annotations

import subprocess
import sys

from pipeinfer.transport.settings import mpi_settings


def printed(*options):
    return subprocess.run([sys.executable, "-m", "pipeinfer", "env", *options], check=True,
                          capture_output=True, text=True).stdout


def test_a_shell_takes_over_the_settings_and_keeps_what_is_set():
    script = printed() + "\nenv"
    done = subprocess.run(["sh", "-euc", script], check=True, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "3"})
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert {name: found[name] for name in mpi_settings()} == \
        mpi_settings() | {"OMP_NUM_THREADS": "3"}


def test_options_pass_on_what_ranks_of_other_hosts_need():
    words = printed("--pass").split()
    assert set(words[::2]) == {"-x"}
    assert set(words[1::2]) == {
        name for name in mpi_settings() if name.startswith(("OMPI_MCA_", "OMP_"))}
