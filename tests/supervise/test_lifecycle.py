"""What a supervisor does after any order of events."""

from __future__ import annotations

import pytest
from hypothesis import event as note
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeinfer.supervise import lifecycle as on
from pipeinfer.supervise.lifecycle import (
    LIMIT,
    Answered,
    Due,
    Elapsed,
    HostCame,
    JobEnded,
    JobReady,
    Order,
    Phase,
    Stop,
)
from pipeinfer.supervise.rules import End, Patience
from tests.support.sample import examples

STATUS = st.sampled_from([1, 6, 137, 0, 2, 130, 4])
LIVED = st.sampled_from([0.5, 25.0, 700.0])
#: phases in which a process of the job may live
ALIVE = set(Phase) - {Phase.PAUSING, Phase.WAITING, Phase.STOPPED}


class World(RuleBasedStateMachine):
    """The jobs, orders and settings of a supervisor, whose events come in any order."""

    @initialize(restarts=st.integers(0, 4), waits=st.booleans())
    def start(self, restarts, waits):
        self.alive, self.exit = False, None
        self.orders, self.answers = 0, {}
        self.settings = self.wanted = 0  #: of the next job, and those that the last answer gave
        self.patience = Patience.of(restarts)
        self.state, actions = on.begin(restarts, waits=waits)
        self.perform(actions)

    def feed(self, event):
        before = self.state
        self.state, actions = on.next_state(before, event)
        note(f"{before.phase.name} {type(event).__name__}")
        self.perform(actions)

    def perform(self, actions):
        for action in actions:
            assert self.exit is None or (isinstance(action, Answered) and action.refused)
            match action:
                case on.Start():
                    assert not self.alive, "two jobs at a time"
                    self.alive = True
                case on.EndJob() | on.Interrupt():
                    assert self.alive
                case on.Apply():
                    self.settings = self.state.order
                case on.Restore():
                    self.settings = self.wanted
                case Answered(number, error):
                    assert number not in self.answers, "a second answer"
                    self.answers[number] = error
                    if not error and self.settings == number:
                        self.wanted = number
                case on.Exit(status):
                    assert not self.alive
                    self.exit = status
                case on.Announce() | on.Wait() | on.Say() | on.Admit():
                    pass

    @rule(status=STATUS, lived=LIVED)
    @precondition(lambda self: self.alive)
    def job_ends(self, status, lived):
        phase, self.alive = self.state.phase, False
        meant = phase in (Phase.MOVING, Phase.TRYING, Phase.FAILING, Phase.ENDING)
        lacks = self.state.waits and status == 4
        if not meant and not lacks:
            self.patience, verdict = self.patience.after(status, lived)
        self.feed(JobEnded(status, lived, "why"))
        if phase is Phase.ENDING:
            assert self.exit == status
        if not meant and lacks:
            assert self.state.phase is Phase.WAITING
        elif not meant:
            assert self.exit == (status if isinstance(verdict, End) else None)
            assert self.state.patience == self.patience

    @rule(late=st.booleans())
    def job_serves(self, late):
        self.feed(JobReady(self.state.job - late))

    @rule(late=st.booleans())
    def time_is_over(self, late):
        self.feed(Elapsed(self.state.job - late))

    @rule()
    def a_host_comes(self):
        waiting = self.state.phase is Phase.WAITING
        self.feed(HostCame())
        assert self.alive or not waiting

    @rule()
    def a_move_is_ordered(self):
        self.orders += 1
        self.feed(Order(self.orders))

    @rule(back=st.integers(0, 2))
    def a_move_is_due(self, back):
        self.feed(Due(max(1, self.orders - back)))

    @rule(back=st.integers(0, 2), why=st.sampled_from(["", "requests still run"]))
    def a_move_is_withdrawn(self, back, why):
        self.feed(on.Withdraw(max(1, self.orders - back), why))

    @rule(at_once=st.booleans(), really=st.integers(0, 9))
    def the_user_stops_it(self, at_once, really):
        if really == 9:  # else few stories would be longer than this
            self.feed(Stop(at_once))

    @rule(how=st.sampled_from(["serves", "ends", "is late"]))
    def it_goes_on(self, how):
        """What comes next in each phase, so that moves get to their ends."""
        match self.state.phase:
            case Phase.STARTING:
                self.job_serves(False)
            case Phase.READY:
                self.a_move_is_ordered()
            case Phase.ORDERED:
                self.a_move_is_due(0)
            case Phase.MOVING | Phase.FAILING:
                self.job_ends(137, 9.0)
            case Phase.PAUSING:
                self.time_is_over(False)
            case Phase.WAITING:
                self.a_host_comes()
            case Phase.TRYING | Phase.RETURNING if how == "serves":
                self.job_serves(False)
            case Phase.TRYING | Phase.RETURNING if how == "ends":
                self.job_ends(6, 1.0)
            case Phase.TRYING | Phase.RETURNING:
                self.time_is_over(False)

    @rule(how=st.sampled_from(["serves", "ends", "is late"]))
    def it_goes_on_for_long(self, how):
        for _ in range(4):
            self.it_goes_on(how)

    @invariant()
    def there_is_a_job_where_it_should_be(self):
        assert self.alive == (self.state.phase in ALIVE)

    @invariant()
    def every_order_but_the_one_in_progress_has_its_answer(self):
        open_one = {self.state.order} - {0}
        assert set(self.answers) == set(range(1, self.orders + 1)) - open_one

    @invariant()
    def without_a_move_the_settings_are_those_of_the_last_one_that_was_done(self):
        if not self.state.order and self.state.phase not in (Phase.ENDING, Phase.STOPPED):
            assert self.settings == self.wanted

    def teardown(self):
        if not hasattr(self, "state"):
            return
        for _ in range(2):  # the second one changes nothing about the end
            self.feed(Stop())
        if self.alive:
            assert self.state.phase is Phase.ENDING
            self.alive = False
            self.feed(JobEnded(5, 1.0))
            assert self.exit == 5
        assert self.state.phase is Phase.STOPPED
        assert self.exit is not None
        assert set(self.answers) == set(range(1, self.orders + 1))
        for event in (Stop(), JobReady(self.state.job), Elapsed(self.state.job), JobEnded(1, 1.0)):
            assert on.next_state(self.state, event) == (self.state, ())


