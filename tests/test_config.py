"""Where values come from, and what bad ones get."""

from __future__ import annotations

import pytest

from pipeinfer.config import Config, options, resolve
from pipeinfer.errors import UsageError


def test_the_command_line_wins_over_environment_file_and_default(tmp_path):
    file = tmp_path / "p.toml"
    file.write_text('top-k = 11\ntop-p = 0.5\ndraft-max = 5\nablate = ["cancel"]\n')
    env = {"PIPEINFER_TOP_K": "22", "PIPEINFER_TOP_P": "0.25", "PIPEINFER_ABLATE": "async,cancel"}
    got = resolve({"top_k": 33}, env, str(file))
    assert got.config.top_k == 33
    assert got.config.top_p == 0.25
    assert got.config.draft_max == 5
    assert got.config.ablate == ("async", "cancel")
    assert got.config.min_p == Config().min_p
    assert got.origin["top_k"] == "command line"
    assert got.origin["top_p"] == "environment PIPEINFER_TOP_P"
    assert got.origin["draft_max"] == f"file {file}"
    assert got.origin["min_p"] == "default"
    assert "command line" in got.show()


@pytest.mark.parametrize(("given", "says"), [
    ({"branches": 0}, "--branches .* the least is 1"),
    ({"top_p": 1.5}, "the most is 1"),
    ({"temp": float("nan")}, "not a number"),
    ({"timeout": -1.0}, "--timeout"),
    ({"policy": "magic"}, "choose from iterative, speculative, pipeinfer"),
    ({"ablate": ("everything",)}, "choose from async"),
    ({"top_k": "many"}, "needs a int"),
    ({"n_predict": True}, "needs a int"),
])
def test_absurd_values_name_the_option(given, says):
    with pytest.raises(UsageError, match=says):
        resolve(given, {})


@pytest.mark.parametrize(("text", "says"), [
    ("tpo-k = 3", "unknown key 'tpo-k'; did you mean top_k"),
    ("top-k = [", "not valid TOML"),
    ("top-k = 3.5", "needs a int"),
])
def test_a_bad_file_is_named(tmp_path, text, says):
    file = tmp_path / "p.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        resolve({}, {}, str(file))


def test_a_missing_file_and_bad_environment():
    with pytest.raises(UsageError, match="can not read config file"):
        resolve({}, {}, "/nowhere.toml")
    with pytest.raises(UsageError, match="PIPEINFER_TOP_K='x'"):
        resolve({}, {"PIPEINFER_TOP_K": "x"})
    with pytest.raises(UsageError, match="PIPEINFER_MLOCK"):
        resolve({}, {"PIPEINFER_MLOCK": "maybe"})
    assert resolve({}, {"PIPEINFER_MLOCK": "yes"}).config.mlock


def test_every_default_is_within_its_bounds_and_flags_are_unique():
    resolve({}, {})
    flags = [flag for option in options().values() for flag in option.flags]
    assert len(flags) == len(set(flags))
