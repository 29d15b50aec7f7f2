"""Lookahead parallelism in virtual time: the same tokens and steps, and sums by hand."""

from __future__ import annotations

import pytest

from benchmarks.methods.traced import Trace, trace
from pipeinfer.core.policy import Policy
from pipeinfer.lab.emulation.virtual import HEADER_BYTES, ROW_BYTES, Wire
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.lookahead import Lookahead
from tests.rig.toy import ToyBackend, ToySpec

SPEC = ToySpec(n_vocab=5, n_layers=2)
WIDE = Limits(n_ctx=200, policy=Policy.SPECULATIVE, exact_width=64, partitions=40)


def decoded(nodes, *sizes):
    backends = [ToyBackend.load(SPEC, n_ctx=600, n_seq_max=WIDE.n_ids, n_batch=256)
                for _ in range(nodes)]
    return trace(backends, WIDE, Lookahead(*sizes), (1, 2, 3), 60)


def test_replicas_share_the_rows_of_the_same_steps():
    alone, plain = decoded(1, 12, 4, 4), decoded(1, 0, 2, 0)
    assert alone.tokens == plain.tokens
    assert plain.per_step == 1.0 < alone.per_step
    for nodes in (2, 4):
        shared = decoded(nodes, 12, 4, 4)
        assert (shared.tokens, len(shared.steps)) == (alone.tokens, len(alone.steps))
        slowest = [max(map(sum, step)) for step in shared.steps]
        assert sum(slowest) < sum(sum(map(sum, step)) for step in alone.steps)
        assert shared.seconds(lambda rows: rows, Wire(0.0, 1e9), 0.0) < alone.seconds(
            lambda rows: rows, Wire(0.0, 1e9), 0.0)
        assert shared.seconds(lambda rows: 1.0, Wire(1.0, 1e9), 1.0) > alone.seconds(
            lambda rows: 1.0, Wire(1.0, 1e9), 1.0)  # where rows are free, dealing out costs


def test_a_step_takes_its_slowest_replica():
    found = Trace(2, [1, 2, 3], [[[1], [2, 3]], [[4], []]])
    wire = Wire(10.0, 1.0)
    first = (2 + 3) + 20 + 2 * 2 * HEADER_BYTES + 5 * ROW_BYTES
    second = 4 + 20 + 2 * HEADER_BYTES + 4 * ROW_BYTES
    assert found.seconds(float, wire, 0.5) == pytest.approx(first + second + 2 * 2 * 0.5)
