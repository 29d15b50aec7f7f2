"""Rank 0's end of the link to the HTTP process: it never blocks, and notices who has gone."""

from __future__ import annotations

import socket
import threading

import pytest

from pipeinfer.errors import ClusterError
from pipeinfer.server import link
from pipeinfer.server.frames import FROM_ENGINE, HEADER, Abort, Failed, FrameReader, Watch, encode
from pipeinfer.server.link import Link


@pytest.fixture
def pair():
    """A link, the socket at its other end, and what is set when a frame arrives."""
    ours, theirs = socket.socketpair()
    made, rang = Link(ours), threading.Event()
    made.on_frame = rang.set
    yield made, theirs, rang
    made.close()
    theirs.close()


def test_frames_arrive_and_ring(pair):
    made, theirs, rang = pair
    theirs.sendall(encode(Watch(True)) + encode(Abort(3, "b")))
    assert rang.wait(10)
    found = []
    while len(found) < 2:
        rang.wait(0.1)
        found += [f for f in (made.take(),) if f]
    assert found == [Watch(True), Abort(3, "b")]
    assert made.take() is None


def test_a_reader_that_is_slow_gets_everything_and_nobody_blocks(pair):
    made, theirs, _ = pair
    sent = [Failed(f"{n} {'y' * 10_000}") for n in range(200)]
    for frame in sent:
        made.send(frame)
    assert made.pump()  # more than the socket holds
    got, reader = [], FrameReader(FROM_ENGINE)

    def read():
        while len(got) < len(sent):
            got.extend(reader.feed(theirs.recv(1 << 16)))

    thread = threading.Thread(target=read)
    thread.start()
    assert made.flush(30)
    thread.join(30)
    assert got == sent


def test_a_reader_that_stopped_is_noticed(pair, monkeypatch):
    made, *_ = pair
    monkeypatch.setattr(link, "MAX_BACKLOG", 1 << 20)
    many = (Failed("y" * 10_000) for _ in range(1000))
    with pytest.raises(ClusterError, match="unread"):
        list(map(made.send, many))
    assert not made.flush(0.05)


def test_an_end_that_goes_away_closes_the_link(pair):
    made, theirs, rang = pair
    theirs.close()
    assert rang.wait(10)
    assert made.closed
    made.send(Failed("x"))  # harmless
    assert not made.pump()
    assert not made.flush(1)


def test_nonsense_closes_the_link(pair):
    made, theirs, rang = pair
    theirs.sendall(HEADER.pack(5) + b"nope!")
    assert rang.wait(10)
    assert made.closed
    assert "Expected `object`" in made.problem
