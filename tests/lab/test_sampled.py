"""Multi-step speculative sampling: its tokens have the target's distribution, exactly."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from click.testing import CliRunner

from pipeinfer.cli import main, terminal
from pipeinfer.emulation.synthetic import N_VOCAB
from pipeinfer_lab.sampled import MSS, SHARED, SampledPair, multi_step

THIRDS = ((5, 3, 2), (1, 8, 1), (0, 4, 6), (10, 0, 0), (2, 2, 6))  #: tenths, of three tokens


def tenths(counts):
    return [Fraction(count, 10) for count in counts]


def floats(law):
    return np.array([float(share) for share in law])


def emitted(p, drafts):
    """The exact law of the emitted token. The code decides at the middle of every interval of
    draws between which its decision may change."""
    law = [Fraction(0)] * 3

    def follow(offers, weight, draws, left):
        index = len(draws)
        if index == len(offers):
            edge = Fraction(0)
            for token, share in enumerate(left):
                if share:
                    last = float(edge + share / 2)
                    assert decide(offers, [*draws, last]) == (token, -1)
                    law[token] += weight * share
                    edge += share
            return
        token, q = offers[index]
        chance = min(Fraction(1), left[token] / q[token])
        if chance:
            rest = [0.5] * (len(offers) - index)
            assert decide(offers, [*draws, float(chance / 2), *rest]) == (token, index)
            law[token] += weight * chance
        if chance < 1:
            rest = [max(a - b, Fraction(0)) for a, b in zip(left, q, strict=True)]
            follow(offers, weight * (1 - chance), [*draws, float((1 + chance) / 2)],
                   [share / sum(rest) for share in rest])

    def decide(offers, draws):
        return multi_step(floats(p), [(token, floats(q)) for token, q in offers], np.array(draws))

    for tokens in itertools.product(range(3), repeat=len(drafts)):
        offers = list(zip(tokens, drafts, strict=True))
        weight = Fraction(1)
        for token, q in offers:
            weight *= q[token]
        if weight:
            follow(offers, weight, [], p)
    return law


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_of_three_tokens_each_has_exactly_the_targets_probability(count):
    """For every target and every one, two or three drafts, each with a law of its own."""
    for target in THIRDS:
        for drafts in itertools.combinations_with_replacement(THIRDS, count):
            assert emitted(tenths(target), [tenths(q) for q in drafts]) == tenths(target)


def excess(counts, law):
    """By how many deviations chi-square exceeds its mean."""
    there = law * counts.sum() >= 5
    rare = np.array([counts[~there].sum()]), np.array([law[~there].sum()])
    seen, wanted = (np.concatenate([whole[there], rest]) for whole, rest in zip(
        (counts, law), rare, strict=True))
    wanted = wanted[seen + wanted > 0] * counts.sum()
    seen = seen[:len(wanted)]
    freedom = len(seen) - 1
    return (((seen - wanted) ** 2 / wanted).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("right", [True, False])
def test_drawn_tokens_have_the_targets_distribution(right):
    """Chi-square over eight tokens. Negative control: offers of another law than is claimed."""
    rng = np.random.default_rng(3)
    p, q, other = rng.dirichlet(np.ones(8), 3)
    counts = np.zeros(8)
    for tokens in rng.choice(8, (20_000, 2), p=q if right else other):
        token, _ = multi_step(p, [(token, q) for token in tokens.tolist()], rng.random(3))
        counts[token] += 1
    assert (excess(counts, p) < 4) == right


@pytest.mark.parametrize("verify", [SHARED, MSS])
def test_both_ways_to_verify_have_one_distribution(verify):
    """Over texts, after the same path: as often each token as the softmax says."""
    pairs = [SampledPair(0.7, seed, temperature=0.9, verify=verify) for seed in range(3000)]
    counts, law = np.zeros(N_VOCAB), np.zeros(N_VOCAB)
    for pair in pairs:
        counts[pair.token((1, 2, 3), 9)] += 1
        scores = pair._scores((1, 2, 3), 9)[0]
        law += np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum() / len(pairs)
    assert excess(counts, law) < 4


def test_an_offer_is_accepted_as_often_as_the_laws_overlap_and_shared_noise_less_often():
    """Of one guess. No coupling can do better than the overlap."""
    found, overlap = {SHARED: 0, MSS: 0}, 0.0
    for seed in range(2000):
        for verify in found:
            pair = SampledPair(0.6, seed, temperature=1.0, verify=verify)
            found[verify] += pair.token((4,), 5) == pair.guesses((4,), 5)[0][0]
        target, draft = pair._scores((4,), 5)
        overlap += np.minimum(*(np.exp(one - one.max()) / np.exp(one - one.max()).sum()
                                for one in (target, draft))).sum()
    assert abs(found[MSS] - overlap) < 4 * np.sqrt(2000) / 2
    assert found[SHARED] < overlap


def test_greedily_the_draft_is_as_often_right_as_it_is_told():
    for acceptance in (0.3, 0.8, 1.0):
        right = 0
        for seed in range(2000):
            pair = SampledPair(acceptance, seed, temperature=1e-6)
            right += pair.token((4,), 5) == pair.guesses((4,), 5)[0][0]
        assert abs(right / 2000 - acceptance) < 0.04


def test_bench_verifies_by_multi_step_sampling_and_jobs_refuse_it(monkeypatch):
    monkeypatch.setattr(terminal, "end_job", lambda code: None)  # it would end the tests' process

    def bench(*more):
        return CliRunner().invoke(main.main, [
            "bench", "--nodes", "4", "--tokens", "48", "--policy", "published", *more])

    done = bench("--verify", "mss", "--temp", "0.8", "--json")
    assert done.exit_code == 0, done.output
    assert '"tokens_equal": true' in done.output
    assert "--verify mss needs --temp above 0" in bench("--verify", "mss").output
    for command in ("generate", "serve"):
        refused = CliRunner().invoke(main.main, [command, "--verify", "mss"])
        assert refused.exit_code == 2
        assert "No such option '--verify'" in refused.output
