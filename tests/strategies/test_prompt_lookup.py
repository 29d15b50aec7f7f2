"""What is copied from a text, and that no proposal of any kind changes a token."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from pipeinfer.core.drafting import Proposal
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.proposers.prompt_lookup import AnswerPool, PromptLookup
from tests.kit.drafting import Fixed
from tests.kit.drafting import job as kit_job


def job(tokens, suffix=(), *, most=4, depth=9, stop=frozenset(), **changes):
    return kit_job(tokens, suffix, max_tokens=most, max_depth=depth, stop_ids=stop,
                   **{"alternatives": 2, "p_split": 0.02, **changes})


def ask(proposer, *args, **kwargs):
    return proposer.propose(job(*args, **kwargs), lambda: False)


def chain(proposals):
    return [p.token for p in proposals if not p.alternative]


def test_what_followed_last_time():
    text = [1, 2, 3, 4, 5, 9, 9, 2, 3]
    assert chain(ask(PromptLookup(), text)) == [4, 5, 9, 9]
    assert chain(ask(PromptLookup(), text, most=2)) == [4, 5]
    assert chain(ask(PromptLookup(), text, depth=1)) == [4]
    assert [p.parent for p in ask(PromptLookup(), text)] == [-1, 0, 1, 2]


def test_the_longest_agreement_wins_then_the_latest():
    text = [1, 2, 7, 0, 5, 2, 8, 0, 1, 2]
    assert chain(ask(PromptLookup(), text))[0] == 7  # "1 2" agrees, later "2" alone does too
    text = [6, 2, 7, 0, 5, 2, 8, 0, 1, 2]
    assert chain(ask(PromptLookup(), text))[0] == 8
    assert [p.token for p in ask(PromptLookup(), text) if p.alternative] == [7]


def test_guesses_in_flight_are_part_of_the_path():
    text = [1, 2, 3, 4, 5, 6, 0, 1]
    assert chain(ask(PromptLookup(), text, (2, 3))) == [4, 5, 6, 0]


def test_a_copy_runs_into_what_it_has_named_and_goes_on():
    assert chain(ask(PromptLookup(), [7, 1, 2, 1, 2], most=6)) == [1, 2, 1, 2, 1, 2]
    assert chain(ask(PromptLookup(), [7, 1, 2, 3, 1], (2, 3), most=5)) == [1, 2, 3, 1, 2]


def test_how_far_a_copy_is_trusted_is_learnt_from_what_was_accepted():
    def claim_after(answer):
        lookup = PromptLookup()
        ask(lookup, [1, 2, 3, 4])
        ask(lookup, [1, 2, 3, 4, *answer])
        return ask(lookup, [1, 2, 3, 4, *answer, 5, 1, 2, 3])[0].confidence

    fresh = ask(PromptLookup(), [1, 2, 3, 4, 1, 2, 3])[0].confidence
    repeats = [5, 1, 2, 3, 4] * 4
    turns = [x for k in range(5) for x in (5, 1, 2, 3, 10 + k)]
    assert claim_after(repeats) > fresh > claim_after(turns)


def test_what_costs_no_model_has_bounds_of_its_own():
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    asked = job(text, most=2, p_min=0.99)
    assert PromptLookup().propose(asked, lambda: False) == ()
    own = structs.replace(asked, free_max=4, free_min=0.5)
    found = PromptLookup().propose(own, lambda: False)
    assert [p.token for p in found if not p.alternative] == [4, 5, 6, 7]
    assert PromptLookup().propose(structs.replace(own, max_tokens=0), lambda: False) == ()


def test_nothing_where_nothing_repeats():
    assert ask(PromptLookup(), [1, 2, 3, 4]) == ()
    assert ask(PromptLookup(), [1, 2, 1], stop=frozenset({2})) == ()
    assert ask(PromptLookup(), [1, 2, 1], p_min=0.9) == ()
    assert ask(PromptLookup(), [1, 1, 1], most=0) == ()


def test_lanes_do_not_mix_and_the_index_grows():
    lookup = PromptLookup()
    assert chain(ask(lookup, [1, 2, 3, 1], lane=0))[0] == 2
    assert chain(ask(lookup, [1, 5, 3, 1], lane=1))[0] == 5
    assert chain(ask(lookup, [1, 2, 3, 1, 6, 0, 1], lane=0))[0] == 6


def written(proposer, lane, prompt, answer, pool):
    """Let a lane write its answer token by token."""
    for k in range(len(answer) + 1):
        ask(proposer, [*prompt, *answer[:k]], lane=lane, pool=pool)


def test_other_answers_of_a_pool_are_guessed_from_and_nobody_elses():
    lookup = PromptLookup()
    written(lookup, 0, [1, 2], [30, 31, 32, 33], pool=1)
    written(lookup, 1, [1, 2], [30, 31, 42, 43], pool=2)
    written(lookup, 2, [1, 2], [30, 31, 52, 53], pool=0)
    assert chain(ask(lookup, [7, 30, 31], lane=3, pool=1)) == [32, 33]  # and no further
    assert chain(ask(lookup, [7, 30, 31], lane=4, pool=2)) == [42, 43]
    assert ask(lookup, [7, 30, 31], lane=5, pool=0) == ()
    assert ask(lookup, [7, 30, 31], lane=6, pool=3) == ()
    assert ask(lookup, [8, 1, 2], lane=7, pool=1) == ()  # prompts are in no pool


def test_an_answer_is_not_another_one_of_its_pool():
    lookup = PromptLookup()
    written(lookup, 0, [1], [5, 6, 5], pool=1)
    found = ask(lookup, [1, 5, 6, 5], lane=0, pool=1)
    assert chain(found) == [6, 5, 6, 5]
    assert found[0].confidence == 0.2


def test_the_text_that_is_trusted_more_goes_out_and_the_other_is_an_alternative():
    lookup = PromptLookup()
    written(lookup, 0, [1], [5, 6, 7, 8], pool=1)
    found = ask(lookup, [7, 3, 5, 6, 7], lane=1, pool=1)  # its own text: 3 after 7, one agrees
    assert chain(found) == [8]
    assert [p.token for p in found if p.alternative] == [3]
    found = ask(lookup, [5, 6, 7, 4, 1, 2, 5, 6, 7], lane=2, pool=1)
    assert chain(found)[0] == 4  # as many agree in both
    assert [p.token for p in found if p.alternative] == [8]


def test_a_full_pool_forgets_its_oldest_answers():
    pool = AnswerPool(most=100)
    for lane in range(30):
        for token in range(10):
            pool.add(lane, 1000 * lane + token)
    assert pool.find([29_003], lane=-1).text[4] == 29_004
    assert pool.find([25_003], lane=-1) is not None
    assert pool.find([3], lane=-1) is None
    assert pool.find([19_003], lane=-1) is None
    assert sum(map(len, pool._index.tokens.values())) <= 100


def test_it_finds_what_a_plain_search_finds():
    rng = random.Random(1)
    for _ in range(300):
        text = [rng.randrange(4) for _ in range(rng.randint(2, 40))]
        found = ask(PromptLookup(), text, alternatives=0)
        best = None
        for size in range(len(text) - 1, 0, -1):
            for end in range(len(text) - 1, size - 1, -1):
                if best is None and text[end - size : end] == text[-size:]:
                    best = [(text + text[end:] * 4)[end + k] for k in range(4)]
        assert chain(found) == (best or [])


def test_several_ask_the_next_only_where_the_first_is_unsure():
    sure, unsure = Fixed(Proposal(-1, 3, 0.96)), Fixed(Proposal(-1, 3, 0.3), Proposal(0, 4, 0.3))
    big = Fixed(Proposal(-1, 7, 0.5), Proposal(0, 8, 0.5))
    assert ask(Cascade([sure, big]), [1]) == sure.proposals
    assert big.asked == 0
    both = ask(Cascade([unsure, big]), [1])
    assert chain(both) == [7, 8]
    assert [(p.token, p.parent) for p in both if p.alternative] == [(3, -1)]
    assert ask(Cascade([unsure, Fixed()]), [1]) == unsure.proposals
    both = Cascade([unsure, big])
    assert both.rows_evaluated == 2
    both.close()
    assert (unsure.asked, big.asked) == (-1, -1)


def test_the_likelier_word_goes_out_and_agreement_makes_it_likelier_still():
    first = Fixed(Proposal(-1, 3, 0.6), Proposal(0, 4, 0.6))
    doubtful, agrees = Fixed(Proposal(-1, 7, 0.4)), Fixed(Proposal(-1, 3, 0.5))
    found = ask(Cascade([first, doubtful]), [1])
    assert chain(found) == [3, 4]
    assert [(p.token, p.confidence) for p in found if p.alternative] == [(7, 0.4)]
    found = ask(Cascade([first, agrees]), [1])
    assert chain(found) == [3, 4]
    assert found[0].confidence == 1 - 0.4 * 0.5


def test_for_a_job_of_trees_the_trees_of_all_are_merged():
    """Each path once, the likeliest within the job's bounds, parents first."""
    first = Fixed(Proposal(-1, 3, 0.5), Proposal(-1, 4, 0.25), Proposal(0, 5, 0.5))
    other = Fixed(Proposal(-1, 4, 0.5), Proposal(0, 6, 0.9), Proposal(-1, 7, 0.1))

    def both(**bounds):
        return Cascade([first, other]).propose(structs.replace(job([1]), **bounds), lambda: False)

    def found(**bounds):
        return [(one.parent, one.token) for one in both(**bounds)]

    whole = [(-1, 4), (0, 6), (-1, 3), (2, 5), (-1, 7)]  # 4: named by both
    assert found(branches=4, max_tokens=9) == whole
    assert found(branches=4, max_tokens=3) == whole[:3]
    assert found(branches=2, max_tokens=9) == whole[:4]
    assert both(branches=2, max_tokens=1) == (Proposal(-1, 4, 1 - 0.75 * 0.5),)


def test_in_steps_it_names_the_same_and_only_models_take_steps():
    class Model(Fixed):
        def steps(self, job):
            yield 2
            return self.propose(job, lambda: False)

    steps = Cascade([PromptLookup(), Model(Proposal(-1, 9, 0.99))]).steps(job([1, 2, 3, 1]))
    assert next(steps) == 2
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert chain(end.value.value) == [9]
