"""The evaluation callback with and without its C part: what reaches Python, what comes of it."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends.llamacpp import eval_callback
from pipeinfer.core.types import make_rows
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import extract_shard
from tests.kit.random_model import RandomSpec, write_random_model

N_LAYERS = 3
ROWS = make_rows([(5, 0, (0,), True), (6, 1, (0,), True)])


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    folder = tmp_path_factory.mktemp("callback")
    path = write_random_model(folder / "m.gguf", RandomSpec(n_layer=N_LAYERS + 1, qtype="Q8_0"))
    return extract_shard(ModelFile(path), 0, N_LAYERS, cache_dir=folder)


@pytest.fixture
def load(llama, monkeypatch):
    """A function that loads a shard, and lists the calls that reach Python: (name, ask)."""
    def loaded(path, *, compiled, layers=N_LAYERS):
        calls = []
        if not compiled:
            monkeypatch.setattr(eval_callback, "compiled_filter", lambda: None)
        elif eval_callback.compiled_filter() is None:
            pytest.skip("layer_filter.c was not compiled here")
        original = eval_callback.EvalCallback._call

        def call(self, tensor, ask, data):
            calls.append((eval_callback.binding.ggml_get_name(tensor), ask))
            return original(self, tensor, ask, data)

        monkeypatch.setattr(eval_callback.EvalCallback, "_call", call)
        backend = llama(path, (0, layers), layers + 1, n_ctx=256)
        calls.clear()  # of warming up
        return backend, calls

    return loaded


def test_in_c_only_outputs_of_layers_reach_python(shard, load):
    backend, calls = load(shard, compiled=True)
    backend.decode(ROWS)
    assert calls == [(b"l_out-2", False)]
    calls.clear()
    backend.decode(make_rows([(7, 2, (0,), True)]), should_stop=lambda: False)
    assert calls == [(b"l_out-%d" % layer, False) for layer in range(N_LAYERS)]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_deep_model_is_not_cut_at_every_layer(tmp_path, load, compiled):
    path = write_random_model(tmp_path / "deep.gguf", RandomSpec(n_layer=20, qtype="Q8_0"))
    deep = extract_shard(ModelFile(path), 0, 19, cache_dir=tmp_path)
    backend, calls = load(deep, compiled=compiled, layers=19)
    backend.decode(ROWS, should_stop=lambda: False)
    told = [name for name, ask in calls if not ask]
    assert told == [b"l_out-%d" % layer for layer in (*range(1, 19, 2), 18)]


def test_without_c_python_is_asked_for_every_node(shard, load):
    backend, calls = load(shard, compiled=False)
    backend.decode(ROWS)
    assert len(calls) > 10 * N_LAYERS
    assert [name for name, ask in calls if not ask] == [b"l_out-2"]


def test_both_give_the_same_hidden_rows(shard, load):
    found = []
    for compiled in (True, False):
        backend, _ = load(shard, compiled=compiled)
        found.append(backend.decode(ROWS))
    assert np.array_equal(*found)


def test_a_library_that_cannot_be_loaded_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "_layer_filter.abi3.so").write_bytes(b"not a library")
    monkeypatch.setattr(eval_callback, "KERNELS", tmp_path)
    eval_callback.compiled.cache_clear()
    try:
        assert eval_callback.compiled_filter() is None
    finally:
        eval_callback.compiled.cache_clear()


def test_a_copy_of_a_layers_output_is_no_fault(monkeypatch):
    """ggml names a copy after its source."""
    callback = eval_callback.EvalCallback(N_LAYERS - 1)
    callback.arm(lambda: False, np.empty((1, 8), np.float32))
    monkeypatch.setattr(eval_callback.binding, "ggml_get_name", lambda tensor: b"l_out-0 (copy)")
    assert callback._call(0, True, None)
    assert callback.error is None
