"""A proposer and a decomposer of another package work everywhere after one line each: the package's
two entry points."""

from __future__ import annotations

import json
import os

import openai
import pytest

from tests.kit import launch
from tests.kit.references import alone
from tests.kit.sample import full
from tests.kit.served import PIPEINFER, serve
from tests.mpi.test_jobs import EMBEDDED

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROMPT = ("-p", "import os", "-n", "24", "--temp", "0", "-c", "512")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The path on which a package with these two entry points is found."""
    site = tmp_path_factory.mktemp("site")
    return package(site, "stutter = tests.kit.plugin:STUTTER\nshout = tests.kit.plugin:SHOUT")


def package(site, entries):
    """The environment of a job that finds a package with these strategies."""
    about = site / "stutter-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stutter\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[pipeinfer.strategies]\n{entries}\n")
    return {"PYTHONPATH": f"{site}{os.pathsep}{launch.ROOT}"}


def plain_tokens():
    """What decoding without any of these writes."""
    return alone(PROMPT[1], int(PROMPT[3]))


@pytest.mark.parametrize("ranks", [1, full(3)])
def test_generate(ranks, installed):
    stuttered = launch.answered(ranks, *PROMPT, "--ignore-eos", "--proposer", "stutter",
                                "--stutter-times", "3", "--set", "path_min=0", "--set",
                                "adapt=false", "--hook", "pace=5", **installed)
    assert stuttered["tokens"] == plain_tokens()
    assert stuttered["stats"]["issued_speculative"] > 0
    plain = launch.answered(ranks, *PROMPT, "--policy", "iterative", "--chat",
                            "-m", EMBEDDED / "task.gguf", **installed)
    shouted = launch.answered(ranks, *PROMPT, "--decomposer", "shout", "--shout-sign", "",
                              **installed)
    assert shouted["text"] == plain["text"].upper()
    assert shouted["tokens"] == plain["tokens"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_error_of_a_proposer_costs_its_guesses_alone(ranks, installed):
    found = launch.answered(ranks, *PROMPT, "--ignore-eos", "--proposer", "stutter", "--set",
                     "stutter_fails_at=3", "--set", "adapt=false", "--hook", "pace=5", **installed)
    assert found["tokens"] == plain_tokens()
    assert [note for note in found["stats"]["notes"] if "draft on rank 0 failed" in note] == [
        "the draft on rank 0 failed: ValueError: stuck: decoding continues without this draft"]


@pytest.mark.parametrize("ranks", [full(1), 3])
def test_serve(ranks, installed):
    with serve(ranks, "--decomposer", "shout", "--shout-sign", "", "--proposer", "stutter", "-c",
               "1024", **installed) as server:
        server.wait_until_ready()
        question = "Students and their grades\nPaula studies logic, 3.75\nGive the grade of Paula."
        ask = {"model": "task", "messages": [{"role": "user", "content": question}],
               "temperature": 0, "max_tokens": 24}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            create = client.chat.completions.create
            shouted = create(**ask).choices[0].message.content
            spoken = create(**ask, extra_body={"decomposer": "none"}).choices[0].message.content
            assert shouted == spoken.upper() != spoken
            with pytest.raises(openai.BadRequestError, match="shout"):
                create(**ask, extra_body={"decomposer": "whisper"})


@pytest.mark.parametrize("ranks", [1, full(3)])
def test_compare(ranks, installed, tmp_path):
    done = launch.run(ranks, [
        *PIPEINFER, "compare", "--tasks", "1", "-n", "40", "-c", "1024", "--method", "stutter",
        "--method", "shout", "--method", "shout+stutter", "--no-plots", "-o", str(tmp_path)],
        **installed)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["answers"]) == {"plain", "stutter", "shout", "shout+stutter"}
    texts = {name: answers[0]["text"] for name, answers in results["answers"].items()}
    assert texts["stutter"] == texts["plain"]
    assert texts["shout"] == texts["shout+stutter"]


def test_a_broken_package_is_named(tmp_path):
    launch.refused(1, "generate", "-p", "x", code=2, says="pipeinfer: error: the strategy broken",
                   **package(tmp_path, "broken = tests.kit.absent:SPEC"))
