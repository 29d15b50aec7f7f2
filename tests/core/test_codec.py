"""Messages survive their bytes, and damaged bytes are refused."""

from __future__ import annotations

import math
import struct
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core import control
from pipeinfer.core.codec import HEADER_BYTES, VERSION, check_decode, decode, encode
from pipeinfer.core.drafting import FeedDraft, StartDraft
from pipeinfer.core.messages import (
    KEY_BYTES,
    CacheOps,
    Cancel,
    Decode,
    LaneClose,
    LaneOpen,
    Part,
    Piece,
    RunCancelled,
    RunFinished,
    ShardChunk,
    ShardEnd,
    ShardHave,
    Shutdown,
    Verdict,
    WorkerFailed,
)
from pipeinfer.core.types import (
    Choice,
    Media,
    Rows,
    SamplingParams,
    SeqCopy,
    SeqJoin,
    SeqKeep,
    SeqRemove,
    make_rows,
)
from pipeinfer.errors import ProtocolError

i32 = st.integers(-(2**31), 2**31 - 1)
run_ids = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(-1e9, 1e9)
seconds = st.floats(0, 1e6)
spans = st.lists(st.tuples(st.floats(0, 1e10), seconds, seconds), max_size=5).map(tuple)
ops = st.lists(st.one_of(
    st.builds(SeqRemove, i32, i32, i32), st.builds(SeqCopy, i32, i32, i32, i32),
    st.builds(SeqKeep, i32), st.builds(SeqJoin, i32, i32),
), max_size=6).map(tuple)
row = st.tuples(i32, i32, st.lists(i32, min_size=1, max_size=4).map(tuple), st.booleans())
choice = st.builds(Choice, i32, st.none() | floats, st.lists(st.tuples(i32, floats),
                                                             max_size=4).map(tuple))
params = st.builds(
    SamplingParams, floats, i32, floats, floats, floats, floats, floats, i32,
    st.lists(st.tuples(i32, floats), max_size=4).map(tuple), st.integers(0, 2**64 - 1), i32,
    st.text(max_size=30), st.integers(0, 2**31 - 1),
    st.lists(st.tuples(i32, i32, i32), max_size=3).map(tuple),
)
jobs = st.builds(StartDraft, params=params, accepted=st.lists(i32, max_size=9))


pieces = st.lists(st.builds(
    Piece, st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), i32, i32, i32, st.booleans()),
    max_size=4).map(tuple)


@st.composite
def decodes(draw):
    rows = make_rows(draw(st.lists(row, max_size=9)))
    n = len(rows)
    if draw(st.booleans()):
        views = draw(st.lists(row, min_size=n, max_size=n).map(lambda rs: tuple(r[2] for r in rs)))
        rows = Rows(rows.tokens, rows.positions, rows.seq_ids, rows.outputs, views)
    if n and draw(st.booleans()):
        offset, n_pos = draw(st.integers(0, 1000)), draw(st.integers(1, 1000))
        places = np.arange(3 * n, dtype=np.int32).reshape(3, n) % n if draw(st.booleans()) else None
        rows.media = Media(n_pos, draw(st.booleans()), places, offset=offset,
                           total=offset + n + draw(st.integers(0, 9)))
    hidden = None
    if draw(st.booleans()):
        d = draw(st.integers(1, 8))
        hidden = np.arange(n * d, dtype=np.float32).reshape(n, d)
    lanes = tuple(draw(st.lists(i32, min_size=n, max_size=n)))
    loads = draw(pieces)
    return Decode(draw(run_ids), draw(run_ids), rows, lanes, draw(ops), draw(st.booleans()),
                  draw(st.booleans()), hidden, draw(spans), saves=draw(pieces), loads=loads,
                  loaded=draw(st.integers(0, len(loads))))


