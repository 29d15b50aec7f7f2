"""Real models in virtual time: a plain loop's tokens, in as many steps as on a pipeline."""

from __future__ import annotations

import pytest

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Request, SamplingParams
from pipeinfer.lab.emulation.decoded import DecodedSimulation
from pipeinfer.lab.emulation.synthetic import SyntheticPair
from pipeinfer.lab.emulation.virtual import Scenario, VirtualStage, Wire
from pipeinfer.models.bundled import EMBEDDED
from pipeinfer.models.locate import open_model
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.draft_model import DraftModel
from pipeinfer.strategies.proposers.lookahead import Lookahead
from tests.rig.plain_loop import PlainLoop

PROMPT = list(range(5, 30))
COUNT = 32


def loaded(name):
    path = EMBEDDED / name
    layers = open_model(path).n_layers
    return LlamaCppBackend.load(path, layers=(0, layers), n_layers_total=layers, first=True,
                                last=True, n_ctx=1024, n_seq_max=80, n_batch=64, n_threads=1)


@pytest.mark.parametrize("policy", [Policy.ITERATIVE, Policy.PIPEINFER, Policy.SPECULATIVE])
def test_tokens_are_the_targets_and_time_is_the_scenarios(policy):
    loop = PlainLoop(EMBEDDED / "target.gguf")
    wanted = loop.generate(PROMPT, COUNT, SamplingParams())
    loop.close()
    target, draft = loaded("target.gguf"), loaded("draft.gguf")
    hints = Lookahead() if policy is Policy.SPECULATIVE else None
    limits = Limits(n_ctx=256, policy=policy, exact_width=4, partitions=40, credit=3, draft_max=2)
    scenario = Scenario((VirtualStage(lambda rows: 0.01 + 0.001 * (rows - 1), 4),) * 2,
                        (Wire(0.0, 1e12),) * 3, lambda rows: 1e-3, limits, SyntheticPair(0.0),
                        direct_cancel=True)
    proposer = DraftModel(draft, paths=4) if policy is Policy.PIPEINFER else None
    simulation = DecodedSimulation(scenario, target, proposer, hints, None)
    first = simulation.ask(Request(0, tuple(PROMPT), COUNT, ignore_eos=True))
    again = simulation.ask(Request(1, tuple(PROMPT), COUNT, ignore_eos=True))
    for one in (first, again):
        assert [emit.choice.token for emit in one.emitted] == wanted
        assert (one.reason, one.stats.accepted) == ("length", COUNT)
    if policy is Policy.ITERATIVE:
        assert first.stats.steps == COUNT
        assert 0.02 * COUNT < first.seconds < 0.03 * COUNT
        assert first.cells == len(PROMPT) + COUNT - 1
    else:
        assert first.seconds < 0.02 * COUNT
    target.close()
    draft.close()
