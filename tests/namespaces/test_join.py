"""Machines without sshd, keys and names that resolve, which join by an address and a token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pipeinfer.supervise import launcher as launchers
from tests.kit.namespaces import Cluster

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PIPEINFER = [sys.executable, "-P", "-m", "pipeinfer"]
SERVE = ["serve", "-m", "embedded", "--port", "8133", "-c", "512", "-t", "1"]
BODY = {"prompt": "class Stack:\n    def __init__", "max_tokens": 400, "temperature": 1.0,
        "seed": 3, "ignore_eos": True, "stream": True}
ASK = f"""
import json, time, urllib.error, urllib.request
for _ in range(300):  # the line that names the address may be a moment earlier than the server
    try:
        urllib.request.urlopen("http://127.0.0.1:8133/health", timeout=20).close()
        break
    except urllib.error.HTTPError:
        time.sleep(0.05)
request = urllib.request.Request(
    "http://127.0.0.1:8133/v1/completions", {json.dumps(BODY).encode()!r},
    {{"Content-Type": "application/json"}})
with urllib.request.urlopen(request, timeout=120) as answer:
    for line in answer:
        if line.startswith(b"data: {{"):
            for choice in json.loads(line[6:])["choices"]:
                print(choice["text"], end="", flush=True)
"""


class Machines:
    """A head and machines that join it, all with one host name."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.lines = cluster, folder, {}
        self.head = f"{cluster.address(1)}:7700"

    def start(self, node, *words, typed="", **env):
        """Start a command on a machine, which keeps what it prints."""
        process = self.cluster.start(words, timeout=110, node=node,
                                     PIPEINFER_STATE=str(self.folder / f"state{node}"),
                                     PIPEINFER_JOIN_TOKEN=typed, **env)
        lines = self.lines[node] = []

        def read():
            lines.extend(iter(process.stderr.readline, ""))

        threading.Thread(target=read, daemon=True).start()
        return process

    def until(self, node, text, seconds=60.0):
        deadline = time.monotonic() + seconds
        while text not in "".join(self.lines[node]):
            assert time.monotonic() < deadline, "".join(self.lines[node])[-3000:]
            time.sleep(0.05)

    def run(self, *words):
        """What a command on the head prints."""
        return self.cluster.run([*PIPEINFER, *words], timeout=30,
                                PIPEINFER_STATE=str(self.folder / "state1")).stdout

    def up(self, *more):
        process = self.start(1, *PIPEINFER, "up", f"--join={self.head}", "--", *SERVE, *more)
        self.until(1, "on each other machine")
        self.token = self.run("tokens", "--new").split()[-1]
        return process

    def join(self, node, **env):
        return self.start(node, *PIPEINFER, "join", self.head, typed=self.token, **env)

    def ask(self):
        return self.cluster.start([sys.executable, "-c", ASK], timeout=110)


@pytest.fixture
def machines(tmp_path):
    with Cluster(3, sshd=False, host_name="box", private=["/tmp"]) as cluster:
        yield Machines(cluster, tmp_path)


