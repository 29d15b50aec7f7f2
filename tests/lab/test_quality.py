"""Scores by rule, sets of prompts, and what a judge's verdicts are made into."""

from __future__ import annotations

import json

import pytest

from pipeinfer.errors import UsageError
from pipeinfer_lab.commands.compare import task_prompts
from pipeinfer_lab.quality import judge, scores, task_sets
from pipeinfer_lab.quality.prompt_sets import file_prompts


def test_conversations_are_prompts_too(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", '
                    '"content": "Which?"}, {"role": "assistant", "content": "This."}]}\n'
                    '{"prompt": "Who?"}\n')
    first, second = file_prompts(path)
    assert first.messages == [{"role": "system", "content": "Be brief."},
                              {"role": "user", "content": "Which?"}]
    assert (first.reference, second.question, second.reference) == ("This.", "Who?", "")


def test_rouge_by_hand():
    """Lin (2004), section 3.1: "police killed the gunman" against three candidates."""
    reference = "police killed the gunman"
    assert scores.rouge_l("police kill the gunman", reference) == pytest.approx(0.75)
    assert scores.rouge_l("the gunman kill police", reference) == pytest.approx(0.5)
    assert scores.rouge_n(2, "The gunman police killed.", reference) == pytest.approx(2 / 3)
    assert scores.rouge_n(1, "the the the", "the cat") == pytest.approx(2 / 5)  # clipped
    assert scores.rouge_l("", reference) == 0.0 == scores.rouge_n(2, "police", reference)


def test_an_answer_counts_where_it_is_contained(tmp_path):
    """A whole word, whatever its case; only the whole text is exact."""
    found = read(tmp_path, {"question": "Who?", "answer": "Lily Wilson"},
                 {"question": "Which?", "answer": ["a", "b c"]})
    assert found[0].score("So it is she.\nName: lily  wilson!") == 1.0
    assert found[0].score("Lily Wilsons") == 0.0
    assert not found[0].exact("Name: Lily Wilson")
    assert found[0].exact(" Lily Wilson\n")
    assert found[1].score("a, c b") == 0.5


def test_an_answer_without_letters_and_digits_is_compared_as_it_is(tmp_path):
    found, = read(tmp_path, {"question": "Which sign?", "answer": "+"})
    assert (found.score("It is +."), found.score(""), found.score("It is -.")) == (1.0, 0.0, 0.0)


def test_files_of_other_benchmarks(tmp_path):
    found = read(
        tmp_path, {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."],
                   "reference": ["Well.", ""]},
        {"instruction": "Name it.", "input": "A thing.", "output": "It is a cat.",
         "dataset": "helpful_base"},
        {"question": "What is 2+2?", "pattern": r"\b4\b"})
    assert [p.question for p in found] == [
        "Write.", "Again.", "Name it.\n\nA thing.", "What is 2+2?"]
    assert [p.kind for p in found] == ["writing", "writing, turn 2", "helpful_base", ""]
    assert [p.reference for p in found] == ["Well.", "", "It is a cat.", ""]
    assert found[2].rouge("It is a dog.") == pytest.approx(
        {"rouge1": 0.75, "rouge2": 2 / 3, "rougeL": 0.75})
    assert (found[3].score("It is 4."), found[3].score("It is 14.")) == (1.0, 0.0)
    path = tmp_path / "list.json"
    path.write_text(json.dumps([{"instruction": "One."}, {"instruction": "Two."}]))
    assert [p.question for p in file_prompts(path)] == ["One.", "Two."]
    path.write_text("plain question\n\nanother\n")
    assert [(p.question, p.score, p.rouge("x")) for p in file_prompts(path)] == [
        ("plain question", None, {}), ("another", None, {})]


@pytest.mark.parametrize("text", [
    "", '{"answer": 1}', "{", "[1]", '{"question": "q", "pattern": "("}', '{"turns": []}'])
def test_bad_sets_are_refused(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError):
        file_prompts(path)


def read(folder, *entries):
    path = folder / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    return file_prompts(path)


def test_generated_questions_have_one_answer():
    asked = list(task_prompts(40, "mixed", 3))
    assert [p.kind for p in asked[:4]] == list(task_sets.KINDS)
    assert len({p.question for p in asked}) == 40
    for prompt in asked:
        if prompt.score is not None:
            assert prompt.score(f"Let us see.\n{prompt.reference}") == 1.0
            assert prompt.score("Let us see.") == 0.0
    student, document = asked[:2]
    assert document.score(document.question.split("Question")[0]) == 0.0  # copied, not answered
    low, high = student.question.split("between ")[1].split("?")[0].split(" and ")
    fits = [line for line in student.question.split("\n") if "GPA of" in line and
            float(low) <= float(line.split("GPA of ")[1][:4]) <= float(high)]
    assert len(fits) == 1
    assert student.reference.removeprefix("name: ") in fits[0]
    assert len(list(task_prompts(None, "planning", 1))) < 20 == len(
        list(task_prompts(None, "students", 1)))
    for kind, count in (("magic", 1), ("planning", 1000)):
        with pytest.raises(UsageError, match=f"--kind {kind}"):
            list(task_prompts(count, kind, 1))


def test_a_win_rate_at_equal_length():
    """Wins that length explains are not the method's; those that it does not explain are."""
    longer = [300, -300, 250, -250, 200, -200]
    assert judge.controlled([1, 0, 1, 0, 1, 0], longer) == pytest.approx(0.5, abs=0.01)
    assert judge.controlled([1, 1, 1, 1, 0, 1], longer) > 0.7
    assert judge.controlled([1, 1, 1], [900, 800, 850]) < 1.0
    assert judge.controlled([1.0], [5]) is None
