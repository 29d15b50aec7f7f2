"""Jobs that start again by themselves: the launch scripts with a launcher that fails, and a real
server whose rank 0 is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import requests

from pipeinfer.cluster import cleanup
from tests.kit import launch
from tests.kit.served import Served

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
RUN = str(launch.ROOT / "launch" / "run")
MPIRUN = """#!/usr/bin/env bash
case "$*" in --version) echo "Open MPI 5.0"; exit ;; esac
echo "$PIPEINFER_JOB $$" >>"$FAKE/starts"
exec "$FAKE/try" "$(wc -l <"$FAKE/starts")"
"""


def script(path, text):
    path.write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def fake(tmp_path):
    """A launcher that runs `try N` for its N-th start."""
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "mpirun", MPIRUN)
    return tmp_path


def start(fake, attempt, restarts, *command):
    script(fake / "try", attempt)
    env = launch.environment(FAKE=str(fake), PIPEINFER_MPIRUN=str(fake / "bin" / "mpirun"),
                             PIPEINFER_RESTARTS=str(restarts))
    env.pop("PIPEINFER_JOB", None)
    env["PATH"] = f"{fake / 'bin'}{os.pathsep}{env['PATH']}"
    return subprocess.Popen(command or [RUN, "3", "generate"], env=env, text=True,
                            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                            start_new_session=True, preexec_fn=launch._heed_interrupts)


def outcome(process):
    """Exit code and standard error."""
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # closes the pipe, too
        raise
    return process.returncode, err


def starts(fake):
    return len((fake / "starts").read_text().splitlines())


def test_a_failed_job_starts_again_until_it_ends_well(fake):
    code, err = outcome(start(fake, "codes=(0 6 137 0); exit ${codes[$1]}", 5))
    assert (code, starts(fake)) == (0, 3)
    assert "exit code 6: starting again in 1 s (4 more after that)" in err
    assert ("killed by signal 9 (SIGKILL), maybe by the kernel for want of memory: starting again "
            "in 2 s") in err


def test_a_job_that_was_killed_says_so_without_restarts(fake):
    code, err = outcome(start(fake, "kill -SEGV $$", 0))
    assert code == 139
    assert "has ended with exit code 139: killed by signal 11 (SIGSEGV)\n" in err
    code, err = outcome(start(fake, "exit 6", 0))
    assert (code, "has ended with" in err) == (6, False)


def test_tries_end(fake):
    code, err = outcome(start(fake, "exit 6", 1))
    assert (code, starts(fake)) == (6, 2)
    assert "every restart is used up" in err


@pytest.mark.parametrize(("restarts", "status"), [(0, 6), (3, 0), (3, 2), (3, 130)])
def test_what_is_not_tried_again(fake, restarts, status):
    code, err = outcome(start(fake, f"exit {status}", restarts))
    assert (code, starts(fake)) == (status, 1)
    assert "starting again" not in err


def test_a_number_of_restarts_that_is_none(fake):
    code, err = outcome(start(fake, "exit 6", "often"))
    assert code == 2
    assert "--restarts" in err
    assert "'often' is not a valid integer" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_somebody_ended_stays_ended(fake, number):
    process = start(fake, 'trap "exit 5" USR1 TERM; mkfifo "$FAKE/fifo"; exec 3<>"$FAKE/fifo"\n'
                          'echo up >"$FAKE/up"; for _ in {1..60}; do read -r -t 1 -u 3; done', 3)
    deadline = time.monotonic() + 30
    while not (fake / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    code, err = outcome(process)
    assert (code, starts(fake)) == (5, 1), err


def test_nothing_of_the_try_before_lives_on(fake):
    """A stopped process, which nothing short of SIGKILL ends."""
    waiter = f'{sys.executable} -c "import time; time.sleep(600)"'
    code, err = outcome(start(fake, f"""
if [ $1 = 1 ]; then
    setsid {waiter} 2>/dev/null & echo $! >"$FAKE/pid"
    until [ "$(cut -d' ' -f6 /proc/$!/stat)" = $! ]; do sleep 0.02; done  # out of the session
    kill -STOP $!; exit 6
