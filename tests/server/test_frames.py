"""Frames between rank 0 and the HTTP process: what was said arrives, damage is refused by name."""

from __future__ import annotations

import dataclasses
import types
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, structs
from msgspec.msgpack import encode as pack

from pipeinfer.errors import ProtocolError
from pipeinfer.server import frames
from pipeinfer.server.frames import (
    FIRST,
    FROM_CLIENT,
    FROM_ENGINE,
    HEADER,
    MAX_FRAME,
    Abort,
    Failed,
    FrameReader,
    News,
    Submit,
    Token,
    decode,
    encode,
)
from pipeinfer.strategies.decomposers.base import Specification

INTEGERS = st.integers(-2**63, 2**64 - 1)
KINDS = {**FIRST, **FROM_ENGINE, **FROM_CLIENT}
values = st.recursive(st.none() | st.booleans() | INTEGERS | st.text(),
                      lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)


def anything(hint):
    """A strategy for values of a type."""
    inner = typing.get_args(hint)
    match typing.get_origin(hint) or hint:
        case typing.Union | types.UnionType:
            return st.one_of(map(anything, inner))
        case types.NoneType:
            return st.none()
        case typing.Literal:
            return st.sampled_from(inner)
        case kind if kind is tuple and inner[1:] == (...,):
            return st.lists(anything(inner[0]), max_size=4).map(tuple)
        case kind if kind is tuple:
            return st.tuples(*map(anything, inner))
        case kind if kind is dict:
            own = values if inner[1] is typing.Any else anything(inner[1])
            return st.dictionaries(st.text(), own, max_size=3)
        case kind if kind is int:
            return INTEGERS
        case kind if kind is float:
            return st.floats(allow_nan=False)
        case kind if issubclass(kind, Struct) or dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            fields = dataclasses.fields if dataclasses.is_dataclass(kind) else structs.fields
            return st.builds(kind, **{f.name: anything(hints[f.name]) for f in fields(kind)})
        case kind:
            return st.from_type(kind)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@given(data=st.data())
def test_every_frame_comes_out_as_it_went_in(kind, data):
    frame = data.draw(anything(kind))
    got = decode(encode(frame)[HEADER.size :], KINDS)
    assert got == frame
    assert type(got) is kind


@given(sent=st.lists(st.one_of(*(anything(kind) for kind in FROM_ENGINE.values())), max_size=5),
       cuts=st.lists(st.integers(0, 400), max_size=12))
def test_frames_come_out_however_the_stream_is_cut(sent, cuts):
    data = b"".join(map(encode, sent))
    ends = [*sorted({c % (len(data) + 1) for c in cuts}), len(data)]
    reader, got, start = FrameReader(FROM_ENGINE), [], 0
    for end in ends:
        got += reader.feed(data[start:end])
        start = end
    assert got == sent


@pytest.mark.parametrize("data", [
    HEADER.pack(MAX_FRAME + 1), *(HEADER.pack(len(body)) + body for body in (
        b"{x}", pack([]), pack({}), b"\xff", b"\xc1", pack({"op": 1}), pack({"op": "bye"}),
        pack({"op": "no such"}), pack({"op": "watch", "on": True})[:-1], b"\x91" * 5000)),
])
def test_what_is_no_frame_is_refused(data):
    with pytest.raises(ProtocolError):
        FrameReader(FROM_CLIENT).feed(data)


RIGHT = {str: "x", bytes: b"x", int: 1, float: 0.5, bool: True, dict: {}, tuple: []}
WRONG = {str: (5, None), bytes: (5, []), int: ("x", 0.5, True), float: ("x", True),
         bool: (1, "x"), dict: ([], 5), tuple: (5, {"x": 1}), None: (5, [])}


