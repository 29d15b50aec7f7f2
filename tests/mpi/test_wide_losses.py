"""Wide stages that lose members: others take the very same slices, and no token changes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from pipeinfer.planning.wide import shares_of
from pipeinfer_lab.chaos.job import ServerJob, poll
from tests.kit import launch
from tests.kit.launch import PIPEINFER
from tests.kit.random_model import tiny, write_random_model
from tests.kit.references import alone, encoded, seeded
from tests.kit.sample import full
from tests.kit.sliced_loop import SlicedLoop

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
ASK = ["-p", "def read(path):\n", "-n", "60", "--temp", "0.8", "--seed", "5", "--ignore-eos", "-c",
       "512", "-t", "1"]
MEMORY, MESSAGES = ("--set", "sum_path=memory"), ("--set", "sum_path=messages")
SPARE = ("--spares", "1")
QUICK = ("--heartbeat", "1")


@pytest.fixture(scope="module")
def undisturbed():
    """The tokens of every grid of two slices: other slices are other roundings."""
    return alone("def read(path):\n", 60, seeded(5), slices=2)


def regions():
    """What lies in memory under a name and is nobody's: other tests may hold their own."""
    return {path.name for path in Path("/dev/shm").glob("pipeinfer-sums-*") if not held(path)}


def held(path):
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):  # locked, or gone by now
        return True
    return False


@pytest.mark.parametrize(("np", "grid", "fault", "more"), [
    (3, "1x2", "kill@1:decode=10", MESSAGES),
    (6, "2x2", "stop@2:decode=10", (*MEMORY, *SPARE, *QUICK)),
    full(5, "2x2", "kill@3:decode=10,kill@4:decode=10", ()),
    full(5, "2x2", "error@4:decode=10:layer=2", MESSAGES),
    full(5, "2x2", "cut-link@1:peer=2:after=200", (*MESSAGES, "--timeout", "16")),
    full(3, "1x2", "kill@2:prefill=1", MEMORY),
    (3, "1x2", "cut-link@1:peer=2:after=200", (*MESSAGES, "--timeout", "16")),
    full(3, "1x3", "kill@1:decode=10", ("--head-stage", "--slices", "3")),
    full(4, "2x2", "kill@1:decode=10,kill@3:decode=20", ("--head-stage", *MESSAGES)),
    full(4, "2,1", "kill@2:decode=10", ("--slices", "2")),
    full(4, "2,1", "kill@3:decode=10", ("--slices", "2")),
    full(5, "2,1", "kill@3:decode=10", ("--slices", "2", *SPARE)),
    full(5, "2x2", "memory@4:decode=5", ()),
    full(6, "2x2", "kill@2:decode=10,kill@3:recovery=1", SPARE),
    full(6, "2x2", "kill@3:decode=10,kill@4:decode=10", SPARE),
    full(6, "2x2", "kill@2:load", SPARE),
    full(5, "2x2", "kill@3:decode=10", ("--distribute",)),
])
def test_the_grid_goes_on_with_the_tokens_of_before(undisturbed, np, grid, fault, more):
    before = regions()
    found = launch.answered(np, *ASK, "--grid", grid, "--hook", f"fault={fault}", *more)
    if "3" not in grid:  # other slices, other roundings
        assert found["tokens"] == undisturbed
    assert any("went on after" in note for note in found["stats"]["notes"])
    # who is lost while stages load is lost before there is a request
    assert found["stats"]["recovered"] >= (":load" not in fault)
    assert not regions() - before


