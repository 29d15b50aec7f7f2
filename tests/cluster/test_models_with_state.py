"""Recurrent models and hybrids: in one process and over stages, with an id for each guess."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from pipeinfer.backends.exact_width import exact_width
from pipeinfer.core.types import END, make_rows
from pipeinfer.errors import BackendError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_tokenizer
from tests.kit import launch
from tests.kit.checked import CheckedLlama
from tests.kit.random_architectures import ALONE, STATEFUL
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.references import GREEDY, alone, seeded
from tests.kit.sample import full, mostly_full
from tests.kit.served import serve

PROMPT = "the rain in the then the rain in the"
GENERATE = [sys.executable, "-m", "pipeinfer", "generate", "-p", PROMPT, "-n", "40", "-c",
            "256", "-t", "1", "--temp", "0", "--ignore-eos", "--json"]
#: so that guesses come in time on busy machines, also where there are few of them
PACED, SLOWLY = ["--hook", "pace=10"], ["--hook", "pace=30"]


@pytest.fixture(params=mostly_full(STATEFUL, "granitehybrid", "qwen35moe"))
def model(request, tmp_path):
    return ModelFile(write_random_model(tmp_path / "m.gguf", tiny(request.param)))


def load(model, n_seq_max=4):
    n = model.n_layers
    return CheckedLlama.load(
        model.path, layers=(0, n), n_layers_total=n, first=True, last=True, n_ctx=256,
        n_seq_max=n_seq_max, n_batch=16, n_threads=1)


def test_nothing_of_a_state_is_taken_back_or_copied_in_silence(model):
    backend = load(model)
    backend.decode(make_rows([(i, i, (0,), True) for i in range(5)]))
    for wrong in (lambda: backend.seq_rm(0, 3, END), lambda: backend.seq_rm(0, 0, 3),
                  lambda: backend.seq_cp(0, 1, 0, 3), lambda: backend.seq_cp(0, 1, 1, 5),
                  lambda: backend.seq_cp(0, 4, 0, 5)):
        with pytest.raises(BackendError, match="no part"):
            wrong()
    backend.seq_cp(0, 1, 0, 5)
    with pytest.raises(BackendError, match="no part"):
        backend.seq_cp(0, 1, 0, 5)  # it would replace a state
    backend.seq_rm(0, 0, END)
    assert backend.seq_bounds(0) is None
    assert backend.seq_bounds(1)[1] == 4  # llama.cpp says no more of a state
    backend.close()


def test_sequences_copied_and_dropped_leave_others_their_bits(model):
    """Random chains on copies, dropped in any order, and one that goes on in place.

    Dropped cells fill the cache once, so that it is compacted. Some decodes are stopped inside.
    """
    rng = np.random.default_rng(1)
    text = rng.integers(0, model.n_vocab, 150).tolist()

    def row(token, pos, seq_id):
        return make_rows([(token, pos, (seq_id,), True)])

    backend = load(model)
    expected = [backend.decode(row(token, pos, 0)).copy() for pos, token in enumerate(text)]
    backend.seq_rm(0, 0, END)
    here, free = 0, [1, 2, 3]
    for pos, token in enumerate(text):
        wrong = free.pop(0)
        backend.seq_cp(here, wrong, 0, pos)
        looks = iter(range(int(rng.integers(1, 2 * model.n_layers))))
        backend.decode(make_rows([(int(rng.integers(0, model.n_vocab)), pos + k, (wrong,), True)
                                  for k in range(int(rng.integers(1, 4)))]), None,
                       lambda looks=looks: next(looks, None) is None)
        if pos and rng.random() < 0.6:  # accepted on a copy, which takes over
            other = free.pop(0)
            backend.seq_cp(here, other, 0, pos)
            found = backend.decode(row(token, pos, other))
            backend.seq_rm(here, 0, END)
            free.append(here)
            here = other
        else:
            found = backend.decode(row(token, pos, here))
        assert found.tobytes() == expected[pos].tobytes()
        backend.seq_rm(wrong, 0, END)
        free.append(wrong)
    backend.close()


def test_a_run_that_is_stopped_inside_leaves_nothing(model):
    backend = load(model)
    assert backend.capabilities.stops_inside
    text = [(i, i, (0,), True) for i in range(6)]
    backend.decode(make_rows(text[:5]))
    backend.seq_cp(0, 1, 0, 5)
    stopped = backend.decode(make_rows([(9, 5, (1,), True), (8, 6, (1,), True)]), None,
                             lambda: True)
    assert stopped is None
    assert backend.seq_bounds(1) is None
    found = backend.decode(make_rows(text[5:])).copy()
    backend.seq_rm(0, 0, END)
    backend.decode(make_rows(text[:5]))
    assert backend.decode(make_rows(text[5:])).tobytes() == found.tobytes()
    backend.seq_cp(0, 1, 0, 6)  # rows of two sequences are completed
    assert backend.decode(make_rows([(9, 6, (0,), True), (8, 6, (1,), True)]), None,
                          lambda: True) is not None
    backend.close()


def test_rows_of_one_run_have_the_bits_of_single_rows(model):
    """Measured on copies of a context."""
    backend = load(model)
    assert exact_width(backend) == 16
    assert backend.seq_bounds(0) is None
    backend.close()


CASES = {
    "killed": (4, ["--hook", "fault=kill@2:decode=12", "--temp", "0.8", "--seed", "3"]),
    "cut short": (3, ["--hook", "pace=20", "--set", "draft_max=2", "--temp", "0.8", "--seed", "6"]),
    "turns": (1, ["--speculation", "on", "--temp", "0.8", "--seed", "4"]),
}
#: whose layers are unlike each other in ways that a takeover has to keep
STATELESS = ("glm-dsa", "deepseek32", "muse-glimmer", "step35", "mimo2", "laguna", "afmoe",
             "smallthinker", "phi2", "phimoe", "apertus", "mellum", "gemma4-small", "exaone-moe")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Targets, and a draft for them, which is right now and then by chance."""
    folder = tmp_path_factory.mktemp("pair")
    return cache(lambda name: write_random_model(folder / f"{name}.gguf", RandomSpec(
        n_layer=1) if name == "draft" else tiny(name, qtype="Q8_0", n_layer={
            "gemma4-small": 18, "smallthinker": 24}.get(name, 12))))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), [
    (name, case) if name in ("qwen35", "glm-dsa") else full(name, case) for name in (
        "qwen35", "granitehybrid", "nemotron_h", "qwen3next", "deepseek4", "kimi-linear", *STATELESS
    ) for case in CASES if case == "killed" or name not in STATELESS])
