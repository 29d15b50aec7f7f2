"""What a job is, from options, a model's header and the ranks' facts; no rank is there."""

from __future__ import annotations

import gguf
import pytest

from pipeinfer.cluster.resolve import JobFacts, choose, idle_node, resolve
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UsageError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.nodes import RankInfo
from tests.kit.configs import job_config
from tests.kit.launch import ROOT
from tests.kit.random_architectures import STATEFUL
from tests.kit.random_model import tiny, write_random_model

EMBEDDED = ROOT / "pipeinfer" / "models" / "embedded"
DRAFT = EMBEDDED / "draft.gguf"


def ranks(count, *, hosts=None):
    return [RankInfo(k, f"host{k if hosts is None else 0}", 1e9, 1, 2) for k in range(count)]


@pytest.fixture(scope="module")
def target():
    return ModelFile(EMBEDDED / "target.gguf")


@pytest.fixture(scope="module")
def stateful(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    return ModelFile(write_random_model(path, tiny(next(iter(STATEFUL)))))


def test_ranks_of_one_host_take_turns_and_look_up_before_the_draft(target):
    found = resolve(job_config(), JobFacts(target, DRAFT, ranks(3, hosts=1)))
    assert found.time_sharing
    assert found.config.speculation.proposer == ("prompt-lookup", "draft")
    assert (found.policy, found.stages) == (Policy.PIPEINFER, 2)
    assert [one.name for one in found.proposers] == ["prompt-lookup", "draft.gguf"]
    apart = resolve(job_config(turns="off"), JobFacts(target, None, ranks(3, hosts=1)))
    assert not apart.time_sharing
    assert apart.config.cluster.turns == "off"
    assert apart.config.speculation.proposer == ("prompt-lookup",)


def test_ranks_of_several_hosts_do_not(target):
    found = resolve(job_config(), JobFacts(target, DRAFT, ranks(3)))
    assert not found.time_sharing
    assert found.config.cluster.turns == "off"


@pytest.mark.parametrize(("count", "hosts", "nodes", "stages", "noted"), [
    (2, 1, 2, 1, True), (2, 1, 2, 2, False), (2, 1, 1, 1, False), (1, 1, 2, 1, False),
    (3, 1, 2, 2, True), (3, None, 2, 2, False)])
def test_a_numa_node_without_layers_is_noted(target, count, hosts, nodes, stages, noted):
    facts = JobFacts(target, None, ranks(count, hosts=hosts), nodes)
    assert [("--head-stage" in line) for line in idle_node(facts, stages)] == [True] * noted


def test_a_state_bounds_requests_unless_their_number_is_given(stateful):
    facts = JobFacts(stateful, None, ranks(1))
    assert resolve(job_config(parallel=16), facts).config.speculation.parallel == 4
    given = job_config(parallel=16, given=frozenset({"parallel"}))
    assert resolve(given, facts).config.speculation.parallel == 16


def test_one_sequence_at_a_time_where_llama_cpp_mixes_up_two(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "glm5-next")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    facts = JobFacts(ModelFile(path), None, ranks(1))
    found = resolve(job_config(), facts).config.speculation
    assert (found.policy, found.parallel, found.partitions) == ("iterative", 1, 0)
    assert not found.prefix_cache
    given = job_config(policy="pipeinfer", parallel=2, given=frozenset({"parallel"}))
    with pytest.raises(UsageError, match=r"at a time alone: leave out --policy pipeinfer and "
                       "--parallel"):
        resolve(given, facts)


@pytest.mark.parametrize(("model", "options", "says"), [
    ("target", {"policy": "speculative", "proposer": ("draft",)}, "needs a draft model"),
    ("target", {"speculation": "off", "policy": "pipeinfer"}, "contradict each other"),
    ("target", {"ablate": ("cancel",), "policy": "iterative"}, "nothing to leave out"),
    ("target", {"proposer": ("mtp",)}, "--proposer mtp"),
    ("stateful", {"policy": "published"}, "keep a state.*: leave out --policy published"),
    ("stateful", {"proposer": ("lookahead",)}, "keep a state.*: leave out --proposer lookahead")])
def test_what_cannot_be_is_refused_before_anything_loads(request, model, options, says):
    with pytest.raises(UsageError, match=says):
        resolve(job_config(**options), JobFacts(request.getfixturevalue(model), None, ranks(2)))


def test_a_change_within_a_job_is_decided_as_its_start(target):
    facts = JobFacts(target, DRAFT, ranks(3))
    begun = resolve(job_config(), facts)
    again = choose(job_config(), facts, begun.backends, time_sharing=begun.time_sharing)
    assert (again.policy, again.proposers) == (begun.policy, begun.proposers)
    assert again.config.speculation.proposer == begun.config.speculation.proposer


def test_the_same_facts_give_the_same_job(target):
    facts = JobFacts(target, DRAFT, ranks(4))
    assert resolve(job_config(), facts) == resolve(job_config(), facts)
