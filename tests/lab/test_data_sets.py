"""Prompts in the forms of public data sets: five own examples of each, and right and wrong answers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from pipeinfer.errors import UsageError
from pipeinfer.lab.commands.compare import behind
from pipeinfer.lab.commands.comparison import Answer
from pipeinfer.lab.quality import programs, scores
from pipeinfer.lab.quality.prompt_sets import file_prompts

SETS = Path(__file__).parent / "sets"


def entries(name):
    return [json.loads(line) for line in (SETS / f"{name}.jsonl").read_text().splitlines()]


def prompts(name, **options):
    found = file_prompts(SETS / f"{name}.jsonl", **options)
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


def test_functions_are_run_with_their_tests():
    for entry, prompt in prompts("humaneval", run=True):
        whole = f"{entry['prompt']}{entry['canonical_solution']}"
        function = whole[whole.index(f"def {entry['entry_point']}"):]
        for answer in (f"Here it is:\n```python\n{whole}```\nDone.", f"```\n{function}```"):
            assert prompt.score(answer) == 1.0, answer
        assert prompt.exact(entry["canonical_solution"])  # the body alone, as a base model goes on
        assert prompt.score(f"```python\n{entry['prompt']}    return None\n```") == 0.0
        assert prompt.score("I cannot.") == 0.0


def test_programs_are_run_with_their_tests():
    for entry, prompt in prompts("mbpp", run=True):
        assert prompt.score(f"```python\n{entry['code']}\n```") == 1.0
        assert prompt.score(entry["code"].replace("return", "return not")) == 0.0
        assert entry["test_list"][0] in prompt.question


def test_code_of_an_answer():
    code = "def f():\n    return 1\n"
    for answer in (f"```python3\n{code}```\nThat is all.", f"``` py title=x\n{code}```",
                   f"```bash\npip install x\n```\n```python\n{code}```\n```\n1\n```",
                   f"```\n{code}```\nIt returns:\n```\n1\n```", f"```Python\n{code}", code):
        assert programs.code_of(answer) == code


def test_a_function_is_known_by_its_whole_name(tmp_path):
    """A helper whose name begins alike is no answer of its own."""
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"prompt": "def add(a, b):\n", "entry_point": "add",
                                "test": "def check(f):\n    assert f(1, 2) == 3"}))
    prompt, = file_prompts(path, run=True)
    assert prompt.score("    def add_all(*given):\n        return sum(given)\n"
                        "    return add_all(a, b)\n") == 1.0


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\x0c"])
def test_texts_may_have_any_ends_of_lines(tmp_path, mark):
    path = tmp_path / "set.jsonl"
    text = json.dumps({"question": f"a{mark}b"}, ensure_ascii=False)
    path.write_text(f"\N{ZERO WIDTH NO-BREAK SPACE}{text}\nc{mark}d\n", encoding="utf-8")
    assert [prompt.question for prompt in file_prompts(path)] == [f"a{mark}b", f"c{mark}d"]


def test_no_program_is_run_unasked(tmp_path):
    for name in ("humaneval", "mbpp"):
        assert all(prompt.score is None for _, prompt in prompts(name))


@pytest.mark.parametrize("program", [
    "raise SystemExit(0)", "import os\nos._exit(0)", "while True:\n    pass", "1 / 0", "def (",
    "x = bytearray(1 << 33)", "open('f', 'wb').write(bytes(1 << 22))"])
def test_a_program_that_does_not_end_well_has_not_passed(program):
    assert not programs.passes(program, seconds=3.0)
    assert programs.passes(f"print('fine')\ntext = {program!r}")


def test_a_program_leaves_nothing_behind(tmp_path):
    """Neither what it starts nor its files."""
    left = tmp_path / "pid"
    code = ("import os, subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            f"open({str(left)!r}, 'w').write(f'{{child.pid}} {{os.getcwd()}}')\n")
    assert programs.passes(code)
    pid, folder = left.read_text().split()
    assert not Path(folder).exists()
    deadline = time.monotonic() + 10  # a killed process ends when it is next scheduled
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie":
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.05)


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
    {"prompt": "def f():", "entry_point": "g", "test": 3},
    {"prompt": "def f():", "entry_point": "g", "test": "def check(c): pass"},
    {"code": "", "test_list": ["a"]}, {"code": "", "text": "?", "test_list": "assert f()"},
    {"code": "", "text": "?", "test_list": []}, {"input": "?", "context": "c", "answers": "Oslo"},
    {"turns": ["a"], "reference": {"a": "b"}}])
def test_other_values_are_named(tmp_path, entry):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(entry))
    with pytest.raises(UsageError, match="prompt 1 has the fields"):
        file_prompts(path)
