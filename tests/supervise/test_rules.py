"""When a job starts again, what its end was, when missing hosts are asked: no process, no clock."""

from __future__ import annotations

import re

import pytest

from pipeinfer.cli.options import parse
from pipeinfer.supervise.logs import Splitter
from pipeinfer.supervise.rules import (
    MissingHosts,
    RestartBudget,
    affects_tokens,
    fixed_options,
    is_wide,
    outcome,
)


def pauses(patience, *ends):
    """What follows each of these ends, (exit status, seconds of life): pause, and starts left."""
    for status, lived in ends:
        patience, pause = patience.after(status, lived)
        yield pause, patience.left


def test_pauses_double_up_to_half_a_minute_and_tries_end():
    assert list(pauses(RestartBudget.of(7), *[(6, 0.1)] * 8)) == [
        (1, 6), (2, 5), (4, 4), (8, 3), (16, 2), (30, 1), (30, 0), (None, 0)]
    assert list(pauses(RestartBudget.of(0), (6, 0.1))) == [(None, 0)]
    assert [RestartBudget.of(7).used_up(6), RestartBudget.of(0).used_up(6)] == [True, False]


def test_a_long_life_resets_the_count_of_restarts():
    assert list(pauses(RestartBudget.of(3), (6, 1), (6, 1), (6, 20), (6, 600))) == [
        (1, 2), (2, 1), (1, 0), (1, 2)]


@pytest.mark.parametrize("status", [0, 2, 130])
def test_what_is_not_tried_again(status):
    assert list(pauses(RestartBudget.of(3), (status, 1))) == [(None, 3)]
    assert not RestartBudget.of(3).used_up(status)


@pytest.mark.parametrize(("launcher", "said", "asked", "status"), [
    (0, "0", False, 0), (0, "6 lost", False, 6), (-9, "", False, 137), (5, "up 77", True, 5),
    (0, "", True, 130), (0, "up 77", False, 1), (0, "up 77", True, 130), (0, "", False, 0)])
def test_the_exit_status_is_rank_0s_own_where_it_left_one(launcher, said, asked, status):
    assert outcome(launcher, said, asked=asked) == status


def missing(hosts, host, *moments):
    """At which of these moments a host that is missing is checked."""
    found = []
    for now in moments:
        hosts.update({host: None}, {}, now)
        found += [now] * bool(hosts.due(now))
    return found


def test_a_host_that_keeps_getting_lost_is_left_alone_for_longer():
    hosts = MissingHosts(60)
    assert missing(hosts, "a", 0, 30, 59, 60, 61, 120) == [60, 120]
    hosts.update({}, {}, 130)
    assert missing(hosts, "a", 200, 319, 320) == [320]
    hosts.hosts["a"].back = 320
    hosts.take_back()  # it is lost at once again
    assert missing(hosts, "a", 330, 569, 570) == [570]
    hosts.update({}, {}, 600)
    day = 330 + 86_400  # after the last loss it counts as a new host
    assert missing(hosts, "a", day, day + 59, day + 60) == [day + 60]
    joined = MissingHosts(60, new_hosts=True)
    assert missing(joined, "b", 10) == [10]  # at once, the first time
    joined.update({}, {}, 20)
    assert missing(joined, "b", 100, 219, 220) == [220]
    assert missing(MissingHosts(0), "a", 0, 10**9) == []


def test_why_a_host_is_missing_is_what_was_found_last():
    hosts = MissingHosts(60)
    hosts.update({"a": None}, {}, 0)
    hosts.update({"a": None}, {"a": "no answer"}, 1)
    assert (hosts.hosts["a"].why, hosts.back) == ("no answer", [])
    hosts.hosts["a"].back = 2
    hosts.update({"a": None}, {"a": "no answer"}, 3)
    assert (hosts.hosts["a"].why, hosts.back) == ("", [2])


@pytest.mark.parametrize(("new", "names"), [
    ("-m a --queue 3 --temp 0.1 --spares 1 -np 4 -md b", []), ("-m b", ["model"]),
    ("-m a --grid 2x2 -ctk f16", ["cache_type_k", "grid"])])
def test_options_on_which_tokens_may_depend(new, names):
    sections = ("model", "cluster", "speculation", "sampling", "serve")
    old, other = (parse(words.split(), *sections).config.values() for words in ("-m a", new))
    assert affects_tokens(old, other) == names
    assert is_wide(other) == ("grid" in names)


@pytest.mark.parametrize(("new", "says"), [
    ("-m b --port 8081 --queue 3", ""), ("-m a", "--port cannot change .*: give --port 8081 as"),
    ("--port 8082 --host 0.0.0.0 --journal j", r"--host, --port, --journal cannot change .*: give "
     r"--host 127.0.0.1 --port 8081 --journal '' as before, or `pipeinfer down`")])
def test_options_that_stay_with_the_http_process(new, says):
    old, other = (parse(words.split(), "model", "serve").config.values()
                  for words in ("-m a --port 8081", new))
    assert re.match(says or "$", fixed_options(old, other))


def test_tagged_output_is_split_by_rank():
    seen = []
    splitter = Splitter(lambda rank, text: seen.append((rank, text)))
    for data in (b"[1,0]<stdout>: a\n[1,", b"12]<stderr>: b [1] c\n[3] d\nprte: [x]\n\n[1,1]<std",
                 b"out>: \xff"):
        splitter.feed(data)
    splitter.close()
    assert seen == [(0, "a"), (12, "b [1] c"), (3, "d"), (None, "prte: [x]"), (None, ""),
                    (1, "\ufffd")]
