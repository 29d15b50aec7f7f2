"""Plans fill the memory of GPUs, where a rank's layers are on one, and not that of its host."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from pipeinfer.cluster.placement import (
    Survey,
    check_devices,
    judge_of,
    members_of,
    notes_on,
    offloading,
    on_their_gpus,
    without_embedding,
)
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
CARD = "Card"
HOSTS = [RankInfo(0, "a", 9e9), RankInfo(1, "b", 0.1 * WHOLE), RankInfo(2, "b", 0.1 * WHOLE)]
CONFIG = JobConfig.of(gpu_layers=99)


def gpu(number, free):
    """A rank's answer. free: of the memory that the whole model takes."""
    return Measured(gpu=number, gpu_name=CARD, gpu_free=free * WHOLE)


def plan(answers, config=CONFIG, hosts=HOSTS):
    ranks = on_their_gpus(config, MODEL, hosts, answers)
    members = members_of((1, 2), (None, None), ranks, {})
    return make_plan(config.cluster, LOAD, members, (1, 2), ranks, lambda split: -split.slowest,
                     timed=False)


def test_each_rank_fills_its_own_gpu():
    """Both together would fit neither the host's memory nor one of the GPUs."""
    found = plan({1: gpu("0", 0.7), 2: gpu("1", 0.7)})
    assert all(start < stop for start, stop in found.ranges)


def test_ranks_on_one_gpu_share_its_memory():
    with pytest.raises(PlanError, match=r"ranks 1, 2 on b, GPU 0 \(Card\) need .* lower -ngl"):
        plan(dict.fromkeys((1, 2), gpu("0", 0.7)))
    with pytest.raises(PlanError, match=r"on b, its GPUs \(Card\) need"):
        plan(dict.fromkeys((1, 2), gpu("", 0.7)))


def test_a_small_gpu_gets_few_layers():
    found = plan({1: gpu("0", 0.3), 2: gpu("1", 2)})
    (_, first), (_, last) = found.ranges
    assert first < (last - first) / 2


def test_where_memory_is_unknown_the_load_says_whether_it_fits():
    assert plan({}).ranges
    with pytest.raises(PlanError):
        plan({}, JobConfig.of())


def test_layers_that_stay_on_the_processor_may_fill_the_hosts_memory():
    answer = Measured(gpu_name=CARD, gpu_free=7.0)
    one = on_their_gpus(JobConfig.of(gpu_layers=4), MODEL, HOSTS, {1: answer})[1]
    assert one.memory == HOSTS[1].memory + 7
    limited = structs.replace(HOSTS[1], settings=NodeSettings(memory=5))
    assert on_their_gpus(CONFIG, MODEL, [limited], {})[0].memory == 5
    torch = structs.replace(HOSTS[1], asked_backend="torch")
    assert on_their_gpus(CONFIG, MODEL, [torch], {}) == [torch]
    assert on_their_gpus(CONFIG, MODEL, HOSTS, {})[1].memory == math.inf


def test_a_rank_without_a_gpu_fills_its_hosts_memory():
    """-ngl is one option for all ranks, and old servers have none; only what failed is unknown."""
    assert on_their_gpus(CONFIG, MODEL, HOSTS, {1: Measured()})[1] == HOSTS[1]
    broken = on_their_gpus(CONFIG, MODEL, HOSTS, {1: Measured(error="no answer")})[1]
    assert broken.memory == math.inf


def test_the_nodes_file_bounds_the_memory_of_gpus():
    settings = NodeSettings(gpu_memory=5, memory=2)
    limited = structs.replace(HOSTS[1], memory=2.0, settings=settings)

    def memory(layers, free):
        answers = {1: Measured(gpu_name=CARD, gpu_free=free)}
        return on_their_gpus(JobConfig.of(gpu_layers=layers), MODEL, [limited], answers)[0].memory

    assert (memory(99, 7.0), memory(99, 3.0), memory(4, 7.0)) == (5, 3, 7)
    assert on_their_gpus(CONFIG, MODEL, [limited], {})[0].device == 5


