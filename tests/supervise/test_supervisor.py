"""The loop that performs what the life cycle returns, over jobs that are no processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from benchmarks import states
from pipeinfer.errors import UsageError
from pipeinfer.server.orders import Hold, ServerState, Sleep
from pipeinfer.supervise import supervisor as module
from pipeinfer.supervise.supervisor import JobSource, Move, Phase, Supervisor

#: phases, and what followed them in these tests; an end follows each
SEEN = set()
ENDS = (Phase.ENDING, Phase.STOPPED)


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """The picture of the phases, which is declared, has every transition that occurs."""
    enter, now = Supervisor._enter, set()

    def watch(supervisor, phase):
        before = supervisor.phase
        enter(supervisor, phase)
        if supervisor.phase not in (before, *ENDS):
            now.add((before, supervisor.phase))

    monkeypatch.setattr(Supervisor, "_enter", watch)
    yield
    SEEN.update(now)
    assert {(a.name, b.name) for a, b in now} <= declared()


def declared():
    return {(a.name, b.name) for a, others in states.PHASES.items() for b in others}


class Job:
    """Runs until it is ended. status: its exit status; None: that of `interrupt`, 5, or 143."""

    def __init__(self, status=None):
        self._status, self._ended = status, asyncio.Event()

    def interrupt(self, *, at_once):
        self._status = 5
        self._ended.set()

    def end(self):
        self._status = 143
        self._ended.set()

    def kill(self):
        raise AssertionError("it has ended by itself")

    async def run(self):
        if self._status is None:
            await self._ended.wait()
        return self._status


class Jobs(JobSource):
    """A source of jobs, which end by themselves with these exit statuses, or not (None)."""

    name, settings = "test-no-such-job", "old"

    def __init__(self, *statuses):
        self._statuses, self.began = list(statuses), []
        self.rested = 0

    def job(self):
        self.began.append(self.settings)
        return Job(self._statuses.pop(0))

    def take(self, settings):
        self.settings = settings

    def ask_hosts(self):
        return ["all hosts answer"]

    def facts(self):
        return {"settings": self.settings}

    def error(self):
        return "no memory"

    def rest(self):
        self.rested += 1


class Door:
    """An HTTP process that has this state."""

    def __init__(self, state):
        self._state, self.orders = state, []

    async def open(self):
        pass

    async def close(self):
        pass

    async def ask(self, order):
        self.orders.append(type(order))
        await asyncio.sleep(0)
        return ServerState(state=self._state)


def supervise(jobs, act, restarts=0, door=None):
    """Run them; `act(supervisor)` meanwhile. The exit status and what was printed."""
    said = []

    async def run():
        supervisor = Supervisor(jobs, restarts, door, said.append)
        acting = asyncio.create_task(act(supervisor))
        status = await asyncio.wait_for(supervisor.run(), 30)
        await acting
        assert supervisor.phase is Phase.STOPPED
        return status

    return asyncio.run(run()), said


async def until(true):
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


async def until_it_runs(supervisor, job):
    await until(lambda: supervisor.running == job)
    supervisor.ready(job)


async def moved(supervisor):
    """Order a move; the future of its answer."""
    order = supervisor.order()
    await supervisor.due(Move("moved", "new"), order)
    return order


def test_a_move_that_fails_comes_back_and_a_second_one_is_done():
    jobs = Jobs(None, 3, None, None)

    async def act(supervisor):
        await until_it_runs(supervisor, 1)
        answer = await moved(supervisor)
        await until_it_runs(supervisor, 3)
        failure = ("the changed job does not start (exit code 3; no memory): back to what there "
                   "was before")
        assert (await answer, supervisor.failed_move) == (failure, failure)
        assert [row["settings"] for row in supervisor.history] == ["old", "new", "old"]
        assert [row["exit"] for row in supervisor.history] == [143, 3, None]
        assert [row.get("moved") for row in supervisor.history] == [True, False, None]
        answer = await moved(supervisor)
        await until_it_runs(supervisor, 4)
        assert (await answer, supervisor.failed_move) == ("", "")
        supervisor.stop()

    status, said = supervise(jobs, act)
    assert (status, jobs.began) == (5, ["old", "new", "old", "new"])
    assert said[0] == "moved; 0 open requests wait"


def test_an_end_before_the_first_job_is_there():
    async def act(supervisor):
        supervisor.stop()

    jobs = Jobs()
    assert supervise(jobs, act) == (130, [])
    assert jobs.began == []


def test_a_job_that_fails_starts_again_on_the_hosts_that_answer():
    async def act(supervisor):
        await until_it_runs(supervisor, 2)
        supervisor.stop()

    status, said = supervise(Jobs(6, None), act, restarts=2)
    assert (status, said[1:]) == (5, ["all hosts answer"])
    assert said[0].startswith("the job has ended with exit code 6: starting again in 1 s (1 more")


def test_a_hang_up_counts_once_and_lets_requests_end():
    """The terminal's end and the shell each send one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    asked = []

    async def run():
        supervisor = Supervisor(Jobs(None), 0, None, [].append)
        running = asyncio.create_task(supervisor.run())
        await until_it_runs(supervisor, 1)
        supervisor._job.interrupt = lambda *, at_once: asked.append(at_once)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        assert asked == [False]
        supervisor._job.end()
        return await asyncio.wait_for(running, 30)

    try:
        assert asyncio.run(run()) == 143
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_job_that_dies_while_a_move_is_prepared_starts_again_as_it_was():
    async def act(supervisor):
        await until_it_runs(supervisor, 1)
        order = supervisor.order()
        with pytest.raises(UsageError, match="is being moved already"):
            supervisor.order()
        supervisor._job.end()
        assert await order == "the job has ended meanwhile"
        await supervisor.due(Move("late", "new"), order)  # which changes nothing
        await until_it_runs(supervisor, 2)
        supervisor.stop()

    jobs = Jobs(None, None)
    assert supervise(jobs, act, restarts=1)[0] == 5
    assert jobs.began == ["old", "old"]


