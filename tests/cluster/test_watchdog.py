"""The process that kills a rank which hangs: real processes, stopped, busy, gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeinfer.cluster import launch as job
from pipeinfer.cluster import watchdog
from pipeinfer.config import JobConfig
from pipeinfer.runtime.pulse import Pulse

pytestmark = pytest.mark.slow
SECONDS = 0.8  #: of silence after which a rank is killed
LONG = 30.0  #: more than anything here takes

RANK = f"""
import os, sys, time
from pipeinfer.cluster.watchdog import Watchdog
from pipeinfer.runtime.pulse import Pulse
pulse = Pulse(float(sys.argv[1]))
pulse.loading = False
dog = Watchdog("rank 7", {SECONDS}, pulse)
print(dog._process.pid, flush=True)
def beats(seconds, doing="computes"):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pulse.beat(doing)
        time.sleep(0.02)
def armed():
    dog.arm()
    beats({SECONDS / 2})  # the first byte is on its way
    print("armed", flush=True)
def works(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
"""


class Rank:
    """A process that runs `body` with a watchdog beside it. dog: that process."""

    def __init__(self, body, deadline=float("inf")):
        self.child = subprocess.Popen(
            [sys.executable, "-c", RANK + body, str(deadline)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.dog = psutil.Process(int(self.child.stdout.readline()))

    def says(self):
        return self.child.stdout.readline().strip()

    def stop(self):
        self.child.send_signal(signal.SIGSTOP)

    def end(self):
        """Its exit status and what was written to its standard error, watchdog included.

        Its standard input is closed first.
        """
        _, errors = self.child.communicate(timeout=LONG)
        return self.child.returncode, errors

    def dog_is_gone(self):
        """Waits for the watchdog to end; it has no parent left to collect it."""
        deadline = time.monotonic() + LONG
        while time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                if self.dog.is_running() and self.dog.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.02)
                    continue
            return True
        return False

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGKILL)
        self.child.wait(LONG)
        for pipe in (self.child.stdin, self.child.stdout, self.child.stderr):
            pipe.close()


@pytest.fixture
def rank():
    made = []

    def make(*args, **options):
        made.append(Rank(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_stopped_rank_is_killed_and_named(rank):
    stopped = rank("armed()\nbeats(60)")
    assert stopped.says() == "armed"
    stopped.stop()
    code, errors = stopped.end()
    assert code == -signal.SIGKILL
    assert "rank 7 on" in errors
    assert "has not responded for" in errors
    assert stopped.dog_is_gone()


def test_a_busy_rank_lives_and_its_watchdog_ends_with_it(rank):
    busy = rank(f"dog.arm()\nworks({4 * SECONDS})\nprint('done', flush=True)\nos._exit(3)")
    assert busy.says() == "done"
    code, errors = busy.end()
    assert (code, errors) == (3, "")
    assert busy.dog_is_gone()


STARVED = """
armed()
one = {min(os.sched_getaffinity(0))}
spinners, parent = [], os.getpid()
for _ in range(12):
    if not (pid := os.fork()):
        os.sched_setaffinity(0, one)
        while os.getppid() == parent:
            pass
        os._exit(0)
    spinners.append(pid)
for task in os.listdir("/proc/self/task"):  # the thread that writes the signs of life, too
    os.sched_setaffinity(int(task), one)
    os.setpriority(os.PRIO_PROCESS, int(task), 19)
sys.stdin.readline()  # until it gets a core again
for pid in spinners:
    os.kill(pid, 9)
print("done", flush=True)
os._exit(3)
"""


def test_a_rank_that_waits_for_a_core_lives(rank):
    """Twelve processes leave its core next to nothing; without a core it cannot write."""
    starved = rank(STARVED)
    assert starved.says() == "armed"
    time.sleep(4 * SECONDS)
    starved.child.stdin.write("go on\n")
    starved.child.stdin.flush()
    assert starved.says() == "done"
    assert starved.end() == (3, "")


def test_a_killed_rank_takes_its_watchdog_along(rank):
    killed = rank("armed()\nbeats(60)")
    killed.says()
    killed.child.kill()
    assert killed.end() == (-signal.SIGKILL, "")
    assert killed.dog_is_gone()


def test_the_watchdog_ends_when_closed_and_nobody_is_killed_afterwards(rank):
    closed = rank(f"dog.arm()\nbeats(0.2)\ndog.close()\nprint('closed', flush=True)\n"
                  f"beats({4 * SECONDS})\nos._exit(5)")
    assert closed.says() == "closed"
    assert closed.dog_is_gone()
    closed.stop()
    time.sleep(2 * SECONDS)
    closed.child.send_signal(signal.SIGCONT)
    assert closed.end() == (5, "")


def test_nothing_is_watched_before_it_is_armed(rank):
    early = rank("print('made', flush=True)\nsys.stdin.readline()\nos._exit(4)")
    assert early.says() == "made"
    early.stop()
    time.sleep(3 * SECONDS)
    assert early.child.poll() is None
    early.child.send_signal(signal.SIGCONT)
    assert early.end() == (4, "")
    assert early.dog_is_gone()


def test_a_rank_that_does_not_meet_the_others_in_time_is_killed(rank):
    code, errors = rank("hasty = Watchdog('rank 8', 9.0, pulse, 0.3)\nworks(60)").end()
    assert code == -signal.SIGKILL
    assert "rank 8 on" in errors
    assert "has been waiting in MPI_Init for more than 0 s" in errors


def test_a_watchdog_closed_before_it_is_armed_ends(rank):
    unarmed = rank("dog.close()\nos._exit(0)")
    assert unarmed.end() == (0, "")
    assert unarmed.dog_is_gone()


def test_a_patient_rank_may_stand_still_for_longer(rank):
    patient = rank(f"pulse.loading = True\ndog.arm()\nbeats({SECONDS})\n"
                   f"print('loads', flush=True)\nbeats({SECONDS})\nos._exit(6)")
    patient.says()
    patient.stop()
    time.sleep(2 * SECONDS)
    patient.child.send_signal(signal.SIGCONT)
    assert patient.end() == (6, "")


def test_a_rank_that_asks_for_patience_with_its_first_byte_gets_it():
    reads, pipe = os.pipe()
    victim = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG})"])
    dog = subprocess.Popen(
        [sys.executable, "-I", "-S", watchdog.__file__, str(reads), str(victim.pid), str(SECONDS),
         "rank 7"], pass_fds=(reads,), stderr=subprocess.DEVNULL)
    os.close(reads)
    try:
        os.write(pipe, b"p")
        time.sleep(3 * SECONDS)
        assert victim.poll() is None
    finally:
        os.close(pipe)
        dog.wait(LONG)
        victim.kill()
        victim.wait(LONG)


def test_a_patient_rank_that_does_not_come_back_is_killed_after_all(rank):
    patient = rank("pulse.loading = True\narmed()\nbeats(60)")
    patient.says()
    patient.stop()
    code, errors = patient.end()
    assert code == -signal.SIGKILL
    assert "has not responded" in errors


def test_a_main_thread_that_does_not_come_around_ends_its_rank(rank):
    hanging = rank("dog.arm()\nbeats(0.5, 'evaluates run 12')\nprint('stuck', flush=True)\n"
                   "time.sleep(60)", deadline=1.0)
    assert hanging.says() == "stuck"
    code, errors = hanging.end()
    assert code == -signal.SIGKILL
    assert "evaluates run 12 for more than 1 s" in errors


def ignored(pid):
    """Signals that a process ignores."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("SigIgn:"):
            mask = int(line.split()[1], 16)
            return {number for number in signal.Signals if mask >> (number - 1) & 1}
    raise AssertionError(pid)


def test_signals_for_the_rank_do_not_end_the_watchdog(rank):
    armed = rank("armed()\nbeats(60)")
    armed.says()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    deadline = time.monotonic() + LONG
    while not ignored(armed.dog.pid).issuperset(numbers):  # it is still starting
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for number in numbers:
        armed.dog.send_signal(number)
    armed.stop()
    assert armed.end()[0] == -signal.SIGKILL


def test_a_pulse_hangs_only_after_a_beat_and_past_its_deadline():
    assert Pulse(0.0).hangs == ""  # it has not begun
    endless = Pulse()
    endless.beat("waits")
    assert endless.hangs == ""
    pulse = Pulse(0.05)
    pulse.beat("loads layers")
    time.sleep(0.1)
    assert pulse.hangs == "loads layers"
    pulse.beat("computes")
    pulse.deadline = LONG
    assert pulse.hangs == ""


@pytest.mark.parametrize(("values", "seconds"), [
    ({}, watchdog.START_SECONDS), ({"model": "user/repo"}, 24 * 3600.0),
    ({"model": "user/repo", "offline": True}, watchdog.START_SECONDS)])
def test_ranks_wait_for_a_model_that_rank_0_fetches(monkeypatch, values, seconds):
    heard = []
    monkeypatch.setattr(job, "fetch", lambda config: heard.append("fetch"))
    monkeypatch.setattr(job, "watch_over", lambda config, pulse, start: heard.append(start))
    job.join(JobConfig.of(keep_binding=True, **values))
    assert heard == [*["fetch"] * (seconds > watchdog.START_SECONDS), seconds]


def test_a_rank_on_a_busy_machine_may_be_silent_for_longer():
    """Its own thread woke late, so a silence says little: three healthy stages were killed so."""
    pulse = Pulse()
    pulse.settle()
    pulse.slept(0.25, 0.4)
    assert not pulse.patient
    pulse.slept(0.25, 0.6)
    assert pulse.patient
