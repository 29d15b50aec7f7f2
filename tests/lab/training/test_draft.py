"""A draft made for a target: the target's own texts, and what a thinned copy learns from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from pipeinfer.errors import ModelError
from pipeinfer.lab.training.__main__ import main
from pipeinfer.lab.training.draft.answers import KEPT, Talk
from pipeinfer.lab.training.draft.own_draft import Settings, joined, marks_of, run
from pipeinfer.lab.training.draft.teach import Lessons, agreement, batches, pack
from pipeinfer.lab.training.network.model import spread, thinned
from pipeinfer.lab.training.network.restore import restore
from pipeinfer.models.locate import EMBEDDED, open_model, open_tokenizer
from tests.support.sample import fewer

WHOLE = EMBEDDED / "target.gguf"
#: whose texts are looked at; the sample's has 2 layers, not 12
TARGET = EMBEDDED / fewer("target.gguf", "draft.gguf")
COUNT = fewer(12, 2)
LENGTH = fewer(60, 48)


@pytest.fixture(scope="module")
def target():
    return restore(TARGET).eval()


@pytest.fixture(scope="module")
def marks():
    return marks_of(open_tokenizer(TARGET))


@pytest.fixture(scope="module")
def texts(target, marks):
    talk, found = Talk(target, marks, slots=6, length=LENGTH, seed=1), []
    while len(found) < fewer(24, 20):
        found += talk.step()
    return found


def test_the_template_is_taken_apart_around_the_users_words(marks):
    tokenizer = open_tokenizer(TARGET)
    whole = tokenizer.encode_chat([{"role": "user", "content": "Sort a list."}])
    words = marks.encode("Sort a list.")
    assert [*marks.before, *words, *marks.between] == whole
    assert marks.ends == frozenset(tokenizer.eog_ids)


def test_what_was_noted_beside_others_is_what_the_target_thinks_alone(target, texts):
    for text in texts:
        tokens = torch.from_numpy(text.tokens.astype(np.int64))
        with torch.no_grad():
            expected = target(tokens[None])[0].log_softmax(-1)
        assert text.likely.shape == text.shares.shape == (len(tokens), KEPT)
        noted = expected.gather(1, torch.from_numpy(text.likely.astype(np.int64)))
        assert torch.allclose(noted.exp(), torch.from_numpy(text.shares.astype(np.float32)),
                              atol=2e-3)
        assert (expected.max(1).values - noted[:, 0] < 1e-3).all()


def test_texts_are_of_several_kinds_and_end_where_the_target_ends_them(marks, texts):
    before = list(marks.before)
    chats = [t for t in texts if t.tokens[: len(before)].tolist() == before]
    assert 0 < len(chats) < len(texts)
    assert all(len(t.tokens) <= LENGTH for t in texts)
    between = list(marks.between)

    def answered(tokens):
        return any(tokens[k : k + len(between)] == between for k in range(len(tokens)))

    assert any(answered(t.tokens.tolist()) for t in chats)


def test_batches_hold_every_text_once_and_no_more_than_they_may(texts, marks):
    lessons = joined(texts, marks.before)
    spans = lessons.spans(held_out=False)
    assert len(spans) + len(lessons.spans(held_out=True)) == len(texts)
    groups = batches(spans, 200, np.random.default_rng(3))
    assert sorted(span for group in groups for span in group) == sorted(spans)
    assert all(len(g) * max(b - a for a, b in g) <= 200 for g in groups if len(g) > 1)
    for group in groups:
        batch = pack(lessons, group)
        n = 0
        for row, (start, stop) in zip(range(len(group)), group, strict=True):
            own = lessons.tokens[start:stop]
            assert batch.x[row, : stop - start].tolist() == own.tolist()
            assert not batch.learned[row, stop - start :].any()
            starts = own[: len(marks.before)].tolist() == list(marks.before)
            first = len(marks.before) - 1 if starts and len(own) > len(marks.before) else 0
            assert batch.learned[row].nonzero()[0, 0] == first
            count = int(batch.learned[row].sum())
            assert batch.likely[n : n + count].tolist() == lessons.likely[
                start + first : stop].tolist()
            n += count


def test_a_copy_of_all_layers_agrees_wholly_and_a_thinned_one_does_not(target, texts):
    lessons = joined(texts, ())
    assert agreement(thinned(target, range(COUNT)), lessons)["agreement"] > 0.99
    assert agreement(thinned(target, range(0, COUNT, 11)), lessons)["agreement"] < 0.5


def test_lessons_are_kept_as_they_are(tmp_path, texts, marks):
    lessons = joined(texts, marks.before)
    lessons.save(tmp_path / "answers.npz")
    again = Lessons.load(tmp_path / "answers.npz")
    assert again.skip == marks.before
    for name in ("tokens", "ends", "likely", "shares"):
        assert (getattr(again, name) == getattr(lessons, name)).all()


def test_layers_are_spread_over_the_target():
    assert [spread(n, 30) for n in (1, 2, 3, 4)] == [[0], [0, 29], [0, 14, 29], [0, 9, 19, 29]]


def test_a_draft_learns_and_is_a_file_with_the_targets_vocabulary(tmp_path):
    out = tmp_path / "draft.gguf"
    settings = Settings(WHOLE, out, tmp_path / "work", layers=2, texts=fewer(30, 20),
                        slots=fewer(8, 20), length=fewer(48, 36), steps=fewer(12, 10),
                        quantisation="q8_0")
    result = run(settings, report=lambda line: None)
    held_out = result["held_out"]
    assert held_out["taught"]["nats"] < held_out["thinned"]["nats"] - 0.05
    assert held_out["quantised"]["nats"] == pytest.approx(held_out["taught"]["nats"], abs=0.2)
    model, whole = open_model(out), open_model(WHOLE)
    assert (model.n_layers, model.architecture) == (2, "llama")
    assert model.texts("tokenizer.ggml.tokens") == whole.texts("tokenizer.ggml.tokens")
    assert open_tokenizer(out).chat_template == open_tokenizer(WHOLE).chat_template
    before = out.read_bytes()
    run(settings, report=lambda line: None)  # everything is there: nothing is learned again
    assert out.read_bytes() == before


@pytest.mark.parametrize(("args", "says"), [
    (["--layers", "12"], "a draft of 12 layers for a target of 12: give 1 to 11"),
    (["--out", "x.bin"], "--out must end in .gguf"),
    (["--minutes", "1"], "give either --minutes or --steps"),
])
def test_impossible_options_are_refused_with_the_reason(tmp_path, args, says):
    if "--out" not in args:
        args = [*args, "--out", str(tmp_path / "x.gguf")]
    done = CliRunner().invoke(main, ["draft", str(WHOLE), "--work", str(tmp_path), "--steps", "1",
                                     "--texts", "1", *args])
    said = f"{done.output} {done.exception}"
    assert done.exit_code != 0
    assert says in said
    if "layers" in says:
        assert isinstance(done.exception, ModelError)
