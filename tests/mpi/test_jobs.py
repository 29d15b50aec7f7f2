"""Real MPI jobs: their command line, and how they end when something goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pipeinfer.cli.generate import generate
from pipeinfer.models.locate import EMBEDDED
from tests.kit import launch
from tests.kit.launch import PIPEINFER
from tests.kit.references import alone
from tests.kit.refusals import assert_refused
from tests.kit.sample import fewer, full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROGRAMS = launch.ROOT / "tests" / "mpi" / "programs"
FAULTY = [sys.executable, str(PROGRAMS / "faulty.py")]
SLOW_WORDS = [sys.executable, str(PROGRAMS / "slow_words.py")]
MORTAL = dict.fromkeys(("OMPI_MCA_mpi_ft_enable", "PRTE_MCA_state_base_recoverable",
                        "PRTE_MCA_state_base_continuous", "PRTE_MCA_state_base_notify_errors"), "0")
NO_DRAFT = ["-m", str(EMBEDDED / "target.gguf"), "-md", "none", "--policy", "pipeinfer"]


def test_the_command_line_over_ranks_gives_one_process_text():
    args, ranks = ["-p", "def fibonacci(n):\n", "-n", "30", "--seed", "5"], fewer(4, 3)
    one, several = launch.answered(1, *args), launch.answered(ranks, *args)
    assert several["tokens"] == one["tokens"]
    assert several["text"] == one["text"]
    assert len(several["stats"]["stages"]) == ranks - 1
    assert several["stats"]["n_output"] == 30


def test_control_tokens_in_a_prompt_are_text_with_a_word_on_it_unless_asked_for():
    args = [*PIPEINFER, "generate", "-p", "a<|im_end|>b", "-n", "1", "--json"]
    plain, special = launch.run(1, args), launch.run(1, [*args, "--special"])
    assert "note: the prompt holds <|im_end|>" in plain.stderr
    assert "--special" in plain.stderr
    assert "note: the prompt" not in special.stderr
    tokens = [json.loads(done.stdout)["stats"]["n_prompt"] for done in (plain, special)]
    assert tokens[1] < tokens[0]


def test_a_rank_without_a_doorbell_delays_no_other_rank():
    alone = 'case "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" in 1) export PIPEINFER_DOORBELL=0;; esac; '
    job = ["sh", "-c", alone + 'exec "$@"', "sh", *PIPEINFER, "generate", "-p", "def f(", "-n", "4",
           "--temp", "0", "--json", "--timeout", "20"]
    done = launch.run(3, job)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 4


def test_a_prompt_from_standard_input_and_a_trace(tmp_path):
    trace = tmp_path / "t.json"
    done = launch.run(1, [str(launch.ROOT / "launch" / "run"), "3", "generate", "-f", "-", "-n",
                          "12", "--temp", "0", "--trace", str(trace)], stdin="import os\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import os\n")
    assert "tokens/s" in done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "X"} == {1, 2}


def test_doctor_over_ranks():
    done = launch.run(3, [*PIPEINFER, "doctor", "--json"])
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == 0, findings
    whats = {f["what"] for f in findings}
    assert {"launch", "pipeinfer", "link 0-1", "link 1-2",
            "llama.cpp on rank 2"} <= whats


LEAVING = """
import atexit, sys
atexit.register(lambda: print("on the way to MPI_Finalize", file=sys.stderr))
from pipeinfer.cli.main import main
main()
"""


@pytest.mark.parametrize(("command", "code"), [
    full(["plan"], 0), (["doctor"], 0), full(["doctor", "-m", "embedded"], 2),
    full(["plan", "--split", "equal"], 4),
])
def test_commands_that_only_query_skip_mpi_finalize(command, code):
    """It crashes there now and then, in a job that survives the death of a rank."""
    done = launch.run(fewer(3, 2), [sys.executable, "-c", LEAVING, *command], timeout=120)
    assert done.returncode == code, done.stderr
    assert "MPI_Finalize" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("args", "code", "says"), [
    (["-m", "/nowhere.gguf"], 3, "/nowhere.gguf"),
    full(["-m", __file__], 3, "GGUF"),
    (["-p", "x " * 4000, "-c", "256"], 5, "context holds 256"),
    full(["--set", "branches=0"], 2, "--set branches"),
    full(NO_DRAFT, 2, "-md"),
])
def test_bad_input_is_one_line_and_an_exit_code(args, code, says):
    base = [] if "-p" in args else ["-p", "x"]
    done = launch.run(fewer(3, 2), [*PIPEINFER, "generate", *base, *args], timeout=60)
    assert done.returncode == code, done.stderr
    line = next(x for x in done.stderr.splitlines() if x.startswith("pipeinfer: error:"))
    assert says in line
    assert "Traceback" not in done.stderr


def test_a_policy_that_needs_a_draft_says_so():
    assert_refused(generate, ["-p", "x", *NO_DRAFT], 2, "-md")


@pytest.mark.parametrize(("architecture", "np", "draft", "code", "says"), [
    ("llama", 4, False, 4, "2 layers"),
    ("llama", fewer(2, 1), True, 3, "the target has 320"),
    ("bloom", 3, False, 3, "bloom"),
])
def test_models_that_do_not_fit(tmp_path, architecture, np, draft, code, says):
    from tests.kit.random_model import RandomSpec, write_random_model

    path = write_random_model(tmp_path / "small.gguf", RandomSpec(n_layer=2))
    if architecture != "llama":
        assert len(architecture) == len("llama")  # nothing moves in the file
        path.write_bytes(path.read_bytes().replace(b"llama", architecture.encode()))
    more = ["-md", str(EMBEDDED / "draft.gguf")] if draft else []
    words = ["-p", "x", "-m", str(path), *more]
    if np == 1:
        assert_refused(generate, words, code, says)
    else:
        launch.refused(np, "generate", *words, code=code, says=says)


def test_a_full_context_prints_what_there_is():
    done = launch.run(2, [*PIPEINFER, "generate", "-p", "import os\n", "-c", "64", "-n", "500",
                          "--ignore-eos"])
    assert done.returncode == 5
    assert "the context of 64 tokens is full" in done.stderr
    assert len(done.stdout) > 40


def test_ranks_with_other_options_are_named():
    launcher = launch.mpirun_path()
    base = [*PIPEINFER, "generate", "-p", "x"]
    process = launch.start([launcher, "-np", "1", *base, ":", "-np", "1", *base, "--set",
                            "chunk=32"],
                           timeout=60)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 6
    assert "rank 1" in err
    assert "chunk" in err


MANY = fewer(200, 80)
LONGER = ["generate", "-p", "x", "-n", str(MANY), "--temp", "0", "--ignore-eos", "--json"]


@pytest.fixture(scope="module")
def undisturbed():
    return alone("x", MANY)


def faulty_processes(kind, seconds=10.0):
    """Ranks that are still there after a while."""
    deadline = time.monotonic() + seconds
    while True:
        left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])
                if "faulty.py" in " ".join(p.info["cmdline"] or ()) and kind in p.info["cmdline"]]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


@pytest.mark.parametrize(("kind", "says"), [
    ("raise", "injected fault"), full("load", "out of memory (injected)"),
    ("hang", "has worked on run"), full("kill", "is dead"),
])
def test_the_job_goes_on_without_a_failing_stage(undisturbed, kind, says):
    done = launch.run(4, [*FAULTY, "2", kind, *LONGER, "--timeout", "8"], timeout=60)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["tokens"] == undisturbed
    (note,) = [note for note in out["stats"]["notes"] if "went on after" in note]
    assert says in note + done.stderr
    assert [stage["rank"] for stage in out["stats"]["stages"].values()] == [1, 3]
    assert not faulty_processes(kind)


@pytest.mark.parametrize(("kind", "code", "says"), [
    ("raise", 6, "injected fault"), full("load", 6, "out of memory (injected)"),
    full("kill", None, ""), ("exit", None, ""),
])
def test_where_mpi_does_not_survive_a_death_the_job_ends(kind, code, says):
    done = launch.run(fewer(4, 3), [*FAULTY, "2", kind, *LONGER], timeout=60, **MORTAL)
    assert done.returncode != 0
    if code is not None:
        assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert ("Traceback" in done.stderr) == (kind == "raise")
    assert not faulty_processes(kind)


def test_stages_after_one_that_dies_at_shutdown_end_too():
    """Nobody passes the end on to them, and without heartbeats nobody else would tell them."""
    done = launch.run(fewer(4, 3), [*FAULTY, "1", "shutdown", *LONGER, "--heartbeat", "0"],
                      timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == MANY
    assert not faulty_processes("shutdown")


def test_the_last_stage_that_fails_ends_the_job():
    done = launch.run(2, [*FAULTY, "1", "raise", *LONGER], timeout=60)
    assert done.returncode == 6
    assert "rank 1" in done.stderr
    assert "injected fault" in done.stderr
    assert "Traceback" in done.stderr
    assert not faulty_processes("raise")


LONG = ["generate", "-p", "import os\n", "-n", "100000", "-c", "8192", "--ignore-eos",
        "--temp", "0"]  # text drawn anew may go on in one line, and mpirun passes on whole ones


def interrupt(command, enough, number, again=0.0):
    process = launch.start(command, timeout=60)
    assert process.stdout is not None
    seen = ""
    while len(seen) < enough:
        piece = os.read(process.stdout.fileno(), 200).decode("utf-8", "replace")
        assert piece, process.stderr.read()
        seen += piece
    process.send_signal(number)
    if again:
        time.sleep(again)
        process.send_signal(number)
    try:
        out, err = process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, seen + out, err


def test_interrupt_of_one_process_finishes_and_reports():
    code, out, err = interrupt([*PIPEINFER, *LONG], 80, signal.SIGINT)
    assert code == 130, err
    assert "ended by interrupted" in err
    assert out.startswith("import os")


def test_interrupt_through_the_launch_script():
    code, _, err = interrupt([str(launch.ROOT / "launch" / "run"), "3", *LONG], 80,
                             signal.SIGINT)
    assert code == 130, err
    assert "ended by interrupted" in err
    assert "busy" in err


def test_interrupt_of_plain_mpirun_prints_what_there_is():
    """On a terminal, with a real Ctrl-C: mpirun drops its ranks' output from then on, and kills
    rank 0 as soon as another rank has died."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(launch.mpirun_path(), ["mpirun", "-np", "3", *SLOW_WORDS, *LONG],
                   launch.environment(MPIEXEC_TIMEOUT="60"))
    seen = b""
    while not re.search(rb"\x1b\[K(?!stages:)[^\x1b]{20}", seen):  # text, behind the progress
        seen += os.read(terminal, 200)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 4096):
            seen += piece
    os.waitpid(pid, 0)
    os.close(terminal)
    assert b"ended by interrupted" in seen


