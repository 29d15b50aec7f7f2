"""How many rows are exact together is measured once for what makes no difference to it."""

from __future__ import annotations

import fcntl
import json

import pytest

from pipeinfer.backends.exact_width import known_widths
from pipeinfer.models import shard_cache
from tests.kit.toy import ToyBackend


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEINFER_CACHE", str(tmp_path))
    return tmp_path


def measured(identity=("model",), **sizes):
    """The widths, and whether anything was decoded for them."""
    backend = ToyBackend.load(log=True, **sizes)
    found = known_widths(backend, identity)
    return found, any(entry[0] == "decode" for entry in backend.log)


@pytest.mark.parametrize("sizes", [{}, {"n_ctx": 2048}, {"n_batch": 512}])
def test_larger_caches_and_batches_share_what_is_known(sizes):
    first, decoded = measured(n_ctx=1024)
    assert decoded
    assert measured(**{"n_ctx": 1024} | sizes) == (first, False)


@pytest.mark.parametrize("sizes", [{"n_ctx": 64}, {"n_batch": 8}, {"identity": ("another",)}])
def test_what_may_make_a_difference_is_measured(sizes):
    measured()
    assert measured(**sizes)[1]


@pytest.mark.parametrize("text", ["", "[]", "[16, 0, 1, 1, 1, 1, 1, 1]", "[4, 5, 1, 1, 1, 1, 1, 1]",
                                  "[16, 4, 1, 1, 1, 1, -1, 1]", '["16", 4, 1, 1, 1, 1, 1, 1]',
                                  "[16, 4, 1, 1, 1, 1, 1]", "[99999, 4, 1, 1, 1, 1, 1, 1]", "{"])
def test_a_note_that_no_search_can_have_written_is_measured_again(own_cache, text):
    first, _ = measured()
    (note,) = own_cache.glob("widths-*")
    note.write_text(f'{{"value": {text}, "check": "{shard_cache._check(json.loads(text))}"}}'
                    if text not in ("", "{") else text)
    again, decoded = measured()
    assert decoded
    assert again.exact == first.exact


def test_a_search_up_to_a_smaller_limit_says_less():
    class Wide(ToyBackend):
        exact_limit = 16

    def known(limit):
        backend = Wide.load(log=True)
        found = known_widths(backend, ("model",), limit)
        return found.exact, any(entry[0] == "decode" for entry in backend.log)

    assert known(4) == (4, True)
    assert known(3) == (3, False)
    assert known(8) == (8, True)  # all four were exact: more may be
    assert known(8) == (8, False)


def test_a_curve_that_others_measured_is_not_stored():
    first = known_widths(ToyBackend.load(), ("model",), known_curve=(9.0,) * 6)
    assert first.curve == (9.0,) * 6
    found, decoded = measured()
    assert decoded
    assert found.curve != first.curve
    assert known_widths(ToyBackend.load(), ("model",), known_curve=(9.0,) * 6).curve == (9.0,) * 6
    assert measured() == (found, False)


def test_a_process_waits_for_another_one_that_measures_the_same(own_cache):
    """And goes on with its result; the lock goes with whoever held it."""
    first, _ = measured()
    (note,) = own_cache.glob("widths-*")
    value = note.read_text()
    note.unlink()
    lock = note.with_name(f".{note.name}.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    waited = []

    def progress(done, total):
        waited.append((done, total))
        if len(waited) == 3:
            note.write_text(value)
            lock.close()

    backend = ToyBackend.load(log=True)
    assert known_widths(backend, ("model",), progress=progress) == first
    assert waited == [(0, 16)] * 3
    assert not any(entry[0] == "decode" for entry in backend.log)
