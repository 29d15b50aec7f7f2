"""Lookahead parallelism over real ranks: one rank's tokens and steps, whoever computes what."""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from pipeinfer.cli.generate import generate
from pipeinfer.core.noise import noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import open_tokenizer
from tests.mpi.test_jobs import EMBEDDED, run_matrix
from tests.rig import launch
from tests.rig.plain_loop import PlainLoop
from tests.rig.served import serve
from tests.support.refusals import refusal
from tests.support.sample import full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef "
SEEDED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "key": noise_key(3)}
GENERATE = [sys.executable, "-m", "pipeinfer", "generate", "-p", PROMPT]


@pytest.fixture(scope="module")
def wanted():
    loop, tokenizer = PlainLoop(EMBEDDED / "target.gguf"), open_tokenizer(EMBEDDED / "target.gguf")
    prompt = tokenizer.encode(PROMPT)
    tokens = [loop.generate(prompt, 60, SamplingParams(**p)) for p in ({}, SEEDED)]
    loop.close()
    tokenizer.close()
    return tokens


def answers(tmp_path, ranks, config):
    todo = [{"prompt": PROMPT, "limits": {}, "count": 60, "params": params}
            for params in ({}, SEEDED)]
    sizes = {"lookahead_window": 6, "lookahead_ngram": 3, "lookahead_candidates": 4, "branches": 1}
    return run_matrix(tmp_path, ranks, {**sizes, **config}, todo)


@pytest.fixture(scope="module")
def steps(tmp_path_factory, wanted):
    """As the scheduler's synchronous policy on one rank counts them."""
    base = answers(tmp_path_factory.mktemp("alone"), 1,
                   {"policy": "speculative", "proposer": ["lookahead"]})
    assert [result["tokens"] for result in base["results"]] == wanted
    found = [result["runs"] - result["speculative_runs"] for result in base["results"]]
    assert found[0] < 60 / 1.3
    return found


@pytest.mark.parametrize("ranks", [1, full(2), full(3), 4, full(5)])
def test_tokens_and_steps_are_those_of_one_rank(tmp_path, wanted, steps, ranks):
    """1, 1, 2, 3 and 4 replicas: of several ranks the first is the head."""
    found = answers(tmp_path, ranks, {"policy": "", "layout": "replicate"})
    assert [result["tokens"] for result in found["results"]] == wanted
    assert [result["runs"] for result in found["results"]] == steps
    reports = found["reports"].values()
    assert len(reports) == max(ranks - 1, 1)
    assert all(report["layers"] == [0, 12] for report in reports)
    if ranks > 3:  # the rows are really dealt out
        rows = [report["rows"] for report in reports]
        assert max(rows) < 0.8 * sum(rows)


@pytest.mark.full
def test_the_command_line_with_a_replica_on_rank_0_and_torch():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    args = ["-n", "24", "--temp", "0", "--json", "--ignore-eos", "--backend", "torch", "--device",
            "cpu", "-c", "512", "-t", "1"]
    done = launch.run(2, [*GENERATE, *args, "--layout", "replicate", "--head-stage"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["stats"]["stages"]) == 2
    plain = launch.run(1, [*GENERATE, *args, "--policy", "iterative"])
    assert found["tokens"] == json.loads(plain.stdout)["tokens"]


@pytest.mark.parametrize("args", [
    ("--policy", "pipeinfer"), ("--proposer", "draft"), ("--proposer", "prompt-lookup"),
    ("-md", str(EMBEDDED / "draft.gguf")), ("--layers", "6,6")])
def test_what_replicas_do_not_go_with(args):
    code, says = refusal(generate, ["-p", PROMPT, "-n", "2", "--layout", "replicate", *args])
    assert code == 2
    assert f"it cannot be combined with {args[0]}" in says


@pytest.mark.parametrize(("fault", "left", "says"), [
    ("kill@2:decode=4", 2, "rank 2 is dead"),
    full("error@1:decode=5,kill@3:decode=4", 1, "rank 3")])
def test_replicas_that_are_lost_take_no_token_along(wanted, fault, left, says):
    done = launch.run(4, [*GENERATE, "-n", "60", "--temp", "0", "--json", "--ignore-eos", "-t", "1",
                          "--layout", "replicate", "--hook", f"fault={fault}"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == wanted[0]
    assert found["stats"]["recovered"] >= 1
    assert len(found["stats"]["stages"]) == left
    assert any(says in note and "went on after" in note for note in found["stats"]["notes"])


def test_a_server_of_replicas_answers_requests_side_by_side(wanted):
    with serve(3, "--layout", "replicate", "-c", "1024") as served:
        served.wait_until_ready()
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", timeout=60) as client, \
                ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(client.completions.create, model="embedded", prompt=PROMPT,
                                 max_tokens=60, temperature=0, extra_body={"ignore_eos": True})
                     for _ in range(3)]
            texts = {one.result().choices[0].text for one in asked}
        _, slots = served.get("/slots")
        assert len(slots) == 16
        assert "draft tokens come from lookahead" in "".join(served.log)
        served.process.send_signal(signal.SIGUSR1)
        assert served.end() == 0, "".join(served.log)
    tokenizer = open_tokenizer(EMBEDDED / "target.gguf")
    assert texts == {tokenizer.decode(wanted[0])}
    tokenizer.close()