def test_no_circumstance_changes_a_token(files, name, case):
    ranks, more = CASES[case]
    params = dict(zip(more[::2], more[1::2], strict=True))
    sampling = seeded(int(params["--seed"]), float(params["--temp"]))
    expected = alone(PROMPT, 40, sampling, path=files(name))
    done = launch.run(ranks, [*GENERATE, "-m", str(files(name)), "-md", str(files("draft")),
                              *([] if case == "turns" else ["--set", "turns=off", *PACED]), *more])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == expected
    assert answer["stats"]["issued_speculative"] > 0
    assert bool(answer["stats"]["recovered"]) == any(
        word.startswith("fault=") for word in more)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [
    ("qwen35", []), full("granitehybrid", ["--temp", "0.8", "--seed", "2"]),
    full("lfm2", ["--draft-ranks", "1"]), full("mamba2", ["--set", "branches=3"])])
def test_a_draft_with_a_state_is_taken_back(files, name, more):
    """The draft is the target itself, so that most of its tokens are right."""
    params = dict(zip(more[::2], more[1::2], strict=True))
    sampling = seeded(int(params["--seed"]), 0.8) if "--temp" in params else GREEDY
    expected = alone(PROMPT, 40, sampling, path=files(name))
    done = launch.run(4, [*GENERATE, "-m", str(files(name)), "-md", str(files(name)),
                          "--set", "turns=off", "--proposer", "draft", *SLOWLY, *more])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == expected
    stats = answer["stats"]  # a draft may be late, so how many tokens it proposes is left open
    assert stats["accepted_speculative"] > 0
    assert 2 * stats["accepted_speculative"] > stats["guesses_tested"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [
    ("granitehybrid", ()), ("qwen35", ("--grid", "1x2")), *(
        full(name, ()) for name in STATEFUL if name != "granitehybrid")])
def test_several_users_of_a_server_get_the_same_answer_at_once(files, name, more):
    body = {"prompt": "the rain in", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with serve(3, "-m", str(files(name)), "-c", "256", "-t", "1", *more) as server, \
            ThreadPoolExecutor(4) as pool:
        server.wait_until_ready()
        answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(4)))
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], full(["--hook", "fault=kill@2:decode=12"])])
@pytest.mark.parametrize("name", ALONE)
def test_one_sequence_at_a_time_gives_the_tokens_of_plain_decoding(files, name, more):
    """llama.cpp mixes two up: users wait for each other, and nothing is speculated."""
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    tokenizer = open_tokenizer(files(name))
    plain = tokenizer.decode(alone(PROMPT, 24, seeded(3, 0.8), path=files(name)), False)
    tokenizer.close()
    with serve(4, "-m", str(files(name)), "-c", "256", "-t", "1", *more) as server, \
            ThreadPoolExecutor(3) as pool:
        server.wait_until_ready()
        answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(3)))
    texts = {answer["choices"][0]["text"].rstrip("\ufffd") for _, answer in answers}
    assert texts == {plain.rstrip("\ufffd")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35", full("granitehybrid"), full("lfm2"), full("deepseek4")])
def test_a_conversation_computes_only_what_is_new(files, name):
    """Three turns over three stages; each prompt begins with the last one and its answer."""
    tokenizer = open_tokenizer(files(name))
    text, cached = "the rain in the land " * 20, []
    with serve(4, "-m", str(files(name)), "-c", "1024", "-t", "1") as server:
        server.wait_until_ready()
        for _ in range(3):
            _, answer = server.post("/v1/completions", {
                "prompt": text, "max_tokens": 16, "temperature": 0, "ignore_eos": True})
            usage = answer["usage"]
            said = answer["choices"][0]["text"]
            plain = tokenizer.decode(alone(text, 16, path=files(name)), False)
            assert said.rstrip("\ufffd") == plain.rstrip("\ufffd")  # it ends within a character
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            text += said + " and then the other rain in " * 8
    tokenizer.close()
    assert cached[0] == 0
    assert 0 < cached[1] < cached[2]
    assert all(one % 64 == 0 for one in cached)
