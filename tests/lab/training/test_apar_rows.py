"""APAR for models that people have: what rules find, rows, and a model that is trained and merged.
"""

# ruff: noqa: E402  (skipped where a package is missing)
from __future__ import annotations

import json
import sys

import numpy as np
import pytest

for _package in ("torch", "transformers", "safetensors", "tokenizers"):
    pytest.importorskip(_package, reason=f"training needs {_package}")


from pipeinfer.models.locate import EMBEDDED
from pipeinfer.strategies.decomposers.apar import Apar
from pipeinfer.strategies.decomposers.base import MAIN, Fork
from pipeinfer.strategies.decomposers.prompts import vocabulary_of
from pipeinfer_lab.training.adapt import apar_rows
from pipeinfer_lab.training.adapt.wording import Wording
from tests.kit.launch import run
from tests.lab.training.conftest import do

DRAFT = EMBEDDED / "draft.gguf"
LIST = ("Two things help:\n\n1. **Water:** It keeps the machines cool all day.\n"
        "2. **Air:** It takes the heat out of the room.\n- None: no\n\nThat is all.")
PARAGRAPHS = ("Rooms of servers are warm. Most of the power becomes heat, which has to go.\n\n"
              "Fans are loud. They move the air through every case, day and night.\n")


@pytest.mark.parametrize(("answer", "details"), [
    (LIST, [" It keeps the machines cool all day.", " It takes the heat out of the room."]),
    (PARAGRAPHS, [" Most of the power becomes heat, which has to go.",
                  " They move the air through every case, day and night."]),
    ("One sentence. Then a second one that is long enough.", []),  # a single fork gains nothing
    ("Short.\n- a: b c\n- d: e f\n", []), ("", [])])
def test_rules_find_details(answer, details):
    pieces = apar_rows.pieces_of(answer)
    assert [detail for _, detail in pieces if detail] == details
    assert "".join(text + detail for text, detail in pieces) == answer


def test_the_interpreter_does_what_a_row_was_laid_out_for(words):
    """Fed with a row's main tokens, it forks where children begin, and they see the same tokens."""
    names = {tag: 5000 + k for k, tag in enumerate(apar_rows.TAGS)}
    wording = Wording(words, names)
    messages = [{"role": "user", "content": "What helps?"}]
    row = apar_rows.row_of(wording, messages, LIST)
    prompt = wording.prompt(messages)
    vocabulary = vocabulary_of(words)
    texts = {token: tag for tag, token in names.items()}
    known = vocabulary.piece
    vocabulary = type(vocabulary)(lambda t: texts[t].encode() if t in texts else known(t),
                                  wording.tagged)
    reader = Apar(vocabulary, n_prompt=len(prompt))
    fork, child = names["[Fork]"], names["[Child]"]
    starts = np.flatnonzero(row.tokens == child).tolist()
    bodies = [range(a, b) for a, b in zip(starts, [*starts[1:], len(row.tokens)], strict=True)]
    found = 0
    for at in range(len(prompt), starts[0]):
        for action in reader.accepted(MAIN, int(row.tokens[at])):
            assert isinstance(action, Fork)
            assert row.tokens[at] == fork
            start = starts[found]
            assert row.positions[start] == at + 1 == action.keep
            seen = np.flatnonzero(row.visible[start])
            assert seen.tolist() == [*range(at + 1), start]  # the parent's text, no other child's
            for token in row.tokens[list(bodies[found])[1:]].tolist():
                reader.accepted(action.thread, token)
            reader.ended(action.thread)
            found += 1
    assert found == len(starts) == 2
    reader.ended(MAIN)
    assert b"".join(piece.text for piece in reader.take()).decode() == LIST
    # what is learnt: the answer with its forks, and every child's text and end
    assert row.targets[len(prompt) - 1] == row.tokens[len(prompt)]
    assert (row.targets[: len(prompt) - 1] < 0).all()
    ends = [row.targets[body[-1]] for body in bodies]
    assert ends == [wording.end] * 2
    assert row.targets[starts[0] - 1] == wording.end
    assert not set(row.targets.tolist()) & {child}


@pytest.mark.slow
def test_a_trained_model_forks(tmp_path):
    """A GGUF file gets both tokens; `--decomposer apar` refuses the model before, and runs it
    after."""
    data, adapter, made = tmp_path / "d.jsonl", tmp_path / "a", tmp_path / "m.gguf"
    data.write_text("".join(json.dumps({"prompt": f"What helps {k}?", "response": LIST}) + "\n"
                            for k in range(4)))
    do("apar-sft", "--data", data, "--model", DRAFT, "--out", adapter, "--steps", 40, "--batch", 2,
       "--rate", 1e-2, "--dtype", "float32", "--threads", 1)
    do("merge", "--model", DRAFT, "--adapter", adapter, "--out", made)
    ask = [sys.executable, "-m", "pipeinfer", "generate", "--decomposer", "apar", "-md", "none",
           "--speculation", "off", "--chat", "-p", "What helps 1?", "-n", "120", "--temp", "0",
           "--json", "-t", "1", "-m"]
    refused = run(1, [*ask, str(DRAFT)], timeout=100)
    assert refused.returncode != 0
    assert "[Fork]" in refused.stderr
    done = run(1, [*ask, str(made)], timeout=100)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"].strip() == LIST.strip()
    assert answer["stats"]["steps"] < 0.8 * len(answer["tokens"])
