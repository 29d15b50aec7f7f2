"""What llama.cpp reports while it loads a file."""

from __future__ import annotations

import pytest

from pipeinfer.backends.llamacpp import context
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.models.bundled import EMBEDDED


def load(progress):
    return LlamaCppBackend.load(
        EMBEDDED / "target.gguf", layers=(0, 12), n_layers_total=12, first=True, last=True,
        n_ctx=256, n_seq_max=2, n_batch=16, n_threads=1, progress=progress)


def test_shares_rise_to_the_whole(monkeypatch):
    monkeypatch.setattr(context, "_REPORT", 0.0)
    seen = []
    load(seen.append).close()
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0, abs=0.05)


def test_reports_are_few():
    seen = []
    load(seen.append).close()
    assert 1 <= len(seen) <= 5


def test_an_error_ends_the_loading_and_is_raised(monkeypatch):
    """As the begin of another epoch does, or a lost head."""
    monkeypatch.setattr(context, "_REPORT", 0.0)
    seen = []

    def progress(share):
        seen.append(share)
        if share > 0.3:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        load(progress)
    assert max(seen) < 0.9
    load(lambda share: None).close()