@pytest.mark.parametrize("last", ["serves", "is late", "ends", "is stopped"])
def test_a_next_job_that_is_not_ready_in_time_ends_and_the_one_before_comes_back(
        monkeypatch, last):
    monkeypatch.setattr(module, "LIMIT", 1.5)  # enough for a start on a busy machine

    async def act(supervisor):
        await until_it_runs(supervisor, 1)
        order = await moved(supervisor)
        await until(lambda: supervisor.running == 3)
        assert supervisor.phase is Phase.RETURNING
        with pytest.raises(UsageError, match="is being moved already"):
            supervisor.order()
        if last == "serves":
            supervisor.ready(3)
        elif last == "is stopped":
            supervisor.stop()
        elif last == "ends":
            supervisor._job.end()
        assert (await order).startswith("the changed job is not ready after 1.5 s")
        assert supervisor.phase is {
            "serves": Phase.READY, "is late": Phase.STARTING, "is stopped": Phase.ENDING}.get(
                last, supervisor.phase)
        supervisor.stop()

    jobs = Jobs(None, None, None)
    status, _ = supervise(jobs, act)
    assert status == (143 if last == "ends" else 5)
    assert jobs.began == ["old", "new", "old"]


def test_a_model_that_does_not_fit_waits_for_a_host():
    async def act(supervisor):
        await until(lambda: supervisor.phase is Phase.WAITING)
        with pytest.raises(UsageError, match="is not ready"):
            supervisor.order()
        supervisor.host_came()
        await until_it_runs(supervisor, 2)
        supervisor.stop()

    jobs = Jobs(4, None)
    jobs.waits = True
    assert supervise(jobs, act)[0] == 5


@pytest.mark.parametrize(("restarts", "status", "says"), [
    (1, 6, ["starting again in 1 s", "all hosts answer", "every restart is used up"]),
    (0, 137, ["killed by signal 9"]), (5, 0, []), (5, 2, [])])
def test_what_is_said_of_the_last_end(restarts, status, says):
    async def act(supervisor):
        pass

    found, said = supervise(Jobs(*[status] * (restarts + 1)), act, restarts)
    assert found == status
    assert [part in line for part, line in zip(says, said, strict=True)] == [True] * len(says)


def test_a_server_that_ends_without_a_word_has_failed():
    """A launcher returns 0 for ranks that were killed before they had met."""
    async def act(supervisor):
        pass

    jobs = Jobs(0, 0)
    jobs.serves = True
    found, said = supervise(jobs, act, restarts=1)
    assert found == 6
    assert "have ended without an error: were they killed" in said[0]
    assert "starting again in 1 s" in said[0]
    assert "every restart is used up" in said[-1]


def test_a_start_that_loses_a_machine_ends_at_once_and_costs_no_restart():
    async def act(supervisor):
        await until(lambda: supervisor.running == 1)
        assert supervisor.start_seconds > 0
        supervisor.lose_host("old2 is gone: the connection is lost", excused=True)
        await until_it_runs(supervisor, 2)
        assert supervisor.start_seconds == 0
        supervisor.lose_host("old3 is gone", excused=True)  # the running job finds that itself
        assert supervisor.phase is Phase.READY
        supervisor._job.end()
        await until_it_runs(supervisor, 3)
        assert [row.get("lost") for row in supervisor.history] == [
            "old2 is gone: the connection is lost", "old3 is gone", None]
        supervisor.stop()

    status, said = supervise(Jobs(None, None, None), act)
    assert status == 5
    assert said[0] == "the job cannot start: old2 is gone: the connection is lost"
    assert "the job has ended: old3 is gone: starting again in 1 s, which costs no restart" in said


