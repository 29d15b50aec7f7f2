"""A host whose cable is pulled in the middle of a text: no reset comes, no process ends. Those that
live take over, or say why they cannot."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time

import pytest

from pipeinfer.models.locate import open_tokenizer
from tests.kit.namespaces import Cluster
from tests.kit.references import TARGET, alone, seeded
from tests.kit.sample import full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROMPT = "class Queue:\n    def __init__(self):\n"
GENERATE = ["generate", "-p", PROMPT, "-n", "90", "--temp", "0.7", "--seed", "11", "--ignore-eos",
            "-c", "512", "-t", "1", "--set", "split=equal"]
PACE = ["--hook", "pace=20"]  # slow enough that the text is under way when the cable is pulled
SECONDS = 60.0


def written(slices=1):
    """What a job of so many slices writes."""
    tokenizer = open_tokenizer(TARGET)
    text = tokenizer.decode(alone(PROMPT, 90, seeded(11, 0.7), slices=slices))
    tokenizer.close()
    return f"{PROMPT}{text}\n"


@pytest.fixture(scope="module")
def undisturbed():
    return written()


def read_until(process, enough, seconds):
    """What the job has written once it is `enough` characters."""
    text, deadline = "", time.monotonic() + seconds
    while len(text) < enough:
        ready = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
        piece = os.read(process.stdout.fileno(), 4096).decode() if ready else ""
        assert piece, f"no text: {text!r} {'' if ready else '(in time)'}"
        text += piece
    return text


def cut_while_it_speaks(cluster, command, cut):
    """What a job printed in all, and its standard error: `cut()` is called after some text."""
    process = cluster.start(cluster.launch(command), timeout=SECONDS)
    try:
        text = read_until(process, len(PROMPT) + 40, 60.0)
        cut()
        when = time.monotonic()
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"no end {SECONDS:g} s after the cut")
    print(f"ended {time.monotonic() - when:.1f} s after the cut", file=sys.stderr)
    assert process.returncode == 0, err
    return text + out, err


@pytest.mark.parametrize(("spares", "node"), [(0, 3), full(1, 2)])
def test_a_cut_link_costs_no_character(undisturbed, spares, node):
    more = ["--spares", str(spares)] if spares else []
    with Cluster(4) as cluster:
        text, _ = cut_while_it_speaks(cluster, [*GENERATE, *PACE, *more],
                                      lambda: cluster.unplug(node))
    assert text == undisturbed


def test_of_two_members_with_a_cut_link_one_is_excluded_in_time():
    """The head hears both, so no heartbeat is missing: one of them says so, and is left out."""
    grid = ["--grid", "1x2", "--timeout", "16"]
    plain = written(slices=2)
    with Cluster(3) as cluster:
        text, err = cut_while_it_speaks(cluster, [*GENERATE, *PACE, *grid],
                                        lambda: cluster.separate(2, 3))
    assert text == plain
    assert re.search(r"rank [12] waited 8.0 s for SUM from rank [12], run \d+", err), err


@pytest.mark.full("such a link in tests/mpi/test_recovery.py, two members beside it")
@pytest.mark.parametrize("at_once", [False, True])
def test_two_stages_with_a_cut_link_go_on_without_one_of_them(undisturbed, at_once):
    """The head hears both and every stage waits: it asks them how far they are."""
    with Cluster(4) as cluster:
        if at_once:
            cluster.separate(2, 3)
            done = cluster.pipeinfer([*GENERATE, "--timeout", "16"], timeout=SECONDS)
            assert done.returncode == 0, done.stderr
            text, err = done.stdout, done.stderr
        else:
            text, err = cut_while_it_speaks(cluster, [*GENERATE, *PACE, "--timeout", "16"],
                                            lambda: cluster.separate(2, 3))
    assert text == undisturbed
    assert re.search(r"what rank 1 sends has not got to rank 2 for \d\.\d s", err), err


URL = "http://127.0.0.1:8127"
STREAM = f"""
import sys, urllib.request
ask = urllib.request.Request("{URL}/v1/completions", sys.argv[1].encode(),
                             {{"Content-Type": "application/json"}})
for line in urllib.request.urlopen(ask, timeout=60):
    print(line.decode(), end="", flush=True)
"""
HEALTH = f"""
import time, urllib.error, urllib.request
while True:  # until it was well and nobody is there any more
    try:
        print(urllib.request.urlopen("{URL}/health", timeout=5).status, flush=True)
        seen = True
    except urllib.error.HTTPError as error:
        if "seen" in globals():
            print(error.code, error.read().decode(), flush=True)
    except OSError:
        if "seen" in globals():
            break
    time.sleep(0.2)
"""


def test_ranks_without_memory_for_the_model_name_what_is_missing(tmp_path):
    """Each of two stages has room for little more than half of the layers."""
    settings = tmp_path / "nodes.toml"
    settings.write_text('[node."node[23]"]\nmemory = "50 MiB"\n')
    body = {"prompt": "def f(", "max_tokens": 400, "temperature": 1.5, "seed": 4, "stream": True,
            "ignore_eos": True}
    with Cluster(3) as cluster:
        process = cluster.start(cluster.launch([
            "serve", "-m", "embedded", "--port", "8127", "-c", "512", "-t", "1", *PACE,
            "--nodes", str(settings)]),
            timeout=SECONDS)

        def ask(*command):
            return cluster.start([sys.executable, "-c", *command], timeout=SECONDS)

        health = ask(HEALTH)
        assert read_until(health, 3, 30.0).startswith("200")
        client = ask(STREAM, json.dumps(body))
        begun = read_until(client, 300, 30.0)
        cluster.unplug(3)
        _, err = process.communicate(timeout=30.0)
        states, _ = health.communicate(timeout=20.0)
        stream, _ = client.communicate(timeout=20.0)
    assert process.returncode == 6, err
    why = (r"rank 2 is dead; the remaining ranks \(rank 1 on node2\) cannot hold the model: "
           r"it needs \d+ MiB, but they have 50 MiB together; \d+ MiB are missing: "
           r"start the job again and use more hosts, .*")
    assert re.search(why, err), err
    failed = json.loads(states.split("\n503 ")[-1].splitlines()[0])
    assert failed["status"] == "failed"
    assert re.fullmatch(why, failed["reason"])
    last = json.loads((begun + stream).rstrip().split("data: ")[-1])
    assert last["error"]["code"] == "cluster_failed"
    assert re.search(why, last["error"]["message"])