def sample(hint):
    """A right value for a field, and wrong ones."""
    kind = next((a for a in typing.get_args(hint) if types.NoneType in typing.get_args(hint)), hint)
    kind = typing.get_origin(kind) or kind
    if issubclass(kind, Struct) or dataclasses.is_dataclass(kind):
        fields = {"method": "pasta"} if kind is Specification else {}
        return fields, WRONG[None]
    return RIGHT[kind], WRONG[kind]


FIELDS = [(kind, name, hint) for kind in KINDS.values()
          for name, hint in typing.get_type_hints(kind).items() if name != "op"]


@pytest.mark.parametrize(("kind", "name", "hint"), FIELDS,
                         ids=[f"{kind.op}.{name}" for kind, name, _ in FIELDS])
def test_a_damaged_field_is_named(kind, name, hint):
    whole = {"op": kind.op} | {n: sample(h)[0] for k, n, h in FIELDS if k is kind}
    decode(pack(whole), KINDS)
    for value in sample(hint)[1]:
        with pytest.raises(ProtocolError, match=rf"`\$\.{name}"):
            decode(pack(whole | {name: value}), KINDS)
    field = next(f for f in structs.fields(kind) if f.name == name)
    del whole[name]
    if field.required:
        with pytest.raises(ProtocolError, match=f"missing required field `{name}`"):
            decode(pack(whole), KINDS)


@pytest.mark.parametrize(("items", "where"), [
    (5, r"\$.items"), ([5], r"items\[0\]"), ([[]], r"items\[0\]"),
    ([["no such", 1]], r"items\[0\]"), ([[["t"]]], r"items\[0\]"),
    ([["end", 1]], r"items\[0\]"),
    ([["end", 1, "stop", {}], ["end", 1, "stop", 5]], r"items\[1\]\[3\]"),
    ([["t", 1, True, False, None, [], None]], r"items\[0\]\[2\]"),
    ([["t", 1, 2, 0, None, [], None]], r"items\[0\]\[3\]"),
    ([["t", 1, 2, False, "x", [], None]], r"items\[0\]\[4\]"),
    ([["t", 1, 2, False, None, [[1]], None]], r"items\[0\]\[5\]\[0\]"),
    ([["t", 1, 2, False, None, [[1.5, 1]], None]], r"items\[0\]\[5\]\[0\]\[0\]"),
    ([["t", 1, 2, False, None, [], 7]], r"items\[0\]\[6\]"),
    ([["error", 1, "request", None]], r"items\[0\]\[3\]"),
])
def test_damaged_news_are_named(items, where):
    with pytest.raises(ProtocolError, match=where):
        decode(pack({"op": "news", "items": items}), FROM_ENGINE)


@pytest.mark.parametrize(("change", "where"), [
    ({"more": 1}, "more"), ({"params": {"no_such": 1}}, r"no_such.*\$.params"),
    ({"params": {"top_k": 0.5}}, r"\$.params.top_k"), ({"prompt": [1, "2"]}, r"prompt\[1\]"),
    ({"params": {"logit_bias": [[1, 2.0, 3]]}}, r"logit_bias\[0\]"),
    ({"decompose": {"method": 1}}, r"\$.decompose.method"),
])
def test_damage_inside_a_field_is_named(change, where):
    whole = {"op": "submit", "id": 1, "prompt": [1], "max_tokens": 3, "params": {}}
    assert decode(pack(whole), FROM_CLIENT) == Submit(
        1, (1,), 3, frames.SamplingParams())
    with pytest.raises(ProtocolError, match=where):
        decode(pack(whole | change), FROM_CLIENT)


def test_a_batch_of_tokens_is_compact():
    news = News(tuple(Token(5, 31999, i % 2 == 0) for i in range(256)))
    assert len(encode(news)) / 256 < 36


def test_a_frame_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    with pytest.raises(ProtocolError):
        encode(Failed("y" * 200))


def test_a_frame_of_the_other_direction_is_refused():
    with pytest.raises(ProtocolError, match="abort"):
        decode(encode(Abort(1, "x"))[HEADER.size :], FROM_ENGINE)