fi
state=$(grep ^State: "/proc/$(cat "$FAKE/pid")/status" 2>/dev/null)
case "$state" in ""|*zombie*) exit 0 ;; esac
exit 9""", 1))
    assert code == 0, err
    assert "killed 1 processes that the previous job left" in err
    (job,) = {line.split()[0] for line in (fake / "starts").read_text().splitlines()}
    assert cleanup.processes_of(job) == []


# --- Slurm ------------------------------------------------------------------------------------


def slurm(fake, attempt, restarts, before):
    """The batch script with a fake srun; what it asks of scontrol."""
    script(fake / "bin" / "srun", 'case " $* " in *" -c "*) exit 0 ;; esac\n'
                                  'echo "$*" >>"$FAKE/starts"; exec "$FAKE/try" 1')
    script(fake / "bin" / "scontrol", 'echo "$*" >>"$FAKE/asked"')
    os.environ["SLURM_NTASKS"], os.environ["SLURM_JOB_ID"] = "3", "77"
    os.environ["SLURM_RESTART_COUNT"], os.environ["PIPEINFER_ROOT"] = str(before), str(launch.ROOT)
    try:
        process = start(fake, attempt, restarts,
                        str(launch.ROOT / "launch" / "slurm.sbatch"), "serve")
    finally:
        for name in ("SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PIPEINFER_ROOT"):
            del os.environ[name]
    code, err = outcome(process)
    asked = fake / "asked"
    return code, err, asked.read_text().split() if asked.exists() else []


@pytest.mark.parametrize(("status", "restarts", "before", "asks"), [
    (6, 2, 0, True), (137, 2, 1, True), (6, 2, 2, False), (6, 0, 0, False), (0, 2, 0, False),
    (2, 2, 0, False), (130, 2, 0, False)])
def test_a_failed_slurm_job_goes_back_into_the_queue(fake, status, restarts, before, asks):
    code, err, asked = slurm(fake, f"exit {status}", restarts, before)
    assert asked == (["requeue", "77"] if asks else []), err
    assert code == (0 if asks else status)
    assert starts(fake) == 1


def test_the_batch_script_may_be_requeued():
    text = (launch.ROOT / "launch" / "slurm.sbatch").read_text()
    assert "\n#SBATCH --requeue\n" in text
    assert "\n#SBATCH --open-mode=append\n" in text


# --- a real server ----------------------------------------------------------------------------


ASK = {"prompt": "import os\n", "temperature": 0.8, "seed": 5, "ignore_eos": True,
       "pipeinfer": {"detail": True}}


def tokens(served):
    status, answer = served.post("/v1/completions", {**ASK, "max_tokens": 24})
    assert status == 200, answer
    return answer["pipeinfer"]["tokens"]


class Stream(threading.Thread):
    """Reads the tokens of a long stream."""

    def __init__(self, served):
        super().__init__(daemon=True)
        self.tokens, self.last, self.ends = [], {}, 0
        self._answer = requests.post(f"{served.url}/v1/completions", stream=True, timeout=90, json={
            **ASK, "max_tokens": 120, "stream": True})
        self.start()

    def run(self):
        with self._answer:
            for line in self._answer.iter_lines():
                if line.startswith(b"data: {"):
                    self.last = json.loads(line[6:])
                    self.tokens += self.last.get("pipeinfer", {}).get("tokens", [])
                self.ends += line == b"data: [DONE]" or b'"error"' in line

    def ended(self):
        self.join(120)
        assert not self.is_alive()
        return self


def job_processes(job):
    """Ranks, the HTTP process and what they started; not the launcher and its helpers."""
    return {p.pid: p for p in cleanup.processes_of(job) if "python" in p.name()
            or "pipeinfer" in p.name()}


def rank_of(job, rank):
    """The process of a rank."""
    old = job_processes(job)
    (found,) = (p for p in old.values()
                if p.environ().get("OMPI_COMM_WORLD_RANK") == str(rank) and "serve" in p.cmdline()
                and p.parent().pid not in old)
    return found


def read(answer, enough=10**6):
    """A stream's events until it breaks off, or so many tokens are there: the number of the last
    one, the tokens, and the answer's id. The stream stays open."""
    last, found, name = -1, [], ""
    with contextlib.suppress(requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
        answer.lines = answer.iter_lines()  # which would close it if it went
        for line in answer.lines:
            if line.startswith(b"id: "):
                last = int(line[4:])
            elif line.startswith(b"data: {"):
                event = json.loads(line[6:])
                found += event.get("pipeinfer", {}).get("tokens", [])
                name = event["id"]
            if len(found) >= enough:
                break
    return last, found, name


@contextlib.contextmanager
def supervised(*more, ranks=3):
    """A real server under launch/run, which starts it again; its `job`. It is slow enough for what
    happens to a stream to come before its end."""
    job = f"test-{os.getpid()}-{time.monotonic_ns()}"
    process = launch.start([RUN, str(ranks), "serve", "--port", str(launch.free_port()), "-c",
                            "512", "-t", "1", "--hook", "pace=60", *more],
                           timeout=200, PIPEINFER_RESTARTS="2", PIPEINFER_JOB=job)
    served = Served(process)
    served.job = job
    try:
        served.wait_until_ready()
        yield served
        process.send_signal(signal.SIGTERM)
        assert served.end(60) == 0, "".join(served.log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        cleanup.end(job)
        process.wait(20)
        process.stdout.close()
        served._reader.join(10.0)
        process.stderr.close()


def test_streams_go_on_with_the_same_tokens_when_the_head_is_killed():
    with supervised() as served:
        wanted, whole = tokens(served), Stream(served).ended().tokens
        assert len(whole) == 120
        disturbed = Stream(served)
        served.until(lambda: len(disturbed.tokens) > 5, "tokens")
        old = job_processes(served.job)
        rank_of(served.job, 0).kill()
        alive = psutil.wait_procs(old.values(), timeout=10)[1]
        assert not alive, alive
        assert disturbed.ended().tokens == whole
        assert disturbed.last["timings"]["restarts_n"] == 1
        assert disturbed.last["timings"]["same_arithmetic"] is True
        assert not set(old) & {p.pid for p in job_processes(served.job).values()} - {
            served.process.pid}
        assert tokens(served) == wanted
        assert "starting again in 1 s" in "".join(served.log)


def test_a_repeated_request_gets_the_rest_after_the_http_process_is_killed(tmp_path):
    """Two clients of a server with a journal, at temperature 1: one has given its request a name,
    the other knows the answer's id."""
    body = {**ASK, "max_tokens": 120, "stream": True, "temperature": 1.0, "seed": 11}
    with supervised("--journal", str(tmp_path / "journal"), ranks=2) as served:
        url = f"{served.url}/v1/completions"
        whole = read(requests.post(url, json=body, stream=True, timeout=90))[1]
        assert len(whole) == 120
        named = {"Idempotency-Key": "the one"}
        streams = [requests.post(url, json=body, headers=named, stream=True, timeout=90),
                   requests.post(url, json=body, stream=True, timeout=90)]
        (first, begun, _), (_, _, name) = (read(stream, 6) for stream in streams)
        door = served.door()
        door.kill()
        psutil.wait_procs([door], timeout=10)
        served.until(lambda: served.health()[0] == 200, "the server", 90)
        rest = requests.post(url, json=body, stream=True, timeout=90,
                             headers=named | {"Last-Event-ID": str(first)})
        assert begun + read(rest)[1] == whole
        again = requests.get(f"{url}/{name}", timeout=90).json()
        assert again["pipeinfer"]["tokens"] == whole
        assert again["timings"]["restarts_n"] == 1
        assert again["timings"]["same_arithmetic"] is True
        for stream in (*streams, rest):
            stream.lines.close()
            stream.close()
