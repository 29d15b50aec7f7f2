"""Frames belong to the epoch they were sent in: mailboxes and ports of one process."""

from __future__ import annotations

import json
import sys
import threading

import pytest

from pipeinfer.core import codec
from pipeinfer.core.control import PortName, Progress
from pipeinfer.core.messages import Tag
from pipeinfer.transport.base import Layout, Mailbox, Regrouped
from pipeinfer.transport.inproc import LocalPort, local_ports


def note(value):
    return Progress(PortName(0), json.dumps(value), 0, 0)


def put(box, value, epoch, tag=Tag.RESULT):
    box.put(7, tag, codec.encode(note(value)), epoch)


def values(taker, tag=Tag.RESULT):
    """Everything that can be taken, in order."""
    found = []
    while (envelope := taker.take(tag)) is not None:
        found.append(json.loads(envelope.message.phase))
    return found


# --- mailboxes --------------------------------------------------------------------------------


def test_frames_of_later_epochs_wait_until_theirs_is_entered_and_keep_their_order():
    box = Mailbox()
    for value, epoch in (("a1", 1), ("now", 0), ("c2", 2), ("b1", 1), ("d2", 2)):
        put(box, value, epoch)
    put(box, "other tag", 1, Tag.TRANSACTION)
    assert values(box) == ["now"]
    assert box.empty
    box.enter(1)
    assert values(box) == ["a1", "b1"]
    assert values(box, Tag.TRANSACTION) == ["other tag"]
    box.enter(2)
    assert values(box) == ["c2", "d2"]


def test_entering_drops_what_was_not_taken_and_what_waited_for_a_skipped_epoch():
    box = Mailbox()
    put(box, "untaken", 0)
    put(box, "skipped", 1)
    put(box, "kept", 3)
    box.enter(2)
    assert box.empty
    put(box, "late", 1)
    box.enter(3)
    assert values(box) == ["kept"]


def test_a_frame_that_waits_ends_a_wait_and_again_when_its_epoch_begins():
    box = Mailbox()
    put(box, "later", 1)
    assert box.arrived.is_set()
    box.arrived.clear()
    box.enter(1)
    assert box.arrived.is_set()


def test_envelopes_name_sender_and_size():
    box = Mailbox()
    put(box, "x", 0)
    envelope = box.take(Tag.RESULT)
    assert envelope.source == 7
    assert envelope.n_bytes == len(codec.encode(note("x")))


def test_nothing_sent_while_an_epoch_is_entered_is_lost_doubled_or_out_of_order():
    """The sender is ahead of the reader, who enters the epoch somewhere among the frames."""
    boxes = [Mailbox() for _ in range(2000)]
    starts = [threading.Barrier(2) for _ in boxes]
    old, new = range(6), range(10, 30)
    frame = codec.encode(note(""))

    def send():
        for box, start in zip(boxes, starts, strict=True):
            start.wait()
            for source in (*old, *new):
                box.put(source, Tag.RESULT, frame, int(source in new))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        sender = threading.Thread(target=send)
        sender.start()
        for box, start in zip(boxes, starts, strict=True):
            start.wait()
            while box.take(Tag.RESULT) is not None:
                pass
            box.enter(1)
        sender.join()
    finally:
        sys.setswitchinterval(interval)
    for box in boxes:
        found = []
        while (envelope := box.take(Tag.RESULT)) is not None:
            found.append(envelope.source)
        assert found == list(new)


# --- local ports ------------------------------------------------------------------------------


def test_a_called_port_takes_nothing_until_it_adopts():
    head, stage = local_ports(2)
    head.send(1, Tag.TRANSACTION, note("old"))
    stage.call(1)
    for _ in range(2):
        with pytest.raises(Regrouped):
            stage.take(Tag.TRANSACTION)
    stage.adopt()
    assert values(stage, Tag.TRANSACTION) == []


def test_a_call_ends_a_wait():
    _, stage = local_ports(2)
    waiting = threading.Thread(target=stage.wait, args=(60.0,))
    waiting.start()
    stage.call(1)
    waiting.join(30.0)
    assert not waiting.is_alive()


def ports_of_a_head_that_has_adopted():
    head, stage = local_ports(2)
    for port in (head, stage):
        port.call(1)
    head.adopt()
    return head, stage


def test_frames_of_the_new_epoch_reach_a_port_that_has_not_adopted_yet():
    head, stage = ports_of_a_head_that_has_adopted()
    head.send(1, Tag.TRANSACTION, note("new"))
    with pytest.raises(Regrouped):
        stage.take(Tag.TRANSACTION)
    stage.adopt()
    assert values(stage, Tag.TRANSACTION) == ["new"]


def test_what_a_thread_sends_before_it_adopts_does_not_reach_the_new_epoch():
    head, stage = ports_of_a_head_that_has_adopted()
    stage.send(0, Tag.RESULT, note("of the old stages"))
    stage.adopt()
    stage.send(0, Tag.RESULT, note("of the new"))
    assert values(head) == ["of the new"]


def test_a_frame_to_another_rank_is_forwarded_with_the_epoch_of_its_sender():
    sent = []
    port = LocalPort(1, {1: Mailbox(4)}, lambda *frame: sent.append(frame))
    port.send(2, Tag.RESULT, note("before"))
    port.call(5)
    port.send(2, Tag.RESULT, note("called"))
    port.adopt()
    port.send(2, Tag.RESULT, note("after"))
    assert [(dest, tag, epoch) for dest, tag, _, epoch in sent] == [
        (2, Tag.RESULT, 4), (2, Tag.RESULT, 4), (2, Tag.RESULT, 5)]


def test_several_calls_lead_to_the_newest_epoch():
    head, stage = local_ports(2)
    for epoch in (1, 2, 3):
        stage.call(epoch)
    stage.adopt()
    assert stage.take(Tag.RESULT) is None
    for epoch in (1, 2):  # the head follows one by one: frames of old epochs are not for the stage
        head.call(epoch)
        head.adopt()
        head.send(1, Tag.RESULT, note(epoch))
    head.call(3)
    head.adopt()
    head.send(1, Tag.RESULT, note(3))
    assert values(stage) == [3]


def test_a_node_without_a_way_is_named():
    port = LocalPort(1, {1: Mailbox()})
    with pytest.raises(ValueError, match="node 1 has no way to node 9"):
        port.send(9, Tag.RESULT, note("x"))


def test_a_layout_names_the_nodes_of_a_rank():
    layout = Layout((0, 2, 1, 2, 0))
    assert layout.local_nodes(0) == [0, 4]
    assert layout.local_nodes(2) == [1, 3]
    assert layout.local_nodes(3) == []
