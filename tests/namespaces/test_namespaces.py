"""Jobs over several real hosts: namespaces with their own links, names, sshd and processors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit import launch, namespaces
from tests.kit.namespaces import Cluster
from tests.kit.references import alone, seeded

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
EMBEDDED = launch.ROOT / "pipeinfer" / "models" / "embedded"
PROMPT = "class Queue:\n    def __init__(self):\n"
GENERATE = ["generate", "-p", PROMPT, "-n", "24", "--temp", "0.7", "--seed", "11", "--json",
            "--set", "split=equal"]  # a busy machine measures noise


@pytest.fixture(scope="module")
def one_process():
    """What one process writes, whatever its policy."""
    return alone(PROMPT, 24, seeded(11, 0.7), ignore_eos=False)


def answer_of(cluster, words=GENERATE, timeout=120, **env):
    """What a job over all hosts prints."""
    done = cluster.pipeinfer(words, timeout=timeout, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def traces(cluster_id):
    """What is left of a cluster on this machine."""
    spaces = list(Path("/run/netns").glob(f"{cluster_id}*"))
    groups = list(Path("/sys/fs/cgroup").glob(f"**/{cluster_id}*"))
    return spaces + groups + list(namespaces.STATE.glob(cluster_id))


def test_three_hosts_give_one_process_tokens(one_process):
    with Cluster(3, cpu=0.6) as cluster:
        answer = answer_of(cluster)
        sent = [cluster.sent_bytes(node) for node in cluster.nodes]
    assert answer["tokens"] == one_process
    assert len(one_process) == 24
    stages = answer["stats"]["stages"]
    assert {key: stage["host"] for key, stage in stages.items()} == {"1": "node2", "2": "node3"}
    assert min(sent) > 10_000  # it went over the links, though hosts have others that lead nowhere
    assert not traces(cluster.id)


@pytest.mark.full("good links beside it, slow ones in tests/lab/test_faults.py")
@pytest.mark.parametrize("policy", ["pipeinfer", "published", "speculative"])
def test_long_and_lossy_links_change_no_token(one_process, policy):
    """50 ms a way, one frame in a hundred lost, 100 Mbit/s."""
    with Cluster(3, rate="100mbit", delay=0.05, loss=0.01) as cluster:
        ping = cluster.run(["ping", "-c", "20", "-i", "0.05", cluster.address(2)], timeout=20) \
            if shutil.which("ping") else None
        answer = answer_of(cluster, [*GENERATE, "--policy", policy], 200)
    assert answer["tokens"] == one_process
    assert answer["stats"]["inter_token_latency_mean"] > 0.015  # three ways for some tokens
    assert ping is None or "time=10" in ping.stdout
    assert not traces(cluster.id)


@pytest.mark.full("tests/test_nodes.py, a host of the nodes file in tests/mpi/test_plans.py")
def test_settings_of_single_hosts(tmp_path):
    with Cluster(3) as cluster:
        (cluster.state / "hosts.toml").write_text(
            '[defaults]\nthreads = 1\n[node.node1]\nrole = "head"\n[node.node3]\nthreads = 2\n'
            'numa = 0\n')
        stages = answer_of(cluster)["stats"]["stages"]
        two = min(2, os.cpu_count())
        assert {stage["host"]: stage["threads"] for stage in stages.values()} == {
            "node2": 1, "node3": two}
        (cluster.state / "hosts.toml").write_text('[node.node2]\nrole = "head"\n')
        done = cluster.pipeinfer(GENERATE, timeout=60)
        assert done.returncode == 2
        assert "makes node2 the head, but rank 0 runs on node1" in done.stderr


def test_what_is_wrong_with_a_host_is_said_before_the_job_starts():
    with Cluster(2) as cluster:
        def says(text, *, ranks=2):
            cluster.hostfile.write_text(text)
            done = cluster.pipeinfer(GENERATE, timeout=60, ranks=ranks)
            assert done.returncode == 2, done.stderr
            assert "Traceback" not in done.stderr
            return done.stderr

        said = says("node1 slots=1\nnode2 slots=1\n", ranks=5)
        assert "5 ranks were asked for, but the 2 hosts" in said
        assert "have 2 slots" in said
        said = says("node1 slots=1\nnode7 slots=1\n")
        assert "host node7: has no address" in said
        with (cluster.state / "etc-hosts").open("a") as names:
            names.write(f"{cluster.address(2)} twin\n")
        said = says("node1 slots=1\nnode2 slots=1\ntwin slots=1\n", ranks=3)
        assert "host twin: has the host name node2, as node2 does" in said
        cluster.unplug(2)
        said = says("node1 slots=1\nnode2 slots=1\n")
        assert "host node2: " in said
        assert "is node2 switched on" in said


@pytest.mark.parametrize("node", [1, 2])
@pytest.mark.parametrize("target", ["DROP", "REJECT"])
def test_a_firewall_is_named_before_the_job_starts(node, target):
    """On the head, or on another host: only log-ins pass."""
    if shutil.which("iptables") is None:
        pytest.skip("no iptables here (apt install iptables)")
    with Cluster(2) as cluster:
        rules = ["-i lo -j ACCEPT", "-p tcp --dport 22 -j ACCEPT", f"-p tcp --syn -j {target}"]
        done = cluster.run(["sh", "-ec", "\n".join(f"iptables -A INPUT {rule}" for rule in rules)],
                           timeout=20, node=node)
        if done.returncode:
            pytest.skip(f"iptables does not work here: {done.stderr.strip()}")
        done = cluster.pipeinfer(GENERATE, timeout=60)
        noted = cluster.run([sys.executable, "-m", "pipeinfer", "doctor", "--hostfile",
                             str(cluster.hostfile)], timeout=60, PIPEINFER_IF="eth1")
    assert done.returncode == 2, done.stderr
    way = r"TCP port \d+ of this host from there" if node == 1 else r"its TCP port \d+ from here"
    assert re.search(rf"host node2: does not let ranks connect \({way}: ", done.stderr)
    assert "Firewalls" in done.stderr
    assert "PATH TO TARGET" not in done.stderr
    assert noted.returncode == 0  # other addresses may let them pass
    assert "warn host node2: does not let ranks connect" in noted.stdout


def test_a_host_with_another_pipeinfer(tmp_path):
    """On node2 the environment that holds pipeinfer is an empty directory."""
    with Cluster(2, private=[launch.ROOT / ".venv"]) as cluster:
        done = cluster.pipeinfer(GENERATE, timeout=60)
    assert done.returncode == 2
    assert "host node2: has no " in done.stderr
    assert "under the same path" in done.stderr


@pytest.fixture
def on_one_host(tmp_path):
    """A request for models that lie on one host, which is not told to hand them out, and what each
    host has a disk of its own for: the models' directory and the cache."""
    models, cache = tmp_path / "models", tmp_path / "cache"
    models.mkdir()
    cache.mkdir()
    for name in ("target.gguf", "draft.gguf"):
        (models / name).write_bytes((EMBEDDED / name).read_bytes())
    # each host would try out how many threads it is fastest with
    return [*GENERATE, "-m", str(models / "target.gguf"), "-md", str(models / "draft.gguf"),
            "-t", "1", "-td", "1"], models, cache