def test_a_stream_outlives_a_machine_that_has_joined_and_is_killed(machines):
    machines.up()
    machines.until(1, "embedded on http")
    plain, error = machines.ask().communicate(timeout=60)
    assert plain, error
    agent = machines.join(2)
    machines.until(2, "as box-2")
    machines.until(1, "is moved to 2 ranks: ready again")
    hosts = json.loads(machines.run("hosts", "--json"))
    assert [(host["name"], host["used"], host["gone"]) for host in hosts] == [("box-2", True, "")]
    machines.until(2, "this machine computes layers ")
    assert hosts[0]["work"].startswith("computes layers ")
    assert "  used: computes layers 0 to " in machines.run("status")
    stream = machines.ask()
    begin = os.read(stream.stdout.fileno(), 4096).decode()
    below = subprocess.run(["ps", "axo", "args"], capture_output=True, text=True, check=True).stdout
    assert machines.token not in below
    agent.kill()
    text, error = stream.communicate(timeout=90)
    assert begin + text == plain, error
    assert len(plain) > 400
    machines.until(1, "box-2 is gone: the connection is lost: starting again in 1 s, which costs "
                      "no restart")
    said = "".join(machines.lines[1])
    assert "want of memory" not in said
    assert "PRTE" not in said
    assert "box-2 is gone: the connection is lost" in machines.run("status").partition("start ")[2]
    deadline = time.monotonic() + 30
    while left := [pid for pid in machines.cluster.pids(2) if _is_rank(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    logs = list((machines.folder / "state1" / "default" / "logs").iterdir())
    assert logs
    assert not any(machines.token in log.read_text() for log in logs)


@pytest.mark.parametrize("fault", ["cut off", "no daemon"])
def test_a_start_that_a_machine_holds_up_ends_and_the_job_before_serves_again(machines, fault):
    """It is cut off as its daemon starts, or has a daemon that does nothing."""
    own = {}
    if fault == "no daemon":
        launcher = machines.cluster.state / "idle" / "bin"
        launcher.mkdir(parents=True)
        for name, does in {"mpirun": f'exec {launchers.needed({}).path} "$@"',
                           "prted": "exec sleep 1000"}.items():
            (launcher / name).write_text(f"#!/bin/sh\n{does}\n")
            (launcher / name).chmod(0o755)
        own = {"PIPEINFER_MPIRUN": str(launcher / "mpirun")}
    machines.up()
    machines.until(1, "embedded on http")
    machines.join(2, **own)
    machines.until(2, "a job of the head starts here")
    if fault == "cut off":
        machines.cluster.unplug(2)
    began = time.monotonic()
    machines.until(1, "the changed job cannot start (")
    assert machines.ask().communicate(timeout=60)[0]
    print(f"{fault}: served again after {time.monotonic() - began:.1f} s")
    (line,) = (line for line in machines.lines[1] if "cannot start (" in line)
    assert "box-2" in line


def test_a_machine_that_is_cut_off_leaves_the_job_alone_and_is_named(machines):
    # on a busy machine a measured split may leave the head without layers: then the loss of the
    # only stage starts the job again
    machines.up("--set", "split=equal")
    machines.until(1, "embedded on http")
    machines.join(2)
    machines.until(1, "is moved to 2 ranks: ready again")
    machines.until(2, "this machine computes layers ")
    machines.cluster.unplug(2)
    assert machines.ask().communicate(timeout=60)[0]
    machines.until(1, "box-2 (")
    deadline = time.monotonic() + 30
    while "box-2  lost: the connection is lost" not in (said := machines.run("status")):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
    assert "2 ranks, runs" in said


def _is_rank(pid):
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
            return "serve" in file.read()
    except OSError:
        return False


def test_a_model_that_does_not_fit_waits_for_the_machine_that_it_needs(machines):
    nodes = machines.folder / "nodes.toml"
    nodes.write_text('[node."*"]\nmemory = "50 MiB"\n')
    head = machines.up("--nodes", str(nodes))
    machines.until(1, "waiting for more machines")
    assert "waiting for more machines" in machines.run("status")
    agent = machines.join(2)
    machines.until(1, "embedded on http")
    assert machines.ask().communicate(timeout=60)[0]
    agent.send_signal(signal.SIGTERM)
    machines.until(2, "this machine has left")
    assert agent.wait(20) == 0
    head.send_signal(signal.SIGTERM)
    assert head.wait(30) is not None
    assert os.listdir(machines.folder / "state1")


def test_without_the_token_nobody_joins(machines):
    machines.up()
    machines.token = machines.token[:-4] + "AAAA"
    agent = machines.join(2)
    assert agent.wait(30) == 2
    machines.until(2, "another certificate")
    assert not list(machines.folder.glob("state2/.join/*/token")), "it would be used again"


def test_in_the_background_the_lines_for_the_others_are_printed_too(machines):
    told = machines.cluster.run([*PIPEINFER, "up", f"--join={machines.head}", "--detach", "--",
                                 *SERVE], timeout=60,
                                PIPEINFER_STATE=str(machines.folder / "state1")).stderr
    assert f"on each other machine: launch/join {machines.head}\n" in told
    assert "it asks for this token: pipeinfer-" in told
    machines.run("down", "--now")
