"""Where values come from, what bad ones get, and which options a user sees first."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from pipeinfer.cli.main import main
from pipeinfer.cli.options import JOB, parse, words_of
from pipeinfer.cluster.generate import grammar_text
from pipeinfer.config import (
    BASIC,
    SECTIONS,
    Config,
    GrammarConfig,
    JobConfig,
    SamplingConfig,
    options,
)
from pipeinfer.errors import UsageError
from pipeinfer.files import read_toml
from pipeinfer.nodes import HostEntry, read_hostfile


def test_the_command_line_wins_over_environment_file_and_default(tmp_path, monkeypatch):
    file = tmp_path / "p.toml"
    file.write_text('top-k = 11\ntop-p = 0.5\ndraft-max = 5\nablate = ["cancel"]\n')
    for name, value in {"TOP_K": "22", "TOP_P": "0.25", "ABLATE": "async,cancel"}.items():
        monkeypatch.setenv(f"PIPEINFER_{name}", value)
    got = parse(["--top-k", "33", "--config", str(file)])
    assert got.config.sampling.top_k == 33
    assert got.config.sampling.top_p == 0.25
    assert got.config.job.speculation.draft_max == 5
    assert got.config.job.speculation.ablate == ("async", "cancel")
    assert got.config.sampling.min_p == SamplingConfig().min_p
    assert got.config.job.given == {"top_k"}
    assert got.origin["top_k"] == "command line"
    assert got.origin["top_p"] == "environment PIPEINFER_TOP_P"
    assert got.origin["draft_max"] == f"file {file}"
    assert got.origin["min_p"] == "default"
    assert "command line" in got.show()


@pytest.mark.parametrize(("given", "says"), [
    (("--set", "branches=0"), "--set branches.*not in the range 1<=x<=32"),
    (("--top-p", "1.5"), "0<=x<=1"),
    (("--temp", "nan"), "not a number"),
    (("--timeout", "-1.0"), "--timeout"),
    (("--policy", "magic"), "'iterative', 'speculative', 'pipeinfer'"),
    (("--ablate", "everything"), "'async'"),
    (("--top-k", "many"), "not a valid integer"),
    (("-n", "True"), "not a valid integer"),
    (("-p", "a\0b"), "NUL"),
    (("--unheard-of",), "No such option"),
])
def test_absurd_values_name_the_option(given, says):
    with pytest.raises(click.UsageError) as caught:
        parse(given)
    assert re.search(says, caught.value.format_message())


@pytest.mark.parametrize(("text", "says"), [
    ("tpo-k = 3", "unknown key 'tpo-k'; did you mean top_k"),
    ("top-k = [", "not valid TOML"),
    ("top-k = 3.5", "must be a whole number"),
    ("top-k = true", "must be a whole number"),
    ('mlock = "yes"', "must be true or false"),
    ('ablate = "cancel"', "must be a list of texts"),
])
def test_a_bad_file_is_named(tmp_path, text, says):
    file = tmp_path / "p.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        parse(["--config", str(file)])


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    for name, text in (("p.toml", "branches = 3\n"), ("g", 'root ::= "a"\n'), ("h", "a slots=2")):
        (tmp_path / name).write_text(f"\ufeff{text}", encoding="utf-8")
    assert read_toml(tmp_path / "p.toml", "config file") == {"branches": 3}
    assert grammar_text(GrammarConfig(grammar_file=str(tmp_path / "g"))) == (
        "gbnf", 'root ::= "a"\n')
    assert read_hostfile(tmp_path / "h") == (HostEntry("a", 2, 1),)


def test_a_bad_value_says_where_it_came_from(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="cannot read config file"):
        parse(["--config", "/nowhere.toml"])
    file = tmp_path / "p.toml"
    file.write_text("branches = 99\n")
    with pytest.raises(click.BadParameter, match=f"from file {file}"):
        parse(["--config", str(file)])
    monkeypatch.setenv("PIPEINFER_MLOCK", "yes")
    assert parse([]).config.job.model.mlock
    monkeypatch.setenv("PIPEINFER_TOP_K", "x")
    with pytest.raises(click.BadParameter, match="from environment PIPEINFER_TOP_K"):
        parse([])


def test_every_default_is_within_its_bounds_and_flags_are_unique():
    assert parse([]).config == Config()
    flags = [flag for option in options().values() for flag in option.flags]
    assert len(flags) == len(set(flags))
    assert len(options()) == sum(len(options(section)) for section in SECTIONS)


def test_a_setting_is_given_by_its_name():
    got = parse(["--set", "branches=3", "--set", "path-min=0.5", "--set=adapt=no", "--set",
                 "branches=4"])
    own = got.config.job.speculation
    assert (own.branches, own.path_min, own.adapt) == (4, 0.5, False)
    assert got.config.job.given == {"branches", "path_min", "adapt"}
    assert got.origin["credit"] == "default"
    assert parse(["-np", "3"]).config.job.speculation.parallel == 3


@pytest.mark.parametrize(("word", "says"), [
    ("brunches=3", "no setting 'brunches'; did you mean branches?"),
    ("branches", "write branches=VALUE"), ("branches=", "write branches=VALUE"),
    ("branches=x", "not a valid integer"), ("adapt=perhaps", "not a valid boolean"),
    ("ctx=3", "no setting 'ctx'")])
def test_a_bad_setting_is_named(word, says):
    with pytest.raises(click.BadParameter) as caught:
        parse(["--set", word])
    assert says in caught.value.format_message()


def test_sections_are_made_and_changed_by_the_names_of_options():
    config = Config.of(ctx=7, temp=0.5, port=1)
    assert (config.job.model.ctx, config.sampling.temp, config.serve.port) == (7, 0.5, 1)
    changed = config.replace(model="x.gguf", ablate=("cancel",))
    assert (changed.job.model.model, changed.job.speculation.ablate) == ("x.gguf", ("cancel",))
    assert changed.job.model.ctx == 7
    assert JobConfig.of(ctx=7).values().items() <= config.values().items()
    with pytest.raises(TypeError, match="JobConfig has no option temp"):
        JobConfig.of(temp=0.5)


def test_help_shows_what_people_need_and_help_all_shows_the_rest():
    few = CliRunner().invoke(main, ["generate", "--help"], terminal_width=100).output
    everything = CliRunner().invoke(main, ["generate", "--help-all"], terminal_width=100).output
    shown = options("model", "cluster", "speculation", "sampling", "grammar", "request")
    for name, option in shown.items():
        if not option.flags:
            assert re.search(rf"\b{name}\b", everything), name
            continue
        flag = next(f for f in option.flags if f.startswith("--"))
        line = re.compile(rf"^  (-\w+, )*(--[\w-]+, )*{flag}(?![\w-])", re.MULTILINE)
        assert line.search(everything), name
        assert bool(line.search(few)) == (name in BASIC), name
    assert "more options: " in few
    assert len(few.splitlines()) < 80


def test_the_words_of_a_command_give_another_one_the_same_options(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("threads = 3\n")
    for words in ([], ["-m", "x.gguf", "-c", "512", "--offline", "--proposer", "prompt-lookup",
                       "--proposer", "lookahead", "--set", "credit=4", "--config", str(file)]):
        one = parse(words, *JOB)
        other = parse(words_of(one, *JOB), *JOB)
        assert (other.config, other.own) == (one.config, one.own)
        assert other.origin == one.origin
