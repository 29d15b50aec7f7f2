"""Whoever names the guesses, the tokens are plain decoding's."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from pipeinfer.cli.generate import generate
from pipeinfer.cluster.generate import run_request
from pipeinfer.cluster.launch import join
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import EMBEDDED
from tests.kit import launch
from tests.kit.configs import job_config
from tests.kit.references import alone
from tests.kit.refusals import assert_refused, output
from tests.kit.sample import fewer
from tests.mpi.test_matrix import adapter_at

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef "


@pytest.fixture(scope="module")
def wanted():
    return alone(PROMPT, 60)


def answered(ranks, *words):
    """What `generate` writes of PROMPT; one rank is this process."""
    asked = ["-p", PROMPT, "--json", *words]
    if ranks == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PIPEINFER_DEFAULT_MODEL", "embedded")
            return json.loads(output(generate, asked))
    return launch.answered(ranks, *asked, timeout=90)


@pytest.mark.parametrize(("more", "policy"), [
    ((), "pipeinfer"), (("-md", "none"), "iterative"), (("--speculation", "off"), "iterative")])
def test_one_process_without_a_draft_guesses_what_the_text_repeats(wanted, more, policy):
    """Where that pays; which it may not, as rows cost on this machine."""
    found = answered(1, "-m", str(EMBEDDED / "target.gguf"), "-n", "60", "--temp", "0",
                     "--ignore-eos", *more)
    assert found["tokens"] == wanted
    assert (found["stats"]["policy"], found["stats"]["draft"]) == (policy, "")
    if policy == "iterative":
        assert found["stats"]["issued_speculative"] == 0


def test_lookahead_over_ranks_takes_fewer_runs_than_tokens(wanted):
    found = answered(3, "-m", str(EMBEDDED / "target.gguf"), "-md", "none", "-n", "60", "--temp",
                     "0", "--ignore-eos", "--proposer", "lookahead", "--policy", "speculative",
                     "--set", "adapt=false")  # whatever else the machine does
    assert found["tokens"] == wanted
    assert found["stats"]["runs"] < len(found["tokens"])


def test_the_embedded_adapter_foresees_tokens():
    """In this process, which has imported torch already."""
    for package in ("torch", "transformers", "safetensors"):
        pytest.importorskip(package)
    count = fewer(60, 24)

    config = job_config(
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
        assert_refused(generate, ["-p", "x", "-n", "2", "--bita", *args], code, says)


def test_prompt_lookup_needs_no_draft_model():
    target = str(EMBEDDED / "target.gguf")
    found = answered(1, "-m", target, "-n", "20", "--proposer", "prompt-lookup")
    assert found["stats"]["policy"] == "pipeinfer"
    assert_refused(generate, ["-m", target, "-p", PROMPT, "--proposer", "draft"], 2,
                   "--proposer draft: needs a draft model")
