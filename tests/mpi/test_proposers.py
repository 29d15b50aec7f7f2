"""Whoever names the guesses, the tokens are plain decoding's."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.cli.generate import generate
from pipeinfer.cluster.generate import run_request
from pipeinfer.cluster.launch import join
from pipeinfer.core.noise import noise_key
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.strategies import registry
from tests.mpi.test_matrix import run_matrix
from tests.rig import launch
from tests.rig.plain_loop import PlainLoop
from tests.support.refusals import output, refusal
from tests.support.sample import fewer, full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
EMBEDDED = launch.ROOT / "pipeinfer" / "models" / "embedded"
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef "


@pytest.fixture(scope="module")
def wanted():
    loop, tokenizer = PlainLoop(EMBEDDED / "target.gguf"), open_tokenizer(EMBEDDED / "target.gguf")
    prompt = tokenizer.encode(PROMPT)
    params = {0.0: SamplingParams(), 0.8: SamplingParams(0.8, 40, 0.95, 0.05, key=noise_key(3))}
    tokens = {t: loop.generate(prompt, 60, p) for t, p in params.items()}
    loop.close()
    tokenizer.close()
    return tokens


def answered(ranks, *words):
    """What `generate` writes of PROMPT; one rank is this process."""
    asked = ["-p", PROMPT, "--json", *words]
    if ranks == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PIPEINFER_DEFAULT_MODEL", "embedded")
            return json.loads(output(generate, asked))
    done = launch.run(ranks, [sys.executable, "-m", "pipeinfer", "generate", *asked], timeout=90)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("more", "policy"), [
    ((), "pipeinfer"), (("-md", "none"), "iterative"), (("--speculation", "off"), "iterative")])
def test_one_process_without_a_draft_guesses_what_the_text_repeats(wanted, more, policy):
    """Where that pays; which it may not, as rows cost on this machine."""
    found = answered(1, "-m", str(EMBEDDED / "target.gguf"), "-n", "60", "--temp", "0",
                     "--ignore-eos", *more)
    assert found["tokens"] == wanted[0.0]
    assert (found["stats"]["policy"], found["stats"]["draft"]) == (policy, "")
    if policy == "iterative":
        assert found["stats"]["issued_speculative"] == 0


@pytest.mark.parametrize(("ranks", "backend", "drafts"), [
    full(1, "llamacpp", ()), full(2, "torch", ("draft",)), (3, "llamacpp", ("draft",)),
    full(4, "llamacpp", ())])
def test_lookahead_over_ranks_and_policies(tmp_path, wanted, ranks, backend, drafts):
    """A window beside the rows that verify or, where it does not fit, behind them (R of 4)."""
    if backend == "torch":
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    config = {"proposer": ["lookahead", *drafts], "backend": backend, "device": "cpu"}
    policies = [{"policy": "speculative"}, {"policy": "pipeinfer", "path_min": 0.001},
                {"policy": "pipeinfer", "exact_width": 4, "join_tip": True},
                {"policy": "speculative", "exact_width": 4}, {"policy": "iterative"}]
    todo = [{"prompt": PROMPT, "limits": limits, "count": 60, "params": params}
            for params in ({}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
                                "key": noise_key(3)}) for limits in policies]
    answer = run_matrix(tmp_path, ranks, config, todo)
    found = [result["tokens"] for result in answer["results"]]
    if backend == "llamacpp":
        assert found == [wanted[t] for t in (0.0, 0.8) for _ in policies]
    else:  # rounds otherwise than llama.cpp: its own plain tokens are those of `iterative`
        assert found == [found[k] for k in (4, 9) for _ in policies]
    assert answer["results"][0]["runs"] < 60 / 1.5  # the prompt repeats itself
    assert sum(result["accepted_speculative"] for result in answer["results"]) > 60


@pytest.mark.full("widths up to 48 in tests/backends/test_torch_backend.py, windows in runs beside "
                  "it")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wide_window_is_one_exact_run_on_torch(ranks):
    """Current token, candidates and window are 43 rows, beyond the 16 that are tried by default."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch = ("--backend", "torch", "--device", "cpu", "-t", "1", "-md", "none", "-n", "40",
             "--ignore-eos", "--temp", "0", "-m", str(EMBEDDED / "target.gguf"))
    wide = ("--proposer", "lookahead", "--policy", "speculative", "--lookahead-window", "7",
            "--lookahead-ngram", "4", "--lookahead-candidates", "7")
    plain, found = answered(ranks, *torch, "--speculation", "off"), answered(ranks, *torch, *wide)
    assert found["tokens"] == plain["tokens"]
    assert found["stats"]["accepted_speculative"] > 0
    if found["stats"]["exact_width"] == 43:  # measured; smaller ones verify in a run of their own
        assert found["stats"]["runs"] == found["stats"]["steps"] < 40


