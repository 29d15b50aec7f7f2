"""A server whose stages change: /health, /metrics and /rebalance, and the command that asks."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from pipeinfer.cli.client import rebalance_command
from pipeinfer.server.frames import (
    Changed,
    Failed,
    Rebalance,
    Rebalanced,
    Recovering,
    Status,
    Submit,
)
from tests.kit.server_peer import FACTS, MODEL, front

pytestmark = pytest.mark.slow


def stage(node, rank, start, stop, host="a"):
    return {"node": node, "rank": rank, "host": host, "layers": [start, stop]}


STAGES = [stage(1, 1, 0, 4), stage(2, 2, 4, 8, "b"), stage(3, 3, 8, 12)]
FEWER = [stage(1, 1, 0, 6), stage(2, 3, 6, 12)]
LOSS = {"lost": [2], "why": "rank 2 is lost"}
DEALT = {"lost": [], "why": "redistributed"}
STATUS = {"waiting": 0, "lanes": [], "runs": 0}


@pytest.fixture(scope="module")
def shared():
    with front(MODEL, parallel=2, queue=1, request_timeout=8.0,
               facts={"stages": STAGES, "changes": [], "lost": []}) as server:
        yield server


@pytest.fixture
def server(shared):
    shared.peer.reset()
    change(shared, STAGES)
    return shared


def change(server, stages, changes=(), lost=()):
    """The engine's word that others hold the layers, once the server has heard it."""
    facts = FACTS | {"stages": stages, "changes": list(changes), "lost": list(lost)}
    server.peer.send(Changed(facts, "as it is now"))
    server.until(lambda: shown(server) == {k: facts[k] for k in ("stages", "changes", "lost")})


def shown(server):
    facts = server.get("/props").json()["pipeinfer"]
    return {key: facts.get(key) for key in ("stages", "changes", "lost")}


def figures(server, name):
    """{labels: value} of a metric; labels as text, empty for none."""
    found = re.findall(rf"^pipeinfer_{name}(?:{{(.*)}})? (\S+)$", server.get("/metrics").text, re.M)
    return {labels: float(value) for labels, value in found}


def answered(server, call, answer):
    """The result of a call that asks to rebalance; the engine answers by `answer(frame)`."""
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(call)
        answer(server.peer.wait_for(Rebalance))
        return asking.result(30.0)


def asks(server, answer, **fields):
    """The response to POST /rebalance."""
    return answered(server, lambda: server.post("/rebalance", {}, **fields), answer)


# --- what has happened ------------------------------------------------------------------------


def test_watchers_see_that_stages_are_taken_over_until_they_are(server):
    with contextlib.closing(server.get("/pipeline", stream=True)) as first:
        lines = (json.loads(line[6:]) for line in first.iter_lines() if line.startswith(b"data: "))
        seen = (one for one in lines if one["op"] in ("facts", "state"))
        assert next(seen)["state"] == "ready"
        server.peer.send(Recovering("rank 2 is lost"))
        assert {**next(seen), "time": 0} == {"op": "state", "state": "recovering", "time": 0,
                                             "reason": "rank 2 is lost", "planned": False}
        with contextlib.closing(server.get("/pipeline", stream=True)) as second:
            line = next(line for line in second.iter_lines() if line)
            assert json.loads(line[6:])["state"] == "recovering"
        assert server.get("/health").json()["status"] == "ok"  # requests wait for the others
        change(server, FEWER, [LOSS], [2])
        found = next(seen)
        assert (found["state"], found["facts"]["stages"], found["facts"]["lost"]) == (
            "ready", FEWER, [2])


def test_health_counts_recoveries_and_names_who_is_lost(server):
    change(server, FEWER, [LOSS, DEALT, {"lost": [4, 5], "why": "two more"}], [2, 4, 5])
    answer = server.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "recoveries": 2, "lost": [2, 4, 5]}
    assert server.get("/props").json()["pipeinfer"]["stages"] == FEWER


def test_a_plan_is_shown_and_nothing_is_changed(server):
    def answer(frame):
        assert frame.preview
        server.peer.send(Rebalanced(frame.id, True, "twice as fast", tuple(FEWER), 2.0))

    found = answered(server, lambda: server.get("/rebalance/plan"), answer).json()
    assert found == {"changes": True, "message": "twice as fast", "gain": 2.0, "stages": FEWER}
    assert shown(server)["stages"] == STAGES


def test_requests_are_answered_before_and_after_a_change_and_an_open_one_goes_on(server):
    server.peer.answer = lambda frame: server.peer.say(frame.id, "be", None)
    body = {"prompt": "x", "max_tokens": 9}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(server.post, "/v1/completions", body)
        number = server.peer.wait_for(Submit).id
        change(server, FEWER, [LOSS], [2])
        server.peer.news(server.peer.say(number, "fore", "stop", recovered=1))
        assert asking.result(30.0).json()["choices"][0]["text"] == "before"
    server.peer.reset()
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "ok"


