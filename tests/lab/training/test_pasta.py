"""PASTA's training: layouts by hand, the objective, annotation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pipeinfer.errors import UsageError
from pipeinfer_lab.training.adapt.chats import read_chats, read_jsonl
from pipeinfer_lab.training.pasta import annotate, bonbon, pasta
from pipeinfer_lab.training.pasta.endpoint import Endpoint, EndpointError
from pipeinfer_lab.training.tasks import tasks
from tests.kit.answering import answering, spoken
from tests.lab.training.conftest import do

torch = pytest.importorskip("torch")

from pipeinfer_lab.training.__main__ import main  # noqa: E402
from pipeinfer_lab.training.pasta import verdicts  # noqa: E402
from pipeinfer_lab.training.pasta.pasta import IGNORE, Block, Flat  # noqa: E402

U, P, A, X, E, Y, S, Z = range(8)
#: u P1 A1 x E1 P2 A2 y E2 S z: one-token promises of length 1, then a sync.
A6 = Flat((U, P, A, X, E, P, A, Y, E, S, Z), 1, (Block(1, 2, 4, 10), Block(5, 6, 8, 10)), (9,),
          control=7)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_example_positions() -> None:
    assert pasta.positions(A6).tolist() == [0, 1, 2, 3, 4, 12, 13, 14, 15, 23, 24]


@pytest.mark.parametrize("blocks", [
    [[2, 6, 3, 1]], [[4, 5, 5, 1]], [[5, 5, 7, 1]], [[2, 3, 6, 1], [4, 5, 8, 1]]])
def test_layouts_with_blocks_that_no_answer_has(blocks: list[list[int]]) -> None:
    """Positions of the first would be sought for ever."""
    record = {**pasta.record_of(A6), "blocks": blocks, "syncs": []}
    with pytest.raises(ValueError, match="one behind the other"):
        pasta.flat_of(record)
    assert pasta.flat_of(pasta.record_of(A6)) == A6


def test_example_visibility() -> None:
    seen = {
        0: [0],
        1: [0, 1],
        2: [0, 1, 2],
        3: [0, 1, 2, 3],
        4: [0, 1, 2, 3, 4],
        5: [0, 1, 5],
        6: [0, 1, 5, 6],
        7: [0, 1, 5, 6, 7],
        8: [0, 1, 5, 6, 7, 8],
        9: list(range(10)),
        10: list(range(11)),
    }
    visible = pasta.visible(A6)
    assert {row: np.flatnonzero(visible[row]).tolist() for row in seen} == seen


def test_example_targets() -> None:
    wanted = [P, P, X, E, IGNORE, S, Y, E, IGNORE, Z, IGNORE]
    assert pasta.targets(A6).tolist() == wanted


def test_example_steps_and_parallelism() -> None:
    assert pasta.steps(A6).tolist() == [0, 1, 0, 2, 3, 2, 0, 3, 4, 3, 5]
    assert pasta.chain(A6) == 5
    assert pasta.parallelism(A6) == pytest.approx(0.6)  # x, y and z in five steps
    assert 12 / pasta.chain(A6) == pytest.approx(2.4)


def test_parallelism_counts_no_tags() -> None:
    """Two promises of ten tokens with blocks of four, a sync: 20 steps of promises, then the second
    block's four and its end while the main thread waits at the sync: 25, and 26 with the word."""
    promise, block = [P] * 10, [A, X, X, X, X, E]
    flat = Flat((U, *promise, *block, *promise, *block, S, Z), 1,
                (Block(10, 11, 16, 10), Block(26, 27, 32, 10)), (33,), control=20 + 4 + 1)
    assert pasta.chain(flat) == 26
    assert pasta.parallelism(flat) == pytest.approx(9 / 26)
    assert pasta.flat_of(pasta.record_of(flat)) == flat


def test_text_decodes_in_one_step_per_token() -> None:
    assert pasta.chain(Flat((U, X, Y, Z), 1, (), ())) == 3


def test_promises_say_lengths_in_tens() -> None:
    assert [pasta.attribute_of(n) for n in (2, 14, 15, 24, 25, 26)] == [1, 1, 2, 2, 3, 3]


def test_bonbon_value_and_gradient() -> None:
    best = torch.tensor([-20.0], requires_grad=True)
    worst = torch.tensor([-30.0], requires_grad=True)
    value = bonbon.loss(best, worst, torch.tensor([9.0]), 10)
    assert bonbon.constant(10) == pytest.approx(25.4607, abs=1e-4)
    assert bonbon.constant(8) == pytest.approx(18.15, abs=1e-9)
    assert float(value.detach()) == pytest.approx(595.43, abs=0.01)
    value.backward()
    assert float(best.grad) < 0 < float(worst.grad)


def test_weight_decides_between_speed_and_quality() -> None:
    fast, right = bonbon.Scored((1,), 3.0, 0.5), bonbon.Scored((2,), 1.0, 1.0)
    assert bonbon.pair([fast, right], 1.0) == (fast, right)
    assert bonbon.pair([fast, right], 8.0) == (right, fast)
    assert bonbon.pair([fast, right], math.inf) == (right, fast)
    assert bonbon.pair([fast, fast], 1.0) is None

    # efficiency by the terms of section 6.3: one answer is short, the other parallel
    short, wide = (bonbon.Scored((1,), 4.0, 0.0, 1.0), bonbon.Scored((2,), 3.0, 0.0, 2.5))
    better = {term: bonbon.pair([short, wide], 0.0, term) for term in bonbon.TERMS}
    assert better == {"speedup": (short, wide), "harmonic": (wide, short),
                      "arithmetic": (wide, short), "parallelism": (wide, short)}
    assert [round(wide.score(2.0, term), 3) for term in bonbon.TERMS] == [3.0, 2.727, 2.75, 2.5]


