"""Jobs that lose ranks in the middle: whatever the policy, the tokens are those of before."""

from __future__ import annotations

import json
import sys
import threading

import pytest

from tests.rig import launch
from tests.rig.served import serve
from tests.support.references import alone, seeded
from tests.support.sample import fewer, full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PIPEINFER = [sys.executable, "-m", "pipeinfer"]
ASK = ["generate", "-p", "def read(path):\n", "-n", "60", "--temp", "0.8", "--seed", "5",
       "--ignore-eos", "--json", "-c", "512", "-t", "1"]


def generate(np, *more, ask=ASK, **env):
    return launch.run(np, [*PIPEINFER, *ask, *more], timeout=90, **env)


def out_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def undisturbed():
    return alone("def read(path):\n", 60, seeded(5))


@pytest.mark.parametrize(("np", "more"), [
    full(4, ("--hook", "fault=kill@3:decode=10", "--policy", "iterative")),
    full(4, ("--hook", "fault=kill@1:decode=10", "--policy", "speculative")),
    full(4, ("--hook", "fault=kill@2:decode=12", "--set", "adapt=false", "--set", "alternatives=3",
             "--set", "path_min=0.001")),
    (4, ("--hook", "fault=error@2:decode=9", "--proposer", "lookahead", "--lookahead-window", "2",
         "--lookahead-candidates", "2")),
    (4, ("--hook", "fault=kill@2:decode=12", "--hook", "fault=kill@3:recovery=1")),
    (3, ("--hook", "fault=kill@1:decode=12", "--head-stage", "--set", "cancel_path=backward")),
    (5, ("--hook", "fault=stop@2:prefill=1", "--spares", "1", "--heartbeat", "1")),
    (4, ("--hook", "fault=cut-link@2:peer=3:after=40", "--timeout", "8")),
    full(5, ("--hook", "fault=cut-link@1:peer=2:after=40", "--timeout", "8", "--spares", "1")),
    full(3, ("--hook", "fault=cut-link@1:peer=2:after=40", "--timeout", "8", "--head-stage")),
], ids=["iterative", "speculative", "trees", "lookahead", "twice", "head-stage", "spare",
        "cut-link", "cut-spare", "cut-head-stage"])
def test_the_tokens_are_those_of_before(undisturbed, np, more):
    found = out_of(generate(np, *more))
    assert found["tokens"] == undisturbed
    assert any("went on after" in note for note in found["stats"]["notes"])
    assert found["stats"]["recovered"] >= 1


@pytest.mark.parametrize("seconds", [-3600, full(3600)])
def test_a_clock_that_jumps_costs_nothing(undisturbed, seconds):
    done = generate(3, "--hook", f"fault=clock@1:decode=12:s={seconds}")
    found = out_of(done)
    assert f"pipeinfer: fault: clock@1:decode=12:s={seconds}" in done.stderr
    assert found["tokens"] == undisturbed
    assert found["stats"]["recovered"] == 0


@pytest.mark.full("a link cut later beside it, one cut from the start in "
                  "tests/cluster/test_assembly.py")
def test_a_link_that_is_cut_from_the_start_costs_no_request_anything(undisturbed):
    found = out_of(generate(4, "--hook", "fault=cut-link@1:peer=2", "--timeout", "8"))
    assert found["tokens"] == undisturbed
    assert any("has not got to rank 2" in note for note in found["stats"]["notes"])
    assert found["stats"]["recovered"] == 0


def test_if_all_stages_fail_the_first_error_is_the_reason():
    """And not that the last of them is gone."""
    done = generate(3, "--hook", "fault=error@1:decode=5", "--hook", "fault=error@2:decode=5")
    assert done.returncode != 0
    assert "injected: error@" in done.stderr
    assert "is dead" not in done.stderr


def test_a_spare_moves_nobody_else():
    equal = ("--set", "split=equal")  # a busy machine measures noise
    found = out_of(generate(5, "--hook", "fault=kill@2:decode=10", "--spares", "1", *equal))
    (note,) = [n for n in found["stats"]["notes"] if "went on" in n]
    assert "4 layers moved" in note
    stages = found["stats"]["stages"].values()
    assert [(stage["rank"], stage["layers"]) for stage in stages] == [
        (1, [0, 4]), (4, [4, 8]), (3, [8, 12])]


def test_a_response_in_threads_is_replayed():
    ask = ["generate", "-m", "task", "--decomposer", "pdos", "-p",
           "Name the capital of France and the capital of Japan.", "-n", "60", "--temp", "0",
           "--json", "-t", "1", "-c", "1024"]
    plain = out_of(generate(1, ask=ask))
    found = out_of(generate(fewer(4, 3), "--hook", "fault=kill@2:decode=12", ask=ask))
    assert found["text"] == plain["text"]
    assert found["stats"]["recovered"] >= 1


def test_layers_are_redistributed_while_a_request_runs():
    body = {"prompt": "def f(", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    options = ("--speculation", "off", "-np", "3")  # else one core has it all, however dealt out
    with serve(4, "-c", "1024", "-t", "1", "--layers", "1,1,10", *options) as server:
        server.wait_until_ready()
        texts, found, status = [], {"changed": False}, 0
        for turn in range(7):  # beside other jobs a stage may look slower than it is
            asking = [threading.Thread(target=lambda: texts.append(
                server.post("/v1/completions", body)[1]["choices"][0]["text"])) for _ in range(3)]
            for one in asking:
                one.start()
            if turn:  # the first ones show what plain stages say
                status, found = server.post("/rebalance", {})
            for one in asking:
                one.join(60)
            if found["changed"]:
                break
        alone = texts[0]
        assert (status, found["changed"]) == (200, True), found
        layers = [stage["layers"] for stage in found["stages"]]
        assert max(stop - start for start, stop in layers) < 10, found
        assert set(texts) == {alone}
        assert server.health()[1]["recoveries"] == 0
        _, props = server.get("/props")
        now = [stage["layers"] for stage in props["pipeinfer"]["stages"]]
        # beside other jobs it may have been no faster: then the layers are back by now
        assert now in (layers, [[0, 1], [1, 2], [2, 12]])
