"""Which ranks draft, what each of them is told to load, and what a user hears about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec import structs

from pipeinfer.cluster.draft_ranks import (
    PlacedProposer,
    check_memory,
    draft_ranks_used,
    load_proposers,
    placed,
    setup_of,
    sliced,
    with_draft_ranks,
)
from pipeinfer.cluster.handshake import unmet
from pipeinfer.cluster.placement import leave_spares
from pipeinfer.cluster.session import Session, settled
from pipeinfer.core.control import DraftReady, DraftSetup, PortName, Ready
from pipeinfer.core.messages import Tag
from pipeinfer.errors import ClusterError, PlanError, UsageError
from pipeinfer.host import Place
from pipeinfer.models.locate import EMBEDDED, open_model
from pipeinfer.models.slices import slices_of
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.planning.measure import Figures
from pipeinfer.planning.planner import asked_counts
from pipeinfer.planning.replan import Holding
from pipeinfer.runtime.drafts import DraftPosts, SlicedDraft
from pipeinfer.strategies import registry
from pipeinfer.strategies.resources import Asked, Draft
from pipeinfer.transport.inproc import local_ports
from tests.kit.configs import job_config
from tests.kit.random_model import tiny, write_random_model

DRAFT, TARGET = EMBEDDED / "draft.gguf", EMBEDDED / "target.gguf"
OWN = NodeSettings(proposer="prompt-lookup")
DRAFTS = NodeSettings(role="draft")


def asked(config):
    return Asked(config, open_model(TARGET), DRAFT, ("llamacpp",))


def ranks(count, **settings):
    """So many ranks; rank3=NodeSettings(...) gives one of them settings."""
    return [RankInfo(k, "host", settings=settings.get(f"rank{k}", NodeSettings()))
            for k in range(count)]


@pytest.mark.parametrize("name", ["draft", "draft-lookahead"])
def test_draft_ranks_run_the_proposer_that_is_asked_for(name):
    head, port = local_ports(2)
    config, hosts = job_config(proposer=(name,)), ranks(2, rank1=DRAFTS)
    found = load_proposers(placed(asked(config), hosts), config, Place(0, 2, None, 1, 0, 2), 512,
                           4096, head, hosts)
    _, setup = port.take_post()
    assert isinstance(setup, DraftSetup)
    assert setup.proposer == name
    assert not found.local


def test_each_proposer_of_a_draft_has_a_rank_of_its_own():
    both = job_config(proposer=("draft", "draft-lookahead"))
    with pytest.raises(UsageError, match=r"draft and draft-lookahead: .* give --draft-ranks 2"):
        placed(asked(both), ranks(2, rank1=DRAFTS))
    found = placed(asked(both), ranks(4, rank2=DRAFTS, rank3=DRAFTS))
    assert [(one.spec.name, one.rank) for one in found] == [("draft", 2), ("draft-lookahead", 3)]


@pytest.mark.parametrize(("count", "used"), [(1, 1), (3, 1)])
def test_ranks_that_no_draft_needs_are_counted(count, used):
    config = job_config(proposer=("draft",), draft_ranks=count)
    found = placed(asked(config), with_draft_ranks(config, ranks(6)))
    assert draft_ranks_used(found, ranks(6)) == used


def test_a_draft_that_does_not_fit_its_rank_is_refused():
    config, hosts = job_config(proposer=("draft",)), ranks(3, rank2=DRAFTS)
    found = placed(asked(config), hosts)
    fits = Draft(DRAFT).held
    check_memory(found, config, [structs.replace(one, memory=fits) for one in hosts])
    with pytest.raises(PlanError, match=r"takes .* GB, and rank 2 on host may fill .* smaller one"):
        check_memory(found, config, [structs.replace(one, memory=fits - 1) for one in hosts])


@pytest.mark.parametrize(("config", "own", "drafting", "spares"), [
    ({"draft_ranks": 1}, {}, [5], []),
    ({"draft_ranks": 1, "spares": 1}, {}, [4], [5]),
    ({"draft_ranks": 1}, {"rank5": OWN}, [4], []),
    ({"draft_ranks": 1, "spares": 1}, {"rank5": OWN}, [3], [4]),
    ({"draft_ranks": 2}, {"rank0": OWN, "rank4": OWN}, [3, 5], []),
    ({"spares": 1}, {"rank5": OWN}, [], [4]),
])
def test_ranks_with_a_proposer_of_their_own_are_no_draft_ranks_and_no_spares(
        config, own, drafting, spares):
    found = with_draft_ranks(job := job_config(**config), ranks(6, **own))
    assert [one.rank for one in found if one.settings.role == "draft"] == drafting
    counts = leave_spares(job.cluster, [None] * 5, range(1, 6), found)
    assert [rank for rank, count in enumerate(counts, 1) if count == 0] == spares


def test_too_few_ranks_for_draft_ranks_beside_proposers_of_their_own():
    with pytest.raises(UsageError, match="start at least 4"):
        with_draft_ranks(job_config(draft_ranks=1), ranks(3, rank2=OWN))
    with pytest.raises(UsageError, match="only 1 ranks can hold layers"):
        leave_spares(job_config(spares=1).cluster, [None, 0], [1, 2],
                     ranks(3, rank2=OWN))


def test_a_draft_rank_gets_no_layers():
    hosts, model = ranks(4, rank3=OWN), open_model(TARGET)
    for layers in ("6,6", "6,6,0"):
        assert asked_counts(job_config(layers=layers).cluster, model, [1, 2, 3], hosts,
                            None) == [6, 6, 0]
    with pytest.raises(PlanError, match="gives 2 layers to rank 3, which drafts"):
        asked_counts(job_config(layers="6,4,2").cluster, model, [1, 2, 3], hosts, None)
    with pytest.raises(PlanError, match="no rank is left for layers"):
        asked_counts(job_config().cluster, model, [3], hosts, None)


def test_settings_of_ranks_that_cannot_follow_them_are_said(tmp_path):
    path = tmp_path / "nodes.toml"
    path.write_text("[rank.1]\nthreads = 2\n[rank.7]\nproposer = \"prompt-lookup\"\n")
    config = job_config(nodes=str(path))
    (note,) = unmet(config, ranks(4))
    assert "settings of rank 7, but the last rank of this job is 3" in note
    assert unmet(config, ranks(8)) == unmet(job_config(), ranks(8)) == []
    (note,) = unmet(job_config(), ranks(4, rank0=OWN))
    assert "rank 0 leads the job" in note


@pytest.mark.parametrize("free", [True, False])
def test_texts_are_looked_up_where_a_rank_of_its_own_does_so(free):
    """Else serve says that --remember-answers has no effect."""
    draft = SimpleNamespace(free=free)
    session = SimpleNamespace(draft=draft, config=job_config(proposer=("draft",)))
    assert Session.looks_up.fget(session) is free


def test_sizes_that_llama_cpp_has_no_paths_for_are_refused_with_the_options_to_lower():
    spec, model = registry.proposers()["draft-lookahead"], Draft(DRAFT)
    assert model.sizes(spec, job_config(lookahead_window=100), 512)
    with pytest.raises(UsageError, match=r"lower its sizes .*lookahead_window.* or --parallel"):
        model.sizes(spec, job_config(lookahead_window=128, lookahead_candidates=128),
                    512)


def job_of(model, ranks, *, n_stages=1, sum_seconds=0.0, memory=1 << 30, run=1e-3, gpu=""):
    """What `sliced` gets of a job whose layers these ranks have in slices."""
    names = tuple(one.name for one in slices_of(model, [1] * len(ranks)))
    held = [Holding(rank, k * (n_stages > 1), 4, k, names, (k,)) for k, rank in enumerate(ranks)]
    ready = {rank: Ready(PortName(1, k), rank, "h", (0, 4), "llamacpp", 4, 0.3, (1.0,), 1 << 20,
                         1 << 20, 1, 0, ((0, 4),), sum_seconds=sum_seconds, gpu=gpu)
             for k, rank in enumerate(ranks)}
    measured = {rank: (Figures(1e10, 1 << 20, {1: 1e-3, 4: 2e-3}), memory) for rank in ranks}
    return held, ready, measured, run


@pytest.mark.parametrize(("ranks_of", "change", "way", "is_sliced"), [
    ((1, 2), {}, "auto", True),
    ((0, 1), {}, "auto", True),
    ((1, 2), {}, "off", False),
    ((1, 2), {"sum_seconds": 1e-3}, "auto", False),  # slower
    ((1, 2), {"sum_seconds": 1e-3}, "on", True),
    ((1, 2), {"memory": 1 << 20}, "auto", False),
    ((1, 2), {"run": 8e-2}, "auto", False),  # a step is little of it, and rank 0 has time
    ((0, 1), {"run": 8e-2}, "auto", True),  # rank 0 has none
    ((1, 2), {"run": 0.0}, "auto", False),  # was not measured
    ((1, 2), {"gpu": "CUDA0"}, "auto", False),
    ((1, 2), {"n_stages": 2}, "auto", False),
])
def test_a_head_is_sliced_where_its_steps_get_faster(ranks_of, change, way, is_sliced, tmp_path):
    config = job_config(proposer=("mtp",)).replace(slice_head=way)
    model = open_model(write_random_model(tmp_path / "m.gguf", tiny("glm4moe", n_vocab=4096)))
    found = placed(Asked(config, model, None, ("llamacpp",)), ranks(4))
    (head,) = sliced(found, config, *job_of(model, ranks_of, **change))
    assert (head.rank, head.elsewhere, bool(head.cut)) == (0, is_sliced, is_sliced)
    if is_sliced:
        assert setup_of(head, config, NodeSettings(), 64, 4096, None).cut == head.cut
        assert head.resource.reads_on(2) < head.resource.reads_on(1) == head.resource.reads


def test_a_head_that_cannot_be_sliced_is_refused_if_it_has_to_be(tmp_path):
    config = job_config(proposer=("mtp",)).replace(slice_head="on")
    model = open_model(write_random_model(tmp_path / "m.gguf", tiny("glm4moe")))
    found = placed(Asked(config, model, None, ("llamacpp",)), ranks(3))
    with pytest.raises(UsageError, match="slice_head=on needs a job of one stage with several"):
        sliced(found, config, *job_of(model, (1, 2), n_stages=2))
    own = PlacedProposer(registry.proposers()["prompt-lookup"], None, 4)
    assert sliced([own], config, *job_of(model, (1, 2), n_stages=2)) == (own,)


@pytest.mark.parametrize("way", ["auto", "on"])
def test_a_head_that_members_cannot_load_stays_on_rank_0_unless_it_must_not(way):
    ports = local_ports(3)
    setup = DraftSetup("mtp", "toy", "", 64, 4, 64, 1, 8, {}, {}, target="toy")
    remote = SlicedDraft(DraftPosts(ports[0]), lambda: {1: setup, 2: setup}, "the head")
    ports[2].send(0, Tag.DRAFT, DraftReady(2, "h", 0, 0, 0, "m.gguf does not exist", 4))
    kept = SimpleNamespace()
    cluster = SimpleNamespace(timeout=5.0, slice_head=way)
    loaded = SimpleNamespace(job=SimpleNamespace(config=SimpleNamespace(cluster=cluster)),
                             proposers=lambda job: kept)
    if way == "on":
        with pytest.raises(ClusterError, match="does not exist"):
            settled(loaded, remote)
        return
    worker, (note,) = settled(loaded, remote)
    assert worker is kept
    assert "on rank 0 alone" in note
    assert "m.gguf does not exist" in note
