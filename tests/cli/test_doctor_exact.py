"""`pipeinfer doctor --exact` compares what a start measures with all layers."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pipeinfer.backends.llamacpp.excerpt import LoadedExcerpt
from pipeinfer.cli.main import main


def said(*args):
    done = CliRunner().invoke(main, ["doctor", "-m", "embedded", "--exact", "--json", *args])
    found = {one["what"]: one for one in json.loads(done.stdout)["findings"]}
    return done.exit_code, found["exact"]


def test_both_are_named_with_their_seconds():
    code, found = said()
    assert code == 0
    assert found["level"] == "ok"
    assert " over all 12 layers (" in found["detail"]
    assert " over the excerpt (" in found["detail"]


@pytest.mark.parametrize("more", [1, 100])
def test_an_excerpt_that_allows_more_is_an_error(monkeypatch, more):
    monkeypatch.setattr(LoadedExcerpt, "width", lambda self, limit, progress: limit + more)
    code, found = said()
    assert code == 1
    assert found["level"] == "fail"
    assert "--exact off" in found["remedy"]
