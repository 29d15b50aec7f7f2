"""`pipeinfer demo`: which jobs it starts. `tests/test_wheel.py` runs it from a wheel."""

from __future__ import annotations

import sys

import pytest

from tests.kit import launch


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("words", "races"), [([], True), (["--no-race"], False),
                                               (["-n", "8"], False)])
def test_the_demo_ends_with_a_race(tmp_path, words, races):
    """Its two jobs, by a launcher that prints its words in place of starting them."""
    (tmp_path / "mpirun").write_text('#!/bin/sh\ncase "$*" in *--version*) echo Open MPI;; *) '
                                     'echo "job: $*";; esac\n')
    (tmp_path / "mpirun").chmod(0o755)
    done = launch.run(1, [sys.executable, "-m", "pipeinfer", "demo", *words], timeout=60,
                      PIPEINFER_MPIRUN=str(tmp_path / "mpirun"))
    jobs = [line for line in done.stdout.splitlines() if line.startswith("job: ")]
    assert done.returncode == 0, done.stderr
    assert ["pipeinfer race" in job for job in jobs] == [False, True][:1 + races]
    assert len({job.split(" -p ")[1].split(" --temp ")[0] for job in jobs}) == 1
    assert jobs[0].endswith(" ".join(words)) or words == ["--no-race"]


def test_without_a_launcher_the_demo_says_how_to_get_one(tmp_path):
    done = launch.run(1, [sys.executable, "-m", "pipeinfer", "demo"],
                      PIPEINFER_MPIRUN=str(tmp_path / "none"))
    assert done.returncode == 2
    assert "PIPEINFER_MPIRUN" in done.stderr
