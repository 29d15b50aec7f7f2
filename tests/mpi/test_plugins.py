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
    about = site / "stutter-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stutter\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[pipeinfer.strategies]\n"
        "stutter = tests.kit.plugin:STUTTER\n"
        "shout = tests.kit.plugin:SHOUT\n")
    return {"PYTHONPATH": f"{site}{os.pathsep}{launch.ROOT}"}


def generate(ranks, installed, *args):
    done = launch.run(ranks, [*PIPEINFER, "generate", "--json", *args], **installed)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def plain_tokens():
    """What decoding without any of these writes."""
    return alone(PROMPT[1], int(PROMPT[3]))


@pytest.mark.parametrize("ranks", [1, full(3)])
def test_generate(ranks, installed):
    stuttered = generate(ranks, installed, *PROMPT, "--ignore-eos", "--proposer", "stutter",
                         "--stutter-times", "3", "--set", "path_min=0", "--set", "adapt=false",
                         "--hook", "pace=5")
    assert stuttered["tokens"] == plain_tokens()
    assert stuttered["stats"]["issued_speculative"] > 0
    plain = generate(ranks, installed, *PROMPT, "--policy", "iterative", "--chat",
                     "-m", str(EMBEDDED / "task.gguf"))
    shouted = generate(ranks, installed, *PROMPT, "--decomposer", "shout", "--shout-sign", "")
    assert shouted["text"] == plain["text"].upper()
    assert shouted["tokens"] == plain["tokens"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_error_of_a_proposer_costs_its_guesses_alone(ranks, installed):
    found = generate(ranks, installed, *PROMPT, "--ignore-eos", "--proposer", "stutter", "--set",
                     "stutter_fails_at=3", "--set", "adapt=false", "--hook", "pace=5")
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


def test_a_broken_package_is_named(installed, tmp_path):
    about = tmp_path / "broken-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[pipeinfer.strategies]\nbroken = tests.kit.absent:SPEC\n")
    done = launch.run(1, [*PIPEINFER, "generate", "-p", "x"],
                      PYTHONPATH=f"{tmp_path}{os.pathsep}{launch.ROOT}")
    assert done.returncode == 2
    assert "pipeinfer: error: the strategy broken" in done.stderr
    assert "Traceback" not in done.stderr
