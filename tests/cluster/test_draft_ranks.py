"""Which ranks draft, what each of them is told to load, and what a user hears about it."""

from __future__ import annotations

import pytest

from pipeinfer.cluster.draft_ranks import cache_sizes
from pipeinfer.cluster.proposers import load_proposers
from pipeinfer.core.control import DraftSetup
from pipeinfer.errors import UsageError
from pipeinfer.host import Place
from pipeinfer.models.bundled import EMBEDDED
from pipeinfer.models.locate import open_model
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.strategies import registry
from pipeinfer.transport.inproc import local_ports

DRAFT, TARGET = EMBEDDED / "draft.gguf", EMBEDDED / "target.gguf"
OWN = NodeSettings(proposer="prompt-lookup")


def ranks(count, **settings):
    """So many ranks; rank3=NodeSettings(...) gives one of them settings."""
    return [RankInfo(k, "host", settings=settings.get(f"rank{k}", NodeSettings()))
            for k in range(count)]


@pytest.mark.parametrize("name", ["draft", "draft-lookahead"])
def test_draft_ranks_run_the_proposer_that_is_asked_for(name):
    head, port = local_ports(2)
    found = load_proposers(
        registry.job_config(proposer=(name,)), Place(0, 2, None, 1, 0, 2), [DRAFT], 512, 4096, head,
        ranks(2, rank1=NodeSettings(role="draft")))
    _, setup = port.take_post()
    assert isinstance(setup, DraftSetup)
    assert setup.proposer == name
    assert not found.local


def test_sizes_that_llama_cpp_has_no_paths_for_are_refused_with_the_options_to_lower():
    spec, model = registry.proposers()["draft-lookahead"], open_model(DRAFT)
    assert cache_sizes(registry.job_config(lookahead_window=100), 512, model, spec)
    with pytest.raises(UsageError, match=r"lower its sizes .*lookahead_window.* or --parallel"):
        cache_sizes(registry.job_config(lookahead_window=128, lookahead_candidates=128), 512,
                    model, spec)
