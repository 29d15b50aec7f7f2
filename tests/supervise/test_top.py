"""What `pipeinfer top` shows of figures, and of servers that are away."""

from __future__ import annotations

import collections
import io

import pytest
from rich.console import Console

from pipeinfer.errors import RequestError
from pipeinfer.supervise import top
from pipeinfer.supervise.top import Screen, draw, look, read, spark
from pipeinfer.transport.http_client import HttpAnswer, HttpFailure

METRICS = """# TYPE pipeinfer_generated_tokens counter
pipeinfer_generated_tokens_total 300.0
pipeinfer_requests_total{outcome="length"} 2.0
pipeinfer_requests_total{outcome="error"} 0.0
pipeinfer_stage_seconds{host="b",rank="1",stage="1"} 0.004
pipeinfer_stage_slowdown{host="b",rank="1",stage="1"} 2.5
pipeinfer_drafted_tokens_total 10.0
pipeinfer_accepted_tokens_total 4.0
pipeinfer_inter_token_seconds_sum 1.0
pipeinfer_inter_token_seconds_count 20.0
"""
FACTS = {"version": "1", "policy": "p", "draft": "d", "spares": [3], "lost": [2],
         "ranks": [{"rank": rank, "host": host, "memory": 1 << 30}
                   for rank, host in enumerate("abcd")],
         "stages": [{"stage": 1, "rank": 1, "host": "b", "layers": [0, 12], "slices": 1,
                     "of_slices": 2, "weight_bytes": 5 << 20, "cache_bytes": 3 << 30,
                     "threads": 4}]}


def shown(frame, *rates):
    console = Console(file=io.StringIO(), width=120)
    console.print(draw(frame, collections.deque(rates)))
    return console.file.getvalue()


def test_a_frame():
    frame = Screen(1.0, "http://h", "ok", name="m\x1b[31m", facts=FACTS, figures=read(METRICS),
                  rate=41.26, lanes=[{"request": 7, "output": 30}])
    frame.supervisor = {"hosts": [{"host": "e", "state": "missing", "why": "does not answer"},
                                  {"host": "a", "state": "used", "why": ""}]}
    text = shown(frame, 10.0, 40.0)
    for words in ("m?[31m at http://h  ready", "41.3 ▃█", "ended: 2 length", "then every 50 ms",
                  "40% accepted", "0-11 1/2  5.0 MiB  3.0 GiB", " 4.00 ", "2.50x",
                  "rank 0 (a) takes requests and drafts; rank 3 (d) is a spare; rank 2 (c) is",
                  "request  output", "hosts    e missing (does not answer)"):
        assert words in text
    assert spark(collections.deque([0.0])) == " "
    assert spark(collections.deque([0.0, 7.0])) == "▁█"


def test_a_server_that_is_away_wants_a_key_or_is_another_program(monkeypatch):
    answers = {"/health": HttpAnswer(
                   503, {}, b'{"status": "restarting", "reason": "rank 0 has died"}'),
               "/metrics": HttpAnswer(200, {}, METRICS.encode())}

    def ask(method, url, **_):
        found = answers[url.removeprefix("http://h")]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(top.http_client, "ask", ask)
    before = Screen(0.0, "http://h", "ok", facts=FACTS, figures={
        "pipeinfer_generated_tokens_total": 300.0 - 5})
    frame = look("http://h", {}, before)
    assert frame.rate == pytest.approx(5 / frame.seen)
    assert "restarting  rank 0 has died" in shown(frame)
    assert "rank 2 (c) is lost" in shown(frame)  # as it was
    answers["/health"] = HttpFailure("nobody listens")
    frame = look("http://h", {})
    assert (frame.state, frame.rate) == ("silent", None)
    assert "silent  nobody listens" in shown(frame)
    for answer, says in ((HttpAnswer(401, {}, b"{}"), "wants an API key"),
                         (HttpAnswer(200, {}, b"<html>"), "is no `pipeinfer serve`")):
        answers["/health"] = answer
        with pytest.raises(RequestError, match=says):
            look("http://h", {})
