"""Texts of a real pair in virtual time: the recorded tokens come out, whoever guesses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.paper.recorded import RecordedPair, Text, circles
from pipeinfer.emulation import scenarios
from pipeinfer.emulation.profiles import load_profiles
from pipeinfer.emulation.scenarios import Experiment
from pipeinfer.emulation.virtual import Simulation, prompt_of
from pipeinfer.strategies.proposers.prompt_lookup import PromptLookup


def edited():
    """A prompt, and an answer that repeats it but for every 16th token; the draft names two of
    three tokens first."""
    rng = np.random.default_rng(1)
    prompt = rng.permutation(1000)[:120].astype(np.int32)
    answer = prompt[10:110].copy()
    answer[::16] = 2000 + np.arange(len(answer[::16]))
    names = rng.integers(3000, 4000, (len(answer), 4)).astype(np.int32)
    right = rng.random(len(answer)) < 2 / 3
    names[right, 0] = answer[right]
    return Text("edits", prompt, answer, names,
                np.tile(np.array([0.65, 0.1, 0.05, 0.05], np.float32), (len(answer), 1)))


class Lookup(Simulation):
    def proposers(self, draft):
        return [PromptLookup()]


class Both(Simulation):
    def proposers(self, draft):
        return [PromptLookup(), draft]


@pytest.mark.parametrize("policy", ["iterative", "speculative", "pipeinfer", "published"])
def test_the_recorded_answer_comes_out_and_the_text_helps_where_it_repeats(policy):
    pair = RecordedPair(text := edited())
    one = Experiment("c", "dolphin-tinyllama", policy=policy, nodes=5, prompt=len(text.prompt),
                     tokens=pair.n_answer)
    built = scenarios.build(load_profiles(), one)
    accepted = []
    scenario = replace(built.scenario, pair=pair)
    for kind in (Simulation, Lookup, Both):
        result = kind(scenario, scenarios.controller_of(built, one)).run()
        assert result.tokens == pair.plain(prompt_of(scenario), pair.n_answer)
        accepted.append(result.stats.accepted_speculative)
    if policy == "pipeinfer":
        assert accepted[2] > max(accepted[:2]) > 0


def test_off_the_path_nothing_is_right():
    text = Text("own", np.array([5, 6, 7], np.int32), np.array([8, 9, 5], np.int32),
                np.array([[8, 1, 2, 3]] * 3, np.int32), np.full((3, 4), 0.25, np.float32))
    pair = RecordedPair(text)
    prompt = pair.prompt(3, 0)
    answer = pair.plain(prompt, 3)
    assert pair.token(prompt, 2) == answer[0]
    assert pair.guesses(prompt, 2)[0][0] == answer[0]
    path = (*prompt[1:], answer[0])
    assert pair.token(path, 3) == answer[1]
    wrong = (*prompt[1:], (answer[0] + 1) % pair.n_vocab)
    assert pair.guesses(wrong, 3)[0] != pair.guesses(path, 3)[0]
    assert pair.acceptance == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="one prompt, of 3 tokens"):
        pair.prompt(4, 0)


def test_an_answer_that_runs_in_circles_is_seen():
    assert circles([*range(30), *range(24)])
    assert not circles(list(range(60)))
    assert not circles(list(range(24)))
