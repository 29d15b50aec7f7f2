"""When stages on GPUs pad their decodes, what that leaves to the scheduler, and what is said."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from msgspec import structs

from pipeinfer.cluster.notes import doubts, doubts_about
from pipeinfer.cluster.resolve import for_chains, on_gpus
from pipeinfer.cluster.session import Session
from pipeinfer.cluster.sizing import ids_for, kept_for
from pipeinfer.config import JobConfig
from pipeinfer.core.control import PortName, Ready
from pipeinfer.core.policy import Policy
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.layers import has_windows
from pipeinfer.models.locate import EMBEDDED, open_model
from pipeinfer.nodes import NodeSettings, RankInfo
from tests.kit.random_model import tiny, write_random_model

MODEL = open_model(EMBEDDED / "draft.gguf")
HOSTS = [RankInfo(0, "a"), RankInfo(1, "b")]
READY = Ready(PortName(1), 1, "b", (0, 2), "llamacpp", 4, 0.0, (1.0,) * 6, 0, 0, 1, 0, ((0, 2),),
              gpu="H200", padded=4, padding_cost=1.31)


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, True), ({"gpu_layers": 0}, False), ({"exact": "off"}, False),
    ({"decomposer": "pdos"}, False), ({"proposer": ("lookahead",)}, False),
    ({"grid": "1x2"}, False),
    ({"ablate": ("multibuffer",)}, False), ({"ablate": ("cancel",)}, True),
    ({"policy": "published"}, True),
])
def test_stages_on_gpus_pad_unless_something_needs_branches(options, wanted):
    config = JobConfig.of(**{"gpu_layers": 99, **options})
    assert on_gpus(config, MODEL, HOSTS) is wanted


def test_the_settings_of_hosts_count():
    config = JobConfig.of()
    one = [HOSTS[0], structs.replace(HOSTS[1], settings=NodeSettings(device="gpu:1"))]
    assert on_gpus(config, MODEL, one)
    assert not on_gpus(config, MODEL, [
        HOSTS[0], structs.replace(one[1], asked_backend="torch")]), "torch pads nothing"
    assert not on_gpus(JobConfig.of(gpu_layers=99), MODEL, [
        structs.replace(host, settings=NodeSettings(device="cpu")) for host in HOSTS])


@pytest.mark.parametrize(("kind", "windows"), [
    ("gemma2", True), ("gpt-oss", True), ("qwen3moe", False), ("olmo2", False)])
def test_models_with_windows_are_not_padded(kind, windows, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(kind)))
    assert has_windows(model) is windows
    assert on_gpus(JobConfig.of(gpu_layers=99), model, HOSTS) is not windows


def test_requests_that_have_a_context_each_are_few_unless_their_number_is_given():
    config = for_chains(JobConfig.of(parallel=16))
    assert config.speculation.parallel == 4
    given = dataclasses.replace(JobConfig.of(parallel=16), given=frozenset({"parallel"}))
    assert for_chains(given).speculation.parallel == 16
    assert kept_for(config.speculation, chains=True) == 2
    assert ids_for(config.speculation, 4, chains=True) == 6
    assert kept_for(JobConfig.of(prefix_cache=False).speculation, chains=True) == 0


def notes(*ready, **options):
    config = JobConfig.of(gpu_layers=99, **options)
    assembly = SimpleNamespace(ready=dict(enumerate(ready, 1)), terms=SimpleNamespace(exact=4))
    return " ".join(doubts_about(config.model, SimpleNamespace(policy=Policy.PIPEINFER), assembly))


def test_what_padding_costs_is_said():
    said = notes(READY, READY)
    assert said == ("decodes on H200 are padded to 4 rows, which take 1.31 times as long as one, "
                    "in plain decoding too")
    assert "near-ties" in notes(READY, structs.replace(READY, padded=0))
    assert notes(structs.replace(READY, padded=1)) == ""
    assert "padded" not in notes(READY, exact="off")


def test_options_for_branches_without_effect_are_named():
    def said(**options):
        job = SimpleNamespace(policy=Policy.SPECULATIVE, chains=True, gaps=False,
                              time_sharing=False)
        return " ".join(doubts(JobConfig.of(**options).speculation, job))

    found = said(alternatives=2, branches=3)
    assert found.startswith("--set alternatives and --set branches without")
    assert said() == said(alternatives=0) == ""


def test_answers_go_on_with_the_same_tokens_only_where_gpus_compute_the_same():
    def bits(*ready, gpu_layers=99):
        config = JobConfig.of(gpu_layers=gpu_layers)
        session = SimpleNamespace(config=config, hosts=HOSTS, loaded=SimpleNamespace(
            job=SimpleNamespace(model=MODEL), chunk=64), assembly=SimpleNamespace(
                held=(), ready=dict(enumerate(ready, 1))))
        session._devices = lambda: Session._devices(session)
        return Session.bits.fget(session)

    def stage(*layers, **more):
        return structs.replace(READY, layers=layers, **more)

    found = bits(stage(0, 2), stage(2, 4))
    assert bits(stage(0, 3), stage(3, 4)) == found  # of one kind, with equal padding
    for change in ({"gpu": "H100"}, {"gpu": ""}, {"padded": 8}):
        assert bits(stage(0, 2), stage(2, 4, **change)) != found
    assert bits(stage(0, 2), stage(2, 4), gpu_layers=2) != found
    assert bits(stage(0, 3, gpu=""), stage(3, 4)) != bits(stage(0, 2, gpu=""), stage(2, 4))
    plain = structs.replace(READY, gpu="", padded=0)
    assert bits(structs.replace(plain, layers=(0, 3))) == bits(plain)
