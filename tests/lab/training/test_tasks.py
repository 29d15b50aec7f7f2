"""Generated tasks and their formats: one right answer, one token per tag, masks that isolate."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from pipeinfer.lab.training.tasks import tasks

pytest.importorskip("tokenizers")

from pipeinfer.lab.training.pair.tokenizer import END_OF_TEXT_ID, IM_END_ID
from pipeinfer.lab.training.pasta import pasta
from pipeinfer.lab.training.pasta.pasta import IGNORE
from pipeinfer.lab.training.tasks import formats, markup, pasta_plans, words
from pipeinfer.lab.training.tasks.markup import Codec


@pytest.fixture(scope="module")
def codec() -> Codec:
    source = tasks.stream(7)
    texts = [f"{task.question}\n\n{task.answer}" for task in islice(source, 1500)]
    texts += [
        " ".join(task.items[0].title for task in islice(source, 500)),
        *markup.SYSTEM.values(),
    ]
    texts += [f"{name}\nAnswers\n\n" for name in ("system", "user", "assistant")] * 3
    texts += [f"{pool}\n {pool}" for pool in (*words.NAMES, *words.GOODS, *words.ASPECTS)] * 3
    return Codec(markup.train_tokenizer(texts, 4096))


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


def test_retrieval_sentences_are_long_enough_for_blocks_to_pay(codec: Codec) -> None:
    for task in islice(tasks.stream(4, kind="retrieval"), 30):
        assert 4 <= len(task.items) <= 8
        assert 10 <= len(task.question.splitlines()) - 2 <= 16
        assert all(18 <= len(codec.encode(item.sentence)) <= 26 for item in task.items)


def test_steps_of_one_line_are_sentences_of_their_own() -> None:
    """PDOS's prompt decoded in sequence puts no line break between steps."""
    assert tasks.found_lines("Answers\n\n####Ada: studies law.####Bob: studies art.\nEnd.") == [
        "Ada studies law.", "Bob studies art.", "End."]


def test_every_tag_is_one_token_in_context(codec: Codec) -> None:
    text = (
        'Answers\n\n####Alice:......\n\n####%%%%<promise topic="Bob" tokens=12/><async>Bob</async>'
        "<sync/>\n1. Carol[Fork]\n[Child] studies"
    )
    ids = codec.encode(text)
    for tag in (*markup.TAGS, ":"):
        assert codec.tags[tag] in ids, tag
    assert codec.tags["\n\n"] in ids
    assert codec.decode(ids) == text
    assert ids.count(codec.one("1")) == 2


def test_numbers_are_one_token_per_digit(codec: Codec) -> None:
    assert [codec.decode([i]) for i in codec.encode("12: 3.45")] == list("12: 3.45")


@pytest.mark.parametrize("kind", list(tasks.KINDS))
def test_without_tags_an_annotated_answer_is_the_answer(codec: Codec, kind: str) -> None:
    rng = np.random.default_rng(0)
    for task in islice(tasks.stream(1, kind=kind), 40):
        text = pasta_plans.annotate(codec, task, rng)
        for tag in (markup.ASYNC, markup.ASYNC_END, markup.SYNC):
            text = text.replace(tag, "")
        while markup.PROMISE in text:
            head, rest = text.split(markup.PROMISE, 1)
            text = head + rest.split(markup.CLOSE, 1)[1]
        assert text == task.answer


def test_every_independent_item_may_have_a_promise_of_its_own(codec: Codec) -> None:
    rng = np.random.default_rng(0)
    for task in islice(tasks.stream(1), 40):
        text = pasta_plans.annotate(codec, task, rng, one_each=True)
        if not task.dependent:
            assert text.count(markup.PROMISE) == len(task.items)


def test_promises_say_the_block_length_in_tens(codec: Codec) -> None:
    rng = np.random.default_rng(1)
    for task in islice(tasks.stream(6), 40):
        ids = codec.encode(pasta_plans.annotate(codec, task, rng))
        flat = pasta.parse([0, *ids], 1, codec.tags, codec.digits)
        for block in flat.blocks:
            length = block.end - block.start + 1
            assert abs(block.room - length) <= 5 or block.room == 10


def paths(example: formats.Example) -> list[list[int]]:
    """What each target's token sees, in order of position: the thread it continues."""
    rows = np.flatnonzero(example.targets != IGNORE)
    return [np.flatnonzero(example.visible[row]).tolist() for row in rows]


@pytest.mark.parametrize("name", ["plain", "pdos", "apar", "sot"])
def test_a_thread_sees_a_gapless_text_and_nothing_after_it(codec: Codec, name: str) -> None:
    """In these formats positions are contiguous: what a token sees is a text from position 0."""
    rng = np.random.default_rng(2)
    for kind in tasks.KINDS:
        task = next(tasks.stream(9, kind=kind))
        example = formats.make(codec, task, rng, name)
        for seen in paths(example):
            positions = example.positions[seen]
            assert sorted(positions) == list(range(len(seen)))
            assert int(positions.max()) == int(example.positions[seen[-1]])


def test_pdos_branches_see_the_prompt_and_themselves(codec: Codec) -> None:
    task = next(tasks.stream(11, kind="retrieval"))
    example = formats.make(codec, task, np.random.default_rng(0), "pdos")
    step = codec.tags[markup.STEP]
    ends = np.flatnonzero((example.targets == step) & (example.tokens == codec.one(".")))
    assert len(ends) == len(task.items)
    for end, item in zip(ends, task.items, strict=True):
        text = codec.decode(example.tokens[example.visible[end]])
        prompt, branch = text.split(f"{words.PREAMBLE}\n\n")
        assert branch == f"####{item.title}:{item.body}"
        assert task.question in prompt
    assert codec.tags[markup.ELLIPSIS] not in example.targets


def test_apar_children_see_earlier_nodes_but_no_details(codec: Codec) -> None:
    task = next(tasks.stream(12, kind="plans"))
    example = formats.make(codec, task, np.random.default_rng(0), "apar")
    ends = np.flatnonzero(example.targets == IM_END_ID)
    texts = [codec.decode(example.tokens[example.visible[end]]) for end in ends]
    parent, *children = [text.split("assistant\n")[-1] for text in texts]
    nodes = [f"{n}. {item.title}[Fork]" for n, item in enumerate(task.items, 1)]
    assert parent == "\n".join(nodes)
    for n, (child, item) in enumerate(zip(children, task.items, strict=True), 1):
        assert child == "\n".join(nodes[:n]) + f"[Child]{item.body}"


def test_sot_points_are_tokenised_as_their_request_is(codec: Codec) -> None:
    task = next(tasks.stream(13, kind="checks"))
    outline = "\n".join(f"{n}. {item.title}" for n, item in enumerate(task.items, 1))
    for seed in range(20):
        example = formats.make(codec, task, np.random.default_rng(seed), "sot")
        ends = np.flatnonzero(example.targets == IM_END_ID)
        if len(ends) == 1:
            continue
        for n, (end, item) in enumerate(zip(ends, task.items, strict=True), 1):
            question = markup.SOT_POINT.format(
                question=task.question, outline=outline, index=n, point=item.title
            )
            prompt = markup.prompt_text("sot", question)
            wanted = [END_OF_TEXT_ID, *codec.encode(prompt + item.sentence)]
            assert example.tokens[example.visible[end]].tolist() == wanted
        return
    raise AssertionError("no point example in twenty")
