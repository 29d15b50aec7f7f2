"""Decides whether the ranks of a job take turns on the cores of one host (time sharing).

Over several hosts, a pipeline computes a run at every stage at the same time. Where all ranks
share the cores of one host this gains nothing: a run takes as long as on all cores together, and a
wrong speculative token takes cores from a right one. There, draft and stages compute one after the
other, each with all cores, and a speculative token has to pay for its row. This module reads
options and the ranks' facts; it has no model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeinfer.cluster import features
from pipeinfer.config import JobConfig
from pipeinfer.nodes import RankInfo


def takes_turns(config: JobConfig, hosts: Sequence[RankInfo], backends: Collection[str],
                numa_nodes: int) -> bool:
    """Whether all ranks take turns with all cores of the host that they share.

    They do not if an option excludes it (`features.TIME_SHARING`), if the nodes file binds threads,
    if sums are split by threads (torch), or if the host has several NUMA nodes.
    backends: of the stages. numa_nodes: of rank 0's host.
    """
    ranks = [one for one in hosts if not one.dead]
    if config.cluster.turns == "off" or len(ranks) < 2 or len({one.host for one in ranks}) > 1 \
            or numa_nodes > 1 or set(backends) != {"llamacpp"} \
            or any(one.settings.drafts for one in ranks[1:]) \
            or features.excluding(features.TIME_SHARING, config):
        return False
    if any(one.settings.bound or one.settings.on_gpu for one in ranks):
        return False
    return min(one.cores_host for one in ranks) > max(one.cores for one in ranks)
