"""The grid that `doctor` draws before a job is started."""

from __future__ import annotations

import pytest

from pipeinfer.cli.doctor import _check_plan
from pipeinfer.config import JobConfig


def ranks(*hosts):
    return [{"rank": rank, "host": host, "memory_available": 1 << 34, "cores": 1,
             "cores_host": 1, "links": [
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


@pytest.mark.parametrize(("line", "level", "what"), [
    ('proposer = "lookahaed"', "fail", "does not exist: choose from draft"),
    ('proposer = "lookahead"', "fail", "give --proposer lookahead instead"),
    ('proposer = "draft-lookahead"', "ok", "12 layers as 6, 6; fits"),  # of a draft given later
])
def test_a_proposer_of_the_nodes_file_that_cannot_be_fails(tmp_path, line, level, what):
    nodes = tmp_path / "nodes.toml"
    nodes.write_text(f"[rank.3]\n{line}\n")
    (found, detail), = drawn("abcd", nodes=str(nodes))
    assert found == level
    assert what in detail


def test_layers_on_gpus_are_compared_with_their_memory(tmp_path):
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[node.b]\ndevice = "gpu"\n')

    def found(free, **options):
        config = JobConfig.of(model="embedded", ctx=512, **options)
        there = ranks("a", "b", "c")
        for one, count in zip(there, (0, 1, 0), strict=True):
            one["probe"] = {"ok": True, "devices": count * [{"description": "Card", "free": free}]}
        *missing, finding = _check_plan(config, there)
        if finding.level == "ok":  # of ranks that are to use a GPU, c has none
            assert [(one.level, one.what) for one in missing] == (
                [("warn", "GPU of rank 2")] if options.get("gpu_layers") else [])
        return finding.level, finding.detail

    for options in ({"gpu_layers": 99}, {"gpu_layers": 0, "nodes": str(nodes)}):
        assert found(1 << 30, **options)[0] == "ok"
        level, detail = found(30 << 20, **options, layers="6,6")
        assert level == "fail"
        assert "rank 1 on b, its GPUs (Card) needs" in detail
    assert found(30 << 20)[0] == "ok"
