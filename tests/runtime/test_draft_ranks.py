"""A draft on a rank of its own names what a draft on rank 0 does."""

from __future__ import annotations

import random
import threading
import time

import pytest
from msgspec import structs

from pipeinfer.core.control import DraftSetup
from pipeinfer.core.drafting import Proposal
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import ClusterError, ModelError, TransportTimeout
from pipeinfer.runtime.draft_rank import DraftRank
from pipeinfer.runtime.drafts import DraftPosts, DraftTeam, RemoteDraft
from pipeinfer.scheduler.events import Drafted
from pipeinfer.strategies.proposers.draft_model import DraftModel
from pipeinfer.transport.inproc import local_ports
from tests.kit.drafting import job as kit_job
from tests.kit.toy import ToyBackend, ToySpec

SPEC = ToySpec(n_vocab=12, n_layers=3, n_embd=8, seed=2)
SECONDS = 20.0
SETUP = DraftSetup("draft", "toy", "", 512, 64, 64, 4, 12, {}, {})


class ToyLoader:
    """Loads the toy model; none other."""

    def __init__(self, n_ctx=512):
        self.n_ctx = n_ctx

    def backend(self, setup):
        if setup.model != "toy":
            raise ModelError(f"{setup.model} does not exist: copy it")
        return ToyBackend.load(SPEC, n_ctx=self.n_ctx), 1

    def proposer(self, setup, backend):
        return DraftModel(backend, setup.n_vocab, paths=setup.paths)


class Rank:
    """A thread that is the draft's rank 1."""

    def __init__(self, model="toy", n_ctx=512):
        self.head, self.port = local_ports(2)
        self.running, self.setup = True, structs.replace(SETUP, model=model)
        self.draft = RemoteDraft(DraftPosts(self.head), {1: self.setup})
        self.thread = threading.Thread(target=self.work, args=(n_ctx,), daemon=True)
        self.thread.start()

    def work(self, n_ctx):
        one = DraftRank(self.port, 1, ToyLoader(n_ctx))
        while self.running:
            if not one.step():
                self.port.wait(0.01)
        one.close()

    def __enter__(self):
        if self.setup.model == "toy":
            self.draft.await_ready(SECONDS)
        return self

    def __exit__(self, *_):
        self.running = False
        self.thread.join(SECONDS)

    def answer(self, draft=None):
        deadline = time.monotonic() + SECONDS
        while (found := (draft or self.draft).take()) is None:
            assert time.monotonic() < deadline
            self.head.wait(0.01)
        return found


def job(accepted, suffix=(), number=1, **change):
    return kit_job(accepted, suffix, job_id=number, **change)


def test_guesses_are_those_of_a_draft_on_rank_0():
    rng = random.Random(1)
    with Rank(n_ctx=96) as ranks:  # so few cells that paths give way to others
        accepted, lane, params = [3, 1], 0, SamplingParams()
        for number in range(60):
            accepted = accepted + [rng.randrange(12) for _ in range(rng.randrange(3))]
            if rng.random() < 0.15 or len(accepted) > 30:
                lane, accepted = lane + 1, accepted[: rng.randrange(1, 6)]
                params = SamplingParams(rng.choice([0.0, 0.8]), key=lane)
            wanted = job(accepted, [rng.randrange(12) for _ in range(rng.randrange(4))], number,
                         lane=lane, params=params, branches=rng.choice([1, 3]), p_split=0.05,
                         alternatives=rng.choice([0, 2]))
            ranks.draft.start(wanted)
            found = ranks.answer()
            alone = DraftModel(ToyBackend.load(SPEC)).propose(wanted, lambda: False)
            assert (found.job_id, found.proposals) == (number, alone)
        assert ranks.draft.busy_seconds > 0


def test_a_stopped_job_is_not_answered_and_the_next_one_is():
    with Rank() as ranks:
        for number in range(1, 6):
            ranks.draft.start(job([3, 1], number=number))
        for number in range(1, 5):
            ranks.draft.stop(number)
        answers = [ranks.answer()]
        while answers[-1].job_id != 5:  # the first ones may have been done
            answers.append(ranks.answer())
        assert ranks.draft.idle
        assert ranks.draft.take() is None


