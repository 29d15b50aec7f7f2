"""Emulation at the wall clock over real ranks: the tokens, whatever the pace."""

from __future__ import annotations

import json
import sys

import pytest

from tests.rig import launch
from tests.support.sample import full

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.skipif(
    launch.mpirun_path() is None, reason="no mpirun")]
BENCH = [sys.executable, "-m", "pipeinfer", "bench", "--cluster", "c", "--nodes", "3", "--tokens",
         "24", "--prompt-tokens", "16", "--json"]


def bench(np, *args):
    done = launch.run(np, [*BENCH, *args], timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("np", "policy"), [
    (3, "pipeinfer"), full(4, "iterative"), full(3, "published")])
def test_the_real_runtime_gives_the_tokens_of_virtual_time(np, policy):
    found = bench(np, "--policy", policy, "--scale", "0.3")
    wall, virtual = found["wall"], found["virtual"]
    assert wall["tokens_equal"]
    assert virtual["tokens_equal"]
    assert len(wall["processor_seconds"]) == np
    assert wall["hops"] % (np - 1) == 0  # every run passes every stage
    assert wall["hops"] >= 6 * (np - 1)
    assert wall["stage_ratio"] is not None


def test_too_few_ranks_are_told_how_many():
    done = launch.run(2, BENCH, timeout=60)
    assert done.returncode == 2
    assert "start mpirun with -np 3, not 2" in done.stderr
