"""From options to limits: what several requests need."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeinfer.cluster.sizing import (
    cells_for,
    choose_policy,
    ids_for,
    kept_for,
    limits_for,
    sizes_for,
)
from pipeinfer.config import JobConfig, SpeculationConfig
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UsageError

CURVE = ((2, 1.2), (4, 1.6), (8, 2.4), (16, 4.0))
DRAFT = Path("draft.gguf")


def limits(config, n_stages=3):
    return limits_for(
        config.speculation,
        choose_policy(config, DRAFT),
        sizes_for(0.2),
        n_ctx=1000,
        chunk=64,
        exact=16,
        n_stages=n_stages,
        curve=CURVE,
        spare=200,
    )[0]


def test_one_request_shares_with_nobody():
    found = limits(JobConfig())
    assert (found.parallel, found.cells, found.share) == (1, 1000, (1,))
    assert not found.alone


def test_several_requests_get_cells_ids_and_groups():
    config = JobConfig.of(parallel=16)
    found = limits(config)
    assert found.cells == 2000
    assert found.kept == 32
    assert found.n_ids == ids_for(config.speculation, 4)
    assert len(found.share) == 16
    assert found.share[0] == 1 < found.share[15]
    assert kept_for(config.replace(prefix_cache=False).speculation) == 0
    assert cells_for(config.replace(cache_tokens=5000).speculation, 1000) == 5000


def test_speculation():
    assert limits(JobConfig.of(speculation="on")).alone
    assert limits(JobConfig.of(speculation="off")).policy is Policy.ITERATIVE
    assert limits(JobConfig.of(speculation="off", policy="iterative")).policy \
        is Policy.ITERATIVE
    with pytest.raises(UsageError, match="--speculation off and --policy pipeinfer"):
        choose_policy(JobConfig.of(speculation="off", policy="pipeinfer"), DRAFT)


def test_what_cannot_be():
    with pytest.raises(UsageError, match="smaller than the context of one request"):
        cells_for(SpeculationConfig(cache_tokens=999), 1000)
    with pytest.raises(UsageError, match="sequence ids"):
        ids_for(SpeculationConfig(parallel=128, partitions=200), 4)
