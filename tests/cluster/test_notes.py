"""What a start says of stages that are not as a user may expect."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeinfer.cluster.notes import doubts_about, one_stage
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.nodes import RankInfo


@pytest.mark.parametrize(("backend", "threads", "exact", "said"), [
    ("torch", 2, 1, True), ("torch", 1, 1, False), ("torch", 2, 16, False),
    ("llamacpp", 2, 1, False)])
def test_threads_of_torch_are_named_where_they_make_runs_narrow(backend, threads, exact, said):
    stage = SimpleNamespace(backend=backend, threads=threads, gpu="", padded=0, padding_cost=1.0)
    assembly = SimpleNamespace(terms=SimpleNamespace(exact=exact), ready={1: stage})
    notes = doubts_about(JobConfig.of().model, SimpleNamespace(policy=Policy.PIPEINFER), assembly)
    assert any("with -t 1 wider runs may be exact" in note for note in notes) == said


@pytest.mark.parametrize(("hosts", "stages", "said"), [
    ("ab", (1,), True), ("aa", (1,), False), ("ab", (0, 1), False), ("abc", (1, 2), False),
    ("a", (0,), False), ("abb", (2,), True)])
def test_a_single_stage_on_another_host_is_named_with_the_option_for_two(hosts, stages, said):
    ranks = [RankInfo(k, host) for k, host in enumerate(hosts)]
    assert ("--head-stage: it holds layers as well" in one_stage(stages, ranks)) == said