def test_ratios_of_verdicts() -> None:
    assert bonbon.win_ratio([(True, 0.9), (True, 0.8)]) == 10
    assert bonbon.win_ratio([(True, 0.6), (False, 0.3)]) == pytest.approx(2)
    assert bonbon.win_ratio([]) == 1


ANSWER = "First of all, the sky is blue.\nSecond of all, the grass is green.\nThat is all now."
GOOD = (
    "<async topic='sky'>First of all, the sky is blue.</async>"
    "<async topic='grass'>\nSecond of all, the grass is green.</async><sync/>\nThat is all now."
)


def test_rules_mark_lines_and_wait_before_what_leans_on_them() -> None:
    pieces = annotate.parse(annotate.by_rules("", ANSWER), ANSWER)
    assert [piece.kind for piece in pieces] == ["block", "block", "sync", "text"]
    for task in islice(tasks.stream(2), 60):
        pieces = annotate.parse(annotate.by_rules("", task.answer), task.answer)
        assert task.dependent != any(piece.kind == "block" for piece in pieces)


@pytest.mark.parametrize(
    ("annotated", "problem"),
    [
        (GOOD.replace("blue", "red"), "not the response"),
        (GOOD.replace("</async>", "", 1), "inside"),
        ("<async topic='a b c d'>" + ANSWER + "</async>", "topic"),
        (ANSWER + "</async>", "closes nothing"),
        ("<async topic='x'>" + ANSWER, "not closed"),
        (f"<async topic='x'>First of all,</async>{ANSWER[13:]}", "fewer"),
    ],
)
def test_malformed_annotations(annotated: str, problem: str) -> None:
    with pytest.raises(annotate.Malformed, match=problem):
        annotate.parse(annotated, ANSWER)


class Chat:
    """Answers with the next of its texts; an integer is a status."""

    def __init__(self) -> None:
        self.answers: list[str | int | bytes] = []
        self.asked: list[dict] = []

    def __call__(self, body: dict, headers: object) -> tuple[int, object]:
        self.asked.append(body)
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            return spoken(answer)
        return (answer, b"") if isinstance(answer, int) else (200, answer)


@pytest.fixture
def chat() -> Iterator[Chat]:
    made = Chat()
    with answering(made) as url:
        made.endpoint = Endpoint(f"{url}/v1", "m", timeout=10, pause=0.0)
        yield made


def test_annotation_asks_again_after_malformed_answers(chat, tmp_path: Path) -> None:
    chat.answers = ["Sure! " + ANSWER, 503, GOOD, "no", "never", "not at all"]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "p", "response": ANSWER}, {"prompt": "q", "response": ANSWER}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    annotator = annotate.by_endpoint(chat.endpoint)
    counts = annotate.annotate_file(source, out, annotator, report=lambda line: None)
    assert counts == {"annotated": 1, "given up": 1, "already there": 0}
    first, second = read_jsonl(out)
    assert first["annotated"] == GOOD
    assert "not the response" in second["problem"]
    assert "not the response" in chat.asked[1]["messages"][-1]["content"]
    again = annotate.annotate_file(source, out, annotator, report=lambda line: None)
    assert again["already there"] == 2
    assert len(list(read_jsonl(out))) == 2


def test_conversations_are_annotated_as_what_they_are(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."},
             {"role": "user", "content": "Two uses?"}, {"role": "assistant", "content": ANSWER}]
    source.write_text(json.dumps({"messages": turns}) + "\n"
                      + json.dumps({"messages": turns[3:]}) + "\n")
    shown = []

    def annotator(prompt: str, response: str) -> str:
        shown.append(prompt)
        return GOOD

    with pytest.raises(UsageError, match="record 2: begins with an answer"):
        annotate.annotate_file(source, out, annotator, report=lambda line: None)
    assert shown == ["user: Hi.\n\nassistant: Hello.\n\nuser: Two uses?"]
    (chat,) = read_chats(out)
    assert (list(chat.messages), chat.answer, chat.annotated) == (turns[:3], ANSWER, GOOD)


def test_a_dead_endpoint_is_an_error(chat) -> None:
    chat.answers = [500, b"{}", b"no json", 400]
    with pytest.raises(EndpointError, match="JSONDecodeError"):
        chat.endpoint.ask([])
    with pytest.raises(EndpointError, match="400"):
        chat.endpoint.ask([])
    assert chat.answers == []


def test_a_judge_is_asked_in_both_orders(chat) -> None:
    chat.answers = ["A 0.9", "B, 0.5", "A 0.9", "A 0.9", "hm", "B"]
    assert verdicts.compare(chat.endpoint, "p", "mine", "other") == [(True, 0.9), (True, 0.5)]
    assert verdicts.compare(chat.endpoint, "p", "x", "y") == [(True, 0.9), (False, 0.9)]
    assert verdicts.compare(chat.endpoint, "p", "x", "y") == [(True, 1.0)]
    first, second = (asked["messages"][0]["content"] for asked in chat.asked[:2])
    assert first.index("mine") < first.index("other")
    assert second.index("other") < second.index("mine")


def test_generated_tasks_are_annotated_by_rules(tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    do("annotate", "--rules", "--tasks", 8, "--out", out)
    rows = list(read_jsonl(out))
    assert len(rows) == 8
    assert all(annotate.parse(row["annotated"], row["response"]) for row in rows)
    with pytest.raises(UsageError, match="either"):
        CliRunner().invoke(main, ["annotate", "--out", str(out)], catch_exceptions=False)
