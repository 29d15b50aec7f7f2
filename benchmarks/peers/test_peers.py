"""What programs print is read, rounds are compared in pairs, and servers end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click
import psutil
import pytest
from click.testing import CliRunner

from benchmarks.peers import __main__ as command
from benchmarks.peers import contest, models, programs, runs
from benchmarks.peers.runs import Measured, Task

BENCH = """[
  {
    "build_commit": "0c1e570",
    "cpu_info": "AMD EPYC",
    "backends": "CPU",
    "model_type": "llama 8B Q8_0",
    "n_threads": 2,
    "flash_attn": 0,
    "repack": true,
    "n_prompt": 0,
    "n_gen": 16,
    "n_depth": 64,
    "avg_ts": 3.891319,
    "samples_ts": [ 3.89132 ]
  }
]
"""
SPECULATIVE = """\
0.01.319.416 I common_speculative_init_result: loading draft model 'draft.gguf'
0.05.604.684 I encoded   99 tokens in    1.436 seconds, speed:   68.953 t/s
0.05.604.685 I decoded   33 tokens in    2.205 seconds, speed:   14.966 t/s
0.05.604.687 I n_draft   = 4
0.05.604.687 I n_predict = 33
0.05.604.687 I n_drafted = 51
0.05.604.688 I n_accept  = 20
0.05.604.728 I accept    = 39.216%
"""
GENERATE = {"text": "\n# The", "tokens": [202, 6, 582], "stats": {
    "n_prompt": 100, "n_output": 3, "tokens_per_second": 20.9, "acceptance": 0.67}}
#: listens as ggml-rpc-server does, and says how many threads it was given
SERVER = f"""#!{sys.executable}
import socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1]))):
    time.sleep(60)