def test_a_lane_that_begins_anew_leaves_jobs_asked_before_as_they_were():
    head, port = local_ports(2)
    draft = RemoteDraft(DraftPosts(head), {1: SETUP})
    rank = DraftRank(port, 1, ToyLoader())
    assert rank.step()
    draft.await_ready(SECONDS)
    asked = [job([3, 1, 4, 1, 5], number=1), job([3, 1, 4, 1, 5, 9], number=2),
             job([3, 1], number=3, params=SamplingParams(0.8, key=7)),
             job([3, 1, 2], number=4, params=SamplingParams(0.8, key=7))]
    for one in asked:
        draft.start(one)
    while rank.step():
        pass
    for one in asked:
        alone = DraftModel(ToyBackend.load(SPEC)).propose(one, lambda: False)
        found = draft.take()
        assert (found.job_id, found.proposals) == (one.job_id, alone)


def test_numbers_of_jobs_may_come_again():
    """Another policy in the same job: a new scheduler counts from 1, over the same ranks."""
    with Rank() as ranks:
        for _ in range(5):
            before = ranks.draft
            for number in (1, 2, 3):
                before.start(job([3, 1], number=number))
            ranks.head.wait(0.005)
            ranks.draft = RemoteDraft(DraftPosts(ranks.head), {1: ranks.setup})
            ranks.draft.await_ready(SECONDS)
            before.close(SECONDS)
            ranks.draft.start(job([3, 1, 4], number=2))
            found = ranks.answer()
            wanted = DraftModel(ToyBackend.load(SPEC)).propose(job([3, 1, 4]), lambda: False)
            assert (found.job_id, found.proposals) == (2, wanted)


def test_a_draft_that_cannot_be_loaded_is_said_with_its_rank_and_exit_code():
    with Rank(model="elsewhere") as ranks:
        with pytest.raises(ClusterError, match=r"rank 1 on .* cannot draft: elsewhere does not"
                           ) as caught:
            ranks.draft.await_ready(SECONDS)
        assert caught.value.exit_code == ModelError.exit_code
        ranks.draft.start(job([3, 1]))
        assert ranks.answer() == Drafted(1, ())


def test_waiting_for_a_rank_that_says_nothing_has_an_end():
    head, *_ = local_ports(2)
    draft = RemoteDraft(DraftPosts(head), {1: SETUP})
    with pytest.raises(TransportTimeout, match="DraftReady"):
        draft.await_ready(0.05)


class Quick:
    """A draft on rank 0 that answers when it is told to."""

    free, local, busy_seconds = False, True, 0.0

    def __init__(self):
        self.answers, self.asked, self.stopped = [], [], []

    def start(self, job):
        self.asked.append(job.job_id)

    def stop(self, job_id):
        self.stopped.append(job_id)

    def take(self):
        return self.answers.pop(0) if self.answers else None

    @property
    def has_news(self):
        return bool(self.answers)

    def close(self, timeout):
        pass


def test_of_two_drafts_the_quick_one_answers_where_the_better_one_is_too_slow():
    with Rank() as ranks:
        quick = Quick()
        team = DraftTeam((quick, ranks.draft))
        team.slot = lambda: 1e-9  # stages are quicker than any draft
        team.start(job([3, 1], number=0))
        ranks.answer(team)  # from here on the better one's speed is known
        team.start(job([3, 1], number=1))
        team.start(job([3, 1], [2], number=2))
        quick.answers = [Drafted(1, (Proposal(-1, 7),)), Drafted(2, ())]
        assert ranks.answer(team).job_id == 1
        assert ranks.answer(team).proposals  # the quick one proposed nothing for the other


def test_a_better_draft_that_keeps_up_with_the_stages_is_waited_for():
    with Rank() as ranks:
        quick = Quick()
        team = DraftTeam((quick, ranks.draft))
        team.slot = lambda: 1e3
        team.start(job([3, 1], number=1))
        assert ranks.answer(team).proposals
        for number in (2, 3):
            team.start(job([3, 1], [2], number=number, max_tokens=(0, 4)[number - 2]))
            quick.answers = [Drafted(number, (Proposal(-1, 7, 0.05),))]
            found = ranks.answer(team)
            assert found.job_id == number
            guesses = {one.token for one in found.proposals}
            assert guesses == {7} if number == 2 else len(found.proposals) == 4
        assert quick.stopped == [1, 2, 3]


class Better(Quick, RemoteDraft):
    """The same, but elsewhere: it takes a job when it is idle."""

    local, idle = False, True