@st.composite
def parts(draw):
    kind = draw(st.sampled_from(("<f4", "<u2")))
    bits = draw(st.binary(max_size=40))
    size = np.dtype(kind).itemsize
    data = np.frombuffer(bits[:len(bits) // size * size], kind)
    return Part(draw(st.integers(0, 1000)), draw(run_ids), draw(run_ids),
                draw(st.integers(0, 2**24)), draw(st.sampled_from(Verdict)), data)


json_values = st.recursive(st.none() | st.booleans() | i32 | st.text(),
                           lambda inner: st.lists(inner, max_size=3), max_leaves=5)


def mappings(kind):
    values = json_values if get_args(kind)[1] is Any else st.from_type(get_args(kind)[1])
    return st.dictionaries(st.text(), values, max_size=3)


st.register_type_strategy(dict, mappings)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(-2**63, 2**63 - 1))


@st.composite
def fed(draw):
    shape = draw(st.tuples(st.integers(0, 3), st.integers(0, 5)))
    kind = draw(st.sampled_from((np.float32, np.float16)))
    return FeedDraft(draw(run_ids), draw(st.integers(0, 2**40)),
                     np.arange(math.prod(shape), dtype=kind).reshape(shape))


messages = st.one_of(
    decodes(), parts(), st.builds(CacheOps, ops, pieces), st.builds(LaneOpen, run_ids, params),
    st.builds(LaneClose, run_ids), st.builds(Shutdown),
    st.builds(RunFinished, run_ids, st.lists(choice, max_size=5).map(tuple), spans,
              loaded=st.integers(0, 2**24)),
    st.builds(RunCancelled, run_ids, spans),
    st.builds(Cancel, st.lists(run_ids, max_size=9).map(tuple)),
    st.builds(WorkerFailed, i32, st.text(), run_ids, st.text(), st.text(), i32),
    jobs, *map(st.from_type, get_args(control.PortMessage)),
    st.builds(ShardHave, i32, run_ids, st.binary(max_size=70)),
    st.builds(ShardChunk, run_ids, st.binary(max_size=300)),
    st.builds(ShardEnd, st.binary(max_size=70)), fed(),
)


@given(messages)
def test_round_trip(message):
    assert decode(encode(message)) == message


@given(messages, st.data())
def test_damaged_frames_are_refused_or_understood(message, data):
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for candidate in (frame, frame[:cut]):
        try:
            decode(candidate)
        except ProtocolError:
            pass


def test_arrays_are_views_into_the_frame():
    hidden = np.ones((2, 4), np.float32)
    rows = make_rows([(1, 2, (0,), True), (3, 3, (0, 5), False)])
    frame = encode(Decode(1, 0, rows, (0, 0), hidden=hidden))
    message = decode(frame)
    assert isinstance(message, Decode)
    assert message.hidden is not None
    assert not message.hidden.flags.owndata
    assert not message.rows.tokens.flags.owndata
    assert len(frame) < HEADER_BYTES + 2 * 4 * 4 + 100


def test_other_versions_and_strangers_are_named():
    frame = bytearray(encode(Shutdown()))
    frame[4] = VERSION + 1
    with pytest.raises(ProtocolError, match=f"version {VERSION + 1}"):
        decode(frame)
    with pytest.raises(ProtocolError, match="header"):
        decode(bytes(HEADER_BYTES))
    with pytest.raises(ProtocolError, match="shorter"):
        decode(b"PIPE")
    with pytest.raises(ProtocolError):
        encode("hello")


SPANS = ((1.7e9, 0.25, 0.125), (1.7e9 + 1, 0.0, 0.0), (1.7e9 + 2, 0.5, 0.0))
ROWS = make_rows([(1, 2, (0,), True)])


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e12])
@pytest.mark.parametrize("message", [
    RunFinished(3, (), spans=SPANS), RunCancelled(3, spans=SPANS),
    Decode(3, 0, ROWS, (0,), spans=SPANS),
], ids=lambda m: type(m).__name__)
def test_times_that_cannot_be_are_refused(message, value):
    frame = bytearray(encode(message))
    assert decode(frame) == message
    assert decode(frame).spans == SPANS
    struct.pack_into("<d", frame, HEADER_BYTES + 8 * 4, value)
    with pytest.raises(ProtocolError, match="run 3 claims"):
        decode(frame)


def test_what_stages_took():
    assert (RunFinished(3, (), spans=SPANS).slowest, RunFinished(3, (), spans=SPANS).computed) == (
        0.5, 0.75)
    assert (RunFinished(3, ()).slowest, RunFinished(3, ()).computed) == (0.0, 0.0)


@pytest.mark.parametrize("count", [4, 2, 2**32 - 1])
def test_a_wrong_count_of_spans_is_refused(count):
    frame = bytearray(encode(RunCancelled(3, spans=SPANS)))
    struct.pack_into("<I", frame, HEADER_BYTES - 4, count)
    with pytest.raises(ProtocolError):
        decode(frame)


