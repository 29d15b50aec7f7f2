"""What stages tell about their work."""

from __future__ import annotations

import time

import numpy as np

from pipeinfer.backends.toy import ToyBackend, ToySpec
from pipeinfer.core import SamplingParams, make_rows
from pipeinfer.protocol import Cancel, Decode, LaneOpen, RunCancelled, RunFinished, Tag
from pipeinfer.stage import Stage
from pipeinfer.transport.inproc import local_ports

SPEC = ToySpec(n_vocab=16, n_layers=3, n_embd=8)


def step(stage):
    stage._handle(stage._receive())


def test_a_run_brings_back_when_each_stage_worked_on_it():
    ports = local_ports(4)
    stages = [Stage(ports[k], 3, ToyBackend.load(SPEC, k - 1, k)) for k in (1, 2, 3)]
    before = time.time()
    ports[0].send(1, Tag.TRANSACTION, LaneOpen(0, SamplingParams()))
    for run_id, parent in ((0, -1), (1, 0), (2, 1)):
        rows = make_rows([(3, run_id, (0,), True)])
        ports[0].send(1, Tag.TRANSACTION,
                      Decode(run_id, parent, rows, np.zeros(1, np.int32), speculative=run_id > 0))
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
        starts, seconds = message.spans.T
        assert len(starts) == 3
        assert before <= starts[0] <= starts[1] <= starts[2] <= after
        assert (seconds < after - before).all()
    worked = [(message.spans[:, 1] > 0).tolist() for message in done]
    assert worked == [[True] * 3, [True, False, False], [True, False, False]]
    assert done[0].slowest == done[0].spans[:, 1].max()
    assert abs(done[0].computed - done[0].spans[:, 1].sum()) < 1e-12
