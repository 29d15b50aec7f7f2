"""A race of policies over paced stages: its lines, its pictures, and over ranks."""

from __future__ import annotations

import io
import json
import sys
from xml.etree import ElementTree

import pytest

from pipeinfer.core.policy import Policy
from pipeinfer.supervise.race_view import (
    RACERS,
    Finished,
    RaceLines,
    as_svg,
    as_text,
    lanes_of,
    result_line,
)
from tests.kit import launch


def finished(policy=Policy.ITERATIVE, tokens=(1, 2), text="one\ttwo", speed=5.0, runs=(0, 9)):
    return Finished(policy, tokens, text, speed, 2.0, runs)


def event(run, stage, start_ms, ms, fate):
    return {"ph": "X", "tid": stage, "ts": start_ms * 1e3, "dur": ms * 1e3, "cat": fate,
            "args": {"run": run, "fate": fate, "rows": 1}}


TRACE = {"traceEvents": [
    {"ph": "M", "tid": 1, "name": "thread_name", "args": {"name": "stage 1"}},
    event(0, 1, 0, 900, "prompt"), event(0, 2, 900, 900, "prompt"),
    event(1, 1, 2000, 100, "non-speculative"), event(1, 2, 2100, 100, "non-speculative"),
    event(2, 1, 2200, 100, "non-speculative"), event(2, 2, 2300, 100, "non-speculative"),
    event(5, 1, 9000, 200, "accepted"), event(5, 2, 9200, 200, "rejected")]}
RACE = [finished(runs=(0, 2)), finished(Policy.PIPEINFER, speed=9.5, runs=(5, 5))]


@pytest.mark.parametrize(("other", "says"), [
    (finished(Policy.PIPEINFER, speed=9.5), "1.9 times, same text"),
    (finished(Policy.PIPEINFER, text="one", speed=5.0), "1.0 times, ANOTHER TEXT"),
    (finished(Policy.PIPEINFER, tokens=(1, 3), speed=0.0), "0.0 times, ANOTHER TEXT"),
    (finished(), "one two")])
def test_a_line_compares_with_the_first(other, says):
    first = other if "times" not in says else finished()
    assert says in result_line(other, first)
    assert "\t" not in result_line(other, first)


def test_pictures_show_an_equal_part_of_each_answer_without_its_prompt():
    span, lanes = lanes_of(TRACE, RACE)
    assert span == 4e5
    assert lanes[0].stages[0] == ((0, 1e5, "non-speculative"), (2e5, 3e5, "non-speculative"))
    assert lanes[1].stages == (((0, 2e5, "accepted"),), ((2e5, 4e5, "rejected"),))
    rows = as_text(span, lanes).splitlines()
    assert [row.split()[-1] for row in rows[:4]] == [
        "=" * 12 + "." * 12 + "=" * 12 + "." * 12, "." * 12 + "=" * 12 + "." * 12 + "=" * 12,
        "+" * 24 + "." * 24, "." * 24 + "x" * 24]
    assert "x rejected" in rows[-1]
    assert "prompt" not in rows[-1]


def test_the_picture_is_svg_whatever_the_model_is_called():
    drawn = ElementTree.fromstring(as_svg("a<b>&c", *lanes_of(TRACE, RACE), ["<1>", "2 & 3"]))
    texts = [one.text for one in drawn.iter() if one.tag.endswith("text")]
    assert {"a<b>&c", "<1>", "2 & 3", "stage 2"} <= set(texts)


def test_an_answer_of_a_single_token_has_no_picture():
    empty = {"traceEvents": [event(0, 1, 0, 900, "prompt")]}
    assert lanes_of(empty, [finished(runs=(0, 0))])[0] == 0


def test_live_lines_are_redrawn_in_place_and_pass_no_control_characters():
    out = io.StringIO()
    lines = RaceLines(out)
    lines.clear()
    assert out.getvalue() == ""
    lines.add(Policy.ITERATIVE, "one\x1b[2J\ntwo")
    lines.add(Policy.PIPEINFER, "x" * 500)
    lines.clear()
    first, second = out.getvalue().split("\x1b[3A", 1)
    assert [line.split("  ")[0] for line in first.replace("\r\x1b[K", "").splitlines()] == [
        *RACERS.values()]
    assert "one [2J two" in first
    assert max(map(len, second.replace("\r\x1b[K", "").splitlines())) <= 80
    assert second.endswith("\x1b[3A\r\x1b[J")


@pytest.mark.mpi
@pytest.mark.slow
def test_over_ranks(tmp_path):
    picture, trace = tmp_path / "race.svg", tmp_path / "race.json"
    common = ["-m", "embedded", "-t", "1", "-n", "24", "-p", "def read(path):", "--temp", "0.6",
              "--seed", "7"]
    done = launch.run(4, [sys.executable, "-m", "pipeinfer", "race", *common, "--hook",
                          "pace=5+1", "-o", str(picture), "--trace", str(trace)])
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert "3 stages paced as slow hosts (5 ms and more for each run: emulated)" in head
    assert [line.split("  ")[0] for line in lines[:3]] == [*RACERS.values()]
    assert [line.endswith("same text") for line in lines[:3]] == [False, True, True]
    assert sum("  stage " in line for line in lines) == 9
    assert f"picture: {picture}" in lines
    assert json.loads(trace.read_text())["traceEvents"]
    assert len(list(ElementTree.parse(picture).getroot())) > 20
    plain = launch.run(1, [sys.executable, "-m", "pipeinfer", "generate", *common, "--json"])
    again = launch.run(4, [sys.executable, "-m", "pipeinfer", "race", *common, "--hook", "pace=1",
                           "--json"])
    assert {tuple(one["tokens"]) for one in json.loads(again.stdout)} == {
        tuple(json.loads(plain.stdout)["tokens"])}


@pytest.mark.mpi
@pytest.mark.slow
def test_a_draft_rank_that_dies_is_named_and_the_race_goes_on():
    done = launch.run(3, [sys.executable, "-m", "pipeinfer", "race", "-m", "embedded", "-t", "1",
                          "-n", "24", "-p", "def read(path):", "--ignore-eos", "--json",
                          "--hook", "pace=8", "--draft-ranks", "1", "--hook",
                          "fault=kill@2:decode=6"])
    assert done.returncode == 0, done.stderr
    race = json.loads(done.stdout)
    assert [one["policy"] for one in race] == [policy.value for policy in RACERS]
    assert len({tuple(one["tokens"]) for one in race}) == 1
    assert "note: rank 2, which drafted, is dead: decoding continues without this draft" in \
        done.stderr


@pytest.mark.mpi
@pytest.mark.slow
def test_one_rank_of_a_launcher_has_no_stages():
    """Without a launcher it starts its ranks: `tests/server/test_race.py` shows that."""
    done = launch.run(1, [launch.mpirun_path(), "-np", "1", sys.executable, "-m", "pipeinfer",
                          "race", "-p", "x"])
    assert done.returncode == 2
    assert "a race needs stages" in done.stderr
