"""Whether ranks take turns with the cores of one host: what they have told and what was asked for
decide."""

from __future__ import annotations

import pytest
from msgspec import structs

from pipeinfer.cluster.resolve import shares_cores
from pipeinfer.nodes import NodeSettings, RankInfo
from tests.kit.configs import job_config

HOSTS = [RankInfo(rank, "box", cores=2, cores_host=8) for rank in range(4)]


def taken(hosts=HOSTS, backends=("llamacpp",), numa_nodes=1, **options):
    return shares_cores(job_config(**options), hosts, backends, numa_nodes)


def with_last(**change):
    return [*HOSTS[:-1], structs.replace(HOSTS[-1], **change)]


@pytest.mark.parametrize("options", [
    {}, {"policy": "iterative"}, {"policy": "speculative"}, {"policy": "pipeinfer"},
    {"head_stage": True}, {"spares": 1}, {"speculation": "off"}, {"threads_draft": 1},
    {"proposer": ("prompt-lookup", "draft")}, {"layers": "4,4,4"},
])
def test_where_all_share_the_cores_of_one_host(options):
    assert taken(**options)


@pytest.mark.parametrize("options", [{"turns": "off"}, {"threads": 2}, {"grid": "auto"}])
def test_not_where_somebody_asked_for_something_else(options):
    """docs/features.md, which is generated, names all options that exclude it."""
    assert not taken(**options)


@pytest.mark.parametrize("hosts", [
    with_last(host="another"), HOSTS[:1],
    with_last(settings=NodeSettings(threads=4)), with_last(settings=NodeSettings(numa="0")),
    with_last(settings=NodeSettings(role="draft")),
    [structs.replace(one, cores=8) for one in HOSTS],  # nothing to gain
], ids=["two hosts", "alone", "threads", "numa", "draft rank", "own cores"])
def test_not_where_ranks_have_cores_of_their_own(hosts):
    assert not taken(hosts)


def test_not_where_bits_or_speed_depend_on_the_core():
    assert not taken(backends=("llamacpp", "torch"))
    assert not taken(numa_nodes=2)


def test_a_dead_rank_does_not_count():
    assert taken(with_last(host="a dead host", dead=True))
