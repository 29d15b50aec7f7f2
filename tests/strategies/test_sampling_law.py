"""The noise of positions is independent: texts have the target's law (docs/algorithms.md 2.4).

A toy target over 8 tokens, the exact joint law of the next three tokens by enumeration, 20,000
draws, chi-square with pooled rare cells, and a negative control. That speculation writes what plain
decoding writes with the same noise is shown in tests/scheduler/test_scheduler.py.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.core.sampling import candidates, choose, noise_key
from pipeinfer.core.types import SamplingParams, make_rows
from tests.kit.toy import ToyBackend, ToySpec

pytestmark = pytest.mark.slow
SPEC = ToySpec(n_vocab=8, n_layers=2, n_embd=8, seed=4)
PROMPT, COUNT, DRAWS = (3, 1), 3, 20_000
SAMPLING = SamplingParams(1.0, top_k=7, top_p=0.97, min_p=0.01)


def step_law(logits):
    """The law of one choice: the truncation of `candidates` with its noise left out."""
    kept = candidates(logits, SAMPLING, np.zeros(1, np.int32), 0).ids
    p = np.zeros(SPEC.n_vocab)
    p[kept] = np.exp(logits[kept].astype(float) - logits.max())
    return p / p.sum()


@functools.cache
def logits_after(tail):
    path = PROMPT + tail
    return ToyBackend.load(SPEC).decode(make_rows(
        [(t, i, (0,), i == len(path) - 1) for i, t in enumerate(path)]))[0]


def exact_law():
    law, steps = {}, {tail: step_law(logits_after(tail)) for length in range(COUNT)
                      for tail in itertools.product(range(SPEC.n_vocab), repeat=length)}
    for text in itertools.product(range(SPEC.n_vocab), repeat=COUNT):
        law[text] = np.prod([steps[text[:i]][text[i]] for i in range(COUNT)])
    return law


def excess(counts, law):
    """(chi-square - freedom) / its standard deviation, cells under 5 expected pooled."""
    cells, rare_seen, rare_expected = [], 0.0, 0.0
    for text, p in law.items():
        expected = p * DRAWS
        if expected < 5:
            rare_seen += counts.get(text, 0)
            rare_expected += expected
        else:
            cells.append((counts.get(text, 0) - expected) ** 2 / expected)
    if rare_expected > 0:
        cells.append((rare_seen - rare_expected) ** 2 / rare_expected)
    freedom = len(cells) - 1
    return (sum(cells) - freedom) / np.sqrt(2 * freedom)


@pytest.fixture(scope="module")
def law():
    return exact_law()


@pytest.mark.full("the law of one token by 8,000 draws in tests/core/test_sampling.py")
def test_the_joint_law_of_three_tokens(law):
    counts = {}
    for seed in range(DRAWS):
        params, text = structs.replace(SAMPLING, key=noise_key(seed)), ()
        while len(text) < COUNT:
            text += (choose(logits_after(text), params, np.zeros(1, np.int32),
                            len(PROMPT) + len(text) - 1).token,)
        counts[text] = counts.get(text, 0) + 1
    assert excess(counts, law) < 4


def test_a_wrong_law_is_noticed(law):
    rng = np.random.default_rng(0)
    texts = list(law)
    p = np.array(list(law.values()))
    p = np.where(p > np.quantile(p, 0.99), p * 1.1, p)
    drawn = rng.choice(len(texts), DRAWS, p=p / p.sum())
    counts = {texts[i]: int(n) for i, n in zip(*np.unique(drawn, return_counts=True), strict=True)}
    assert excess(counts, law) > 4