def test_a_split_without_a_plan_is_refused_as_well():
    with pytest.raises(PlanError, match=r"rank 2 on b, GPU 1 \(Card\) needs .* lower -ngl"):
        plan({1: gpu("0", 2), 2: gpu("1", 0.3)}, JobConfig.of(gpu_layers=99, split="equal"))


def devices_of(config, answers):
    """The plan of equal shares where every rank has much memory, and the ranks on their GPUs."""
    roomy = [structs.replace(one, memory=9 * WHOLE) for one in HOSTS]
    found = plan({}, JobConfig.of(gpu_layers=99, split="equal"), roomy)
    return found, on_their_gpus(config, MODEL, roomy, answers)


def test_the_layers_on_a_gpu_fit_it_though_the_host_has_memory_for_others():
    """With -ngl 8 a stage of 6 layers is all on its GPU, with -ngl 2 its last one is."""
    answers = {1: gpu("0", 0.2), 2: gpu("1", 0.2)}
    found, hosts = devices_of(config := JobConfig.of(gpu_layers=8), answers)
    with pytest.raises(PlanError, match=r"rank 1 on b, GPU 0 \(Card\): layers there need .* free"):
        check_devices(config, LOAD, found, hosts)
    found, hosts = devices_of(config := JobConfig.of(gpu_layers=2), answers)
    check_devices(config, LOAD, found, hosts)


def test_ranks_that_share_a_gpu_are_named():
    found, hosts = devices_of(CONFIG, {1: gpu("0", 2), 2: gpu("1", 2)})
    assert notes_on(found, hosts, {}) == []
    found, hosts = devices_of(CONFIG, dict.fromkeys((1, 2), gpu("0", 2)))
    (note,) = notes_on(found, hosts, {})
    assert note.startswith("ranks 1, 2 share the GPU of b, GPU 0 (Card): how fast")


def test_ranks_whose_library_finds_no_gpu_are_named():
    answers = {0: Measured(), 1: Measured(), 2: gpu("1", 2)}
    (note,) = notes_on(*devices_of(CONFIG, answers), answers)
    assert note.startswith("llama.cpp finds no GPU for rank 1: all layers")
    answers[1] = Measured(error="no answer")
    assert notes_on(*devices_of(CONFIG, answers), answers) == []


def test_a_draft_takes_the_memory_of_the_processor_or_of_the_gpu():
    """Where its own layers are, not the stage's."""
    alone = on_their_gpus(CONFIG, MODEL, HOSTS[:1], {0: gpu("0", 1)})

    def memory(hosts, where):
        return members_of((0,), (None,), hosts, {}, head_bytes=100, drafts_on_gpu=where)[0].memory

    assert (memory(alone, where=False), memory(alone, where=True)) == (WHOLE, WHOLE - 100)
    assert (memory(HOSTS, where=False), memory(HOSTS, where=True)) == (9e9 - 100, 9e9)
    assert HOSTS[0].drafts_on_gpu(JobConfig.of(gpu_layers_draft=9))
    assert not HOSTS[0].drafts_on_gpu(CONFIG)


def test_the_embedding_is_not_on_the_gpu():
    there = on_their_gpus(CONFIG, MODEL, HOSTS, {1: gpu("0", 1)})[1]
    assert without_embedding(LOAD, there).first_bytes == 0 < LOAD.first_bytes
    assert without_embedding(LOAD, HOSTS[1]) == LOAD
    partly = on_their_gpus(JobConfig.of(gpu_layers=4), MODEL, HOSTS, {1: gpu("0", 1)})[1]
    assert without_embedding(LOAD, partly) == LOAD


def test_ranks_on_gpus_keep_no_cores_busy():
    assert offloading(CONFIG, MODEL, HOSTS) == [0, 1, 2]
    hosts = on_their_gpus(CONFIG, MODEL, HOSTS, {1: gpu("0", 1), 2: Measured()})
    assert set(judge_of(hosts, ()).seats) == {2}
    members = dict(zip((1, 2), members_of((1, 2), (None, None), hosts, {}), strict=True))
    of_session = Survey(None, LOAD, members, {}, []).located(HOSTS)
    assert set(judge_of(of_session, ()).seats) == {0, 2}  # rank 0 has no stage


def test_the_gpus_that_a_rank_sees(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert visible_gpus() == ""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert visible_gpus() == "3"
