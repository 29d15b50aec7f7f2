"""Ranks that have the model's file read their layers from it, unless they are told otherwise."""

from __future__ import annotations

import pytest

from pipeinfer.llama import stream
from tests.kit import launch
from tests.kit.own_caches import own_caches

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
REQUEST = ["-p", "def area(r):\n", "-n", "24", "--temp", "0", "--ignore-eos", "-c", "128", "-t",
           "1", "-m", "embedded"]


@pytest.mark.skipif(not stream.available(), reason="no streams here")
@pytest.mark.parametrize(("option", "files"), [("auto", 0), ("always", 2), ("never", 0)])
def test_layers_have_files_of_their_own_only_where_that_is_requested(option, files, tmp_path):
    with own_caches(tmp_path):
        found = launch.answered(3, *REQUEST, "--set", f"shard_cache={option}",
                                PIPEINFER_CACHE=str(tmp_path))
    assert len(list(tmp_path.glob("*.gguf"))) == files
    assert found["tokens"] == launch.answered(1, *REQUEST, "--policy", "iterative")["tokens"]
