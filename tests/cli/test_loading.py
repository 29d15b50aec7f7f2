"""The lines that a start prints in a terminal and in a log."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios

import pytest

from pipeinfer.cli import terminal
from pipeinfer.cli.loading import LoadingLines, progress_text
from pipeinfer.cluster.assembly import StageState
from pipeinfer.models.hub import Lines


class Start:
    """A start with a clock that the test sets."""

    def __init__(self, live):
        self.now, self.out = 0.0, io.StringIO()
        self.lines = LoadingLines(self.out, live=live, clock=lambda: self.now)
        self.states = {1: StageState(since=0.0), 2: StageState(since=0.0)}

    def at(self, now, **phases):
        """phases: n1="phase done total"."""
        self.now = now
        for name, text in phases.items():
            phase, done, total = text.rsplit(" ", 2)
            state = self.states[int(name[1:])]
            state.heard = now
            state.reach(phase, int(done), int(total))
            if phase == "ready":
                state.ready = object()
        self.lines.show(self.states)
        return self.out.getvalue()


def test_what_was_read_does_not_jump_back():
    start = Start(live=False)
    for done in (40_000_000, 10_000_000, 60_000_000):
        start.at(1.0, n1=f"reading {done} 100000000")
        assert start.states[1].done == max(40_000_000, done)
    start.at(2.0, n1="loading 0 100000000")
    assert start.states[1].done == 0


def test_a_short_start_leaves_no_line_in_a_log():
    start = Start(live=False)
    start.at(0.5, n1="loading 0 100000000")
    start.at(1.0, n1="measuring 0 1", n2="loading 0 1")
    assert start.at(2.0, n1="ready 1 1", n2="ready 1 1") == ""


def test_a_long_start_has_a_line_for_each_phase_and_every_ten_seconds():
    start = Start(live=False)
    start.at(0.0, n1="loading 0 4000000000", n2="extracting 0 2000000000")
    assert start.at(2.9, n1="loading 1000000000 4000000000") == ""
    said = start.at(4.0, n1="loading 1000000000 4000000000", n2="extracting 100000000 2000000000")
    assert said == ("pipeinfer: stages: 1 loading 1,000 of 4,000 MB (250 MB/s, 12 s left) | "
                    "2 extracting 100 of 2,000 MB (25 MB/s, 76 s left)\n")
    assert start.at(9.0) == said
    assert start.at(14.0).count("\n") == 2
    said = start.at(15.0, n1="measuring 4 16")
    assert said.count("\n") == 3
    assert "1 measuring 25%" in said
    said = start.at(30.0, n1="ready 1 1", n2="ready 1 1")
    assert said.endswith("pipeinfer: ready after 30 s: loading 15 s, extracting 30 s, "
                         "measuring 15 s\n")


def test_what_comes_before_loading_is_counted_as_well():
    start = Start(live=False)
    start.at(20.0, n1="loading 0 1", n2="loading 0 1")
    said = start.at(25.0, n1="ready 1 1", n2="ready 1 1")
    assert said.endswith("pipeinfer: ready after 25 s: planning 20 s, loading 5 s\n")


def test_a_terminal_has_one_line_that_is_replaced():
    start = Start(live=True)
    assert start.at(0.2, n1="loading 0 1") == "\r\x1b[Kstages: 1 loading | 2 waiting"
    said = start.at(8.0, n1="ready 1 1", n2="ready 1 1")
    assert said.split("\r\x1b[K")[-1].startswith("pipeinfer: ready after 8 s: ")


def test_a_later_start_has_a_time_of_its_own():
    start = Start(live=False)
    start.at(5.0, n1="ready 1 1", n2="ready 1 1")
    for state in start.states.values():
        state.ready = None
    start.at(365.0, n1="loading 0 1", n2="loading 0 1")
    said = start.at(370.0, n1="ready 1 1", n2="ready 1 1")
    assert said.endswith("pipeinfer: ready after 5 s: loading 5 s\n")


def test_a_line_is_no_longer_than_its_terminal():
    """Else the terminal wraps it, and each later line leaves a copy of it."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 30))
    with open(slave, "w") as out:
        lines = LoadingLines(out, live=True, clock=lambda: 0.0)
        lines.show({node: StageState(phase="loading", since=0.0) for node in range(1, 9)})
    assert os.read(master, 4096) == b"\r\x1b[Kstages: 1 loading | 2 loading"[:4 + 29]
    os.close(master)


@pytest.mark.parametrize(("state", "now", "text"), [
    (StageState(phase="loading", done=10**6, total=10**11, since=0.0), 1.0,
     "loading 1 of 100,000 MB"),
    (StageState(phase="measuring", done=3, total=16, since=0.0), 1.0, "measuring 19%"),
    (StageState(phase="waiting", since=0.0), 1.0, "waiting"),
    (StageState(phase="loading", done=0, total=10**9, since=0.0), 5.0, "loading 0 of 1,000 MB"),
    (StageState(phase="loading", done=10**8, total=10**9, since=0.0), 0.5,
     "loading 100 of 1,000 MB"),
])
def test_rates_are_shown_where_they_mean_something(state, now, text):
    assert progress_text(state, now) == text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("term", "replaces"), [
    ("dumb", False), ("", False), ("unknown", False), ("xterm-256color", True)])
def test_a_terminal_that_replaces_no_line_gets_no_escape_sequence(monkeypatch, term, replaces):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", out := Terminal())
    assert terminal.progress_stream() == (out, replaces)
    terminal.show_over("1 of 2")
    lines = Lines()
    for done in (1 << 20, 10 << 20):
        lines("model.gguf", done, 10 << 20)
    said = out.getvalue()
    assert ("\x1b" in said) == replaces
    if not replaces:
        assert said == ("pipeinfer: model.gguf: 10 % of 10.5 MB\n"
                        "pipeinfer: model.gguf: 100 % of 10.5 MB\n")
