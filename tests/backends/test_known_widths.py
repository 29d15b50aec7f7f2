"""How many rows are exact together is measured once for what makes no difference to it."""

from __future__ import annotations

import time

import pytest

from pipeinfer.backends import measuring
from pipeinfer.backends.exact_width import known_widths
from pipeinfer.models.shard_cache import recall
from tests.rig.toy import ToyBackend


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "waited", lambda: 0.0)
    return tmp_path


def neighbour(monkeypatch, share):
    """Threads wait for cores, for so much of the time."""
    monkeypatch.setattr(measuring, "waited", lambda: share * time.perf_counter())


def measured(identity=("model",), **sizes):
    """The widths, and whether anything was decoded for them."""
    backend = ToyBackend.load(log=True, **sizes)
    found = known_widths(backend, identity)
    return found, any(entry[0] == "decode" for entry in backend.log)


@pytest.mark.parametrize("sizes", [{}, {"n_ctx": 1024}, {"n_batch": 512}])
def test_larger_caches_and_batches_share_what_is_known(sizes):
    first, decoded = measured()
    assert decoded
    assert measured(**sizes) == (first, False)


@pytest.mark.parametrize("sizes", [{"n_ctx": 64}, {"n_batch": 8}, {"identity": ("another",)}])
def test_what_may_make_a_difference_is_measured(sizes):
    measured()
    assert measured(**sizes)[1]


@pytest.mark.parametrize("text", ["", "[]", "[0, 1, 1, 1, 1, 1, 1, 0]",
                                  "[99, 1, 1, 1, 1, 1, 1, 0]", "[4, 1, 1, 1, 1, 1, -1, 0]",
                                  '["4", 1, 1, 1, 1, 1, 1, 0]', "[4, 1, 1, 1, 1, 1, 1]",
                                  "[4, 1, 1, 1, 1, 1, 1, -1]", "{"])
def test_a_note_that_nobody_can_have_written_is_measured_again(own_cache, text):
    first, _ = measured()
    (note,) = own_cache.glob("widths-*")
    note.write_text(text)
    again, decoded = measured()
    assert decoded
    assert again.exact == first.exact


def test_a_curve_of_a_busy_moment_is_measured_until_a_quiet_one(own_cache, monkeypatch):
    neighbour(monkeypatch, 0.8)
    busy, decoded = measured()
    assert decoded
    (note,) = own_cache.glob("widths-*")
    assert recall(note)[-1] == pytest.approx(0.8, abs=0.01)
    neighbour(monkeypatch, 1.6)
    assert measured() == (busy, True)  # worse than what is known
    neighbour(monkeypatch, 0.01)
    quiet, decoded = measured()
    assert decoded
    assert quiet.exact == busy.exact
    neighbour(monkeypatch, 0.8)
    assert measured() == (quiet, False)


def test_a_curve_that_others_measured_is_not_kept_for_good():
    first = known_widths(ToyBackend.load(), ("model",), known_curve=(9.0,) * 6)
    assert first.curve == (9.0,) * 6
    found, decoded = measured()
    assert decoded
    assert found.curve != first.curve
    assert known_widths(ToyBackend.load(), ("model",), known_curve=(9.0,) * 6) == found
