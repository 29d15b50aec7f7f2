"""What stages did in virtual time, and what of it was of no use."""

from __future__ import annotations

import itertools

from pipeinfer.core.policy import Ablation
from pipeinfer_lab.traced import simulate
from tests.kit.emulated import scenario


def test_cancellation_reduces_wasted_time_and_direct_is_no_slower():
    def run(direct, off):
        spec = scenario((0.02,) * 6, acceptance=0.5, direct=direct, ablations=frozenset(off))
        return simulate(spec)

    (none, waste), (backward, less), (direct, least) = (
        run(True, [Ablation.CANCEL]), run(False, []), run(True, []))
    assert sum(least.wasted) < 0.8 * sum(waste.wasted)
    assert sum(least.wasted) <= sum(less.wasted) <= sum(waste.wasted)
    assert direct.tokens == backward.tokens == none.tokens
    assert direct.tokens_per_second > none.tokens_per_second


def test_spans_say_what_stages_did():
    result, traced = simulate(scenario(acceptance=0.5))
    by_stage = [[s for s in traced.spans if s[0] == stage] for stage in range(3)]
    for spans, busy in zip(by_stage, result.busy, strict=True):
        assert all(b[2] >= a[3] - 1e-12 for a, b in itertools.pairwise(spans))
        assert 0.9 * busy < sum(s[3] - s[2] for s in spans) <= busy
    fates = {s[4] for s in traced.spans}
    assert fates == {"prompt", "token", "guess", "dead", "skipped"}
    dead = sum(s[3] - s[2] for s in by_stage[0] if s[4] in ("dead", "skipped"))
    assert dead <= traced.wasted[0] + 1e-9