@pytest.mark.parametrize("proposals", [(), (Proposal(-1, 7, 0.5),)])
def test_an_answer_that_waits_is_given_when_another_job_takes_its_place(proposals):
    """Of several requests at once: the better draft takes the newest job alone."""
    quick, better = Quick(), Better()
    better.idle = False
    team = DraftTeam((quick, better))
    team.slot = lambda: 1e3  # the better draft keeps up, so it is waited for
    for number in (1, 2):
        team.start(job([3, 1], number=number, lane=number))
        quick.answers = [Drafted(number, proposals)]
        if number == 1:
            assert team.take() is None
    assert team.has_news
    found = team.take()
    assert (found.job_id, found.proposals) == (1, proposals)
    assert team.take() is None  # that of 2 goes on waiting


@pytest.mark.parametrize(("branches", "tokens"), [(1, {2}), (2, {2, 7})])
def test_a_job_for_trees_gets_the_tree_of_both_drafts(branches, tokens):
    """As SpecInfer merges those of its small models, before anything is verified."""
    quick, better = Quick(), Better()
    better.idle = True
    team = DraftTeam((quick, better))
    team.start(job([3, 1], number=1, branches=branches))
    better.idle = False
    quick.answers = [Drafted(1, (Proposal(-1, 7, 0.3),))]
    assert team.take() is None
    better.answers = [Drafted(1, (Proposal(-1, 2, 0.6), Proposal(0, 4, 0.9)))]
    found = team.take()
    assert {one.token for one in found.proposals if one.parent < 0} == tokens


def test_a_better_draft_that_is_first_is_the_answer():
    with Rank() as ranks:
        quick = Quick()
        team = DraftTeam((quick, ranks.draft))
        team.start(job([3, 1], number=1))
        assert ranks.answer(team).proposals
        assert quick.stopped == [1]
        quick.answers = [Drafted(1, (Proposal(-1, 7),))]
        assert team.take() is None


# --- three of them ----------------------------------------------------------------------------


def three(**seconds):
    """A quick local member, and two elsewhere; the last one is the best."""
    members = Quick(), Better(), Better()
    return DraftTeam(members), *members


def test_of_three_the_free_one_elsewhere_gets_every_job():
    team, _, middle, best = three()
    middle.free = True
    team = DraftTeam((middle, best))
    for number in (1, 2, 3):
        team.start(job([3, 1], number=number, free_only=number == 2))
        best.idle = False
    assert middle.asked == [1, 2, 3]
    assert best.asked == [1]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_every_job_of_three_gets_one_answer(seed, local):
    """Whatever the order of answers, withdrawals and jobs that take others' places.

    local: whether one of them gets every job. A request waits for ever for one that nobody answers.
    """
    rng = random.Random(seed)
    members = Quick() if local else Better(), Better(), Better()
    team = DraftTeam(members)
    team.slot = lambda: rng.choice([0.0, 1e-9, 1e3])
    answered, withdrawn = set(), set()

    def hear():
        while (found := team.take()) is not None:
            assert found.job_id not in withdrawn | answered
            answered.add(found.job_id)

    def answer(k):
        one = members[k]
        if one.asked:
            number = one.asked.pop(0)
            one.idle = True
            if number not in one.stopped:
                one.answers.append(Drafted(number, rng.choice([(), (Proposal(
                    -1, k, rng.choice([0.5, 0.99])),)]), 1, 1.0))

    for number in range(1, 40):
        team.start(job([3, 1], number=number, lane=rng.randrange(3)))
        for one in members[local:]:
            one.idle = not one.asked
        for _ in range(rng.randrange(4)):
            answer(rng.randrange(3))
            rng.random() < 0.5 and hear()
        if rng.random() < 0.2 and (gone := rng.randint(1, number)) not in answered:
            withdrawn.add(gone)
            team.stop(gone)
    while any(one.asked for one in members) or team.has_news:
        answer(rng.randrange(3))
        hear()
    assert answered == set(range(1, 40)) - withdrawn


def test_a_job_at_a_rank_whose_draft_failed_later_is_answered():
    """Another choice of proposers could not be loaded, and the former one goes on."""
    with Rank() as ranks:
        other = RemoteDraft(DraftPosts(ranks.head), {
            1: structs.replace(ranks.setup, model="elsewhere")})
        with pytest.raises(ClusterError, match="elsewhere does not exist"):
            other.await_ready(SECONDS)
        ranks.draft.start(job([3, 1]))
        assert ranks.answer() == Drafted(1, ())