def test_a_move_that_loses_a_machine_comes_back():
    async def act(supervisor):
        await until_it_runs(supervisor, 1)
        order = await moved(supervisor)
        await until(lambda: supervisor.running == 2)
        supervisor.lose_host("old2 is gone", excused=True)
        await until_it_runs(supervisor, 3)
        assert "the changed job cannot start (old2 is gone): back to" in await order
        supervisor.stop()

    jobs = Jobs(None, None, None)
    assert supervise(jobs, act)[0] == 5
    assert jobs.began == ["old", "new", "old"]


def test_a_pause_ends_with_the_supervisor():
    async def act(supervisor):
        await until(lambda: supervisor.phase is Phase.PAUSING)
        supervisor.stop()

    assert supervise(Jobs(6), act, restarts=3)[0] == 130


@pytest.mark.parametrize("state", ["asleep", "restarting", ""])
def test_a_job_that_sleeps_starts_again_on_the_hosts_that_answer(state):
    """Also if a request has come since, or no answer: what follows is the same."""
    jobs = Jobs(None, None, None)

    async def act(supervisor):
        supervisor.wake()  # nothing sleeps
        await supervisor.sleep()  # nothing is ready
        for number in (1, 2):
            await until_it_runs(supervisor, number)
            await supervisor.sleep()
            assert supervisor.phase is Phase.RETIRING
            await until(lambda: supervisor.phase is Phase.ASLEEP)
            assert (supervisor.running, jobs.rested) == (0, number)
            with pytest.raises(UsageError, match="the next request wakes it"):
                supervisor.order()
            supervisor.wake()
        await until_it_runs(supervisor, 3)
        assert [row.get("slept") for row in supervisor.history] == [True, True, None]
        supervisor.stop()

    status, said = supervise(jobs, act, door=Door(state))
    assert status == 5  # without restarts, too
    assert said == ["no request comes: the job ends until the next one", "all hosts answer"] * 2


def test_a_job_does_not_sleep_when_a_request_has_come_meanwhile():
    door = Door("ready")

    async def act(supervisor):
        await until_it_runs(supervisor, 1)
        job = supervisor._job
        await supervisor.sleep()
        assert (supervisor.phase, supervisor._job) == (Phase.READY, job)
        supervisor.stop()

    jobs = Jobs(None)
    assert supervise(jobs, act, door=door) == (5, [])
    assert (door.orders[0], set(door.orders[1:]) <= {Hold}, jobs.rested) == (Sleep, True, 0)


@pytest.mark.parametrize("when", [Phase.RETIRING, Phase.ASLEEP])
def test_a_supervisor_ends_while_its_job_sleeps(when):
    jobs = Jobs(None)

    async def act(supervisor):
        jobs.rest = supervisor.stop if when is Phase.RETIRING else jobs.rest
        await until_it_runs(supervisor, 1)
        await supervisor.sleep()
        if when is Phase.ASLEEP:
            await until(lambda: supervisor.phase is when)
            supervisor.stop()

    assert supervise(jobs, act, door=Door("asleep"))[0] == 130
    assert jobs.began == ["old"]


@pytest.mark.parametrize("then", [Phase.PAUSING, Phase.WAITING])
@pytest.mark.parametrize("when", [Phase.READY, Phase.ORDERED, Phase.RETURNING])
def test_a_job_that_ends_waits_for_a_moment_or_for_a_host(when, then):
    """For a host, if those that remain cannot hold the model."""
    jobs = Jobs(None, *[3, None] * (when is Phase.RETURNING), None)
    jobs.waits = True

    async def act(supervisor):
        await until_it_runs(supervisor, 1)
        if when is Phase.RETURNING:
            await moved(supervisor)
            await until(lambda: supervisor.phase is when)
            await until(lambda: supervisor.running == 3)
        elif when is Phase.ORDERED:
            supervisor.order()
        assert supervisor.phase is when
        number, job = supervisor.number, supervisor._job
        job._status = 4 if then is Phase.WAITING else 6
        job._ended.set()
        await until(lambda: supervisor.phase is then)
        supervisor.host_came()
        await until_it_runs(supervisor, number + 1)
        supervisor.stop()

    assert supervise(jobs, act, restarts=1)[0] == 5


def test_an_order_with_nothing_to_move_is_withdrawn():
    async def act(supervisor):
        await until_it_runs(supervisor, 1)
        order = supervisor.order()
        supervisor.withdraw(order)
        assert (supervisor.phase, await order) == (Phase.READY, "")
        supervisor.stop()

    assert supervise(Jobs(None), act)[0] == 5


def test_every_transition_of_the_picture_occurs(request):
    """The last test here: those before have to have run."""
    chosen = {item.name.partition("[")[0] for item in request.session.items
              if item.path == Path(__file__)}
    if left := {name for name in globals() if name.startswith("test_")} - chosen:
        pytest.skip(f"{len(left)} tests are left out")
    assert {(a.name, b.name) for a, b in SEEN} == declared()
