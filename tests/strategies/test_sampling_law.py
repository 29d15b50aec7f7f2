"""Speculation does not change the law of the text (docs/algorithms.md 2.4).

A toy target over 8 tokens, the exact joint law of the next three tokens by enumeration, 20,000
draws with and without speculation (a draft that is right most of the time, several runs in
flight), chi-square with pooled rare cells, and a negative control.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.core.noise import noise_key
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import candidates
from pipeinfer.core.types import ALL_SEQS, END, SamplingParams, make_rows
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.draft_model import DraftModel
from tests.rig.toy import ToyBackend, ToySpec, draft_of
from tests.support.driver import Driver

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


def exact_law():
    backend = ToyBackend.load(SPEC)
    law = {}
    steps: dict[tuple[int, ...], np.ndarray] = {}
    for length in range(COUNT):
        for tail in itertools.product(range(SPEC.n_vocab), repeat=length):
            path = PROMPT + tail
            backend.seq_rm(ALL_SEQS, 0, END)
            logits = backend.decode(make_rows(
                [(t, i, (0,), i == len(path) - 1) for i, t in enumerate(path)]))
            steps[tail] = step_law(logits[0])
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


@pytest.mark.full("the law of one token by 8,000 draws in tests/core/test_sampling.py; every "
                  "policy writes what plain decoding writes with the same noise in "
                  "tests/scheduler/test_scheduler.py")
@pytest.mark.parametrize("policy", [Policy.ITERATIVE, Policy.PIPEINFER])
def test_the_joint_law_of_three_tokens(law, policy):
    limits = Limits(n_ctx=64, policy=policy, exact_width=4, credit=4, p_min=0.0, draft_max=2,
                    branches=2, p_split=0.2)
    draft = DraftModel(ToyBackend.load(draft_of(SPEC, 0.8)))
    driver = Driver(limits, ToyBackend.load(SPEC), draft)
    counts: dict[tuple[int, ...], int] = {}
    speculated = 0
    for seed in range(DRAWS):
        out = driver.generate(PROMPT, structs.replace(SAMPLING, key=noise_key(seed)), COUNT)
        text = tuple(token for token, _ in out)
        counts[text] = counts.get(text, 0) + 1
        speculated += sum(s for _, s in out)
    assert excess(counts, law) < 4
    assert (speculated > DRAWS) == (policy is Policy.PIPEINFER)


def test_a_wrong_law_is_noticed(law):
    rng = np.random.default_rng(0)
    texts = list(law)
    p = np.array(list(law.values()))
    p = np.where(p > np.quantile(p, 0.99), p * 1.1, p)
    drawn = rng.choice(len(texts), DRAWS, p=p / p.sum())
    counts = {texts[i]: int(n) for i, n in zip(*np.unique(drawn, return_counts=True), strict=True)}
    assert excess(counts, law) > 4
