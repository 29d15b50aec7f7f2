"""A host that is lost with its disk: the host of the next stage has copies of its files."""

from __future__ import annotations

import json
import re

import pytest

from tests.kit.namespaces import Cluster
from tests.kit.references import alone, seeded
from tests.namespaces.test_cut import PACE, cut_while_it_speaks

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROMPT = "def read(path):\n    return open(path).read()\n\n\n" * 12
GENERATE = ["generate", "-p", PROMPT, "-n", "90", "--temp", "0.7", "--seed", "11", "--ignore-eos",
            "-c", "1024", "-t", "1", "--set", "split=equal", "--set", "chunk=32"]


@pytest.mark.full("copies and fetches between stores in tests/runtime/test_kv_store.py")
def test_a_host_that_dies_with_its_disk_costs_no_second_reading(tmp_path):
    folder = tmp_path / "kv"
    with Cluster(4, private=[str(tmp_path)]) as cluster:
        # paced, so that the copies are there before the first of the hosts leaves
        before = cluster.pipeinfer([*GENERATE, "--kv-disk", str(folder), "--json", *PACE],
                                   timeout=90)
        assert before.returncode == 0, before.stderr
        found = json.loads(before.stdout)
        assert found["stats"]["restored"] == 0
        files = {node: len(list((cluster.state / f"disk-{node}-0").glob("kv/??/*")))
                 for node in (2, 3, 4)}
        whole = (found["stats"]["n_prompt"] - 1) // 32
        # its own, and those of the stage before it
        assert all(count >= 2 * whole for count in files.values()), files
        text, err = cut_while_it_speaks(
            cluster, [*GENERATE, "--kv-disk", str(folder), *PACE],
            lambda: cluster.unplug(3))
    assert found["tokens"] == alone(PROMPT, 90, seeded(11, 0.7))
    assert text == PROMPT + found["text"] + "\n"
    assert "layers moved" in err
    restored, = [int(one) for one in re.findall(r"prompt: (\d+) of", err)]
    # after the loss, and before it if the cable was pulled behind the prompt
    assert restored in (whole * 32, 2 * whole * 32), err
