"""Jobs that lose ranks in the middle: whatever the policy, the tokens are those of before."""

from __future__ import annotations

import json
import threading

import pytest

from tests.kit import launch
from tests.kit.launch import PIPEINFER
from tests.kit.references import alone, seeded
from tests.kit.served import serve

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
ASK = ["-p", "def read(path):\n", "-n", "60", "--temp", "0.8", "--seed", "5", "--ignore-eos", "-c",
       "512", "-t", "1"]


@pytest.fixture(scope="module")
def undisturbed():
    return alone("def read(path):\n", 60, seeded(5))


@pytest.mark.parametrize(("np", "more", "left"), [
    (4, ("--hook", "fault=kill@2:decode=12", "--hook", "fault=kill@3:recovery=1"), [(1, 12)]),
    (5, ("--hook", "fault=stop@2:prefill=1", "--spares", "1", "--heartbeat", "1"),
     [(1, 4), (4, 4), (3, 4)]),
    (4, ("--hook", "fault=cut-link@2:peer=3:after=40", "--timeout", "8"), None),
], ids=["kill", "stop", "cut"])
def test_the_job_goes_on_with_the_tokens_of_before(undisturbed, np, more, left):
    """Who takes which layers over is tested with fake ports in tests/cluster/test_assembly.py."""
    # a busy machine measures noise
    found = launch.answered(np, *ASK, *more, "--set", "split=equal", timeout=90)
    assert found["tokens"] == undisturbed
    assert any("went on after" in note for note in found["stats"]["notes"])
    assert found["stats"]["recovered"] >= 1
    stages = found["stats"]["stages"].values()
    assert left in (None, [(one["rank"], one["layers"][1] - one["layers"][0]) for one in stages])


def test_a_clock_that_jumps_costs_nothing(undisturbed):
    done = launch.run(3, [*PIPEINFER, "generate", "--json", *ASK, "--hook",
                          "fault=clock@1:decode=12:s=-3600"], timeout=90)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "pipeinfer: fault: clock@1:decode=12:s=-3600" in done.stderr
    assert found["tokens"] == undisturbed
    assert found["stats"]["recovered"] == 0


def test_if_all_stages_fail_the_first_error_is_the_reason():
    """And not that the last of them is gone."""
    done = launch.run(3, [*PIPEINFER, "generate", *ASK, "--hook", "fault=error@1:decode=5",
                          "--hook", "fault=error@2:decode=5"], timeout=90)
    assert done.returncode != 0
    assert "injected: error@" in done.stderr
    assert "is dead" not in done.stderr


def test_layers_are_redistributed_while_a_request_runs():
    body = {"prompt": "def f(", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
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
        # which stage looked fastest is the machine's: one of them may have been given all
        assert layers != [[0, 1], [1, 2], [2, 12]], found
        assert set(texts) == {alone}
        assert server.health()[1]["recoveries"] == 0
        _, props = server.get("/props")
        now = [stage["layers"] for stage in props["pipeinfer"]["stages"]]
        # beside other jobs it may have been no faster: then the layers are back by now
        assert now in (layers, [[0, 1], [1, 2], [2, 12]])
