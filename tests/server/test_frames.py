"""Frames on a socket: any cut, a reader that stops, an end that goes away."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.errors import ClusterError, ProtocolError
from pipeinfer.server import frames as link
from pipeinfer.server.frames import HEADER, MAX_FRAME, Frames, Link, encode

values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                      lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)


@given(frames=st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=5),
       cuts=st.lists(st.integers(0, 400), max_size=12))
def test_frames_come_out_as_they_went_in(frames, cuts):
    sent = [{**frame, "op": "x"} for frame in frames]
    data = b"".join(map(encode, sent))
    ends = [*sorted({c % (len(data) + 1) for c in cuts}), len(data)]
    reader, got, start = Frames(), [], 0
    for end in ends:
        got += reader.feed(data[start:end])
        start = end
    assert got == sent


@pytest.mark.parametrize("data", [
    HEADER.pack(MAX_FRAME + 1), HEADER.pack(3) + b"{x}", HEADER.pack(2) + b"[]",
    HEADER.pack(2) + b"{}", HEADER.pack(1) + b"\xff", HEADER.pack(8) + b'{"op":1}',
])
def test_what_is_no_frame_is_refused(data):
    with pytest.raises(ProtocolError):
        Frames().feed(data)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    made = Link(ours)
    yield made, theirs
    made.close()
    theirs.close()


def test_frames_arrive_and_ring(pair):
    made, theirs = pair
    rang = threading.Event()
    made.on_frame = rang.set
    theirs.sendall(encode({"op": "a"}) + encode({"op": "b"}))
    assert rang.wait(10)
    found = []
    while len(found) < 2:
        rang.wait(0.1)
        found += [f for f in (made.take(),) if f]
    assert [f["op"] for f in found] == ["a", "b"]
    assert made.take() is None


def test_a_reader_that_is_slow_gets_everything_and_nobody_blocks(pair):
    made, theirs = pair
    sent = [{"op": "x", "n": n, "fill": "y" * 10_000} for n in range(200)]
    for frame in sent:
        made.send(frame)
    assert made.pump()  # more than the socket holds
    got, reader = [], Frames()

    def read():
        while len(got) < len(sent):
            got.extend(reader.feed(theirs.recv(1 << 16)))

    thread = threading.Thread(target=read)
    thread.start()
    assert made.flush(30)
    thread.join(30)
    assert got == sent


def test_a_reader_that_stopped_is_noticed(pair, monkeypatch):
    made, _ = pair
    monkeypatch.setattr(link, "MAX_BACKLOG", 1 << 20)
    many = ({"op": "x", "fill": "y" * 10_000} for _ in range(1000))
    with pytest.raises(ClusterError, match="unread"):
        list(map(made.send, many))
    assert not made.flush(0.05)


def test_an_end_that_goes_away_closes_the_link(pair):
    made, theirs = pair
    rang = threading.Event()
    made.on_frame = rang.set
    theirs.close()
    assert rang.wait(10)
    assert made.closed
    made.send({"op": "x"})  # harmless
    assert not made.pump()
    assert not made.flush(1)


def test_nonsense_closes_the_link(pair):
    made, theirs = pair
    rang = threading.Event()
    made.on_frame = rang.set
    theirs.sendall(struct.pack(">I", 5) + b"nope!")
    assert rang.wait(10)
    assert made.closed


def test_a_frame_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(link, "MAX_FRAME", 100)
    with pytest.raises(ProtocolError):
        encode({"op": "x", "fill": "y" * 200})
