"""Which ranks draft, what each of them is told to load, and what a user hears about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeinfer.cluster.draft_ranks import (
    PlacedProposer,
    placed,
    setups_of,
    with_draft_ranks,
)
from pipeinfer.cluster.handshake import unmet
from pipeinfer.cluster.placement import leave_spares
from pipeinfer.cluster.proposers import load_proposers
from pipeinfer.cluster.session import Session
from pipeinfer.core.control import DraftSetup
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.host import Place
from pipeinfer.models.bundled import EMBEDDED
from pipeinfer.models.locate import open_model
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.planning.planner import asked_counts
from pipeinfer.strategies import registry
from pipeinfer.strategies.resources import Asked, Draft
from pipeinfer.transport.inproc import local_ports

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
    config, hosts = registry.job_config(proposer=(name,)), ranks(2, rank1=DRAFTS)
    found = load_proposers(placed(asked(config), hosts), config, Place(0, 2, None, 1, 0, 2), 512,
                           4096, head, hosts)
    _, setup = port.take_post()
    assert isinstance(setup, DraftSetup)
    assert setup.proposer == name
    assert not found.local


def test_draft_ranks_run_one_proposer_of_the_draft():
    with pytest.raises(UsageError, match="draft and draft-lookahead: draft ranks run one of them"):
        placed(asked(registry.job_config(proposer=("draft", "draft-lookahead"))),
               ranks(2, rank1=DRAFTS))


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
    found = with_draft_ranks(job := registry.job_config(**config), ranks(6, **own))
    assert [one.rank for one in found if one.settings.role == "draft"] == drafting
    counts = leave_spares(job.cluster, [None] * 5, range(1, 6), found)
    assert [rank for rank, count in enumerate(counts, 1) if count == 0] == spares


def test_too_few_ranks_for_draft_ranks_beside_proposers_of_their_own():
    with pytest.raises(UsageError, match="start at least 4"):
        with_draft_ranks(registry.job_config(draft_ranks=1), ranks(3, rank2=OWN))
    with pytest.raises(UsageError, match="only 1 ranks can hold layers"):
        leave_spares(registry.job_config(spares=1).cluster, [None, 0], [1, 2],
                     ranks(3, rank2=OWN))


def test_a_draft_of_few_layers_is_refused_whatever_made_the_ranks_draft():
    """By the nodes file, too, so no option is named."""
    own = PlacedProposer(registry.proposers()["draft"], Draft(DRAFT), (1, 2, 3))
    with pytest.raises(UsageError, match="2 layers, too few for 3 ranks: let fewer draft"):
        setups_of(own, registry.job_config(), ranks(4), 512, 4096, None)


def test_a_draft_rank_gets_no_layers():
    hosts, model = ranks(4, rank3=OWN), open_model(TARGET)
    for layers in ("6,6", "6,6,0"):
        assert asked_counts(registry.job_config(layers=layers).cluster, model, [1, 2, 3], hosts,
                            None) == [6, 6, 0]
    with pytest.raises(PlanError, match="gives 2 layers to rank 3, which drafts"):
        asked_counts(registry.job_config(layers="6,4,2").cluster, model, [1, 2, 3], hosts, None)
    with pytest.raises(PlanError, match="no rank is left for layers"):
        asked_counts(registry.job_config().cluster, model, [3], hosts, None)


def test_settings_of_ranks_that_cannot_follow_them_are_said(tmp_path):
    path = tmp_path / "nodes.toml"
    path.write_text("[rank.1]\nthreads = 2\n[rank.7]\nproposer = \"prompt-lookup\"\n")
    config = registry.job_config(nodes=str(path))
    (note,) = unmet(config, ranks(4))
    assert "settings of rank 7, but the last rank of this job is 3" in note
    assert unmet(config, ranks(8)) == unmet(registry.job_config(), ranks(8)) == []
    (note,) = unmet(registry.job_config(), ranks(4, rank0=OWN))
    assert "rank 0 leads the job" in note


@pytest.mark.parametrize("free", [True, False])
def test_texts_are_looked_up_where_a_rank_of_its_own_does_so(free):
    """Else serve says that --remember-answers has no effect."""
    draft = SimpleNamespace(free=free)
    session = SimpleNamespace(draft=draft, config=registry.job_config(proposer=("draft",)))
    assert Session.looks_up.fget(session) is free


def test_sizes_that_llama_cpp_has_no_paths_for_are_refused_with_the_options_to_lower():
    spec, model = registry.proposers()["draft-lookahead"], Draft(DRAFT)
    assert model.sizes(spec, registry.job_config(lookahead_window=100), 512)
    with pytest.raises(UsageError, match=r"lower its sizes .*lookahead_window.* or --parallel"):
        model.sizes(spec, registry.job_config(lookahead_window=128, lookahead_candidates=128),
                    512)
