"""Drafts on ranks of their own, in real jobs: the tokens stay, and guesses are made."""

from __future__ import annotations

import functools
import json
import sys

import pytest

from tests.rig import launch
from tests.support.references import alone, seeded
from tests.support.sample import full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
EMBEDDED = launch.ROOT / "pipeinfer" / "models" / "embedded"
TARGET, DRAFT = str(EMBEDDED / "target.gguf"), str(EMBEDDED / "draft.gguf")
PROMPT = "def fibonacci(n):\n"
GENERATE = [sys.executable, "-m", "pipeinfer", "generate", "-p", PROMPT, "-n", "60", "--seed", "5",
            "--json", "--timeout", "60"]
PACED = ["--pace-ms", "8"]  # else guesses are not worth their while


@pytest.fixture(scope="module")
def plain():
    """What decoding all alone writes, of the whole model and of two slices of it."""
    return functools.cache(lambda slices: alone(PROMPT, 60, seeded(5), slices=slices,
                                                ignore_eos=False))


@pytest.mark.parametrize(("np", "options"), [
    (3, ["--draft-ranks", "1"]), (4, ["--draft-ranks", "2"]),
    full(3, ["--draft-ranks", "1", "--policy", "published"]),
    full(2, ["--draft-ranks", "1", "--head-stage"]),
    (3, ["--draft-ranks", "1", "-mds", DRAFT, "-md", TARGET]),
    (4, ["--draft-ranks", "1", "-mds", DRAFT, "-md", TARGET, "--policy", "published",
         "--branches", "3"]),
    full(4, ["--draft-ranks", "1", "-mds", DRAFT, "-md", TARGET, "--policy", "speculative",
             "--branches", "3"]),
])
def test_tokens_are_the_plain_ones_and_guesses_come(np, options, plain):
    done = launch.run(np, [*GENERATE, *PACED, "-m", TARGET, "-md", DRAFT, *options])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == plain(1)
    assert answer["stats"]["accepted_speculative"] > 0
    assert any(f"drafts on rank {np - int(options[1])} " in note
               for note in answer["stats"]["notes"])


@pytest.mark.parametrize(("np", "drafts"), [(3, "1"), full(4, "1"), full(4, "2")])
def test_beside_slices(np, drafts, plain):
    """On one rank, or as the members of a wide stage."""
    cut = ["--grid", "1x2"] if np - int(drafts) == 3 else ["--slices", "2"]
    done = launch.run(np, [*GENERATE, *PACED, "--draft-ranks", drafts, *cut])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == plain(2)
    assert answer["stats"]["accepted_speculative"] > 0


@pytest.mark.parametrize(("np", "count", "victim"), [
    (3, "1", 2), full(4, "1", 3), full(4, "2", 2), full(4, "2", 3)])
def test_a_draft_that_dies_takes_its_guesses_along_and_nothing_else(np, count, victim, plain):
    done = launch.run(np, [*GENERATE, *PACED, "--draft-ranks", count, "--fault",
                          f"kill@{victim}:decode=12"])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == plain(1)
    assert any("tokens come without its guesses" in note for note in answer["stats"]["notes"])


def test_a_draft_that_fails_takes_its_guesses_along_and_nothing_else(plain):
    done = launch.run(3, [*GENERATE, *PACED, "--draft-ranks", "1", "--fault", "error@2:decode=12"])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == plain(1)
    assert any("rank 2 on" in note and "cannot draft" in note
               for note in answer["stats"]["notes"])


@pytest.mark.parametrize(("np", "options", "words"), [
    (2, ["--draft-ranks", "1"], "start at least 3"),
    full(4, ["--draft-ranks", "3"], "start at least 5"),
])
def test_what_does_not_fit_is_refused(np, options, words):
    done = launch.run(np, [*GENERATE, *options])
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
