"""What a launcher leaves behind when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeinfer.cluster.cleanup import VARIABLE
from pipeinfer.supervise.job import SupervisedJob
from tests.kit import launch

#: a daemon's ssh that does not end, with the launcher's output, and a helper that ends soon
LAUNCHER = """
import subprocess, sys
print(subprocess.Popen(["sleep", sys.argv[1]]).pid, flush=True)
"""


def gone(number):
    """Whether a process has ended, reaped or not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.mark.parametrize("seconds", ["600", "0.2"])
def test_a_daemons_ssh_does_not_outlive_its_launcher(seconds):
    said = []
    environ = {**os.environ, VARIABLE: f"test-{os.getpid()}"}
    job = SupervisedJob([sys.executable, "-c", LAUNCHER, seconds], environ,
                        lambda _, text: said.append(text))
    assert asyncio.run(asyncio.wait_for(job.run(), 60)) == 0
    deadline = time.monotonic() + 10  # a killed process ends when it is next scheduled
    while not gone(int(said[0])):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_who_reads_the_output_of_a_launch_script_sees_its_end(tmp_path):
    """As $(launch/ssh ...) does: the pipe is the launcher's own, which its ssh has as well."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)
    done = subprocess.run(
        [sys.executable, "-c", launch.SUPERVISED, sys.executable, str(launcher), "600"],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert gone(int(done.stdout))
