"""What a key may do, and how often."""

from __future__ import annotations

import pytest
import requests

from pipeinfer.cli.serve import api_keys
from pipeinfer.config import ServeConfig
from pipeinfer.errors import UsageError
from pipeinfer.server.keys import Allowance, Meter, duration, parse_line
from pipeinfer.server.middleware import Guard, scopes_of
from tests.kit.server_peer import MODEL, SECONDS, front, settings_of
from tests.server.test_http import error


@pytest.mark.parametrize(("line", "key", "allowance"), [
    ("abc", "abc", Allowance()), ("ab== ", "ab==", Allowance()),
    ("two words", "two words", Allowance()),
    ("k scopes=watch", "k", Allowance(("watch",))),
    ("k= scopes=ask,change requests-per-minute=60 at-once=2", "k=",
     Allowance(("ask", "change"), 60, 2)),
    ("k tokens-per-minute=1000000000 connections=5", "k",
     Allowance(tokens_per_minute=1_000_000_000, connections=5))])
def test_lines_of_key_files(line, key, allowance):
    assert parse_line(line.strip(), "f, line 1") == (key, allowance)


@pytest.mark.parametrize(("words", "says"), [
    ("scopes=all", "scopes are some of ask,watch,change"),
    ("scope=ask", "word 2 is none of scopes="),
    ("at-once=0", "at-once is a whole number from 1"), ("at-once=2 fast", "word 3 is none of"),
    ("connections=1000001", "connections is a whole number from 1 to 1000000"),
    ("requests-per-minute=" + "9" * 5000, "requests-per-minute is a whole number")])
def test_lines_that_cannot_be_used_show_no_key(words, says):
    with pytest.raises(UsageError, match=says) as caught:
        parse_line(f"secretkey {words}", "keys.txt, line 3")
    assert str(caught.value).startswith("keys.txt, line 3: ")
    assert "secretkey" not in str(caught.value)


def test_a_minutes_requests_may_come_at_once_and_then_one_by_one():
    meter = Meter(Allowance(per_minute=30))
    assert [meter.wait(100.0) for _ in range(31)] == [0.0] * 30 + [2.0]
    assert meter.wait(101.0) == pytest.approx(1.0)
    assert meter.wait(102.0) == 0.0
    assert meter.wait(102.0) == pytest.approx(2.0)
    assert [meter.wait(10_000.0) for _ in range(31)][-2:] == [0.0, 2.0]
    assert Meter(Allowance()).wait(1.0) == 0.0


def test_tokens_may_be_overdrawn_once_and_are_waited_for_then():
    meter = Meter(Allowance(tokens_per_minute=60))
    assert meter.wait(100.0) == 0.0
    meter.used(150, 100.0)  # a request that has begun is not cut off
    assert meter.wait(100.0) == pytest.approx(91.0)
    assert meter.wait(190.0) == pytest.approx(1.0)
    assert meter.wait(191.0) == 0.0
    assert meter.wait(10_000.0) == 0.0
    assert dict(meter.headers(10_000.0)) == {
        b"x-ratelimit-limit-tokens": b"60", b"x-ratelimit-remaining-tokens": b"60",
        b"x-ratelimit-reset-tokens": b"0ms"}
    assert Meter(Allowance()).headers(1.0) == []


def test_a_reload_leaves_what_a_key_has_used_while_its_limits_stay():
    meters, limits = {}, Allowance(per_minute=2, at_once=1)

    def guard(*allowances):
        names = ("a", "b")[:len(allowances)]
        return Guard(None, settings_of("m", keys=dict(zip(names, allowances, strict=True))),
                     frozenset(), meters)

    guard(limits, limits)
    a, b = meters["a"], meters["b"]
    a.open = 1
    assert [a.wait(100.0), a.wait(100.0), b.wait(100.0)] == [0, 0, 0]
    guard(limits, Allowance(per_minute=9))
    assert meters == {"a": a, "b": b}
    assert a.at_request_limit
    assert a.wait(100.0) > 0
    assert [b.wait(100.0) for _ in range(9)] == [0] * 9


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0, "0ms"), (0.0201, "21ms"), (1.0, "1s"), (59.2, "1m0s"), (61.0, "1m1s"), (3600, "60m0s")])
def test_durations_are_those_of_openais_headers(seconds, text):
    assert duration(seconds) == text


def test_every_path_needs_a_scope():
    for method, path, scopes in (
            ("POST", "/v1/chat/completions", "ask"), ("GET", "/v1/responses/x", "ask"),
            ("POST", "/tokenize", "ask"), ("GET", "/metrics", "watch"), ("GET", "/slots", "watch"),
            ("GET", "/pipeline", "watch"), ("GET", "/rebalance/plan", "watch"),
            ("POST", "/rebalance", "change"), ("GET", "/v1/models", "ask watch"),
            ("GET", "/props", "ask watch"), ("GET", "/whatever", "ask")):
        assert scopes_of(method, path) == tuple(scopes.split())


