"""Where values come from, what bad ones get, and which options a user sees first."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from pipeinfer.cli.main import main
from pipeinfer.cli.options import parse
from pipeinfer.config import BASIC, SECTIONS, Config, JobConfig, SamplingConfig, options
from pipeinfer.errors import UsageError


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
    (("--branches", "0"), "--branches.*not in the range 1<=x<=32"),
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


def test_np_is_parallel_and_never_silently_branches():
    assert parse(["-np", "3"]).config.job.speculation.parallel == 3
    assert parse(["--branches", "3"]).config.job.speculation.branches == 3
    with pytest.raises(UsageError, match=r"--parallel.*--branches"):
        parse(["-np", "3", "--policy", "speculative"])
    parse(["--parallel", "3", "--policy", "speculative"])


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
    shown = options("model", "cluster", "speculation", "sampling", "request")
    for name, option in shown.items():
        flag = next(f for f in option.flags if f.startswith("--"))
        line = re.compile(rf"^  (-\w+, )*(--[\w-]+, )*{flag}(?![\w-])", re.MULTILINE)
        assert line.search(everything), name
        assert bool(line.search(few)) == (name in BASIC), name
    assert "more options: " in few
    assert len(few.splitlines()) < 80