def test_figures_are_of_the_stages_that_there_are(server):
    slow = {"stage_seconds": [0.1, 0.4, 0.1], "stage_slowdown": [1.0, 4.0, 1.0]}
    server.peer.send(Status(0.0, STATUS | slow))
    server.until(lambda: len(figures(server, "stage_slowdown")) == 3)
    assert figures(server, "stage_slowdown") == {
        'host="a",rank="1",stage="1"': 1.0, 'host="b",rank="2",stage="2"': 4.0,
        'host="a",rank="3",stage="3"': 1.0}
    assert list(figures(server, "stage_seconds").values()) == [0.1, 0.4, 0.1]
    assert figures(server, "recoveries") == {"": 0.0}

    change(server, FEWER, [LOSS, DEALT], [2])
    server.peer.send(Status(0.0, STATUS | {
        "stage_seconds": [0.2, 0.3], "stage_slowdown": [1.0, 1.5]}))
    server.until(lambda: len(figures(server, "stage_slowdown")) == 2)
    assert figures(server, "stage_seconds") == {
        'host="a",rank="1",stage="1"': 0.2, 'host="a",rank="3",stage="2"': 0.3}
    assert figures(server, "recoveries") == {"": 1.0}
    assert figures(server, "ranks_lost") == {"": 1.0}


# --- dealing out anew -------------------------------------------------------------------------


def says(server, changed, message, stages=None):
    def answer(frame):
        if stages is not None:
            change(server, stages, [DEALT])
        server.peer.send(Rebalanced(frame.id, changed, message))
    return answer


def test_rebalance_answers_with_the_stages_from_now_on(server):
    answer = asks(server, says(server, True, "redistributed", FEWER))
    assert answer.status_code == 200
    assert answer.json() == {"changed": True, "message": "redistributed", "stages": FEWER}
    # nobody was lost
    assert server.get("/health").json() == {"status": "ok", "recoveries": 0, "lost": []}


def test_rebalance_that_changes_nothing_says_why(server):
    answer = asks(server, says(server, False, "the layers stay"))
    assert answer.json() == {"changed": False, "message": "the layers stay", "stages": STAGES}


def test_only_one_at_a_time(server):
    second = []

    def answer(frame):
        second.append(server.post("/rebalance", {}))
        says(server, False, "the layers stay")(frame)

    assert asks(server, answer).status_code == 200
    assert second[0].status_code == 429
    assert second[0].json()["error"]["code"] == "rebalancing"
    assert asks_again(server).status_code == 200


def asks_again(server):
    server.peer.reset()
    return asks(server, says(server, False, "the layers stay"))


def test_replies_without_a_request_are_ignored(server):
    server.peer.send(Rebalanced(10**6, False, "late"))
    assert asks_again(server).json()["message"] == "the layers stay"


def test_only_post_requests_redistribute_layers(server):
    assert server.get("/rebalance").status_code == 405
    assert not [frame for frame in server.peer.seen if isinstance(frame, Rebalance)]


def test_without_an_answer_it_ends_after_the_requests_time_and_can_be_asked_again():
    with front(MODEL, request_timeout=0.3, facts={"stages": STAGES}) as server:
        answer = server.post("/rebalance", {})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        server.peer.reset()
        assert server.post("/rebalance", {}).status_code == 504  # not 429: the first is over


def test_a_server_with_keys_deals_out_for_those_who_have_one():
    with front(MODEL, keys=["secret"], facts={"stages": STAGES}) as server:
        assert server.post("/rebalance", {}).status_code == 401
        answer = asks(server, says(server, False, "the layers stay"),
                      headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200


def test_a_server_that_is_loading_deals_nothing_out():
    with front(MODEL, ready=False) as server:
        answer = server.post("/rebalance", {})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "loading"


def test_an_engine_that_fails_meanwhile_is_a_503():
    frame = Failed("rank 1 died")
    with front(MODEL, request_timeout=20.0, facts={"stages": STAGES}) as server:
        answer = asks(server, lambda _: server.peer.send(frame))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "cluster_failed"


# --- the command ------------------------------------------------------------------------------


def command(server, answer, *options):
    """The result of the command."""
    args = ["--url", server.url, *options]
    return answered(server, lambda: CliRunner().invoke(rebalance_command, args), answer)


def test_the_command_names_the_stages(server):
    result = command(server, says(server, True, "stage 2 gave 2 layers away", FEWER))
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "stage 2 gave 2 layers away", "stage 1: layers 0-5 on rank 1 (a)",
        "stage 2: layers 6-11 on rank 3 (a)"]


def test_the_command_prints_one_object(server):
    result = command(server, says(server, False, "the layers stay"), "--json")
    assert result.exit_code == 0
    assert json.loads(result.output) == {
        "changed": False, "message": "the layers stay", "stages": STAGES}


def run(*options):
    """`pipeinfer rebalance` as a process: its failures end the process."""
    return subprocess.run([sys.executable, "-m", "pipeinfer", "rebalance", *options],
                          capture_output=True, text=True, timeout=60)


def test_the_command_fails_in_one_line_where_nobody_listens():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = run("--url", url, "--json")
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith(f"pipeinfer: error: no server answers at {url}")
    assert done.stderr.count("\n") == 1


def test_the_command_passes_a_refusal_on():
    with front(MODEL, keys=["secret"], facts={"stages": STAGES}) as server:
        done = run("--url", server.url, "--api-key", "wrong")
        assert done.returncode != 0
        assert done.stderr.startswith("pipeinfer: error: ")
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr
        result = command(server, says(server, False, "the layers stay"), "--api-key", "secret")
        assert result.exit_code == 0
