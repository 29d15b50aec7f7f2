"""`pipeinfer sample` without ranks: what is drawn and written, and going on behind a file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from pipeinfer.cluster.generate import Generated
from pipeinfer.config import JobConfig
from pipeinfer.core.sampling import noise_key
from pipeinfer.errors import UsageError
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.strategies.decomposers.prompts import Opening
from pipeinfer_lab.commands import comparison, sample
from pipeinfer_lab.training.pasta.endpoint import Endpoint
from tests.kit.answering import answering, spoken
from tests.lab.test_compare import answer, judgement


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Runs the command with three answers to each prompt: one is cut off, one has no layout.
    Returns what it has said, and the seeds that noise was made of."""
    keys: list[int] = []

    def answered(session, opening, params, n_predict):
        del session, opening
        keys.append(params.key)
        return Generated(reason=("stop", "length", "stop")[len(keys) % 3], seed=n_predict)

    def scored(session, asked, prompt, answer):
        del session, prompt, answer
        return {"text": asked.reference} if len(keys) % 3 == 0 else None

    session = contextlib.nullcontext(SimpleNamespace())
    joined = SimpleNamespace(place=SimpleNamespace(rank=0), lead=lambda hook: session)
    monkeypatch.setattr(sample, "join", lambda job: joined)
    monkeypatch.setattr(sample, "open_response", lambda session, messages: Opening((1,)))
    monkeypatch.setattr(sample, "run_request", answered)
    monkeypatch.setattr(sample, "scored", scored)

    def run(*words):
        keys.clear()
        done = CliRunner().invoke(sample.sample_command, [
            "--samples", "3", "--out", str(tmp_path / "s.jsonl"), *words])
        if done.exception is not None:
            raise done.exception
        return done.stderr, list(keys)

    return run


def test_a_seed_is_chosen_reported_and_kept(draw, tmp_path):
    said, keys = draw("--tasks", "2", "-n", "40")
    records = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    (seed,) = {record["made"]["seed"] for record in records}
    assert f"pipeinfer: seed {seed}\n" in said
    assert "2 of 6 answers are left out because they were cut off: raise -n (40)" in said
    assert "2 of 6 answers are left out because they are empty" in said
    assert len(set(keys)) == 6
    said, more = draw("--tasks", "3")
    assert f"pipeinfer: seed {seed}\n" in said
    assert len(more) == 3
    (tmp_path / "s.jsonl").unlink()
    assert draw("--tasks", "3", "--seed", str(seed))[1] == [*keys, *more]


def test_noise_is_made_once_of_seed_prompt_and_answer(draw):
    drawn = [int(np.random.default_rng([7, 0, turn]).integers(2**31)) for turn in range(3)]
    assert draw("--tasks", "1", "--seed", "7")[1] == [noise_key(one) for one in drawn]


def test_a_line_that_was_cut_off_is_drawn_again(draw, tmp_path):
    path = tmp_path / "s.jsonl"
    draw("--tasks", "2", "--seed", "3")
    whole = path.read_bytes()
    for kept in (len(whole) - 1, whole.index(b"\n") + 4):
        path.write_bytes(whole[:kept])
        assert len(draw("--tasks", "2", "--seed", "3")[1]) == 3
        assert path.read_bytes() == whole


@pytest.mark.parametrize(("changed", "says"), [
    ({"model": "0" * 64}, "the model was 000"), ({"seed": 4}, "seed was 4, and is 3 now"),
    ({"temp": 0.5}, "temp was 0.5")])
def test_a_file_of_other_draws_is_not_gone_on_with(draw, tmp_path, changed, says):
    path = tmp_path / "s.jsonl"
    draw("--tasks", "1", "--seed", "3")
    record = json.loads(path.read_text())
    record["made"] |= changed
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(UsageError, match=says):
        draw("--tasks", "2", "--seed", "3")


def test_a_file_of_other_prompts_is_not_gone_on_with(draw, tmp_path):
    path = tmp_path / "s.jsonl"
    draw("--tasks", "1", "--seed", "3")
    path.write_text(path.read_text().replace('"content": "', '"content": "Well, '))
    with pytest.raises(UsageError, match="prompt 1 is another one now"):
        draw("--tasks", "2", "--seed", "3")