def test_hosts_without_the_model_get_their_layers(on_one_host, one_process):
    """Both directories are empty on node2 and node3."""
    request, models, cache = on_one_host
    with Cluster(3, cpu=0.6, private=[models, cache]) as cluster:
        received = []
        for _ in range(2):
            answer = answer_of(cluster, [*request, "--distribute"], PIPEINFER_CACHE=str(cache))
            assert answer["tokens"] == one_process
            received.append(sum(s["received_bytes"] for s in answer["stats"]["stages"].values()))
            there = [sum(p.stat().st_size for p in cluster.state.glob(f"disk-{node}-1/*.gguf"))
                     for node in (2, 3)]
        assert received == [sum(there), 0]
        assert cluster.sent_bytes(1) > sum(there) > 10 << 20
        assert not list(cache.glob("*.gguf"))


def begin_of_command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()[:6]
    except (FileNotFoundError, ProcessLookupError):  # what prepares a node ends meanwhile
        return b""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_stays_when_the_program_is_killed(number):
    command = [sys.executable, "-m", "tests.kit.namespaces",
               "--nodes", "2", "--cpu", "0.5", "--", "sleep", "600"]
    before = set(namespaces.STATE.glob("*"))
    process = subprocess.Popen(command, cwd=launch.ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + 40
        sleeping = []
        while not sleeping:
            assert time.monotonic() < deadline
            assert process.poll() is None
            made = [path.name for path in set(namespaces.STATE.glob("*")) - before]
            sleeping = [name for name in made if b"sleep" in b"".join(
                map(begin_of_command, namespaces._pids(f"{name}n1")))]
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(timeout=20)
        while traces(sleeping[0]):
            assert time.monotonic() < deadline + 20, traces(sleeping[0])
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait(timeout=10)
