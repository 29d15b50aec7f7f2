"""Responses in threads over real ranks: the same text for any number of them and any proposer.

One job compares several methods on the embedded task model (`pipeinfer compare`). A job of one rank
is this process, which has imported torch already.
"""

from __future__ import annotations

import functools
import json

import pytest
from click.testing import CliRunner

from pipeinfer.cli.generate import generate
from pipeinfer_lab.commands.compare import compare_command
from tests.kit import launch
from tests.kit.refusals import refusal
from tests.kit.sample import fewer, full
from tests.kit.served import serve
from tests.mpi.test_jobs import PIPEINFER

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
#: the sample counts steps of the first three, and compares texts with LLAMA
TORCH = ("plain", "pasta", "pasta+lookahead@speculative", "pdos", "apar", "skeleton",
         "pdos+prompt-lookup")[:fewer(7, 3)]
DECOMPOSERS = tuple(method for method in TORCH if "+" not in method and "@" not in method)
LLAMA = ("plain", "pdos", "skeleton", "apar", "pdos+lookahead", "apar+prompt-lookup")
SAMPLED = ("--temp", "0.8", "--seed", "5")


def words(folder, backend, methods, *extra):
    """What follows `compare`. Pictures, which tests/lab/test_compare.py looks at, take longer than
    the answers."""
    out = ["-m", "task", "--backend", backend, "-n", "400", "-o", str(folder), "--no-plots", "-t",
           "1", *extra, *(() if "--prompts" in extra else ("--tasks", "1"))]
    for method in methods:
        out += ["--method", method]
    return out


def compare(folder, ranks, *given):
    """Answers by method: text, tokens, steps of each prompt."""
    command = words(folder, *given)
    if ranks == 1:
        CliRunner().invoke(compare_command, command, catch_exceptions=False)
    else:
        done = launch.run(ranks, [*PIPEINFER, "compare", *command], timeout=240)
        assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())["answers"]


def texts(answers, method):
    return [answer["text"] for answer in answers[method]]


METHODS = {"torch": TORCH, "llamacpp": LLAMA}
WAYS = {"greedy": ("--temp", "0"), "sampled": SAMPLED}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Methods in one process by backend and way, each when it is first asked for: on torch all,
    on llama.cpp those whose texts are the others', too."""
    @functools.cache
    def answers(backend, way):
        folder = tmp_path_factory.mktemp(f"{backend}-{way}")
        methods = TORCH if backend == "torch" else [name for name in LLAMA if "+" not in name]
        return compare(folder, 1, backend, methods, *WAYS[way])

    return answers


@pytest.mark.parametrize(("backend", "ranks", "way"), [
    full("llamacpp", 2, "greedy"), ("llamacpp", 3, "sampled"), full("llamacpp", 4, "greedy"),
    full("torch", 2, "greedy"), full("torch", 4, "sampled")])
def test_text_does_not_depend_on_ranks_or_proposers(alone, tmp_path, backend, ranks, way):
    methods = METHODS[backend]
    found = compare(tmp_path, ranks, backend, methods, *WAYS[way])
    wanted = alone(backend, way)
    for method in methods:
        assert texts(found, method) == texts(wanted, method.partition("+")[0]), method


@pytest.mark.parametrize(("backend", "way", "ranks", "threads", "methods"), [
    ("llamacpp", "sampled", 2, 1, LLAMA[1:4]), full("llamacpp", "greedy", 3, 40, LLAMA[1:4]),
    full("torch", "greedy", 2, 1, DECOMPOSERS),
    full("torch", "greedy", 3, 2, DECOMPOSERS), full("torch", "greedy", 4, 40, DECOMPOSERS)])
def test_text_does_not_depend_on_how_many_threads_are_at_work(
        alone, tmp_path, backend, way, ranks, threads, methods):
    found = compare(tmp_path, ranks, backend, methods, *WAYS[way],
                    "--set", f"decompose_threads={threads}")
    for method in methods:
        assert texts(found, method) == texts(alone(backend, way), method), method


def test_threads_take_fewer_steps_than_plain_decoding(alone):
    for answers in (alone("torch", "greedy"), alone("llamacpp", "sampled")):
        steps = {method: sum(a["steps"] for a in found) for method, found in answers.items()}
        for method in {"pasta", "pdos", "apar"} & answers.keys():
            assert steps[method] < 0.7 * steps["plain"], steps
        # short texts repeat little
        assert steps.get("pasta+lookahead@speculative", 0) <= steps.get("pasta", 0)
        assert all(answer["text"].strip() for found in answers.values() for answer in found)


def test_pasta_runs_on_llamacpp_with_positions_that_rise(tmp_path):
    answers = compare(tmp_path, 2, "llamacpp", ("plain", "pasta"), "--temp", "0", "--pasta-oracle")
    steps = {method: sum(a["steps"] for a in found) for method, found in answers.items()}
    assert steps["pasta"] < 0.7 * steps["plain"]
    (first,), (second,) = answers["pasta"], answers["pasta, oracle"]
    assert "<" not in first["text"] + second["text"]
    assert len(first["blocks"]) == len(second["blocks"]) > 1
    assert min(first["blocks"]) > 5


def test_generate_streams_a_decomposed_answer():
    question = ("Students and their grades\nAnna: biology, 3.21\nBen: history, 2.85\n"
                "What are the grades of Anna and Ben?")
    answer = launch.answered(2, "--decomposer", "pdos", "-p", question, "-n", "200", "--temp", "0",
                             timeout=90)
    assert answer["text"].strip()
    assert "%%%%" not in answer["text"]


@pytest.mark.parametrize(("options", "message"), [
    (("--decomposer", "pdos", "--json-schema", "{}"), "combined with a grammar"),
    (("--decomposer", "pasta", "--repeat-penalty", "1.1"), "penalties"),
    (("--decomposer", "apar", "-m", "EMBEDDED"), "single tokens"),
    (("--decomposer", "pasta", "--pasta-positions", "guess"), "pred-10x"),
])
def test_impossible_combinations_are_refused_with_the_reason(options, message):
    embedded = launch.ROOT / "pipeinfer" / "models" / "embedded" / "target.gguf"
    options = [str(embedded) if option == "EMBEDDED" else option for option in options]
    assert message in refusal(generate, ["-p", "x", "-n", "4", *options])[1]


def test_the_server_decomposes_what_it_can_and_says_what_it_cannot():
    question = [{"role": "user", "content": (
        "Students and their grades\nAnna studies biology, 3.21\nBen studies history, 2.85\n"
        "What are the grades of Anna and Ben?")}]
    with serve(2, "--decomposer", "pdos", "--temp", "0") as server:
        server.wait_until_ready()

        def ask(**extra):
            return server.post("/v1/chat/completions", {
                "messages": question, "max_tokens": 200, "temperature": 0, **extra})

        texts = {}
        for method in ("none", "pdos", "skeleton", "apar"):
            status, answer = ask(decomposer=method)
            assert status == 200, answer
            texts[method] = answer["choices"][0]["message"]["content"]
        assert len(set(texts.values())) > 1
        assert ask()[1]["choices"][0]["message"]["content"] == texts["pdos"]
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        status, answer = ask(decomposer="pdos", response_format=schema)
        assert (status, answer["error"]["param"]) == (400, "decomposer")
        assert ask(response_format=schema)[0] == 200  # the server's own choice gives way
        status, answer = ask(decomposer="pasta")
        assert (status, answer["error"]["param"]) == (400, "decomposer")
        assert ask(decomposer="magic")[0] == 400
        assert server.health()[0] == 200