@pytest.mark.parametrize("text", ["my notes", "my notes\n", '{"messages": [], "samples": []}\n'])
def test_other_peoples_files_stay_as_they_are(draw, tmp_path, text):
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="line 1: does not say how its answers were drawn"):
        draw("--tasks", "1")
    assert path.read_text() == text


@pytest.mark.parametrize("words", [
    ("-p", "x"), ("-f", "x"), ("--stop", "x"), ("--json",), ("--ignore-eos",), ("--chat",),
    ("--special",), ("--no-display-prompt",)])
def test_options_of_one_request_are_not_offered(tmp_path, words):
    done = CliRunner().invoke(sample.sample_command, [
        "--tasks", "1", "--out", str(tmp_path / "s.jsonl"), *words])
    assert done.exit_code == 2
    assert "No such option" in done.stderr


@pytest.fixture
def chats(tmp_path):
    """Two conversations, the second without an answer, and a folder with a baseline's."""
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", '
                    '"content": "Which?"}, {"role": "assistant", "content": "abcdef"}]}\n'
                    '{"prompt": "Who?"}\n')
    answers = [answer("plain", 1.0, 12, 12, 12, text="ab"), answer("plain", 1.0, 9, 9, 9)]
    (tmp_path / "base").mkdir()
    comparison.write(tmp_path / "base", "title", "text", [], {"plain": answers},
                     ["Which?", "Who?"], plots=False)
    return path, tmp_path / "base"


def test_quality_and_speedup_are_against_the_baselines_answers_too(chats):
    """PASTA's section 4: Baseline-SFT's length, and verdicts against its answer and the original,
    each in both orders."""
    path, base = chats
    asked_for = []

    def judge(body, headers):
        asked_for.append(body["messages"][0]["content"])
        return spoken(judgement(asked_for[-1]))

    with answering(judge) as url:
        endpoint = Endpoint(f"{url}/v1", "m")
        (only,) = sample.judged(one_line(path), endpoint)
        assert only.quality("abcd") == pytest.approx(0.1)  # the longer text wins: the original
        assert len(asked_for) == 2
        first, second = sample.judged(path, endpoint, base)
        assert first.quality("abcd") == pytest.approx(1.0)  # 1.9 won, 1.9 lost
        assert len(asked_for) == 2 + 4
        second.quality("abcd")
        assert len(asked_for) == 2 + 4 + 2  # there is no original
    tokenizer = open_tokenizer(EMBEDDED / "task.gguf")
    job = SimpleNamespace(config=JobConfig())
    session = SimpleNamespace(tokenizer=tokenizer, limits=SimpleNamespace(n_ctx=400),
                              loaded=SimpleNamespace(job=job))
    tokens = tokenizer.split("Answers are short.", special=False)
    given = Generated(tokens=list(tokens), threads=[0] * len(tokens), text="abcd", reason="stop")
    asked = dataclasses.replace(first, quality=lambda text: 1.0)
    steps = len(tokens) + 1
    assert sample.scored(session, asked, (5, 6), given)["speedup"] == pytest.approx(12 / steps)
    original = len(tokenizer.split("abcdef", special=False))
    assert sample.scored(session, dataclasses.replace(asked, baseline=None), (5, 6), given)[
        "speedup"] == pytest.approx(original / steps)
    tokenizer.close()


def one_line(path):
    one = path.with_name("one.jsonl")
    one.write_text(path.read_text().splitlines()[0] + "\n")
    return one


def test_what_a_baseline_has_to_be(chats, draw, tmp_path):
    path, base = chats
    with pytest.raises(UsageError, match="answers other questions"):
        sample.judged(one_line(path), Endpoint("http://127.0.0.1:1", "m"), base)
    with pytest.raises(UsageError, match=r"record 2: has no answer.*or give --baseline"):
        sample.judged(path, Endpoint("http://127.0.0.1:1", "m"))
    with pytest.raises(UsageError, match="--baseline answers --prompts"):
        draw("--tasks", "1", "--baseline", str(base))
    words = ("--prompts", str(one_line(path)), "--judge", "http://127.0.0.1:1", "--seed", "1")
    draw(*words)
    comparison.write(base, "", "", [], {"plain": [answer("plain", 1.0, 9, 9, 9)]}, ["Which?"],
                     plots=False)
    with pytest.raises(UsageError, match="prompt 1 is another one now"):
        draw(*words, "--baseline", str(base))
    assert json.loads((tmp_path / "s.jsonl").read_text())["baseline"] is None
