"""docs/mini.py, which teaches the method: short, alone, and right."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys

import pytest

from tests.kit.launch import ROOT

FILE = ROOT / "docs" / "mini.py"


@pytest.fixture
def mini(monkeypatch):
    """The file as a module whose stages and drafts take no time."""
    spec = importlib.util.spec_from_file_location("mini", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mini", module)
    spec.loader.exec_module(module)
    for name in ("STAGE_S", "ROW_S", "DRAFT_S"):
        monkeypatch.setattr(module, name, 0.0)
    return module


def test_it_is_short_and_imports_nothing_of_the_package():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 400
    assert "import pipeinfer" not in text
    assert "from pipeinfer" not in text


def test_the_race_and_the_picture_are_printed():
    done = subprocess.run([sys.executable, FILE, "--stages", "3"], capture_output=True, text=True,
                          check=True, timeout=60)
    assert done.stdout.count("tokens/s") == 3
    assert done.stdout.count("  stage 3  ") == 3
    assert "token for token" in done.stdout


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_policy_writes_the_models_own_text(mini, stages):
    rng = random.Random(stages)
    for policy in (*mini.POLICIES, mini.Policy("wide", batch=5, runs=3),
                   mini.Policy("one draft token", batch=1, runs=6)):
        prompt = [rng.randrange(mini.VOCABULARY) for _ in range(rng.randint(1, 12))]
        head = mini.Head(policy, stages, mini.Picture())
        assert head.generate(prompt, 80) == mini.written(prompt, 80, stages), policy
        assert (head.right > 20) == bool(policy.batch)


def test_what_cannot_be_accepted_is_cancelled(mini, monkeypatch):
    monkeypatch.setattr(mini, "draft", lambda text, stages: [
        (mini.model(text, stages) + 1) % mini.VOCABULARY])  # never right
    head = mini.Head(mini.POLICIES[-1], 2, mini.Picture())
    assert head.generate([1, 2], 30) == mini.written([1, 2], 30, 2)
    assert head.right == 0
    assert head.cancelled


def test_without_the_copies_of_cells_the_text_would_be_another(mini, monkeypatch):
    monkeypatch.setattr(mini.Copy, "__new__", lambda cls, *_: tuple.__new__(cls, (1, 1, 0, 0)))
    head = mini.Head(mini.POLICIES[-1], 2, mini.Picture())
    assert head.generate([1, 2, 3], 40) != mini.written([1, 2, 3], 40, 2)
