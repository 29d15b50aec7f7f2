"""Plans fill the memory of GPUs, where a rank's layers are on one, and not that of its host."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from pipeinfer.cluster.placement import members_of, on_their_gpus
from pipeinfer.config import JobConfig
from pipeinfer.core.control import Measured
from pipeinfer.errors import PlanError
from pipeinfer.host import visible_gpus
from pipeinfer.models.locate import EMBEDDED, open_model
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.planning.planner import load_of, make_plan

MODEL = open_model(EMBEDDED / "target.gguf")
LOAD = load_of(MODEL, 200_000, 64)  # layers with much cache: what else there is counts little
WHOLE = LOAD.stage_bytes(0, MODEL.n_layers)
HOSTS = [RankInfo(0, "a", 9e9), RankInfo(1, "b", 0.1 * WHOLE), RankInfo(2, "b", 0.1 * WHOLE)]
CONFIG = JobConfig.of(gpu_layers=99)


def plan(answers, config=CONFIG, hosts=HOSTS):
    ranks = on_their_gpus(config, MODEL, hosts, answers)
    members = members_of((1, 2), (None, None), ranks, {})
    return make_plan(config.cluster, LOAD, members, (1, 2), ranks, lambda split: -split.slowest,
                     timed=False)


def test_each_rank_fills_its_own_gpu():
    """Both together would fit neither the host's memory nor one of the GPUs."""
    found = plan({1: Measured(gpu="0", gpu_free=0.7 * WHOLE),
                  2: Measured(gpu="1", gpu_free=0.7 * WHOLE)})
    assert all(start < stop for start, stop in found.ranges)


def test_ranks_on_one_gpu_share_its_memory():
    with pytest.raises(PlanError, match="on b, GPU 0 need"):
        plan(dict.fromkeys((1, 2), Measured(gpu="0", gpu_free=0.7 * WHOLE)))
    with pytest.raises(PlanError, match="on b, its GPUs need"):
        plan(dict.fromkeys((1, 2), Measured(gpu_free=0.7 * WHOLE)))


def test_a_small_gpu_gets_few_layers():
    found = plan({1: Measured(gpu="0", gpu_free=0.3 * WHOLE),
                  2: Measured(gpu="1", gpu_free=2 * WHOLE)})
    (_, first), (_, last) = found.ranges
    assert first < (last - first) / 2


def test_where_memory_is_unknown_the_load_says_whether_it_fits():
    assert plan({}).ranges
    with pytest.raises(PlanError):
        plan({}, JobConfig.of())


def test_layers_that_stay_on_the_processor_may_fill_the_hosts_memory():
    one = on_their_gpus(JobConfig.of(gpu_layers=4), MODEL, HOSTS, {1: Measured(gpu_free=7.0)})[1]
    assert one.memory == HOSTS[1].memory + 7
    limited = structs.replace(HOSTS[1], settings=NodeSettings(memory=5))
    assert on_their_gpus(CONFIG, MODEL, [limited], {})[0].memory == 5
    torch = structs.replace(HOSTS[1], asked_backend="torch")
    assert on_their_gpus(CONFIG, MODEL, [torch], {}) == [torch]
    assert on_their_gpus(CONFIG, MODEL, HOSTS, {})[1].memory == math.inf


def test_the_gpus_that_a_rank_sees(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert visible_gpus() == ""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert visible_gpus() == "3"
