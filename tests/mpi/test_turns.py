"""Ranks of one host that take turns with its cores: the tokens of plain decoding, also when one of
them is lost, and for several requests at once."""

from __future__ import annotations

import concurrent.futures

import pytest

from pipeinfer import host
from tests.kit import launch
from tests.kit.references import alone, seeded
from tests.kit.sample import full
from tests.kit.served import serve

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.skipif(
    host.facts(1, 0, 1).cores_host < 2 or len(host.numa_nodes()) > 1,
    reason="no two cores with the same memory to share")]
PROMPT = "def read(path):\n"
TURNS = {"PIPEINFER_TURNS": "auto", "PIPEINFER_THREADS": "0", "PIPEINFER_THREADS_DRAFT": "0"}


def generate(np, *more):
    return launch.answered(np, "-p", PROMPT, "-n", "60", "--temp", "0.8", "--seed", "5",
                           "--ignore-eos", "-c", "512", *more, timeout=90, **TURNS)


@pytest.fixture(scope="module")
def undisturbed():
    return alone(PROMPT, 60, seeded(5))


def notes_of(found, word):
    return [note for note in found["stats"]["notes"] if word in note]


@pytest.mark.parametrize(("np", "more"), [
    (2, ()), full(3, ()), (3, ("--policy", "iterative")), full(3, ("--policy", "speculative")),
    full(3, ("--head-stage",)), full(4, ("--speculation", "on")),
])
def test_the_tokens_are_those_of_plain_decoding(undisturbed, np, more):
    found = generate(np, *more)
    assert found["tokens"] == undisturbed
    assert notes_of(found, "draft and stages share its")
    assert found["stats"]["cancelled_runs"] == 0  # nothing is guessed while a run is out


def test_threads_that_somebody_has_bound_are_left_alone(undisturbed):
    found = generate(2, "-t", "1")
    assert found["tokens"] == undisturbed
    assert not notes_of(found, "cores in time")


def test_a_rank_that_is_lost_costs_no_token(undisturbed):
    found = generate(4, "--hook", "fault=kill@2:decode=6")
    assert found["tokens"] == undisturbed
    assert notes_of(found, "cores in time")
    assert notes_of(found, "went on after")
    assert found["stats"]["recovered"] >= 1


def test_several_requests_at_once():
    prompts = [PROMPT, "import os\n", "class Reader:\n"]
    wanted = [alone(prompt, 40, seeded(5)) for prompt in prompts]
    with serve(3, "-c", "512", **TURNS) as served, \
            concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        served.wait_until_ready()
        answers = list(pool.map(lambda prompt: served.post("/v1/completions", {
            "prompt": prompt, "max_tokens": 40, "temperature": 0.8, "seed": 5, "ignore_eos": True,
            "pipeinfer": {"detail": True}}), prompts))
    assert [(status, answer["pipeinfer"]["tokens"]) for status, answer in answers] == [
        (200, tokens) for tokens in wanted]
