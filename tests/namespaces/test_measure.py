"""`pipeinfer measure` over hosts, with programs beside it that stand in for llama.cpp's own."""

from __future__ import annotations

import pytest

from benchmarks.shared.__main__ import read
from tests.kit import llama_programs
from tests.kit.namespaces import Cluster

pytestmark = [pytest.mark.mpi, pytest.mark.slow,
              pytest.mark.full("one host in tests/cli/test_measure.py")]


@pytest.mark.parametrize("worker", [True, False])
def test_each_host_runs_a_worker_and_what_fails_is_said(tmp_path, worker):
    programs = llama_programs.write(tmp_path / "programs", worker=worker)
    path = tmp_path / "ours.json"
    with Cluster(3) as cluster:
        done = cluster.pipeinfer(["measure", "--programs", str(programs), "--share", str(path),
                                  "-t", "1"], timeout=240)
        left = cluster.run(["pgrep", "-f", str(programs)], timeout=20)
    assert done.returncode == 0, done.stderr
    assert left.stdout == ""
    record = read(path)
    assert len(record.hosts) == 3
    if worker:
        assert record.baseline is not None
        assert record.baseline.workers == 3
    else:
        assert record.baseline is None
        assert "has no ggml-rpc-server" in done.stderr
    assert cluster.address(2) not in path.read_text()
