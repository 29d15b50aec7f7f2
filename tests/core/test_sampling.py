"""The acceptance rule: laws, order of steps, purity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core.sampling import (
    best_shares,
    candidates,
    choose,
    contenders,
    gumbel,
    likeliest,
    noise_key,
    shortlist,
)
from pipeinfer.core.types import NO_TOKEN, SamplingParams
from tests.kit.sample import fewer

NO_HISTORY = np.zeros(1, np.int32)
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -1.5, -2.0, -4.0], np.float32)


def law(params):
    """The distribution that the truncation steps leave."""
    order = np.argsort(-LOGITS, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    p = np.exp(LOGITS[order].astype(float))
    p /= p.sum()
    if params.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(p), params.top_p)) + 1]
    kept = order[LOGITS[order] >= LOGITS[order].max() + (
        np.log(params.min_p) if params.min_p else -np.inf)]
    q = np.zeros(len(LOGITS))
    q[kept] = np.exp(LOGITS[kept].astype(float) / params.temperature)
    return q / q.sum()


def chi_square(counts, p):
    """Statistic and degrees of freedom over the cells that can occur."""
    inside = p > 0
    assert counts[~inside].sum() == 0
    expected = p[inside] * counts.sum()
    return float(((counts[inside] - expected) ** 2 / expected).sum()), int(inside.sum()) - 1


DRAWS = fewer(20_000, 8_000)
#: 99.9 % quantiles of the chi-square law by degrees of freedom
LIMIT = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


@pytest.mark.slow
@pytest.mark.parametrize("params", [
    SamplingParams(1.0), SamplingParams(0.7), SamplingParams(1.5, top_k=5),
    SamplingParams(1.0, top_p=0.8), SamplingParams(1.0, min_p=0.1),
    SamplingParams(0.8, top_k=6, top_p=0.95, min_p=0.05),
], ids=str)
def test_frequencies_match_the_law(params):
    params = SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p,
                            key=noise_key(11))
    counts = np.zeros(len(LOGITS))
    for position in range(DRAWS):
        counts[choose(LOGITS, params, NO_HISTORY, position).token] += 1
    statistic, freedom = chi_square(counts, law(params))
    assert statistic < LIMIT[freedom]


@pytest.mark.slow
def test_the_chi_square_test_can_fail():
    """Negative control (docs/algorithms.md 2.3): top-k children with p/q give (5/6, 1/6)."""
    p, q = np.array([0.5, 0.5]), np.array([0.6, 0.4])
    rng = np.random.default_rng(0)
    accepted = rng.random(20_000) < min(1, p[0] / q[0])
    counts = np.array([accepted.sum(), (~accepted).sum()], float)
    assert chi_square(counts, p)[0] > LIMIT[1]
    assert abs(counts[0] / 20_000 - 5 / 6) < 0.02


@pytest.mark.slow
def test_shared_noise_accepts_as_the_table_says():
    """docs/algorithms.md 2.2: p=(.5,.3,.2), q=(.2,.3,.5) agree at a rate of 0.63."""
    p, q = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.3, 0.5])
    params = SamplingParams(1.0, key=noise_key(3))
    same = sum(choose(p, params, NO_HISTORY, i).token == choose(q, params, NO_HISTORY, i).token
               for i in range(DRAWS))
    assert abs(same / DRAWS - 0.63) < 0.015


def test_greedy_takes_the_lowest_of_equal_ids():
    assert choose(np.array([1.0, 3.0, 3.0]), SamplingParams(), NO_HISTORY, 0).token == 1
    biased = SamplingParams(logit_bias=((2, 0.5),))
    assert choose(np.array([1.0, 3.0, 3.0]), biased, NO_HISTORY, 0).token == 2


def test_noise_depends_on_key_position_and_token_only():
    ids = np.arange(100)
    noise = gumbel(7, 3, ids)
    assert np.array_equal(noise[10:20], gumbel(7, 3, ids[10:20]))
    assert not np.array_equal(noise, gumbel(7, 4, ids))
    assert not np.array_equal(noise, gumbel(8, 3, ids))
    assert len({noise_key(1), noise_key(2), noise_key(1, 1), noise_key(1, 0, (1,))}) == 4


def test_noise_is_standard_gumbel():
    noise = np.concatenate([gumbel(1, i, np.arange(1000)) for i in range(50)])
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.05


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=40), st.integers(0, 10),
       st.floats(0.05, 1), st.floats(0, 0.9), st.floats(0.1, 3))
def test_truncation_always_leaves_the_best_token(values, top_k, top_p, min_p, temperature):
    logits = np.array(values)
    left = candidates(logits, SamplingParams(temperature, top_k, top_p, min_p), NO_HISTORY, 0)
    assert int(np.argmax(logits)) in left.ids
    assert top_k == 0 or len(left.ids) <= max(top_k, 1)


def test_penalties_follow_llama_cpp():
    history = np.array([0, 0, 3, 5], np.int32)
    params = SamplingParams(repeat_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5,
                            repeat_last_n=3)
    scores = candidates(LOGITS, params, history, 3).scores
    assert scores[0] == pytest.approx(2.0 / 2 - 0.5 - 0.25)
    assert scores[3] == pytest.approx(0.0 - 0.5 - 0.25)
    assert scores[5] == pytest.approx(-1.5 * 2 - 0.5 - 0.25)
    assert scores[1] == 1.0
    everything = SamplingParams(frequency_penalty=1.0, repeat_last_n=-1)
    assert candidates(LOGITS, everything, history, 3).scores[0] == pytest.approx(0.0)


def test_rows_of_pictures_are_no_part_of_the_window_of_penalties():
    history = np.array([0, 3, *[NO_TOKEN] * 9, 5], np.int32)
    params = SamplingParams(repeat_penalty=2.0, presence_penalty=0.5, repeat_last_n=2)
    without = candidates(LOGITS, params, np.array([0, 3, 5], np.int32), 2).scores
    assert candidates(LOGITS, params, history, 11).scores.tolist() == without.tolist()


def test_log_probabilities_are_those_of_the_raw_logits():
    params = SamplingParams(0.5, top_k=2, n_logprobs=3, logit_bias=((7, 100.0),))
    choice = choose(LOGITS, params, NO_HISTORY, 0)
    raw = LOGITS.astype(float) - np.log(np.exp(LOGITS.astype(float)).sum())
    assert choice.token == 7
    assert choice.logprob == pytest.approx(raw[7])
    assert [i for i, _ in choice.top] == [0, 1, 2]
    assert choice.top[0][1] == pytest.approx(raw[0])


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=40), st.data(),
       st.sampled_from([0.0, 0.7]), st.integers(0, 5), st.floats(0.3, 1), st.floats(0, 0.5))
def test_a_mask_is_a_vocabulary_without_the_other_tokens(values, data, temperature, top_k, top_p,
                                                         min_p):
    """The tokens that are allowed are chosen among as if no others were there."""
    logits = np.array(values)
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=1, max_size=len(values) + 3)))
    params = SamplingParams(temperature, top_k, top_p, min_p, key=5, logit_bias=((0, 3.0), (1, -2)))
    ids = np.flatnonzero(allowed[: len(values)])
    token = choose(logits, params, NO_HISTORY, 3, allowed).token
    biased = logits.copy()
    biased[0] += 3.0
    biased[1] -= 2.0
    # banning by a bias of minus infinity is another way to the same choice
    others = tuple((i, -np.inf) for i in range(len(values)) if i not in set(ids.tolist()))
    if not ids.size:
        assert token == NO_TOKEN
    elif top_k <= len(ids):
        banned = SamplingParams(temperature, top_k, top_p, min_p, key=5,
                                logit_bias=(*params.logit_bias, *others))
        assert token == choose(logits, banned, NO_HISTORY, 3).token
    if temperature == 0 and ids.size:
        assert token == ids[np.argmax(biased[ids])]
    left = candidates(logits, params, NO_HISTORY, 3, allowed)
    assert set(left.ids.tolist()) <= set(ids.tolist())


def test_no_token_has_no_log_probability():
    choice = choose(LOGITS, SamplingParams(n_logprobs=3), NO_HISTORY, 0, np.zeros(8, bool))
    assert (choice.token, choice.logprob, choice.top) == (NO_TOKEN, None, ())
    few = choose(LOGITS, SamplingParams(n_logprobs=1), NO_HISTORY, 0, np.array([False, True]))
    assert few.token == 1
    assert few.top[0][0] == 0


def test_a_mask_comes_after_penalties_and_before_truncation():
    allowed = np.array([False, True, True, True, False, False, False, False])
    params = SamplingParams(1.0, top_k=2, presence_penalty=5.0)
    left = candidates(LOGITS, params, np.array([1, 1], np.int32), 1, allowed)
    assert sorted(left.ids.tolist()) == [2, 3]


# --- large vocabularies, of which not every token is looked at ------------------------------------


def vocabulary(seed, size, spread, ties):
    """Logits float32[size]; with ties many are equal."""
    values = np.random.default_rng(seed).normal(0.0, spread, size)
    return (np.round(values) if ties else values).astype(np.float32)


LARGE = {"seed": st.integers(0, 10**6), "size": st.sampled_from([127, 300, 8192, 17_000, 40_001]),
         "spread": st.sampled_from([0.0, 0.1, 1.0, 3.0, 9.0]), "ties": st.booleans()}


@given(**LARGE, temperature=st.sampled_from([0.0, 0.1, 0.8, 1.0, 3.0]),
       key=st.integers(0, 2**64 - 1),
       change=st.sampled_from([{}, {"top_k": 40}, {"top_k": 7, "top_p": 0.6}, {"top_p": 0.9},
                               {"top_p": 1e-9}, {"min_p": 0.05}, {"repeat_penalty": 1.3},
                               {"logit_bias": ((3, 40.0), (5, -np.inf))},
                               {"bans": ((-1, -1, 7),)}]))
def test_the_choice_is_the_best_of_all_candidates(seed, size, spread, ties, temperature, key,
                                                  change):
    logits, history = vocabulary(seed, size, spread, ties), np.arange(9, dtype=np.int32)
    params = SamplingParams(temperature, key=key, **change)
    everyone = candidates(logits, params, history, 8)
    assert choose(logits, params, history, 8).token == everyone.best()
    if not change:
        most = everyone.ranked(8)[0].tolist()
        assert best_shares(logits, params, history, 8, count=8)[0].tolist() == most
        assert [i for i, _ in likeliest(logits, params, 8, 8).top] == most


@given(**LARGE, top_p=st.floats(0.01, 0.999))
def test_top_p_takes_the_likeliest_until_it_has_enough(seed, size, spread, ties, top_p):
    logits = vocabulary(seed, size, spread, ties)
    order = np.lexsort((np.arange(size), -logits))
    p = np.exp(logits[order].astype(float) - logits.max())
    mass = np.cumsum(p / p.sum())
    wanted = int(np.searchsorted(mass, top_p)) + 1
    found = candidates(logits, SamplingParams(1.0, top_p=top_p), NO_HISTORY, 0).ids
    near = np.abs(mass[max(wanted - 2, 0) : wanted] - top_p).min() < 1e-6
    assert set(found.tolist()) == set(order[: len(found)].tolist())
    assert len(found) == wanted or (near and abs(len(found) - wanted) <= 1)


@given(**LARGE, count=st.integers(1, 64), margin=st.sampled_from([0.0, 2.0, 9.0]),
       temperature=st.sampled_from([0.3, 1.0]), key=st.integers(0, 2**64 - 1))
def test_contenders_are_the_best_and_who_is_near(seed, size, spread, ties, count, margin,
                                                 temperature, key):
    logits = vocabulary(seed, size, spread, ties)
    everyone = candidates(logits, SamplingParams(temperature, key=key), NO_HISTORY, 0)
    ids, scores = contenders(logits, temperature, key, 0, count=count, margin=margin)
    assert np.array_equal(scores, everyone.scores[ids])
    least = min(everyone.ranked(count)[1][-1], everyone.scores.max() - margin)
    assert set(np.flatnonzero(everyone.scores >= least).tolist()) <= set(ids.tolist())


def test_a_shortlist_is_short_and_holds_every_tie():
    logits = vocabulary(1, 49_152, 3.0, ties=False)
    logits[[5, 40_000]] = logits.max() + 1.0
    assert shortlist(logits, 1).tolist() == [5, 40_000]
    assert len(shortlist(logits, 64)) < 200
    assert shortlist(logits[:200], 8) is None
    assert shortlist(np.full(49_152, np.nan, np.float32), 8) is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("allowed", [None, np.arange(30_000) % 3 > 0])
def test_shares_are_those_of_the_softmax_of_all_scores(temperature, allowed):
    logits = vocabulary(2, 30_000, 3.0, ties=False)
    params = SamplingParams(temperature, key=4)
    scores = candidates(logits, params, NO_HISTORY, 0, allowed).scores
    wanted = np.sort(np.exp(scores - scores.max()))[::-1][:8] / np.exp(scores - scores.max()).sum()
    found = best_shares(logits, params, NO_HISTORY, 0, allowed, count=8)[1]
    assert found == pytest.approx(wanted, rel=1e-5 if not temperature else 0.1)
    nobody = np.zeros(30_000, np.bool_)
    ids, shares = best_shares(logits, params, NO_HISTORY, 0, nobody, count=8)
    assert (ids.size, shares.size) == (0, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("limits", [{}, {"top_k": 40, "top_p": 0.95}])
@pytest.mark.parametrize("size", [5000, 100])
def test_tokens_that_a_head_cannot_propose_have_no_share(temperature, limits, size):
    """Their logits are -inf; all of those that a grammar leaves may be."""
    params = SamplingParams(temperature, key=3, **limits)
    logits = np.full(size, -np.inf, np.float32)
    few = np.array([3, 70, 90])
    logits[few] = np.random.default_rng(1).standard_normal(3)
    for allowed in (None, np.ones(size, np.bool_)):
        ids, shares = best_shares(logits, params, NO_HISTORY, 5, allowed, count=8)
        assert 0 < len(ids) == len(set(ids.tolist()) & set(few.tolist()))
        assert shares.sum() == pytest.approx(1.0)
    ids, shares = best_shares(logits, params, NO_HISTORY, 5, np.arange(size) > 90, count=8)
    assert (ids.size, shares.size) == (0, 0)
