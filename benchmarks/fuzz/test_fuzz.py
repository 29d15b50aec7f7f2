"""Mutated input of every kind: what once failed, and some hundred fresh cases.

`python -m benchmarks.fuzz` examines as many as one likes; inputs that fail are kept in
corpus/<kind>/ beside this file and replayed here, compressed, by what is in them.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import random
import time

import pytest

from benchmarks.fuzz import mutate, runner, sanitized
from benchmarks.fuzz.__main__ import CORPUS, KINDS
from pipeinfer.errors import ModelError

pytestmark = pytest.mark.slow
FRESH = {"gguf": 250, "safetensors": 100, "frames": 800, "http": 80, "config": 400,
         "lora": 80}
SEED = int(os.environ.get("FUZZ_SEED", "1"))


def told(result):
    return [failure.what for failure in result.failures]


@pytest.mark.parametrize("name", KINDS)
def test_what_once_failed_fails_no_more(name):
    inputs = [runner.load(path) for path in sorted((CORPUS / name).glob("*.z"))]
    assert inputs, f"no corpus of {name}"
    result = runner.run(KINDS[name], inputs.__getitem__, len(inputs))
    assert told(result) == []
    assert result.accepted + result.refused == len(inputs)


@pytest.mark.parametrize("name", KINDS)
def test_fresh_changes_are_used_or_refused(name):
    kind = KINDS[name]
    result = runner.run(kind, functools.partial(runner.case, kind, SEED), FRESH[name])
    assert told(result) == []
    assert result.accepted > 0
    assert result.refused > 0
    assert result.slowest < runner.LIMIT_SECONDS


def test_the_same_seed_gives_the_same_inputs():
    for kind in KINDS.values():
        first, again, other = (runner.case(kind, seed, 5) for seed in (3, 3, 4))
        assert first == again
        assert first != other


SAID = """\
/b/ggml/src/ggml-quants.c:77:14: runtime error: shift exponent -3 is too large for 32-bit type 'int'
    #0 0x7f01 in dequantize /b/ggml/src/ggml-quants.c:77
==12==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602 at pc 0x7f bp 0x7f sp 0x7f
READ of size 4 at 0x602 thread T0
    #0 0x7f02 in memcpy ../../../../src/libsanitizer/sanitizer_common/interceptors.inc:827
    #1 0x7f03 in llama_vocab::impl::load(int) /b/src/llama-vocab.cpp:900
"""


def test_what_sanitizers_say_is_told_by_place():
    assert sanitized.places(SAID) == [
        "src/ggml-quants.c:77: shift exponent N is too large for N-bit type 'int'",
        "src/llama-vocab.cpp:900 llama_vocab::impl::load(int): heap-buffer-overflow"]
    assert sanitized.places("==12==WARNING: AddressSanitizer failed to allocate 0x1 bytes") == []


# --- the runner notices -------------------------------------------------------------------------


def outcome(examine, count=3, **extra):
    kind = runner.Kind("made up", lambda draw: b"x", examine, **extra)
    return runner.run(kind, lambda i: b"%d" % i, count)


def test_a_crash_is_one_cases_failure():
    def examine(data, directory):
        if data == b"1":
            faulthandler.disable()  # its trace would read like a failure of the tests
            os.abort()
        return "fine"

    result = outcome(examine)
    assert (result.cases, result.accepted) == (3, 2)
    assert [(f.data, f.what) for f in result.failures] == [(b"1", "died of SIGABRT")]


def test_a_hang_is_ended(monkeypatch):
    monkeypatch.setattr(runner, "LIMIT_SECONDS", 0.2)
    result = outcome(lambda data, directory: time.sleep(60) or "fine", 1)
    assert ["took more than" in what for what in told(result)] == [True]


def test_other_errors_and_long_messages_are_failures():
    def examine(data, directory):
        raise {b"0": ModelError("one line"), b"1": ModelError("two\nlines"),
               b"2": ModelError(""), b"3": KeyError("x")}[data]

    result = outcome(examine, 4)
    assert result.refused == 1
    assert len(result.failures) == 3
    assert "KeyError" in result.failures[2].what


def test_memory_without_bound_is_a_failure():
    result = outcome(lambda data, directory: str(len(bytes(2 * runner.LIMIT_BYTES))), 1)
    assert "MemoryError" in told(result)[0]


def test_what_is_wrong_at_the_end_counts():
    assert told(outcome(lambda d, _: "fine", 1, finish=lambda: "grown")) == ["grown"]


def test_failures_are_kept_by_what_is_in_them(tmp_path):
    failure = runner.Failure(b"abc" * 999, "x")
    path = runner.store(failure, tmp_path / "gguf")
    assert runner.store(failure, tmp_path / "gguf") == path
    assert runner.load(path) == failure.data


def test_changes_change():
    draw = random.Random(1)
    data = bytes(range(100))
    assert sum(mutate.change_bytes(draw, data) != data for _ in range(200)) > 150
    value = {"a": [1, 2.5, "x", None], "b": {"c": True}}
    changed = [mutate.change_value(draw, value) for _ in range(200)]
    assert sum(repr(one) != repr(value) for one in changed) > 150
    assert value == {"a": [1, 2.5, "x", None], "b": {"c": True}}


def test_what_failed_under_the_sanitizers_is_kept(tmp_path):
    known, corpus, folder = (tmp_path / name for name in ("known", "tree", "failing"))
    for place in (known / "gguf", corpus / "gguf", corpus / "frames"):
        place.mkdir(parents=True)
    for path in (known / "gguf" / "old.z", corpus / "gguf" / "old.z", corpus / "frames" / "new.z"):
        path.write_text(path.name)
    assert sanitized.keep_failing(corpus, known, folder) == [folder / "frames" / "new.z"]
    assert (folder / "frames" / "new.z").read_text() == "new.z"
    assert not (folder / "gguf").exists()
