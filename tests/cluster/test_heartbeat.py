"""Signs of life over loopback, with short times."""

from __future__ import annotations

import socket
import threading
import time

import msgspec
import pytest

from pipeinfer.cluster.heartbeat import _BODY, HeadPulse, RankPulse
from pipeinfer.runtime.pulse import Pulse

pytestmark = pytest.mark.slow
SECONDS = 0.8
LONG = 20.0


def until(true):
    deadline = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def head():
    pulse = HeadPulse(SECONDS)
    yield pulse
    pulse.close()


@pytest.fixture
def start(head):
    """Starts a rank that beats; hasty unless asked to be patient."""
    made = []

    def make(rank, *, patient=False, meeting=None, on_silence=lambda: None):
        pulse = Pulse()
        pulse.loading = patient
        made.append(RankPulse(rank, meeting or head.meeting, pulse, on_silence))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one._socket.close()


def heard(head):
    return set(head._heard)


def beat(head, rank, *, token=None, patient=False, cut=None):
    """One beat by hand."""
    data = (bytes.fromhex(head.meeting.token) if token is None else token) + _BODY.pack(
        rank, patient)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(data[:cut], ("127.0.0.1", head.meeting.port))


def test_ranks_that_beat_are_not_silent_and_one_that_closes_becomes_so(head, start):
    woken = threading.Event()
    head.wake = woken.set
    first, _ = start(1), start(2)
    until(lambda: heard(head) == {1, 2})
    for _ in range(8):
        assert head.silent() == set()
        time.sleep(SECONDS / 4)
    assert not woken.is_set()
    first.close()
    until(lambda: head.silent() == {1})
    assert woken.wait(LONG)


def test_a_rank_that_beats_again_is_no_longer_silent(head, start):
    start(3).close()
    until(lambda: head.silent() == {3})
    start(3)
    until(lambda: head.silent() == set())


def test_a_rank_that_was_never_heard_is_not_silent(head, start):
    start(1)
    until(lambda: heard(head) == {1})
    time.sleep(2 * SECONDS)
    assert head.silent() == set()


def test_beats_that_are_none_are_ignored(head):
    beat(head, 4, token=bytes(16))
    for cut in (0, 5, 20):
        beat(head, 4, cut=cut)
    beat(head, 5)
    until(lambda: heard(head))  # in order over loopback, so the others have been looked at
    assert heard(head) == {5}


def test_a_beat_is_answered_with_the_same_bytes(head):
    data = bytes.fromhex(head.meeting.token) + _BODY.pack(6, True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(LONG)
        sock.sendto(data, ("127.0.0.1", head.meeting.port))
        assert sock.recvfrom(64)[0] == data


def test_a_patient_rank_gets_longer(head):
    beat(head, 1)
    beat(head, 2, patient=True)
    until(lambda: head.silent() == {1})
    until(lambda: head.silent() == {1, 2})


def test_a_rank_notices_once_that_the_head_is_silent(head, start):
    told = []
    start(1, on_silence=lambda: told.append(True))
    until(lambda: heard(head) == {1})
    time.sleep(2 * SECONDS)
    assert told == []
    head.close()
    until(lambda: told)
    time.sleep(2 * SECONDS)
    assert told == [True]


def test_neither_a_rank_without_answers_nor_one_that_is_closed_leaves(head, start):
    told = []
    wrong = msgspec.structs.replace(head.meeting, token=bytes(16).hex())
    start(1, meeting=wrong, on_silence=lambda: told.append("not answered"))
    closed = start(2, on_silence=lambda: told.append("closed"))
    until(lambda: heard(head) == {2})
    time.sleep(SECONDS)
    closed.close()
    head.close()
    time.sleep(5 * SECONDS)
    assert told == []
    assert heard(head) == {2}


def test_addresses_that_nobody_answers_at_do_no_harm(head, start):
    meeting = msgspec.structs.replace(
        head.meeting, addresses=("192.0.2.1", "not an address", "127.0.0.1"))
    start(5, meeting=meeting)
    until(lambda: heard(head) == {5})
    time.sleep(2 * SECONDS)
    assert head.silent() == set()


def test_a_meeting_names_loopback_last_and_a_secret_of_its_own(head):
    other = HeadPulse(SECONDS)
    try:
        assert head.meeting.token != other.meeting.token
        assert len(bytes.fromhex(head.meeting.token)) == 16
        local = [address.startswith("127.") for address in head.meeting.addresses]
        assert local == sorted(local)
        assert head.meeting.seconds == SECONDS
    finally:
        other.close()