TestAnyOrderOfEvents = World.TestCase
TestAnyOrderOfEvents.settings = settings(examples(300), stateful_step_count=40)


def after(*events, restarts=3):
    """The last state and the actions of the last event."""
    state, actions = on.begin(restarts)
    for event in events:
        state, actions = on.next_state(state, event)
    return state, actions


MOVED = (JobReady(1), Order(1), Due(1), JobEnded(143, 9.0))


def test_a_move_ends_the_job_and_starts_the_next_one():
    assert after(*MOVED[:3])[1] == (on.Announce(), on.EndJob())
    state, actions = after(*MOVED)
    assert (state.phase, actions) == (Phase.TRYING, (on.Apply(), on.Start(), on.Wait(LIMIT, 2)))
    state, actions = after(*MOVED, JobReady(2))
    assert (state.phase, actions) == (Phase.READY, (Answered(1),))


@pytest.mark.parametrize(("events", "says"), [
    ((JobEnded(3, 1.0, "no such file"),), "the changed job does not start (exit code 3; no such "),
    ((Elapsed(2), JobReady(2), JobEnded(143, 601.0)), "the changed job is not ready after 600 s")])
def test_where_the_next_job_does_not_start_the_one_before_comes_back(events, says):
    state, actions = after(*MOVED, *events)
    assert state.phase is Phase.RETURNING
    said, *rest = actions
    assert said.text.startswith(says)
    assert rest == [on.Restore(), on.Announce(back=True), on.Start(), on.Wait(LIMIT, 3)]
    for last in (JobReady(3), Elapsed(3), JobEnded(1, 1.0), Stop()):
        then, actions = after(*MOVED, *events, last)
        assert actions[0] == Answered(1, said.text)
        assert then.phase is {JobReady: Phase.READY, Elapsed: Phase.STARTING,
                              JobEnded: Phase.PAUSING, Stop: Phase.ENDING}[type(last)]


@pytest.mark.parametrize(("events", "says"), [
    ((), "the job is not ready"), ((JobReady(1), Order(1)), "the job is being moved already"),
    (MOVED, "the job is being moved already"), ((JobReady(1), Stop()), "the job is not ready")])
def test_an_order_at_another_time_is_refused(events, says):
    state, (answer,) = after(*events, Order(7))
    assert (answer.order, answer.refused, answer.error.startswith(says)) == (7, True, True)
    assert state == after(*events)[0]


def test_a_job_that_dies_while_a_move_is_prepared_starts_again_as_it_was():
    state, actions = after(JobReady(1), Order(1), JobEnded(6, 30.0))
    assert state.phase is Phase.PAUSING
    assert actions[:2] == (on.Admit(), Answered(1, "the job has ended meanwhile"))
    assert actions[-1] == on.Wait(1.0, 1)
    assert after(JobReady(1), Order(1), JobEnded(6, 30.0), Elapsed(1))[1] == (on.Start(again=True),)


def test_an_end_that_the_user_wants_is_no_failure():
    assert after(Stop(), JobEnded(6, 1.0))[1] == (on.Exit(6),)
    assert after(JobEnded(6, 1.0), Stop())[1] == (on.Exit(130),)
    assert after(Stop(), Stop(True))[1] == (on.Interrupt(True),)