def test_keys_with_scopes_and_bounds():
    keys = {"all": Allowance(), "watch": Allowance(("watch",)),
            "ask": Allowance(("ask",), per_minute=2), "one": Allowance(("ask",), at_once=1),
            "few": Allowance(tokens_per_minute=10), "narrow": Allowance(connections=1)}
    with front(MODEL, keys=keys) as server:
        def ask(key, path="/v1/completions", **body):
            return requests.post(server.url + path, json={"prompt": "x", **body}, stream=True,
                                 timeout=SECONDS, headers={"Authorization": f"Bearer {key}"})

        def get(key, path):
            return server.get(path, headers={"Authorization": f"Bearer {key}"})

        for answer in (ask("watch"), ask("ask", "/rebalance"), get("ask", "/metrics")):
            assert error(answer, 403)["code"] == "insufficient_scope"
        assert get("watch", "/metrics").status_code == 200
        assert get("ask", "/props").status_code == 200
        assert [ask("ask").status_code for _ in range(2)] == [200, 200]
        late = ask("ask")
        assert error(late, 429)["code"] == "rate_limit_exceeded"
        assert 1 <= int(late.headers["Retry-After"]) <= 30
        assert ask("all").status_code == 200  # each key for itself
        assert "x-ratelimit-limit-requests" not in ask("all").headers
        assert late.headers["x-ratelimit-remaining-requests"] == "0"
        left = int(ask("few", prompt=[1, 2, 3]).headers["x-ratelimit-remaining-tokens"])
        assert left == 10 - 3 - len(server.tokenizer.encode("ok", add_bos=False))
        assert ask("few", prompt=[1] * 30, n=2).status_code == 200
        broke = ask("few")
        assert "10 tokens per minute" in error(broke, 429)["message"]
        assert int(broke.headers["Retry-After"]) > 60
        assert get("few", "/v1/models").status_code == 200
        with requests.get(server.url + "/pipeline", stream=True, timeout=SECONDS,
                          headers={"Authorization": "Bearer narrow"}):
            assert error(get("narrow", "/v1/models"), 429)["code"] == "rate_limit_exceeded"
        server.peer.answer = lambda frame: None
        with ask("one", stream=True):
            assert error(ask("one"), 429)["code"] == "rate_limit_exceeded"
        server.peer.answer = lambda frame: server.peer.say(frame.id, "ok")
        # until it is noticed that the client has left
        server.until(lambda: ask("one").status_code != 429)


def test_a_comment_of_a_key_file_is_no_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text("\ufeff# all keys\n   # of the laboratory\n\nalpha  # for Ann\nbe#ta scopes=ask"
                    " # for Bo\n\t#gamma\n", encoding="utf-8")
    assert api_keys(ServeConfig(api_key_file=str(file))) == {
        "alpha": Allowance(), "be#ta": Allowance(("ask",))}
    file.write_text("  # note\n")
    with pytest.raises(UsageError, match="contains no key"):
        api_keys(ServeConfig(api_key_file=str(file)))


def test_a_key_that_is_there_twice_has_the_same_permissions(tmp_path):
    file = tmp_path / "keys"
    config = ServeConfig(api_key_file=str(file), api_key=("gamma",))
    file.write_text("alpha scopes=ask\nbeta\nalpha scopes=ask\ngamma\n")
    assert api_keys(config) == {"gamma": Allowance(), "alpha": Allowance(("ask",)),
                                "beta": Allowance()}
    for line in ("alpha", "gamma scopes=ask", "beta at-once=2"):
        file.write_text(f"alpha scopes=ask\nbeta\n\n{line}\n")
        with pytest.raises(UsageError, match=(
                "keys, line 4: this key was given before with other scopes or limits")) as caught:
            api_keys(config)
        assert line.split()[0] not in str(caught.value)


@pytest.mark.parametrize("separate", [False, True])
def test_keys_share_prompts_unless_they_are_separated(separate):
    keys = {"one": Allowance(), "two": Allowance()}
    with front(MODEL, keys=keys, separate_keys=separate) as server:
        salts = []

        def answer(frame):
            salts.append(frame.salt)
            return server.peer.say(frame.id, "ok")

        server.peer.answer = answer
        for key in ("one", "two", "one"):
            assert requests.post(f"{server.url}/v1/completions", json={"prompt": "x"},
                                 headers={"Authorization": f"Bearer {key}"},
                                 timeout=SECONDS).status_code == 200
    first, second, third = salts
    assert first == third
    assert (first != second) == separate
    assert b"one" not in first
