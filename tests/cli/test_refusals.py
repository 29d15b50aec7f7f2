"""What commands refuse, in one line and before anything loads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pipeinfer.cli.generate import generate
from pipeinfer.cli.measure import measure_command
from pipeinfer.cli.plan import plan_command
from pipeinfer.forecast import grids
from pipeinfer.forecast.report import file_view
from pipeinfer.supervise import race
from pipeinfer.supervise.commands import up_command
from pipeinfer.supervise.race import race_command
from pipeinfer_lab.commands import compare, files, sample
from pipeinfer_lab.commands.bench import bench_command
from tests.kit import launch
from tests.kit.random_model import tiny, write_random_model
from tests.kit.refusals import refusal


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
    done = CliRunner().invoke(files.shard, [str(path), "--stages", "2"])
    assert "layers 4-4" in done.stdout
    done = CliRunner().invoke(files.shard, [str(path), "--stages", "3"])
    assert "multiples of 4" in str(done.exception)
    done = CliRunner().invoke(files.shard, [whole_only, "--stages", "2"])
    assert "46 layers" in str(done.exception)


SAMPLE = ("--out", "s.jsonl")
REFUSED = [
    (generate, (), 2, "no prompt was given"),
    (generate, ("-p", "x", "-f", "y"), 2, "not both"),
    (generate, ("-f", "/nowhere"), 2, "cannot read /nowhere"),
    (generate, ("-p", "x", "--config", "/nowhere.toml"), 2, "cannot read config file"),
    (files.trace, ("/nowhere", "-o", "x.png"), 2, "cannot read /nowhere"),
    (files.shard, ("/nowhere.gguf", "--stages", "2"), 3, "/nowhere.gguf"),
    (measure_command, ("--policy", "iterative"), 2, "leave them out"),
    (measure_command, ("--share", "ours.txt"), 2, "ours.json"),
    (measure_command, ("--programs", "."), 2, "GGML_RPC"),
    (race_command, ("-p", "x"), 2, "there is no launcher /nowhere/mpirun"),
    (race_command, ("-p", "x", "--policy", "iterative"), 2, "race decides about --policy"),
    (race_command, ("-p", "x", "--ablate", "cancel"), 2, "race decides about --policy"),
    (race_command, ("-p", "x", "--decomposer", "pdos"), 2, "race decides about --policy"),
    (up_command, ("generate", "-p", "x"), 2, "`pipeinfer up` keeps a server running, not generate"),
    (up_command, ("--join", "192.0.2.1:7700", "--", "serve"), 2, "--join=192.0.2.1:7700"),
    (up_command, ("--journal", "--", "serve"), 2, "--journal stands before `serve`: give options"),
    (up_command, ("--hosts", "/no/hosts", "--", "serve"), 2, "cannot read hostfile /no/hosts"),
    (up_command, ("--", "--port", "many"), 2, "Invalid value for '--port'"),
    (up_command, ("--name", "a/b", "--", "serve"), 2, "--name 'a/b'"),
    (sample.sample_command, (*SAMPLE, "--tasks", "1", "--pasta-positions", "oracle:12,30"), 2,
     "train by pred-1x or pred-10x"),
    (sample.sample_command, (*SAMPLE, "--tasks", "1", "--pasta-positions", "oracle"), 2,
     "compare --pasta-oracle finds them"),
    (sample.sample_command, (*SAMPLE, "--tasks", "1", "--repeat-penalty", "1.2"), 2,
     "cannot be combined with repetition penalties"),
    (sample.sample_command, ("--tasks", "1", "--out", "none/s.jsonl"), 2,
     "cannot write none/s.jsonl"),
    (sample.sample_command,
     (*SAMPLE, "--prompts", "none.jsonl", "--judge", "http://127.0.0.1:1/v1"), 2,
     "there is no such file"),
    (compare.compare_command, ("--prompts", __file__, "--tasks", "1"), 2,
     "leave out --tasks and --kind"),
    (compare.compare_command, ("--prompts", __file__, "--kind", "mixed"), 2,
     "leave out --tasks and --kind"),
    (compare.compare_command, ("--pasta-oracle", "--method", "pdos"), 2, "add --method pasta"),
]


@pytest.mark.parametrize(("command", "words", "code", "says"), REFUSED, ids=[
    f"{command.name} {' '.join(words)}" for command, words, *_ in REFUSED])
def test_what_cannot_be_is_refused_before_anything_loads(tmp_path, monkeypatch, command, words,
                                                         code, says):
    def load(config):
        raise AssertionError(f"{config} is loaded")

    for module in (compare, race, sample):
        monkeypatch.setattr(module, "join", load)
    if command is race_command:
        monkeypatch.setenv("PIPEINFER_MPIRUN", "/nowhere/mpirun")
    monkeypatch.setenv("PIPEINFER_STATE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found, line = refusal(command, words)
    assert (found, says in line) == (code, True), line


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
