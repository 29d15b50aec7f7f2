"""Generated tasks: endless, one right answer each, split by a hash."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from pipeinfer_lab.training.tasks import tasks


@pytest.mark.parametrize("kind", list(tasks.KINDS))
def test_the_right_answer_is_an_exact_match_and_a_wrong_one_is_not(kind: str) -> None:
    for task in islice(tasks.stream(3, kind=kind), 50):
        assert tasks.score(task, task.answer) == 1
        assert tasks.exact_match(task, task.answer + "<|im_end|>")
        shorter = "\n".join(task.lines[:-1])
        assert tasks.score(task, shorter) < 1
        wrong = task.answer.replace(task.items[0].title, "Nobody", 1)
        assert not tasks.exact_match(task, wrong)
        assert not tasks.exact_match(task, task.answer + "\nOne more.")


def test_streams_repeat_and_splits_are_disjoint() -> None:
    first = [task.question for task in islice(tasks.stream(5), 300)]
    assert first == [task.question for task in islice(tasks.stream(5), 300)]
    held = [task.question for task in islice(tasks.stream(5, held_out=True), 100)]
    assert not set(first) & set(held)
    assert all(tasks.is_held_out(task) for task in islice(tasks.stream(8, held_out=True), 20))


def test_totals_need_the_item_before() -> None:
    for task in islice(tasks.stream(2, kind="totals"), 20):
        assert task.dependent
        amounts = [int(line.split(" pays ")[1]) for line in task.question.splitlines()[1:-1]]
        for total, item in zip(np.cumsum(amounts), task.items, strict=True):
            assert f"holds {total} coins" in item.body


def test_retrieval_sentences_are_long_enough_for_blocks_to_pay() -> None:
    for task in islice(tasks.stream(4, kind="retrieval"), 30):
        assert 4 <= len(task.items) <= 8
        assert 10 <= len(task.question.splitlines()) - 2 <= 16
        assert all(15 <= len(item.sentence.split()) <= 18 for item in task.items)


def test_steps_of_one_line_are_sentences_of_their_own() -> None:
    """PDOS's prompt decoded in sequence puts no line break between steps."""
    assert tasks.found_lines("Answers\n\n####Ada: studies law.####Bob: studies art.\nEnd.") == [
        "Ada studies law.", "Bob studies art.", "End."]