"""


@pytest.fixture
def task(tmp_path):
    def with_server(text):
        program = tmp_path / "ggml-rpc-server"
        program.write_text(text)
        program.chmod(0o755)
        return Task(tmp_path, Path("m.gguf"), Path("p.txt"), 100, 16, 4, 10.0)

    return with_server


def test_speeds_are_read():
    assert runs.parse_bench(BENCH, []).tokens_per_second == 3.891319
    found = runs.parse_speculative("the text", SPECULATIVE, ["x"])
    assert found.tokens_per_second == pytest.approx(33 / 2.205)
    assert found.raw == {"text": "the text", "drafted": 51, "accept": 20}
    assert runs.parse_pipeinfer(json.dumps(GENERATE), []).tokens_per_second == 20.9


#: answers as ik_llama.cpp's llama-bench does, with the number of its new tokens as speed
IK = f"""#!{sys.executable}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-rtr"] == "1" and given["-p"] == given["-n"] == "0", given
print(json.dumps([{{"avg_ts": float(given["-gp"].partition(",")[2]) / int(given["-t"])}}]))
"""


def test_ik_llama_cpp_is_measured_behind_the_prompt(task, tmp_path):
    program = tmp_path / "llama-bench"
    program.write_text(IK)
    program.chmod(0o755)
    asked = [one for one in contest.entries(None, (), tmp_path) if "ik_llama" in one.name]
    assert [one.options for one in asked] == [("-fa", "0"), ("-fa", "1")]
    assert asked[0].measure(task(SERVER), asked[0].options, 0).tokens_per_second == 4.0
    assert not [one for one in contest.entries(None, ()) if "ik_llama" in one.name]


@pytest.mark.parametrize("read", [
    lambda text: runs.parse_bench(text, ["program"]), lambda text: runs.parse_speculative(
        "", text, ["program"]), lambda text: runs.parse_pipeinfer(text, ["program"])])
@pytest.mark.parametrize("text", ["", "[]", "{}", "error: unknown argument"])
def test_what_cannot_be_read_is_named(read, text):
    with pytest.raises(click.ClickException, match="`program` reported no speed"):
        read(text)


@pytest.mark.parametrize(("whole", "threads"), [(False, "2"), (True, "4")])
def test_workers_share_the_threads_or_have_all_and_end(task, whole, threads):
    others = set(psutil.Process().children())  # of earlier tests
    with runs.workers(task(SERVER), 2, whole=whole) as options:
        servers = set(psutil.Process().children()) - others
        assert [one.cmdline()[-2:] for one in servers] == [["-t", threads]] * 2
        assert options[0] == "--rpc"
        assert options[1].count(",") == 1
    assert not any(one.is_running() for one in servers)


def test_workers_end_when_the_run_fails(task):
    context = runs.workers(task(SERVER), 1)
    others = set(psutil.Process().children())  # of earlier tests
    context.__enter__()
    (server,) = set(psutil.Process().children()) - others
    assert not context.__exit__(RuntimeError, RuntimeError(), None)
    assert not server.is_running()


def test_a_worker_that_does_not_start_says_why(task):
    start = time.monotonic()
    with (pytest.raises(click.ClickException, match=r"does not listen: cannot bind"),
          runs.workers(task("#!/bin/sh\necho cannot bind >&2; exit 1\n"), 1)):
        pass
    assert time.monotonic() - start < 10


def entry(name, *, ours=False, guesses=False, group="g", speeds=(1.0,)):
    def measure(given, options, processes):
        speed = next(left)
        if speed is None:
            raise click.ClickException("broken")
        return Measured(speed, [name])

    left = iter(speeds)
    return contest.Entry(group, name, ours, guesses, measure, ())


def test_ratios_are_of_one_round_and_to_the_fastest_that_guesses_no_more():
    wanted = [
        entry("slow", speeds=(9.0, 1.0, 1.0)), entry("fast", speeds=(2.0, 4.0, 5.0)),
        entry("guessing", guesses=True, speeds=(10.0, 8.0, 20.0)),
        entry("other group", group="h", speeds=(100.0,) * 3),
        entry("plain", ours=True, speeds=(4.0, 4.0, 4.0)),
        entry("drafted", ours=True, guesses=True, speeds=(5.0, 16.0, 10.0)),
    ]
    heard = []
    found = contest.lines(contest.contest(
        wanted, [None], 3, lambda turn, one, measured: heard.append((turn, one.name))))
    assert heard == [(turn, one.name) for turn in range(3) for one in wanted]
    plain, drafted = found[4:]
    assert (plain.reference, plain.ratio) == ("fast", (1.0, 0.8, 2.0))
    assert (drafted.reference, drafted.ratio) == ("guessing", (0.5, 0.5, 2.0))
    assert all(one.ratio is None for one in found[:4])
    assert "1.00 (0.80 to 2.00) of fast" in contest.table(found)


def test_one_that_fails_is_left_out_and_the_others_go_on():
    wanted = [entry("gone", speeds=(None,)), entry("there", speeds=(3.0, 3.0)),
              entry("plain", ours=True, speeds=(3.0, 6.0))]
    told = []
    found = contest.lines(contest.contest(wanted, [None], 2, lambda *heard: told.append(heard)))
    assert [one.runs for one in found] == [0, 2, 2]
    assert found[2].reference == "there"
    assert [heard[2] for heard in told if heard[1].name == "gone"] == ["broken"]
    assert "failed" in contest.table(found)


@pytest.mark.parametrize("draft", [models.DRAFT, None])
def test_entries_have_names_of_their_own_and_a_reference_each(draft):
    wanted = [*contest.entries(draft), *contest.length_entries(1024)]
    assert len({(one.group, one.name) for one in wanted}) == len(wanted)
    for group in {one.group for one in wanted}:
        assert {one.ours for one in wanted if one.group == group} == {True, False}


def test_prepared_files_are_taken_and_missing_programs_named(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "05b-Q8_0.gguf").touch()
    assert models.make("05b-Q8_0", tmp_path).name == "05b-Q8_0.gguf"
    with pytest.raises(click.ClickException, match=r"no llama-bench, .*leave --programs out"):
        programs.find(tmp_path, tmp_path)


def test_a_step_that_fails_says_what_to_do():
    for command_line in (["false"], ["no-such-program"]):
        with pytest.raises(click.ClickException, match="install it"):
            programs.step(command_line, 10, "install it")
    with pytest.raises(click.ClickException, match="took over"):
        programs.step(["sleep", "5"], 0.05, "install it")


def test_unknown_files_are_refused_before_anything_is_made(tmp_path):
    done = CliRunner().invoke(command.main, ["--files", "07b", "--work", str(tmp_path / "w")])
    assert done.exit_code == 2
    assert "no file 07b: choose of 05b-Q8_0" in done.output
    assert not (tmp_path / "w").exists()
