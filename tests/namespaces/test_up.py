"""`pipeinfer up` over hosts: one goes and comes back under a stream, another one is added."""

from __future__ import annotations

import json
import signal
import sys
import time

import pytest

from tests.kit.launch import ROOT
from tests.kit.namespaces import Cluster
from tests.namespaces.test_cut import read_until
from tests.namespaces.test_door import BODY, CLIENT

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PIPEINFER = [sys.executable, "-P", "-m", "pipeinfer"]
SERVE = ["serve", "-m", "embedded", "--port", "8128", "-c", "512", "-t", "1", "--hook", "pace=20"]


@pytest.mark.full("a job moved under a stream in tests/supervise/test_up.py, which hosts it gets "
                  "in tests/supervise/test_hosts.py, when they are asked in "
                  "tests/supervise/test_rules.py")
def test_streams_outlive_a_host_that_leaves_and_comes_back(tmp_path):
    with Cluster(3) as cluster:
        state = {"PIPEINFER_STATE": str(tmp_path / "state"), "PYTHONPATH": str(ROOT)}
        hosts = tmp_path / "hosts"
        lines = cluster.hostfile.read_text().splitlines(keepends=True)
        hosts.write_text("".join(lines[:2]))
        server = cluster.start([*PIPEINFER, "up", "--hosts", str(hosts), "--ask-hosts-every", "2",
                                "--", *SERVE], timeout=240, **state)

        def call(*words):
            done = cluster.run([*PIPEINFER, *words], timeout=100, **state)
            assert done.returncode == 0, done.stderr
            return done.stdout

        def hosts_are(*states):
            deadline = time.monotonic() + 60
            while True:
                done = cluster.run([*PIPEINFER, "status", "--json"], timeout=30, **state)
                found = json.loads(done.stdout) if done.returncode == 0 else {"hosts": []}
                if tuple(host["state"] for host in found["hosts"]) == states:
                    return
                assert time.monotonic() < deadline, found
                time.sleep(0.5)

        def ask():
            return cluster.start([sys.executable, "-c", CLIENT, json.dumps(BODY)], timeout=200)

        def text_of(process, begun=""):
            rest, said = process.communicate(timeout=120)
            assert not said
            return (begun + rest).rpartition("\n ")[0]

        whole = text_of(ask())
        hosts.write_text("".join(lines))
        hosts_are("used", "used", "used")  # by itself, at a quiet moment
        client = ask()
        begun = read_until(client, 30, 30.0)
        cluster.unplug(3)
        assert text_of(client, begun) == whole  # the others took its layers over
        hosts_are("used", "used", "lost")
        client = ask()
        begun = read_until(client, 30, 30.0)
        cluster.plug(3)
        said = call("rescale")
        assert "moved to 3 ranks: " in said, said
        assert text_of(client, begun) == whole
        hosts_are("used", "used", "used")
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=60)
    assert "host node3 can take ranks: the job moves at the next quiet moment" in log
    assert log.count(" with 2 stages") == 2, log
