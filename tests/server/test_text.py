"""Tokens to text with stop strings, and calls of functions in a text, in every cut."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core.types import SamplingParams
from pipeinfer.models.text.text_stream import TextStream
from pipeinfer.server.answer_parser import AnswerParser, parse_call
from pipeinfer.server.call_grammar import CallGrammar
from pipeinfer.server.choice import Generation, Reading
from pipeinfer.server.errors import Failure
from pipeinfer.server.families import FAMILIES, HERMES
from pipeinfer.server.frames import Submit
from pipeinfer.server.tools import Call, ToolUse, Words, joined


def generation_of(tokenizer, stops=()):
    """A choice, and a reading of it."""
    made = Generation(1, 0, 3, lambda _: None, TextStream(tokenizer, stops) if stops else None)
    return made, Reading(made, TextStream(tokenizer, stops))


class Holder:
    """Holds a choice and follows it, as an answer does."""

    def __init__(self):
        self.reported = []
        self.choice = Generation(1, 0, 3, self.follow)
        self.choice.frame = Submit(1, (1, 2, 3), 4, SamplingParams())

    def follow(self, choice):
        self.reported.append(choice.reason)


@pytest.mark.parametrize("end", [
    lambda choice: choice.end("stop", {}), lambda choice: choice.fail(Failure("failed", "gone"))])
def test_a_choice_that_has_ended_leaves_its_prompt_without_the_collector(end):
    gc.disable()
    try:
        one = Holder()
        end(one.choice)
        end(one.choice)
        assert len(one.reported) == 1
        left = weakref.ref(one)
        del one
        assert left() is None
    finally:
        gc.enable()


def cut(text, places):
    ends = [*sorted({p % (len(text) + 1) for p in places}), len(text)]
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def spelled(tokenizer, text, cuts):
    """Tokens of a text that is cut somewhere first, so that one text has many spellings."""
    return [token for part in cut(text, cuts) for token in tokenizer.encode(part, add_bos=False)]


@given(text=st.text("ab é漢\n", max_size=30),
       stops=st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3),
       cuts=st.lists(st.integers(0, 30), max_size=8), looks=st.lists(st.booleans(), max_size=40))
def test_text_and_pieces_do_not_depend_on_spelling_or_on_who_looks_when(
        tokenizer, text, stops, cuts, looks):
    generation, reading = generation_of(tokenizer, stops)
    seen, pieces, stopped = "", [], False
    look = iter(looks)
    for token in spelled(tokenizer, text, cuts):
        stopped = generation.push((token, False, None, (), None)) or stopped
        if next(look, False):
            reading.advance()
            delta = reading.take()
            assert delta.offset == len(seen)
            seen, pieces = seen + delta.text, pieces + delta.pieces
    generation.end("length", {})
    reading.advance()
    delta = reading.take()
    seen, pieces = seen + delta.text, pieces + delta.pieces
    at = [i for i in (text.find(s) for s in stops) if i >= 0]
    assert stopped == bool(at)
    assert generation.reason == ("stop" if at else "length")
    # Which stop string is met first depends on the spelling when they overlap, its place does not
    # for one alone.
    if len(stops) < 2:
        assert seen == (text[: at[0]] if at else text)
    assert text.startswith(seen)
    assert not any(s in seen for s in stops)
    assert "".join(p.text for p in pieces) == seen


def test_a_failure_is_the_end_and_stays_it(tokenizer):
    generation, reading = generation_of(tokenizer)
    generation.fail(Failure("failed", "oh"))
    generation.end("stop", {})
    assert generation.reason == "error"
    assert generation.failure == Failure("failed", "oh")
    assert not generation.push((5, False, None, (), None))
    reading.advance()
    assert reading.take().text == ""


@pytest.mark.parametrize("reason", ["length", "stop", "context", "disconnected"])
def test_a_character_that_the_end_cuts_off_is_left_out(tokenizer, reason):
    generation, reading = generation_of(tokenizer, ("never",))
    for token in [*tokenizer.encode("né", add_bos=False), byte_token(tokenizer, b"\xc3")]:
        generation.push((token, False, None, (), None))
    generation.end(reason, {})
    reading.advance()
    delta = reading.take()
    assert delta.text in ("né", "")  # what may begin a stop string is shown at a proper end only
    assert "".join(piece.text for piece in delta.pieces) == "né"
    assert delta.pieces[-1].text == ""


def test_bytes_that_begin_no_character_are_told(tokenizer):
    generation, reading = generation_of(tokenizer)
    generation.push((byte_token(tokenizer, b"\xc3"), False, None, (), None))
    generation.push((byte_token(tokenizer, b"a"), False, None, (), None))
    reading.advance()
    assert reading.take().text == "\ufffda"


def byte_token(tokenizer, byte):
    return next(t for t in range(tokenizer.n_vocab) if tokenizer.piece(t) == byte)


# --- calls ------------------------------------------------------------------------------------


def parser(family):
    return AnswerParser(next(f for f in FAMILIES if f.name == family), ToolUse([], 99))


def parse(parser, parts):
    """The words of an answer, and its calls with all of their arguments."""
    found = [part for text in parts for part in parser.push(text)]
    found = joined(found + parser.push("", ended=True))
    return ("".join(part.text for part in found if isinstance(part, Words)),
            [part for part in found if isinstance(part, Call)])


def test_arguments_are_not_held_back_and_an_end_within_them_is_no_content():
    reader = parser("hermes")
    (call,) = reader.push('<tool_call>{"name": "f", "arguments": {')[:1]
    assert (call.name, call.arguments) == ("f", "")
    assert [more.arguments for more in reader.push('"a": "lo')] == ['"a": "lo']
    assert [more.arguments for more in reader.push("ng")] == ["ng"]
    assert reader.push("", ended=True) == []
    assert reader.calls == 1


@pytest.mark.parametrize("family", ["hermes", "llama"])
@pytest.mark.parametrize("text", [
    "plain text", "a < b, <tool", "{not json}", '{"name": 1}', "<tool_call>oh</tool_call>",
    "<tool_call>{", "", "  ", '{"name": "f"}', "<|python",
])
def test_what_is_no_call_is_content(family, text):
    for places in ([], [1], [3, 5]):
        assert parse(parser(family), cut(text, places)) == (text, [])


def test_content_is_not_held_back_longer_than_needed():
    reader = parser("hermes")
    assert reader.push("hello <to") == [Words("hello ")]
    assert reader.push("day") == [Words("<today")]
    reader = parser("llama")
    assert reader.push("hello") == [Words("hello")]
    assert reader.push(' {"name"') == [Words(' {"name"')]


def test_arguments_may_be_text_and_depth_is_no_trap():
    assert parse_call('{"name": "f", "arguments": "{}"}').arguments == "{}"
    assert parse_call("[" * 100_000) is None
    assert parse_call('{"name": "f", "arguments": [1]}') is None


def test_a_forced_call_begins_with_the_mark_where_that_is_a_token():
    from pipeinfer.models.text.constraint import Constraint
    from pipeinfer.models.text.grammar import compile_grammar
    from pipeinfer.models.text.vocabulary import Vocabulary

    tokens = [*(bytes([i]) for i in range(256)), b"\xff<tool_call>", b"\xff</tool_call>",
              b"\xff<|end|>"]
    mark, close, end = 256, 257, 258
    vocabulary = Vocabulary(tokens, [end])
    compiled = compile_grammar("lark", CallGrammar(
        HERMES, {"<tool_call>": 256, "</tool_call>": 257}).of([{"name": "f"}]), vocabulary)
    constraint = Constraint(vocabulary, compiled)

    def allowed(path):
        return set(constraint.allowed(path).nonzero()[0].tolist())

    text = list(b'\n{"name": "f", "arguments": {}}\n')
    assert allowed([]) == {mark}
    assert allowed([mark]) == {ord("\n")}
    assert close in allowed([mark, *text])
    assert allowed([mark, *text, close]) == {end}
