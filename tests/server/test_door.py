"""The HTTP process that outlives the job, against one scripted engine after the other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest
import requests

from pipeinfer.errors import ClusterError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.server import http_process, orders
from pipeinfer.server.frames import (
    GREETING,
    Abort,
    Bye,
    Draining,
    Failed,
    Ready,
    Submit,
    encode,
)
from tests.kit.server_peer import FACTS, MODEL, SECONDS, Peer, Reached, settings_of

pytestmark = pytest.mark.slow
TEXT = "one two three four five six"


def spawn(path):
    """The process, and the socket at which a supervisor sends it orders."""
    control = http_process.unix_listener(f"{path.parent}-control")
    with http_process.unix_listener(str(path)) as listener:
        return http_process.start(listener, os.environ, control), control


class Door(Reached):
    """The process, its folder, and whoever is rank 0."""

    def __init__(self, folder, **settings):
        self.path = folder / "inner" / "door"
        self.path.parent.mkdir()
        self.settings = settings_of(str(MODEL), **settings)
        self.tokenizer = open_tokenizer(MODEL)
        self.tokens = self.tokenizer.encode(TEXT, add_bos=False)
        self.process = self.spawn()
        self.children = []
        self.enter()

    def spawn(self):
        process, self.control = spawn(self.path)
        return process

    def enter(self, settings=None, answer=lambda frame: None, **facts):
        """A new rank 0, ready for requests."""
        child = http_process.enter(str(self.path), settings or self.settings,
                                   lambda: http_process.listen("127.0.0.1", 0, 60.0))
        self.url, self.peer = child.url, Peer(child.link, self.tokenizer)
        self.children.append(child)
        self.peer.answer = answer
        self.peer.send(Ready(FACTS | {"bits": "a"} | facts))
        self.until(lambda: self.health()[0] == 200)

    def leave(self, *words):
        """Rank 0 dies, after these frames."""
        for frame in words:
            self.peer.send(frame)
        self.children[-1].link.flush(SECONDS)
        self.children[-1].link.close()
        self.peer.close()

    def health(self):
        try:
            answer = self.get("/health")
        except requests.ConnectionError:
            return 0, {}
        return answer.status_code, answer.json()

    def lose(self, *words):
        """The same, and the HTTP process has noticed it."""
        self.leave(*words)
        self.away()

    def away(self):
        self.until(lambda: self.health()[1].get("status") == "restarting")

    def close(self):
        with contextlib.suppress(ClusterError):
            self.peer.send(Bye())
        if self.health()[1].get("status") == "restarting":
            self.process.terminate()
        self.process.wait(SECONDS)
        self.control.close()
        for child in self.children:
            child.link.close()
        self.peer.close()
        self.tokenizer.close()


@pytest.fixture
def door(tmp_path):
    with contextlib.closing(Door(tmp_path)) as one:
        yield one


def obeyed(door, order):
    """The state after an order of the supervisor."""
    with socket.socket(socket.AF_UNIX) as link, link.makefile("rwb") as lines:
        link.settimeout(SECONDS)
        link.connect(f"{door.path.parent}-control")
        lines.write(msgspec.json.encode(order) + b"\n")
        lines.flush()
        return json.loads(lines.readline())


def let_sleep(door):
    """The state after that order."""
    return obeyed(door, orders.Sleep(until=1e9))["state"]


class Client(threading.Thread):
    """A stream of a completion, read in a thread."""

    def __init__(self, url, **body):
        super().__init__(daemon=True)
        self.text, self.last, self.left = "", {}, threading.Event()
        self._ask = url, {"prompt": "x", "max_tokens": 100, "stream": True, **body}
        self.start()

    def run(self):
        url, body = self._ask
        with requests.post(f"{url}/v1/completions", json=body, stream=True,
                           timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                if self.left.is_set():
                    return
                if line.startswith(b"data: {"):
                    self.last = json.loads(line[6:])
                    self.text += "".join(one["text"] for one in self.last.get("choices", ()))

    def ended(self):
        self.join(SECONDS)
        assert not self.is_alive()
        return self


def some(door, count):
    """What a first rank 0 says: some tokens, and no end."""
    door.peer.answer = lambda frame: door.peer.say(frame.id, "", None, door.tokens[:count])


def begun(door, count):
    """A stream of which these tokens have come, and which has not ended."""
    some(door, count)
    client = Client(door.url)
    door.until(lambda: client.text)
    return client


def missing(door, frame):
    """News of the tokens that a request lacks, and of its end."""
    return door.peer.say(frame.id, "", "length", door.tokens[len(frame.output):])


def rest(door):
    """What the next one says: what is missing, and the end."""
    door.peer.answer = lambda frame: missing(door, frame)


def test_a_stream_goes_on_with_the_next_job(door):
    client = begun(door, 3)
    door.lose()
    assert door.health()[1]["reason"] == "rank 0 has died"
    late = Client(door.url)  # begins while nobody is there
    time.sleep(0.1)
    door.enter()
    first = door.peer.wait_for(Submit, 1)
    assert first.output == tuple(door.tokens[:3])
    assert door.peer.wait_for(Submit, 2).output == ()
    for frame in (first, door.peer.wait_for(Submit, 2)):
        door.peer.news(missing(door, frame))
    assert client.ended().text == late.ended().text == TEXT
    assert client.last["timings"]["restarts_n"] == 1
    assert client.last["timings"]["same_arithmetic"] is True
    assert client.last["timings"]["predicted_n"] == len(door.tokens)
    assert "restarts_n" not in late.last["timings"]
    assert "pipeinfer_restarts_total 1.0" in door.get("/metrics").text


def test_requests_wake_a_job_that_sleeps(door):
    """Those that only look do not."""
    assert let_sleep(door) == "asleep"
    door.leave(Bye())
    for path in ("health", "props", "v1/models", "slots", "metrics"):
        assert door.get(f"/{path}").status_code == 200
    assert door.health() == (200, {"status": "asleep"})
    client = Client(door.url)
    door.away()
    assert "wakes for a request" in door.health()[1]["reason"]
    door.enter()
    door.peer.news(missing(door, door.peer.wait_for(Submit)))
    assert client.ended().text == TEXT
    assert "restarts_n" not in client.last["timings"]


def test_requests_wait_for_the_model_that_they_name(door):
    offer = orders.Offer(names=("m", "other"), until=1e9)
    assert obeyed(door, offer)["wanted"] == ""
    door.peer.answer = lambda frame: door.peer.say(frame.id, "of m")

    def ask(model, limit=SECONDS):
        answer = requests.post(f"{door.url}/v1/completions", timeout=limit, json={
            "prompt": "x", "model": model})
        return answer.status_code, answer.json()

    def names():
        return [one["id"] for one in door.get("/v1/models").json()["data"]]

    assert names() == ["m", "other"]
    assert door.get("/v1/models/other").json()["id"] == "other"
    assert ask("third")[0] == 404
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(ask, "other")
        door.until(lambda: obeyed(door, offer)["wanted"] == "other")
        assert ask("m")[1]["choices"][0]["text"] == "of m"  # the others go on meanwhile
        obeyed(door, orders.Offer(names=("m", "other"), refused={"other": "it is too large"},
                                  until=1e9))
        code, error = waits.result(SECONDS)
        assert (code, error["error"]["code"]) == (503, "model_not_loaded")
        assert "it is too large" in error["error"]["message"]
        with pytest.raises(requests.Timeout):
            ask("other", 0.5)  # leaves
        door.until(lambda: obeyed(door, offer)["wanted"] == "")
        waits = pool.submit(ask, "other")
        door.until(lambda: obeyed(door, offer)["waiting"] == 1)
        obeyed(door, orders.Move(why="the model changes", new_model=False, until=1e9))
        door.lose()
        door.enter(msgspec.structs.replace(door.settings, name="other"),
                   lambda frame: door.peer.say(frame.id, "of other"))
        code, answer = waits.result(SECONDS)
        assert (code, answer["model"], answer["choices"][0]["text"]) == (200, "other", "of other")
        assert names() == ["other", "m"]
        assert obeyed(door, offer)["wanted"] == ""


def test_a_model_that_does_not_come_in_time(tmp_path):
    with contextlib.closing(Door(tmp_path, restart_timeout=0.2)) as door:
        obeyed(door, orders.Offer(names=("m", "other"), until=1e9))
        answer = door.post("/v1/messages/count_tokens", {
            "messages": [{"role": "user", "content": "x"}], "model": "other"})
        assert answer.status_code == 503
        assert "restart_timeout" in answer.json()["error"]["message"]
        assert obeyed(door, orders.Look(until=1e9))["wanted"] == ""


def test_a_resumed_stream_names_the_lost_rank_and_other_arithmetic(door):
    client = begun(door, 2)
    door.lose(Failed("stage 2 is gone"))
    assert door.health()[1]["reason"] == "stage 2 is gone"
    door.enter(bits="b")
    door.peer.news(missing(door, door.peer.wait_for(Submit)))
    assert client.ended().text == TEXT
    assert client.last["timings"]["same_arithmetic"] is False


@pytest.mark.full("what is handed over in test_a_stream_goes_on_with_the_next_job")
def test_what_has_ended_or_has_lost_its_client_is_not_handed_over(door):
    def open_now():
        return float(re.search(r"^pipeinfer_open_choices (\S+)$", door.get("/metrics").text,
                               re.MULTILINE)[1])

    some(door, 3)
    full = Client(door.url, max_tokens=3)  # its end gets lost
    stopped = Client(door.url, stop=["two"])
    gone = door.stream("/v1/completions", {"prompt": "x"})
    door.peer.wait_for(Submit, 3)
    door.peer.wait_for(Abort, reason="stop")
    door.until(lambda: full.text and stopped.text)
    door.lose()
    before = open_now()
    gone.close()
    door.until(lambda: open_now() == before - 1)
    door.enter()
    assert full.ended().last["choices"][0]["finish_reason"] == "length"
    assert stopped.ended().text == "one "
    assert stopped.last["choices"][0]["finish_reason"] == "stop"
    door.until(lambda: open_now() == 0)
    assert door.peer.seen == []


def test_streams_end_with_an_error_when_no_job_returns_in_time(tmp_path):
    with contextlib.closing(Door(tmp_path, restart_timeout=0.5)) as door:
        client = begun(door, 1)
        door.leave()
        assert client.ended().last["error"]["code"] == "cluster_failed"
        assert "not back within 0.5 s (--set restart_timeout)" in client.last["error"]["message"]
        answer = door.post("/v1/completions", {"prompt": "x"})
        assert answer.status_code == 503
        assert "being started again" in answer.json()["error"]["message"]
        assert answer.headers["Retry-After"]
        door.enter()
        rest(door)
        assert Client(door.url).ended().text == TEXT


def test_other_settings_hold_and_another_model_takes_up_nothing(door, tmp_path):
    other = tmp_path / "other.gguf"
    other.symlink_to(MODEL)
    client = begun(door, 1)
    door.leave()
    door.enter(settings_of(str(other), keys=("key",)))
    assert client.ended().last["error"]["message"] == (
        "the server has come back with another model")
    rest(door)
    assert door.post("/v1/completions", {"prompt": "x"}).status_code == 401
    answer = door.post("/v1/completions", {"prompt": "x"}, headers={"X-Api-Key": "key"})
    assert answer.json()["choices"][0]["text"] == TEXT
    helpers = psutil.Process(door.process.pid).children
    door.until(lambda: 1 == sum(
        "pipeinfer.models.text.tokenizing" in helper.cmdline() for helper in helpers()))


@pytest.mark.parametrize("how", ["goodbye", "no job any more", "while nobody is there"])
def test_the_http_process_ends_every_stream_and_leaves_no_file(door, how):
    client = begun(door, 1)
    if how == "goodbye":
        door.leave(Draining(1.0), Bye())
    elif how == "no job any more":
        door.process.send_signal(signal.SIGTERM)
    else:
        door.lose(Failed("the disk is full"))
        door.process.send_signal(signal.SIGTERM)
    error = client.ended().last["error"]
    assert error["code"] == ("shutting_down" if how == "goodbye" else "cluster_failed")
    assert how != "while nobody is there" or "the disk is full" in error["message"]
    assert door.process.wait(SECONDS) == (0 if how == "goodbye" else 1)
    assert not door.path.parent.exists()


def test_frames_that_arrive_with_the_settings_are_kept(door):
    door.lose()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(door.path))
        assert http_process.first_frame(link, GREETING).url == door.url
        link.sendall(encode(door.settings) + encode(Ready(FACTS)))
        door.until(lambda: door.health()[0] == 200)
    door.away()


def test_the_http_process_ends_on_a_signal_without_a_rank_0(tmp_path):
    path = tmp_path / "inner" / "door"
    path.parent.mkdir()
    process, control = spawn(path)
    with control, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        assert http_process.first_frame(stranger, GREETING).url == ""  # it waits
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0
    assert not path.parent.exists()


def test_another_user_may_not_be_rank_0(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(orders.os, "getuid", lambda: os.geteuid() + 1)
    path = str(tmp_path / "door")
    with http_process.unix_listener(path) as listener, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        assert http_process.EngineListener(listener).accept_first() is None
        assert stranger.recv(100) == b""  # not even a greeting
    assert "belongs to another user" in caplog.text


def test_rank_0_is_told_where_no_http_process_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(http_process, "_ENTER_SECONDS", 0.2)
    with pytest.raises(ClusterError, match="does not answer"):
        http_process.enter(str(tmp_path / "door"), settings_of(str(MODEL)), lambda: None)
