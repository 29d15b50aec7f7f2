"""Models by a name of the hub over ranks: rank 0 alone asks, and the others get their layers."""

from __future__ import annotations

import json
import signal
import sys
import time

import psutil
import pytest

from tests.kit import launch
from tests.kit.fake_hub import Hub, running
from tests.kit.gguf_files import split
from tests.kit.launch import PIPEINFER
from tests.kit.sample import full
from tests.mpi.test_distribute import EMBEDDED, apart, held, received

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
REPO = "maker/Model-GGUF"
REQUEST = ["-p", "def area(r):\n", "-n", "24", "--temp", "0", "--ignore-eos", "-c", "128", "--json",
           "-t", "1"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The embedded target in three parts."""
    return split(EMBEDDED / "target.gguf", tmp_path_factory.mktemp("parts"), stem="Model-Q8_0")


@pytest.fixture
def hub(parts):
    with running(Hub({REPO: {path.name: path.read_bytes() for path in parts}})) as found:
        yield found


def tokens(np, *args):
    return launch.answered(np, *args, *REQUEST)["tokens"]


def job(homes, request, **rank_0):
    """A job whose ranks each have a directory, a cache and a home of their own."""
    command = [*PIPEINFER, "generate", *request, *REQUEST]
    code, out, err = apart([(1, home, command, {
        "HF_HOME": home / "hf", "HF_ENDPOINT": "http://127.0.0.1:9"
        } | (rank_0 if home == homes[0] else {})) for home in homes])
    assert code == 0, err
    return out


def test_hosts_get_no_byte_of_layers_that_they_do_not_hold(parts, tmp_path):
    """The parts lie in rank 0's directory alone."""
    homes = [tmp_path / f"host{rank}" for rank in range(3)]
    homes[0].mkdir()
    for path in parts:
        (homes[0] / path.name).write_bytes(path.read_bytes())
    out = job(homes, ["-m", parts[0].name, "--distribute"])
    assert json.loads(out)["tokens"] == tokens(1, "-m", str(EMBEDDED / "target.gguf"))
    arrived = received(out)
    for number, home in enumerate(homes[1:], 1):
        layers, size = held(home)
        assert len(layers) == 1
        assert arrived[number] == size < sum(path.stat().st_size for path in parts) * 0.75
        assert not list(home.glob("*.gguf"))


def test_rank_0_alone_asks_the_hub_and_once(hub, parts, tmp_path):
    """For the others it leads nowhere."""
    homes = [tmp_path / f"host{rank}" for rank in range(3)]
    out = job(homes, ["-m", REPO, "--distribute"], HF_ENDPOINT=hub.url)
    assert json.loads(out)["tokens"] == tokens(1, "-m", str(EMBEDDED / "target.gguf"))
    assert len([one for one in hub.asked if one.path.startswith("/api/models/")]) == 1
    assert hub.sent() == sum(path.stat().st_size for path in parts)
    assert [(home / "hf").exists() for home in homes] == [True, False, False]


def test_a_name_that_leads_nowhere_is_said_once(hub):
    """Ranks that are not ready for messages when rank 0 ends do not wait for it until a deadline:
    that of meeting each other is 60 s."""
    program = launch.ROOT / "tests" / "mpi" / "programs" / "slow_start.py"
    done = launch.run(3, [sys.executable, str(program), "1", "generate", "-m", f"{REPO}:Q2_K",
                          *REQUEST], timeout=45, HF_ENDPOINT=hub.url, HF_HOME="/nonexistent/hf")
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("has no Q2_K: there are Q8_0 (11.3 MB)") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [
    signal.SIGTERM, full(signal.SIGINT), full(signal.SIGUSR1)])
def test_an_interrupt_ends_a_fetch_and_the_ranks_that_wait_for_it(hub, parts, tmp_path, number):
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    command = [*PIPEINFER, "generate", "-m", REPO, *REQUEST]
    hub.stall_after = parts[0].stat().st_size // 2
    job = launch.start([launch.mpirun_path(), "-np", "3", *command], timeout=120, **env)
    assert hub.stalled.wait(60)
    deadline = time.monotonic() + 60
    while not any(part.stat().st_size for part in (tmp_path / "hf").rglob("*.incomplete")):
        assert time.monotonic() < deadline  # what was sent has to be written as well
        time.sleep(0.05)
    rank_0 = next(p for p in psutil.Process(job.pid).children(recursive=True)
                  if p.environ().get("PMIX_RANK") == "0" and "generate" in p.cmdline())
    rank_0.send_signal(number)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130, err
    assert "stopped; the same command goes on from here" in err
    hub.stall_after = 0
    hub.go_on.set()
    done = launch.run(3, command, **env)
    assert done.returncode == 0, done.stderr
    assert any(one.start > 0 for one in hub.fetched())