def test_spans_have_three_columns():
    with pytest.raises(ProtocolError, match="not three of each stage"):
        encode(RunCancelled(3, spans=((1.0, 2.0, 0.0), (3.0, 4.0))))


def control_frame(body):
    """A frame with this JSON body."""
    header = bytearray(encode(LaneClose(1))[:HEADER_BYTES])
    struct.pack_into("<I", header, HEADER_BYTES - 8, len(body))
    return bytes(header) + body


@pytest.mark.parametrize(("good", "bad"), [
    (b'"grammar_start":7', b'"grammar_start":-1'), (b'"grammar_start":7', b'"grammar_start":"7"'),
    (b'"grammar":"a', b'"grammar":"\xff'), (b'"grammar":', b'"gram":'),
    (b'"lane":1', b'"lane":1e999'),
])
def test_a_damaged_lane_is_refused(good, bad):
    lane = LaneOpen(1, SamplingParams(grammar="a: /ä/", grammar_start=7))
    body = encode(lane)[HEADER_BYTES:]
    assert decode(control_frame(body)) == lane
    assert body.count(good) == 1
    with pytest.raises(ProtocolError, match="control message is damaged"):
        decode(control_frame(body.replace(good, bad)))


def test_activations_must_match_the_rows():
    rows = make_rows([(1, 2, (0,), True)])
    with pytest.raises(ProtocolError, match="activations"):
        encode(Decode(1, 0, rows, (0,), hidden=np.ones((2, 4), np.float32)))


def test_views_cost_nothing_when_absent_and_are_checked():
    rows = make_rows([(1, 2, (0,), True), (3, 3, (0, 5), False)])
    seen = Rows(rows.tokens, rows.positions, rows.seq_ids, rows.outputs, ((0, 7), (5,)))
    plain, wider = (encode(Decode(1, 0, r, (0, 0))) for r in (rows, seen))
    assert len(wider) == len(plain) + 4 * (3 + 3)
    assert decode(wider).rows == seen
    assert decode(plain).rows.views is None
    assert decode(plain).rows != seen
    for offsets in ((0, 2, 2), (0, 2, 4), (1, 2, 3), (0, 2, 1)):
        frame = bytearray(wider)
        frame[-24:-12] = np.array(offsets, "<i4").tobytes()
        with pytest.raises(ProtocolError):
            decode(frame)
    with pytest.raises(ValueError, match="differ in length"):
        Rows(rows.tokens, rows.positions, rows.seq_ids, rows.outputs, ((0,),))


@pytest.mark.parametrize(("numbers", "why"), [
    ((0, 1, 0, 2, 1), "0 positions"), ((1, 1, 1, 2, 1), "rows 1 to 3 of a picture of 2"),
    ((1, 1, -1, 2, 1), "rows -1"), ((2, 1, 0, 2, 1), "stand outside")])
def test_rows_of_a_picture_that_cannot_be_are_refused(numbers, why):
    places = np.array([[0, 1], [0, 3 if "stand" in why else 1], [0, 0]], np.int32)
    rows = make_rows([(-1, k, (0,), False) for k in range(2)], media=Media(2, True, places))
    frame = encode(Decode(1, 0, rows, (0, 0)))
    good = np.array([2, 1, 0, 2, 1], "<i4").tobytes()
    assert frame.count(good) == 1
    decode(frame) if "stand" not in why else None
    with pytest.raises(ProtocolError, match=why):
        decode(frame.replace(good, np.array(numbers, "<i4").tobytes()))


def test_rows_of_a_picture_have_no_tokens_and_are_bounded_as_others():
    rows = make_rows([(-1, 2, (0,), True)], media=Media(1))
    check_decode(Decode(9, 0, rows, (1,)), **SIZES)
    with pytest.raises(ProtocolError, match="outside 16 positions"):
        check_decode(Decode(9, 0, make_rows([(-1, 16, (0,), True)], media=Media(1)), (1,)), **SIZES)


# --- what a stage does not have -------------------------------------------------------------------


def run_of(token=1, position=2, ids=(0,), lane=1, ops=(), hidden=None, views=None):
    rows = make_rows([(token, position, ids, True)])
    rows = Rows(rows.tokens, rows.positions, rows.seq_ids, rows.outputs, views)
    return Decode(9, 0, rows, (lane,), ops, hidden=hidden)