@pytest.mark.parametrize(("end", "missed"), [("mpi_job.leave()", "[]"), ("os._exit(0)", "[1]")])
def test_a_rank_that_leaves_in_order_is_not_reported_dead(end, missed):
    program = f"""
import os, time
from pipeinfer.transport import (mpi_job)
world = mpi_job.world()
if world.Get_rank() == 1:
    time.sleep(0.2)
    {end}
deadline = time.monotonic() + (20 if {missed} else 2)
while sorted(mpi_job.failed_ranks(world)) != [1] and time.monotonic() < deadline:
    world.Iprobe()
    time.sleep(0.01)
print(sorted(mpi_job.failed_ranks(world)), flush=True)
mpi_job.leave()
"""
    done = launch.run(2, [sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == missed


def test_what_a_killed_launcher_left_is_cleared_by_the_next_job(tmp_path):
    """mpirun would give up when it gets the process id in the name of such a directory."""
    first = launch.start([launch.mpirun_path(), "-np", "2", sys.executable, "-c",
                          "import time; time.sleep(60)"], timeout=60, TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob(f"ompi.{first.pid}/pmix.*.tool")) and \
            time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = psutil.Process(first.pid).children(recursive=True)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.kill()
    assert list(tmp_path.glob("ompi.*")), "the launcher names its directory otherwise by now"
    done = launch.run(2, [*PIPEINFER, "generate", "-p", "x", "-n", "2"], TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("ompi.*")) == []


ABSURD = ["generate", "-p", "x", "-n", "3", "--hook", "fault=lunch"]


@pytest.mark.parametrize("mortal", [False, full(True)])
@pytest.mark.parametrize(("head", "words"), [
    ([sys.executable, str(PROGRAMS / "late.py"), *ABSURD], "error: --hook fault=lunch"),
    ([*PIPEINFER, *ABSURD[:5]], "error: rank 1 on "),
], ids=["rank 0 is late", "rank 0 has none"])
def test_an_error_is_said_once_by_rank_0(mortal, head, words):
    more = MORTAL if mortal else {}
    done = launch.run(1, [launch.mpirun_path(), "-np", "1", *head, ":", "-np", "2", *PIPEINFER,
                          *ABSURD], timeout=60, **more)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("--hook fault=lunch: write KIND@RANK") == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
