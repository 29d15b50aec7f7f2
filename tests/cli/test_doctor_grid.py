"""The grid that `doctor` draws before a job is started."""

from __future__ import annotations

import pytest

from pipeinfer.cli.doctor import _check_plan
from pipeinfer.config import JobConfig


def ranks(*hosts):
    return [{"rank": rank, "host": host, "memory_available": 1 << 34, "links": [
        {"source": rank, "dest": rank + 1, "latency": 1e-4, "bandwidth": 1e8}]}
        for rank, host in enumerate(hosts)]


def drawn(hosts, **options):
    config = JobConfig.of(model="embedded", **options)
    return [(one.level, one.detail) for one in _check_plan(config, ranks(*hosts))]


def test_it_names_members_slices_bytes_and_what_a_sum_would_take():
    plan, first, second, spare = drawn("abbcde", grid="2x2", layers="7,5")
    assert plan == ("ok", "target.gguf: layers 7, 5 on ranks 1, 2; ranks 3, 4; fits")
    assert first[1].startswith("stage 1: layers 0-6, sums through shared memory: rank 1 on b "
                               "(KV heads 0-0, columns 0-383; ")
    assert "stage 2: layers 7-11, a sum takes about 1" in second[1]
    assert "rank 4 on d (KV heads 1-1, columns 384-767; 3 MB)" in second[1]
    assert spare[1] == "spare: rank 5"


@pytest.mark.parametrize(("options", "what"), [
    ({"grid": "2x2"}, "4 members, but only 2 ranks"),
    ({"grid": "1x2", "slices": "9"}, "cannot be cut into 9 slices"),
])
def test_a_grid_that_cannot_be_fails(options, what):
    (level, detail), = drawn("abc", **options)
    assert level == "fail"
    assert what in detail
