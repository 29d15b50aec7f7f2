"""Prompts in the forms of public data sets: five own examples of each, and right and wrong answers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeinfer.errors import UsageError
from pipeinfer_lab.commands.compare import behind
from pipeinfer_lab.commands.comparison import Answer
from pipeinfer_lab.quality import scores
from pipeinfer_lab.quality.prompt_sets import file_prompts

SETS = Path(__file__).parent / "sets"


def entries(name):
    return [json.loads(line) for line in (SETS / f"{name}.jsonl").read_text().splitlines()]


def prompts(name):
    found = file_prompts(SETS / f"{name}.jsonl")
    return list(zip(entries(name), found, strict=True))


def test_the_last_number_counts():
    for entry, prompt in prompts("gsm8k"):
        number = entry["answer"].rpartition("#### ")[2]
        assert prompt.score(f"First 7, then 99. So it is {number}.") == 1.0
        assert prompt.exact(f"**{number}**")
        assert prompt.score(f"It is {number}, not 7.") == 0.0 == prompt.score("I do not know.")
        assert "####" not in prompt.reference
        assert prompt.question == entry["question"]


@pytest.mark.parametrize(("text", "number"), [
    ("1,234.5 in all", 1234.5), ("-3", -3.0), ("it is \N{MINUS SIGN}3.5", -3.5),
    ("from 2 to 10.", 10.0), ("none", None)])
def test_numbers(text, number):
    assert scores.last_number(text) == number


def test_programs_have_a_good_answer_and_no_score():
    for entry, prompt in [*prompts("humaneval"), *prompts("mbpp")]:
        shown = entry["test_list"] if "test_list" in entry else [entry["prompt"].rstrip()]
        assert all(text in prompt.question for text in shown)
        assert prompt.reference == entry.get("code", entry.get("canonical_solution"))
        assert prompt.score is None


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\x0c"])
def test_texts_may_have_any_ends_of_lines(tmp_path, mark):
    path = tmp_path / "set.jsonl"
    text = json.dumps({"question": f"a{mark}b"}, ensure_ascii=False)
    path.write_text(f"\N{ZERO WIDTH NO-BREAK SPACE}{text}\nc{mark}d\n", encoding="utf-8")
    assert [prompt.question for prompt in file_prompts(path)] == [f"a{mark}b", f"c{mark}d"]


def test_answers_of_long_texts():
    for entry, prompt in prompts("longbench"):
        best = entry["answers"][0]
        assert prompt.score(best) == 1.0
        assert prompt.exact(best)
        assert prompt.score("Something entirely different") < 0.2
        assert entry["context"] in prompt.question
        assert entry["input"] in prompt.question
        assert prompt.kind == entry["dataset"]
    (_, first), (_, second), *_ = prompts("longbench")
    assert first.score("He was born in Bergen") == pytest.approx(1 / 3)  # 2 of 6 words by F1
    assert second.score("north room") == 1.0  # the best of several answers


def test_summaries_by_rouge():
    for name, field in (("xsum", "summary"), ("cnn_dailymail", "highlights")):
        for entry, prompt in prompts(name):
            assert prompt.rouge(entry[field])["rougeL"] == 1.0
            assert prompt.score is None


def test_the_second_turn_follows_the_own_answer():
    found = file_prompts(SETS / "mt_bench.jsonl")
    given = entries("mt_bench")
    assert [p.question for p in found] == [turn for entry in given for turn in entry["turns"]]
    first, second = found[4:6]
    assert (first.reference, second.reference) == ("The fourth.", "That cannot be known.")
    assert (first.kind, second.kind) == ("reasoning", "reasoning, turn 2")
    answer = Answer("plain", 1.0, 1, 1, 1, 1, 1, 1.0, 0.0, None, None, None, text="The slow one.")
    assert behind(first, [], []) is first
    assert behind(second, [first], [answer]).messages == [
        {"role": "user", "content": first.question},
        {"role": "assistant", "content": "The slow one."},
        {"role": "user", "content": second.question}]


@pytest.mark.parametrize("entry", [
    {"turns": "one text"}, {"turns": [1]}, {"question": "?", "answer": "#### none"},
    {"article": 1, "highlights": "a"}, {"input": "", "context": "c", "answers": []},
    {"prompt": 3, "entry_point": "f", "test": "def check(c): pass"},
    {"code": "", "test_list": ["a"]}, {"code": "", "text": "?", "test_list": "assert f()"},
    {"code": "", "text": "?", "test_list": []}, {"input": "?", "context": "c", "answers": "Oslo"},
    {"turns": ["a"], "reference": {"a": "b"}}])
def test_other_values_are_named(tmp_path, entry):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(entry))
    with pytest.raises(UsageError, match="prompt 1 has the fields"):
        file_prompts(path)
