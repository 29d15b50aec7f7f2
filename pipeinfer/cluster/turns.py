"""Decides whether the ranks of a job take turns on the cores of one host (time sharing).

Over several hosts, a pipeline computes a run at every stage at the same time. Where all ranks
share the cores of one host this gains nothing: a run takes as long as on all cores together, and a
wrong speculative token takes cores from a right one. There, draft and stages compute one after the
other, each with all cores, and a speculative token has to pay for its row. This module reads
options and the ranks' facts; it has no model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeinfer.cluster.draft_ranks import draft_ranks_of
from pipeinfer.cluster.policy_choice import overlaps
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.nodes import RankInfo
from pipeinfer.strategies import registry


def takes_turns(config: JobConfig, hosts: Sequence[RankInfo], backends: Collection[str],
                numa_nodes: int) -> bool:
    """Whether all ranks take turns with all cores of the host that they share.

    They do not if the user has bound threads or set an option that only overlapping runs have, if
    sums are split by threads (torch), if ranks stand for other machines (`--pace-ms`), or if the
    host has several NUMA nodes.
    backends: of the stages. numa_nodes: of rank 0's host.
    """
    model, cluster, own = config.model, config.cluster, config.speculation
    ranks = [one for one in hosts if not one.dead]
    if cluster.turns == "off" or len(ranks) < 2 or len({one.host for one in ranks}) > 1 \
            or numa_nodes > 1 or set(backends) != {"llamacpp"}:
        return False
    bound = model.threads or model.numa or model.gpu_layers or cluster.keep_binding or any(
        one.settings.bound or one.settings.on_gpu for one in ranks)
    apart = cluster.pace_ms or cluster.grid or cluster.slices or draft_ranks_of(list(hosts)) \
        or own.layout != "pipeline"
    other = own.decomposer or registry.inline(own) is not None or registry.adapter(own) \
        or own.policy == Policy.PUBLISHED or overlaps(own)
    shared = min(one.cores_host for one in ranks) > max(one.cores for one in ranks)
    return shared and not (bound or apart or other)
