"""Drafts on ranks of their own, in real jobs that lose them or cannot have them."""

from __future__ import annotations

import functools
import json

import pytest

from pipeinfer.models.locate import EMBEDDED
from tests.kit import launch
from tests.kit.references import alone, seeded
from tests.kit.sample import full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
TARGET, DRAFT = str(EMBEDDED / "target.gguf"), str(EMBEDDED / "draft.gguf")
PROMPT = "def fibonacci(n):\n"
ASK = ["-p", PROMPT, "-n", "60", "--seed", "5", "--timeout", "60"]
PACED = ["--hook", "pace=8"]  # else guesses are not worth their while


@pytest.fixture(scope="module")
def plain():
    """What decoding all alone writes, of the whole model and of two slices of it."""
    return functools.cache(lambda slices: alone(PROMPT, 60, seeded(5), slices=slices,
                                                ignore_eos=False))


@pytest.mark.parametrize(("np", "fault", "says"), [
    (3, "kill@2", "decoding continues without this draft"),
    full(4, "kill@3", "decoding continues without this draft"),
    (3, "error@2", "cannot draft")])
def test_a_draft_that_dies_or_fails_costs_its_proposals_and_no_token(np, fault, says, plain):
    answer = launch.answered(np, *ASK, *PACED, "--draft-ranks", "1", "--hook",
                             f"fault={fault}:decode=12")
    assert answer["tokens"] == plain(1)
    notes = [note for note in answer["stats"]["notes"] if says in note]
    assert any("kill" in fault or "rank 2 on" in note for note in notes)


@pytest.mark.parametrize(("np", "options", "words"), [
    (2, ["--draft-ranks", "1"], "start at least 3"),
    full(4, ["--draft-ranks", "3"], "start at least 5"),
])
def test_what_does_not_fit_is_refused(np, options, words):
    launch.refused(np, "generate", *ASK, *options, code=2, says=words)


# --- proposers of the nodes file --------------------------------------------------------------


def own(tmp_path, **tables):
    """The option for a nodes file with settings of ranks: rank3={"proposer": "mtp"}."""
    lines = [line for name, table in tables.items() for line in (
        f"[rank.{name.removeprefix('rank')}]", *(f"{k} = {json.dumps(v)}"
                                                 for k, v in table.items()))]
    path = tmp_path / "nodes.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["--nodes", str(path)]


LOOKUP, MODEL = {"proposer": "prompt-lookup"}, {"draft": DRAFT}


@pytest.mark.parametrize(("tables", "options", "words"), [
    ({"rank3": LOOKUP, "rank4": MODEL}, [], ["prompt-lookup drafts on rank 3", "draft.gguf drafts "
                                             "on rank 4 "]),
    ({"rank2": {"draft": TARGET}, "rank3": MODEL, "rank4": {"role": "draft"}},
     ["-md", DRAFT, "--policy", "published", "--set", "branches=3"],
     ["target.gguf drafts on rank 2 ", "draft.gguf drafts on rank 3 ",
      "draft.gguf drafts on rank 4 "]),
    full({"rank4": LOOKUP}, ["--grid", "1x2", "-md", DRAFT], ["prompt-lookup drafts on rank 4"]),
    full({"rank3": {"draft": TARGET}}, ["--policy", "speculative"], ["target.gguf drafts"]),
    full({"rank3": {"proposer": "draft-lookahead", **MODEL}}, [], ["draft.gguf drafts on rank 3"]),
])
def test_ranks_have_proposers_of_their_own(tables, options, words, plain, tmp_path):
    answer = launch.answered(5, *ASK, *PACED, "-m", TARGET, *own(tmp_path, **tables), *options)
    assert answer["tokens"] == plain(2 if "--grid" in options else 1)
    assert answer["stats"]["accepted_speculative"] > 0
    notes = "\n".join(answer["stats"]["notes"])
    assert all(word in notes for word in words), notes


def test_one_of_them_dies_and_the_other_goes_on(plain, tmp_path):
    answer = launch.answered(4, *ASK, *PACED, "-m", TARGET, *own(tmp_path, rank2=LOOKUP, rank3={
        "draft": DRAFT}), "--hook", "fault=kill@3:decode=6")
    assert answer["tokens"] == plain(1)
    assert sum("decoding continues without this draft" in note
               for note in answer["stats"]["notes"]) == 1
    assert answer["stats"]["accepted_speculative"] > 0


@pytest.mark.parametrize(("tables", "code", "words"), [
    ({"rank2": {"proposer": "lookahaed"}}, 2, "does not exist: choose from draft"),
    full({"rank2": {"proposer": "lookahead"}}, 2, "give --proposer lookahead instead"),
    full({"rank2": {"proposer": "prompt-lookup", "draft": DRAFT}}, 2, "evaluates no draft"),
    full({"rank2": {"proposer": "mtp"}}, 2, "heads of llama models are not supported"),
    full({"rank2": {"draft": "none.gguf"}}, 3, "the proposer draft of rank 2 (nodes file): "),
    full({"rank1": LOOKUP, "rank2": LOOKUP}, 2, "would draft alike"),
    full({"rank2": {"role": "stage", **LOOKUP}}, 2, "which makes it propose tokens instead"),
])
def test_settings_that_cannot_be_are_refused(tables, code, words, tmp_path):
    launch.refused(3, "generate", *ASK, *own(tmp_path, **tables), code=code, says=words)
