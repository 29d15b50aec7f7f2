"""`plan`, `shard` and `bench` say beforehand what the runtime would refuse."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pipeinfer.cli.plan import plan_command
from pipeinfer.errors import UsageError
from pipeinfer.forecast import grids
from pipeinfer.forecast.report import file_view
from pipeinfer_lab.commands import compare, sample
from pipeinfer_lab.commands.bench import bench_command
from pipeinfer_lab.commands.files import shard
from tests.kit import launch
from tests.kit.random_model import tiny, write_random_model

PIPEINFER = [sys.executable, "-m", "pipeinfer"]


@pytest.fixture(scope="module")
def whole_only(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "gemma.gguf"
    return str(write_random_model(path, tiny("gemma2", n_layer=46, n_embd=64)))


def test_a_dry_plan_refuses_a_model_that_cannot_be_split(whole_only):
    done = CliRunner().invoke(plan_command, [whole_only, "--dry-run", "--cluster", "c"])
    assert "46 layers" in str(done.exception)
    assert "-np 1" in str(done.exception)


def test_a_dry_plan_keeps_to_layers_that_can_begin_a_stage(tmp_path):
    path = write_random_model(tmp_path / "m.gguf", tiny("smollm3", n_layer=48, n_embd=64))
    done = CliRunner().invoke(plan_command, [
        str(path), "--dry-run", "--hostfile", str(launch.ROOT / "hostfiles" / "beowulf-hetero"),
        "--json"])
    assert done.exception is None, done.exception
    ends = [stage["layers"] for stage in json.loads(done.stdout)["stages"]]
    assert len(ends) > 5
    assert all(start % 4 == 0 for start, _ in ends)


def test_shards_ahead_of_time_keep_to_them_too(tmp_path, monkeypatch, whole_only):
    monkeypatch.setenv("PIPEINFER_CACHE", str(tmp_path / "cache"))
    path = write_random_model(tmp_path / "m.gguf", tiny("smollm3"))
    done = CliRunner().invoke(shard, [str(path), "--stages", "2"])
    assert "layers 4-4" in done.stdout
    done = CliRunner().invoke(shard, [str(path), "--stages", "3"])
    assert "multiples of 4" in str(done.exception)
    done = CliRunner().invoke(shard, [whole_only, "--stages", "2"])
    assert "46 layers" in str(done.exception)


@pytest.mark.parametrize(("words", "says"), [
    (("--tasks", "1", "--pasta-positions", "oracle:12,30"), "train by pred-1x or pred-10x"),
    (("--tasks", "1", "--pasta-positions", "oracle"), "compare --pasta-oracle finds them"),
    (("--tasks", "1", "--repeat-penalty", "1.2"), "cannot be combined with repetition penalties"),
    (("--tasks", "1", "--out", "none/s.jsonl"), "cannot write none/s.jsonl"),
    (("--prompts", "none.jsonl", "--judge", "http://127.0.0.1:1/v1"), "there is no such file")])
def test_sampling_refuses_before_anything_loads(tmp_path, monkeypatch, words, says):
    def load(config):
        raise AssertionError(f"{config} is loaded")

    monkeypatch.setattr(sample, "join", load)
    done = CliRunner().invoke(sample.sample_command, ["--out", str(tmp_path / "s.jsonl"), *words])
    assert isinstance(done.exception, UsageError), done.exception
    assert says in str(done.exception)


@pytest.mark.parametrize(("words", "says"), [
    (("--prompts", __file__, "--tasks", "1"), "leave out --tasks and --kind"),
    (("--prompts", __file__, "--kind", "mixed"), "leave out --tasks and --kind"),
    (("--pasta-oracle", "--method", "pdos"), "add --method pasta")])
def test_comparing_refuses_options_without_effect_before_anything_loads(monkeypatch, words, says):
    def load(config):
        raise AssertionError(f"{config} is loaded")

    monkeypatch.setattr(compare, "join", load)
    done = CliRunner().invoke(compare.compare_command, list(words))
    assert isinstance(done.exception, UsageError), done.exception
    assert says in str(done.exception)


def test_ranks_that_sample_need_no_torch():
    without = "import sys; sys.modules['torch'] = None; import pipeinfer_lab.commands.sample"
    subprocess.run([sys.executable, "-c", without], check=True, timeout=60)


@pytest.mark.parametrize(("command", "more"), [(plan_command, ["--grids", "--hosts", "2"]),
                                               (bench_command, ["--grid", "2", "--nodes", "3",
                                                                "--tokens", "8"])])
def test_grids_of_a_model_that_is_not_sliced_are_said_to_be_emulated_only(
        monkeypatch, command, more):
    # it is said before grids are emulated, which takes seconds: tests/emulation/test_wide.py
    monkeypatch.setattr(grids, "compare", lambda *given: given)
    monkeypatch.setattr(grids, "as_text", lambda table: "a table")
    arguments = ["--cluster", "c", "--pair", "falcon-7b", *more]
    done = CliRunner().invoke(command, arguments)
    assert "emulated only" in done.stderr
    assert "add up to its width" in done.stderr
    done = CliRunner().invoke(command, [*arguments[:2], "--pair", "dolphin-tinyllama", *more])
    assert "emulated only" not in done.stderr


def test_what_a_row_of_a_mixture_draws_is_what_it_costs(tmp_path):
    """Two of four experts: further rows draw the others."""
    path = write_random_model(tmp_path / "m.gguf", tiny("qwen3moe"))
    view = file_view(path, 256)
    experts = 4 * 3 * 4 * 64 * 256 * 4  # bytes: layers, matrices, experts, columns, width, floats
    everything = sum(view.load.costs) + experts / 2
    assert view.moved(1) == 1.0
    assert view.moved(2) == pytest.approx((everything - experts / 4) / sum(view.load.costs))
    assert view.moved(64) == pytest.approx(everything / sum(view.load.costs))
    assert view.weight_bytes > everything
