"""The loop that performs what the life cycle returns, over jobs that are no processes."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from pipeinfer.supervise.lifecycle import JobReady, Phase
from pipeinfer.supervise.supervisor import JobChange, Supervisor


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


class Jobs:
    """A source of jobs, which end by themselves with these exit statuses, or not (None)."""

    name, logs_at, hostfile, waits = "test-no-such-job", "its logs", "", False

    def __init__(self, *statuses):
        self._statuses, self.settings, self.began = list(statuses), "old", []

    def job(self):
        self.began.append(self.settings)
        return Job(self._statuses.pop(0))

    def ask_hosts(self):
        return ["all hosts answer"]

    def facts(self):
        return {"settings": self.settings}

    def error(self):
        return "no memory"


def supervise(jobs, act, restarts=0):
    """Run them; `act(supervisor)` meanwhile. The exit status and what was printed."""
    said = []

    async def run():
        supervisor = Supervisor(jobs, restarts, None, said.append)
        acting = asyncio.create_task(act(supervisor))
        status = await asyncio.wait_for(supervisor.run(), 30)
        await acting
        assert supervisor.state.phase is Phase.STOPPED
        return status

    return asyncio.run(run()), said


async def until_it_runs(supervisor, job):
    async with asyncio.timeout(20):
        while supervisor.running != job:
            await asyncio.sleep(0.01)
    supervisor.feed(JobReady(job))


async def moved(supervisor, jobs):
    """Order a move; the future of its answer."""
    number, answer = supervisor.order()
    supervisor.due(number, JobChange("moved", lambda: setattr(jobs, "settings", "new"),
                                     lambda: setattr(jobs, "settings", "old")))
    return answer


def test_a_move_that_fails_comes_back_and_a_second_one_is_done():
    jobs = Jobs(None, 3, None, None)

    async def act(supervisor):
        await until_it_runs(supervisor, 1)
        answer = await moved(supervisor, jobs)
        await until_it_runs(supervisor, 3)
        failure = ("the changed job does not start (exit code 3; no memory): back to what there "
                   "was before")
        assert (await answer, supervisor.failed_move) == (failure, failure)
        assert [row["settings"] for row in supervisor.history] == ["old", "new", "old"]
        assert [row["exit"] for row in supervisor.history] == [143, 3, None]
        assert [row.get("moved") for row in supervisor.history] == [True, False, None]
        answer = await moved(supervisor, jobs)
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


@pytest.mark.parametrize(("last", "at_once"), [((), False), ((signal.SIGHUP,), True)])
def test_a_hang_up_counts_once_and_lets_requests_end_unless_it_is_a_chat(last, at_once):
    """The terminal's end and the shell each send one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    asked = []

    async def run():
        supervisor = Supervisor(Jobs(None), 0, None, [].append, last=last)
        running = asyncio.create_task(supervisor.run())
        await until_it_runs(supervisor, 1)
        supervisor._job.interrupt = lambda *, at_once: asked.append(at_once)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        assert asked == [at_once]
        supervisor._job.end()
        return await asyncio.wait_for(running, 30)

    try:
        assert asyncio.run(run()) == 143
    finally:
        signal.signal(signal.SIGHUP, before)