def adapter_at(path, prompts):
    """A BiTA adapter of random vectors: what it proposes is worth nothing, and harmless."""
    from pipeinfer.models.bita_adapter import BitaAdapter, save_bita

    chance = np.random.default_rng(prompts)

    def normal(*shape):
        return chance.normal(0, 0.5, shape).astype(np.float32)

    layers = (12, prompts, 2, 64)
    save_bita(path, BitaAdapter(normal(3, 256), normal(*layers), normal(*layers)))
    return str(path)


@pytest.mark.parametrize(("backend", "ranks", "prompts", "drafts"), [
    full("torch", 1, 16, ()), full("torch", 2, 0, ("draft",)), full("torch", 4, 16, ()),
    full("llamacpp", 1, 0, ()), ("llamacpp", 2, 0, ("draft",)), full("llamacpp", 4, 0, ())])
def test_random_masks_and_prompts_change_no_token(tmp_path, wanted, backend, ranks, prompts,
                                                  drafts):
    """In one run with the rows that verify, behind them, and under policies that do not wait."""
    for package in ("torch", "transformers", "safetensors"):
        pytest.importorskip(package)
    config = {"bita": adapter_at(tmp_path / "bita.safetensors", prompts), "backend": backend,
              "device": "cpu", "proposer": ["bita", *drafts], "policy": "speculative"}
    policies = [{"policy": "iterative"}, {"policy": "speculative"},
                {"policy": "speculative", "exact_width": 5},
                {"policy": "pipeinfer", "path_min": 0.001}]
    todo = [{"prompt": PROMPT, "limits": limits, "count": 24, "params": params}
            for params in ({}, {"temperature": 0.8, "top_k": 40, "key": noise_key(3)})
            for limits in policies]
    answer = run_matrix(tmp_path, ranks, config, todo)
    found = [result["tokens"] for result in answer["results"]]
    assert found == [found[k] for k in (0, 4) for _ in policies]
    if backend == "llamacpp":  # the greedy ones, of a plain loop
        assert found[0] == wanted[0.0][:24]
    assert sum(result["issued_speculative"] for result in answer["results"]) > 100
    assert answer["exact_width"] >= 8


def test_the_embedded_adapter_foresees_tokens():
    """In this process, which has imported torch already."""
    for package in ("torch", "transformers", "safetensors"):
        pytest.importorskip(package)
    count = fewer(60, 24)

    config = registry.job_config(
        model=str(EMBEDDED / "target.gguf"), bita=str(EMBEDDED / "bita.safetensors"),
        proposer=("bita",), policy="speculative", backend="torch", device="cpu", ctx=512,
        threads=1)
    with join(config).lead() as session:
        def answer(policy):
            session.head.drain(60)
            session.head.reconfigure(structs.replace(session.limits, policy=policy), None)
            return run_request(session, session.tokenizer.encode(PROMPT), SamplingParams(), count,
                               ignore_eos=True)

        plain, guessed = answer(Policy.ITERATIVE), answer(Policy.SPECULATIVE)
    assert guessed.tokens == plain.tokens
    assert len(plain.tokens) == count
    runs = guessed.stats()
    steps = runs["runs"] - runs["speculative_runs"]  # masks follow in runs of their own
    assert steps < count / 1.25


def test_what_bita_cannot_do_is_said(tmp_path):
    pytest.importorskip("safetensors")
    adapter = adapter_at(tmp_path / "a.safetensors", 4)
    for args, code, says in (
            ([adapter], 2, "--prompting none"),
            (["", "--proposer", "bita"], 2, "--proposer bita needs an adapter"),
            ([str(tmp_path / "none"), "--backend", "torch"], 3, "no such file"),
            ([adapter, "--backend", "torch", "-m", str(EMBEDDED / "draft.gguf")], 3,
             "is for 12 layers of 256 elements, the model has 2 layers of 256")):
        found, line = refusal(generate, ["-p", "x", "-n", "2", "--bita", *args])
        assert found == code, line
        assert says in line


def test_prompt_lookup_needs_no_draft_model():
    target = str(EMBEDDED / "target.gguf")
    found = answered(1, "-m", target, "-n", "20", "--proposer", "prompt-lookup")
    assert found["stats"]["policy"] == "pipeinfer"
    code, says = refusal(generate, ["-m", target, "-p", PROMPT, "--proposer", "draft"])
    assert code == 2
    assert "--proposer draft needs a draft model" in says
