"""Several clients on emulated clusters: virtual time is exact, so speeds can be compared here."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from msgspec import structs

from pipeinfer.core.policy import Policy
from pipeinfer.emulation.profiles import load_profiles
from pipeinfer.emulation.scenarios import Experiment, build
from pipeinfer.emulation.virtual import prompt_of
from pipeinfer.scheduler.controller import Controller, Timing, gaps, groups
from tests.kit.clients import Clients
from tests.kit.sample import fewer, full

TOKENS = fewer(64, 32)


def load(clients, speculation="auto", *, cluster="c", pair="dolphin-tinyllama", nodes=8):
    built = build(load_profiles(), Experiment(cluster, pair, nodes=nodes, tokens=TOKENS,
                                              prompt=32, limits=(("chunk", 16),)))
    timing = Timing(1.0, len(built.scenario.stages), built.curve, 0.0, 0.0)
    limits = structs.replace(built.scenario.limits, parallel=16, alone=speculation == "on",
                     share=groups(timing, 16, 16))
    if speculation == "off":
        limits = structs.replace(limits, policy=Policy.ITERATIVE)
    scenario = dataclasses.replace(built.scenario, limits=limits)
    result = Clients(scenario, clients, 2,
                     Controller(limits, built.pinned, built.curve)).run_all()
    assert len(result.outputs) == 2 * clients
    for request_id, tokens in result.outputs.items():
        assert tokens == scenario.pair.plain(prompt_of(scenario, request_id), TOKENS)
    return result


@pytest.mark.parametrize(("pair", "counts"), [
    ("dolphin-tinyllama", (1, 10)), full("dolphin-tinyllama", (1, 2, 4, 8, 16)),
    full("goliath-xwin7b", (1, 2, 4, 8, 16))])
def test_more_clients_get_more_tokens_and_auto_is_as_good_as_the_better_choice(pair, counts):
    speeds = {}
    for clients in counts:
        auto, on, off = (load(clients, s, pair=pair).tokens_per_second
                         for s in ("auto", "on", "off"))
        assert auto > 0.95 * max(on, off), (clients, auto, on, off)
        speeds[clients] = auto
    rising = [speeds[clients] for clients in counts if clients != 8]
    assert all(fewer < more for fewer, more in itertools.pairwise(rising))
    if 8 in counts:
        assert speeds[8] > 0.95 * speeds[4]


def test_lanes_share_runs_as_far_as_that_fills_the_pipeline():
    free = ((2, 1.0), (16, 1.1))
    linear = ((2, 2.0), (16, 16.0))
    paper = ((2, 1.49), (4, 2.48), (8, 4.45), (16, 8.39))

    def sizes(curve, stages, width=16):
        return groups(Timing(1.0, stages, curve, 0.0, 0.0), width, 16)

    assert sizes(free, 4)[:8] == (1, 1, 1, 1, 2, 2, 2, 2)
    assert max(sizes(free, 4, width=3)) == 3
    assert sizes(linear, 4) == (1,) * 16
    assert sizes(paper, 7)[6:9] == (1, 1, 1)  # one run too many for the pipeline is no reason
    assert sizes(paper, 7)[15] == 2
    assert sizes(((2, 3.4), (4, 3.6), (16, 8.0)), 1)[:5] == (1, 1, 1, 4, 5)
    assert groups(Timing(1.0, 1.0, (), 0.0, 0.0), 1, 3) == (1, 1, 1)


def test_queueing_is_not_taken_for_time_on_the_way():
    """Else more runs would be sent, which queue longer, and so on."""
    built = build(load_profiles(), Experiment("c", "dolphin-tinyllama", nodes=8))
    controller = Controller(structs.replace(built.scenario.limits, policy=Policy.ITERATIVE,
                                            parallel=16))
    for k in range(40):
        spans = [[1.5 + k, 0.04], [1.6 + k, 0.04]]
        controller.run_returned(1, 0.04, 0.08, 0.75, gaps(1.0 + k, 1.7 + k, spans))
    assert controller.timing is not None
    assert controller.timing.transit < 0.25  # half a second of it was a queue
