"""POST /race: `pipeinfer race` as a child of the HTTP process, one at a time, and its ends."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import threading

import psutil
import pytest
import requests

from pipeinfer.cli.serve import race_words
from pipeinfer.config import Config
from tests.kit.sample import full
from tests.kit.server_peer import MODEL, SECONDS, front

pytestmark = [pytest.mark.slow, pytest.mark.mpi]
STAGES = [{"node": 1, "rank": 0, "host": "a", "layers": [0, 12]}]
#: a real race, but a quick one; no more tokens than an answer would have
QUICK = ("-m", "embedded", "-t", "1", "--temp", "0", "--hook", "pace=2+1",
         "-n", "8")
LONG = (*QUICK[:-1], "4000", "--ignore-eos", "-c", "8192")


def racing(server):
    """The launcher below the HTTP process, and its ranks."""
    return [one for one in psutil.Process(server.child.process.pid).children(recursive=True)
            if "race" in _words(one)]


def _words(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def rows(response):
    """The events of a stream, as they come."""
    return (json.loads(line.removeprefix("data: "))
            for line in response.iter_lines(decode_unicode=True) if line)


def gone(processes):
    left = psutil.wait_procs(processes, timeout=SECONDS)[1]
    assert left == []


def start(server):
    """A race that has begun: the answer, and its events after the first text."""
    answer = server.post("/race", {"prompt": "def f("}, stream=True)
    found = rows(answer)
    assert [next(found)["event"] for _ in range(2)] == ["begin", "text"]
    return answer, found


def test_three_policies_answer_and_an_option_of_the_server_is_no_option_of_the_race(monkeypatch):
    monkeypatch.setenv("PIPEINFER_POLICY", "iterative")
    terminal, named = pty.openpty()  # the server's, in which its own progress is shown
    monkeypatch.setenv("PIPEINFER_TERMINAL", f"{socket.gethostname()}:{os.ttyname(named)}")
    with front(MODEL, race=QUICK, facts={"stages": STAGES}) as server:
        assert server.get("/props").json()["race"] is True
        answer = server.post("/race", {"prompt": "def f("}, stream=True)
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        begin, *found, last = rows(answer)
        names = [one["policy"] for one in begin["racers"]]
        assert (begin["stages"], names) == (5, ["iterative", "speculative", "pipeinfer"])
        ends = [one for one in found if one["event"] == "end"]
        assert [one["policy"] for one in ends] == names
        assert all(one["same"] and one["tokens"] == 8 for one in ends)
        texts = {name: "".join(one["text"] for one in found
                               if one["event"] == "text" and one["policy"] == name)
                 for name in names}
        assert len(set(texts.values())) == 1
        assert all(texts.values())
        assert [(lane["policy"], len(lane["stages"])) for lane in last["lanes"]] == [
            (name, 5) for name in names]
        fates = [fate for lane in last["lanes"] for runs in lane["stages"] for _, _, fate in runs]
        assert last["span"] > 0
        assert {"non-speculative", "accepted"} <= {*fates}
        gone(racing(server))
    assert select.select([terminal], [], [], 0)[0] == []
    os.close(terminal)


def test_one_at_a_time_and_it_ends_with_its_client():
    with front(MODEL, race=LONG, facts={"stages": STAGES}) as server:
        answer, found = start(server)
        second = server.post("/race", {"prompt": "x"})
        assert second.status_code == 429
        assert second.json()["error"]["code"] == "race_running"
        ranks = racing(server)
        assert len(ranks) > 5
        assert next(found)["event"] == "text"  # the other one has not disturbed it
        answer.close()
        gone(ranks)


@pytest.mark.parametrize("how", ["killed", full("engine leaves")])
def test_it_ends_with_the_server(how):
    with front(MODEL, race=LONG, facts={"stages": STAGES}) as server:
        (_, events), ranks, found = start(server), racing(server), []
        assert len(ranks) > 5
        reading = threading.Thread(target=lambda: _read(events, found))
        reading.start()
        if how == "killed":
            os.kill(server.child.process.pid, signal.SIGKILL)
        else:
            server.child.fail("it is over")
        gone(ranks)
        reading.join(SECONDS)
        assert not reading.is_alive()
        errors = [one["error"]["message"] for one in found if "error" in one]
        assert errors == ["the race has ended early: the server ends"][:how != "killed"]


def _read(events, found):
    try:
        for one in events:
            found.append(one)
    except requests.RequestException:
        pass


def test_a_race_that_fails_says_why_and_another_may_begin():
    words = ("-m", "embedded", "--policy", "iterative")
    with front(MODEL, race=words, facts={"stages": STAGES}) as server:
        for _ in range(2):
            answer = server.post("/race", {"prompt": "x"}, stream=True)
            error = [*rows(answer)][-1]["error"]
            assert error["code"] == "race_failed"
            assert error["message"].startswith("the race has ended early: race decides about")


@pytest.mark.parametrize(("race", "hosts"), [
    (QUICK, "ab"), full((), "a"), full(QUICK, "")])
def test_where_it_is_not_offered_it_is_refused(race, hosts):
    stages = [{"node": i, "rank": i, "host": host, "layers": [0, 1]}
              for i, host in enumerate(hosts)]
    with front(MODEL, race=race, facts={"stages": stages}) as server:
        assert server.get("/props").json()["race"] is False
        answer = server.post("/race", {"prompt": "x"})
        assert answer.status_code == 404
        assert "race=false" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("options", "offered"), [
    ({"model": "embedded"}, True), ({"model": "embedded", "race": False}, False),
    ({"model": "embedded", "host": "0.0.0.0"}, False),
    ({"model": "embedded", "draft_model": "none"}, False),
    ({"model": "embedded", "draft_model": "none", "proposer": ("prompt-lookup",)}, True)])
def test_which_servers_offer_one(options, offered):
    config = Config.of(**options)
    words = race_words(config.job, config.serve)
    assert bool(words) is offered
    if "proposer" in options:
        assert words[-2:] == ("--proposer", "prompt-lookup")
        assert words[words.index("-md") + 1] == "none"
