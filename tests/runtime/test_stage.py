"""What stages tell about their work."""

from __future__ import annotations

import time

import pytest

from pipeinfer.core.control import PortName, RollCall, Standing
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Cancel, Decode, LaneOpen, RunCancelled, RunFinished, Tag
from pipeinfer.core.types import SamplingParams, make_rows
from pipeinfer.runtime.stage import Stage
from pipeinfer.transport.inproc import local_ports
from tests.kit.toy import ToyBackend, ToySpec

SPEC = ToySpec(n_vocab=16, n_layers=3, n_embd=8)


def step(stage):
    stage._handle(stage._receive())


def test_a_run_brings_back_when_each_stage_worked_on_it():
    ports = local_ports(4)
    stages = [Stage(ports[k], Grid.plain(3), ToyBackend.load(SPEC, k - 1, k)) for k in (1, 2, 3)]
    before = time.time()
    ports[0].send(1, Tag.TRANSACTION, LaneOpen(0, SamplingParams()))
    for run_id, parent in ((0, -1), (1, 0), (2, 1)):
        rows = make_rows([(3, run_id, (0,), True)])
        ports[0].send(1, Tag.TRANSACTION,
                      Decode(run_id, parent, rows, (0,), speculative=run_id > 0))
    for stage in stages[:1]:
        for _ in range(4):
            step(stage)
    ports[0].send(2, Tag.CANCEL, Cancel((1,)))
    for stage in stages[1:]:
        for _ in range(4):
            step(stage)
    done = [ports[0].take(Tag.RESULT).message for _ in range(3)]
    after = time.time()
    assert [type(message) for message in done] == [RunFinished, RunCancelled, RunCancelled]
    for message in done:
        starts, seconds, waited = zip(*message.spans, strict=True)
        assert not any(waited)  # nobody shares these stages
        assert len(starts) == 3
        assert before <= starts[0] <= starts[1] <= starts[2] <= after
        assert max(seconds) < after - before
    worked = [[span[1] > 0 for span in message.spans] for message in done]
    assert worked == [[True] * 3, [True, False, False], [True, False, False]]
    assert done[0].slowest == max(span[1] for span in done[0].spans)
    assert abs(done[0].computed - sum(span[1] for span in done[0].spans)) < 1e-12


class Cancelling:
    """A backend between whose layers the head's cancellation arrives."""

    def __init__(self, inner, port):
        self.inner, self.port = inner, port
        self.info, self.capabilities = inner.info, inner.capabilities
        self.seq_rm, self.seq_cp, self.seq_keep = inner.seq_rm, inner.seq_cp, inner.seq_keep

    def decode(self, rows, hidden=None, should_stop=None):
        asked = 0

        def stop():
            nonlocal asked
            asked += 1
            if asked == 1:
                self.port.send(1, Tag.CANCEL, Cancel((0,)))
                time.sleep(0.002)  # stages do not look more often than every half millisecond
            return should_stop()

        return self.inner.decode(rows, hidden, None if should_stop is None else stop)


@pytest.mark.parametrize(("outputs", "speculative", "stopped"), [
    ((False, False, True), False, True),  # the end of a prompt, whose client has left
    ((True,), True, True),  # a guess
    ((True,), False, False),  # an accepted token: computed to its end
])
def test_what_can_be_stopped_inside_a_run(outputs, speculative, stopped):
    ports = local_ports(2)
    stage = Stage(ports[1], Grid.plain(1), Cancelling(ToyBackend.load(SPEC), ports[0]))
    ports[0].send(1, Tag.TRANSACTION, LaneOpen(0, SamplingParams()))
    rows = make_rows([(3, k, (0,), wanted) for k, wanted in enumerate(outputs)])
    ports[0].send(1, Tag.TRANSACTION, Decode(0, -1, rows, (0,) * len(rows),
                                             speculative=speculative))
    step(stage)
    step(stage)
    answer = ports[0].take(Tag.RESULT).message
    assert isinstance(answer, RunCancelled if stopped else RunFinished)
    assert stage.stats.runs["stopped" if stopped else "computed"] == 1


def test_a_stage_tells_how_many_transactions_have_come_and_whether_it_is_idle():
    ports = local_ports(3)
    stage = Stage(ports[1], Grid.plain(2), Asked(ToyBackend.load(SPEC, 0, 2), ports[0]))
    ports[0].send(1, Tag.TRANSACTION, LaneOpen(0, SamplingParams()))
    step(stage)
    ports[0].send(1, Tag.CANCEL, RollCall(0))
    assert stage._take() is None
    ports[0].send(1, Tag.TRANSACTION, Decode(0, -1, make_rows([(3, 0, (0,), True)]),
                                             (0,), speculative=True))
    step(stage)  # it is asked meanwhile
    ports[0].send(1, Tag.TRANSACTION, RollCall(0))
    step(stage)
    told = [ports[0].take(Tag.RESULT).message for _ in range(3)]
    assert all(isinstance(one, Standing) and one.port == PortName(1) for one in told)
    assert [one.received for one in told] == [1, 2, 3]
    assert [one.idle > 0 for one in told] == [True, False, False]
    passed = [type(ports[2].take(Tag.TRANSACTION).message) for _ in range(3)]
    assert passed == [LaneOpen, Decode, RollCall]


class Asked(Cancelling):
    """A backend between whose layers the head asks how far the stage is."""

    def decode(self, rows, hidden=None, should_stop=None):
        self.port.send(1, Tag.CANCEL, RollCall(0))
        time.sleep(0.002)
        should_stop()
        return self.inner.decode(rows, hidden, None)