SIZES = {"n_seq": 4, "n_positions": 16, "n_tokens": 100, "lanes": {1}}


@pytest.mark.parametrize("good", [
    {}, {"token": 99}, {"position": 15}, {"ids": (0, 3)}, {"views": ((3,),)},
    {"ops": (SeqRemove(-1, 0), SeqCopy(0, 3, 0, 9), SeqKeep(3), SeqJoin(0, 3, 7))},
])
def test_a_run_within_the_sizes_passes(good):
    check_decode(run_of(**good), **SIZES)
    check_decode(decode(encode(run_of(**good))), **SIZES)


@pytest.mark.parametrize("bad", [
    {"token": 100}, {"token": -1}, {"position": 16}, {"position": -1}, {"ids": (0, 4)},
    {"ids": (-1,)}, {"views": ((4,),)}, {"lane": 2}, {"ops": (SeqRemove(-2, 0),)},
    {"ops": (SeqRemove(4, 0),)}, {"ops": (SeqRemove(0, -1),)}, {"ops": (SeqCopy(0, 4, 0, 1),)},
    {"ops": (SeqCopy(-1, 0, 0, 1),)}, {"ops": (SeqKeep(-1),)}, {"ops": (SeqJoin(0, 4),)},
    {"ops": (SeqJoin(0, 1, 0),)},
])
def test_a_run_outside_of_the_sizes_is_refused(bad):
    with pytest.raises(ProtocolError, match=r"outside|not open"):
        check_decode(run_of(**bad), **SIZES)


def test_activations_have_the_models_width():
    for width in (None, 8):
        check_decode(run_of(hidden=np.ones((1, 8), np.float32)), **SIZES, width=width)
    for hidden in (None, np.ones((1, 7), np.float32)):
        with pytest.raises(ProtocolError, match="activations of 8"):
            check_decode(run_of(hidden=hidden), **SIZES, width=8)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repeat_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sampling_parameters_are_numbers(field, value):
    for params in (SamplingParams(**{field: value}), SamplingParams(logit_bias=((1, value),))):
        with pytest.raises(ProtocolError, match="Expected `float`, got `null`"):
            decode(encode(LaneOpen(1, params)))


@pytest.mark.parametrize(("good", "bad"), [
    (b'"host":"h"', b'"host":1'), (b'"host":"h",', b""), (b'"exit_code":6', b'"exit_code":1e999'),
    (b'"exit_code":6', b'"exit_code":2147483648'), (b'"summary":', b"[" * 100_000),
])
def test_a_failure_report_has_texts_and_a_code(good, bad):
    body = encode(WorkerFailed(1, "h", 2, "s", "t"))[HEADER_BYTES:]
    assert body.count(good) == 1
    with pytest.raises(ProtocolError, match="control message is damaged"):
        decode(control_frame(body.replace(good, bad)))


# --- control messages -------------------------------------------------------------------------


@given(st.one_of(*map(st.from_type, get_args(control.Control))))
def test_control_messages_survive_their_bytes(message):
    assert control.unpack(control.pack(message)) == message


@pytest.mark.parametrize("text", [
    "", "{", "[]", '{"type": "Nothing"}', '{"type": "NewEpoch"}',
    '{"type": "NewEpoch", "rank_of": [0, "1"], "epoch": 1, "lost": []}',
    '{"type": "NewEpoch", "rank_of": [0, 1], "epoch": 1.5, "lost": []}',
    '{"type": "NewEpoch", "rank_of": [0, 1], "epoch": 1, "lost": [], "more": 1}',
    '{"type": "Progress", "port": {"stage": 1, "member": "x"}, "phase": "", "done": 1, "total": 1}',
    "[" * 100_000,
])
def test_damaged_control_messages_are_refused(text):
    for read in (control.unpack, lambda data: decode(control_frame(data))):
        with pytest.raises(ProtocolError, match="control message is damaged"):
            read(text.encode())


def test_only_messages_to_ports_travel_as_frames():
    with pytest.raises(ProtocolError, match="Invalid value 'Leave'"):
        decode(control_frame(control.pack(control.Leave())))
    with pytest.raises(ProtocolError, match="cannot encode Leave"):
        encode(control.Leave())
