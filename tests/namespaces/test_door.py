"""Hosts go and come back under a stream, and rank 0 dies: the job starts on those that answer."""

from __future__ import annotations

import contextlib
import json
import signal
import sys

import psutil
import pytest

from tests.kit.namespaces import Cluster
from tests.namespaces.test_cut import read_until

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
URL = "http://127.0.0.1:8128"
CLIENT = f"""
import json, sys, time, urllib.error, urllib.request
while True:
    try:
        assert urllib.request.urlopen("{URL}/health", timeout=5).status == 200
        break
    except OSError:
        time.sleep(0.1)
ask = urllib.request.Request("{URL}/v1/completions", sys.argv[1].encode(),
                             {{"Content-Type": "application/json"}})
for line in urllib.request.urlopen(ask, timeout=120):
    if line.startswith(b"data: {{"):
        chunk = json.loads(line[6:])
        print(chunk["choices"][0]["text"] if "choices" in chunk else chunk, end="", flush=True)
        if "timings" in chunk:
            print("\\n", *map(chunk["timings"].get, ("restarts_n", "same_arithmetic")))
"""
BODY = {"prompt": "class Queue:\n    def __init__(self):\n", "max_tokens": 250, "temperature": 1,
        "seed": 4, "stream": True, "ignore_eos": True}


def kill_rank_0(cluster):
    for process in map(psutil.Process, cluster.pids(1)):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("OMPI_COMM_WORLD_RANK") == "0" \
                    and "serve" in process.cmdline():
                process.kill()


@pytest.mark.full("rank 0 killed under a stream in tests/mpi/test_supervised.py, hosts that do not "
                  "answer in tests/cli/test_doctor_hosts.py")
def test_a_stream_outlives_a_host_and_rank_0():
    serve = ["serve", "-m", "embedded", "--port", "8128", "-c", "512", "-t", "1", "--hook",
             "pace=20"]
    with Cluster(3) as cluster:
        server = cluster.start(cluster.launch(serve), timeout=240, PIPEINFER_RESTARTS="3")

        def ask():
            return cluster.start([sys.executable, "-c", CLIENT, json.dumps(BODY)], timeout=200)

        whole, _ = ask().communicate(timeout=60)
        assert whole.endswith("None None\n")
        client = ask()
        begun = read_until(client, 30, 30.0)
        cluster.unplug(3)
        kill_rank_0(cluster)
        rest, said = client.communicate(timeout=120)
        assert not said
        assert (begun + rest).rpartition("\n ")[0] == whole.rpartition("\n ")[0]
        assert rest.endswith("1 True\n")
        client = ask()
        read_until(client, 30, 30.0)
        cluster.plug(3)
        kill_rank_0(cluster)
        again, _ = client.communicate(timeout=120)
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=60)
    assert again.endswith("1 True\n")
    assert "host node3 does not answer: going on without it" in log
    assert "2 ranks instead of 3" in log
    assert log.count(" with 2 stages") == 2, log
    assert log.count(" with 1 stage") == 1, log