def test_a_slow_member_costs_time_and_no_token(undisturbed):
    done = launch.run(3, [*PIPEINFER, "generate", "--json", *ASK, "--grid", "1x2", "--hook",
                          "fault=slow@2:ms=10"], timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "pipeinfer: fault: slow@2:ms=10" in done.stderr
    assert found["tokens"] == undisturbed
    leader, slow = (found["stats"]["stages"][node] for node in ("1", "2"))
    assert leader["waited"] > slow["waited"]
    assert leader["compute"] < slow["compute"]


def test_where_nobody_can_take_over_it_says_what_is_missing():
    done = launch.run(4, [*PIPEINFER, "generate", *ASK, "--grid", "2,1", "--hook",
                          "fault=kill@3:decode=10"], timeout=100)
    assert done.returncode == 6, done.stderr
    assert "rank 3 is dead" in done.stderr
    assert "start the job again, with --spares to survive this" in done.stderr


#: members, slices, layers of each stage; stages begin behind layers with attention
GRIDS = {"1x2": ((2,), "", (12,)), "2x2": ((2, 2), "", (8, 4)), "2,1": ((2, 1), "2,2", (8, 4)),
         "1x2 unequal": ((2,), "3:1", (12,))}
#: columns of an expert, of mixtures; slices of few columns have some of the experts each
COLUMNS = {"gpt-oss": 128, "qwen3moe": 32, "qwen35moe": 64, "qwen35moe, some experts": 32}


@pytest.mark.parametrize(("name", "grid"), [("qwen35moe", "1x2"), *(
    full(name, grid) for name in (*COLUMNS, "qwen35", "qwen3next", "nemotron_h-groups")
    for grid in GRIDS if (name, grid) != ("qwen35moe", "1x2"))])
def test_a_spare_takes_the_experts_and_states_of_a_lost_member(tmp_path, name, grid):
    widths, slices, layers = GRIDS[grid]
    if name.startswith("nemotron"):  # every third layer has attention
        layers = tuple({8: 9, 4: 3}.get(count, count) for count in layers)
    path = write_random_model(tmp_path / "m.gguf", tiny(
        name.partition(",")[0], qtype="Q8_0", n_layer=12, expert_ff=COLUMNS.get(name, 64)))
    loop = SlicedLoop(path, layers, [own or (1.0,) for own in shares_of(slices, widths)],
                      n_ctx=256, cache_dir=tmp_path)
    expected = loop.generate(encoded(path, "the rain in"), 40, seeded(3))
    loop.close()
    found = launch.answered(
        2 + sum(widths), "-m", path, "-md", path, "-p", "the rain in", "-n", "40", "-c", "256",
        "-t", "1", "--temp", "0.8", "--seed", "3", "--ignore-eos", "--grid",
        ",".join(map(str, widths)), "--layers", ",".join(map(str, layers)),
        *(["--slices", slices] if slices else []), *SPARE, "--hook", "fault=kill@2:decode=9",
        "--set", "turns=off")
    assert found["tokens"] == expected
    assert found["stats"]["recovered"]


BODIES = [{"prompt": prompt, "max_tokens": 300, "temperature": 0.7, "seed": seed,
           "ignore_eos": True} for seed, prompt in enumerate(("import os\n", "class A:\n", "x = "))]


def asked(job, pool):
    """Futures of the texts of requests that run at once."""
    return [pool.submit(lambda body=body: requests.post(
        f"{job.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])
        for body in BODIES]


def texts(answers):
    return [one.result() for one in answers]


@pytest.mark.full("a member that stops in test_the_grid_goes_on_with_the_tokens_of_before")
@pytest.mark.parametrize("rank", [2, 1])
def test_a_member_that_resumes_after_its_replacement_changes_no_stream(rank):
    """Its watchdog sleeps, too, as on a machine that is frozen; others have its slices by then."""
    arguments = ["--port", "0", "-c", "1024", "-t", "1", "--parallel", "3", "--grid", "1x2",
                 "--heartbeat", "1", *SPARE]
    with ServerJob(4, arguments, seconds=150) as job, ThreadPoolExecutor() as pool:
        ranks = job.await_ranks(60)
        job.await_ready(60)
        wanted = texts(asked(job, pool))
        found = asked(job, pool)
        frozen = [ranks[rank], *watchdogs(job, ranks[rank].pid)]
        assert len(frozen) == 2
        for process in frozen:
            process.send_signal(signal.SIGSTOP)
        assert texts(found) == wanted
        for process in frozen:
            process.send_signal(signal.SIGCONT)
        assert poll(lambda: not frozen[0].is_running(), 10.0)
        assert texts(asked(job, pool)) == wanted
        assert job.drain(20) == 0
        assert job.left_over(5.0) == []


def watchdogs(job, pid):
    """The processes that watch over a rank."""
    found = []
    for process in job.processes():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if str(pid) in words and any(os.path.basename(w) == "watchdog.py" for w in words):
                found.append(process)
    return found
