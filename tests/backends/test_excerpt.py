"""A few layers and rows of the output matrix give the R of the whole file."""

from __future__ import annotations

import functools
import itertools
from contextlib import closing

import numpy as np
import pytest

from pipeinfer.backends.exact_width import exact_width
from pipeinfer.backends.llamacpp import eval_callback, excerpt
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.eval_callback import EvalCallback
from pipeinfer.backends.llamacpp.excerpt import (
    InnerBackend,
    InnerCallback,
    LoadedExcerpt,
    excerpt_of,
)
from pipeinfer.core.types import make_rows
from pipeinfer.llama import binding, short_runs
from pipeinfer.models.excerpt import kinds_of
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.models.shard import extract_shard
from tests.kit.random_architectures import RECIPES, STATEFUL
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.sample import full

#: recipes whose layers llama.cpp can compute from the first one on, as of a whole model
NAMES = ("llama", "qwen2", "qwen3", *RECIPES, *STATEFUL)


@pytest.fixture
def load(llama):
    return functools.partial(llama, kind=LlamaCppBackend, n_ctx=1024, n_threads=2)


def spec_of(name, **changes):
    return tiny(name, **changes) if name in (*RECIPES, *STATEFUL) else RandomSpec(
        name, n_embd=256, n_ff=512, **changes)


def width_of(path, backend):
    with LoadedExcerpt.opened(path, backend) as found:
        assert found is not None
        return found.width(16, None)


#: rows of experts are too short for the blocks of k-quants
CASES = [*itertools.product(NAMES, ("F16", "BF16", "Q8_0", "Q4_0")),
         *itertools.product(("llama", "qwen2", "qwen3"), ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q6_K"))]
SAMPLED = (("llama", "Q8_0"), ("llama", "Q4_K_M"), ("gemma3", "F16"), ("gpt-oss", "Q8_0"),
           ("qwen3moe", "Q4_0"), ("glm4moe", "Q8_0"), ("qwen35", "Q8_0"), ("nemotron_h", "F16"))


@pytest.mark.parametrize(("name", "qtype"), [case if case in SAMPLED else full(*case)
                                             for case in CASES])
def test_the_excerpt_gives_the_width_of_the_whole(load, name, qtype, tmp_path):
    path = write_random_model(tmp_path / "m.gguf", spec_of(name, qtype=qtype))
    backend = load(path)
    found, whole = width_of(path, backend), exact_width(backend)
    print(f"{name} {qtype}: {found} of the excerpt, {whole} of the whole")
    assert 1 <= found <= whole


def test_products_with_the_same_name_are_told_apart(load, tmp_path):
    """Both products that make the queries of a deepseek2 are called alike."""
    path = write_random_model(tmp_path / "m.gguf", spec_of("deepseek2", qtype="Q8_0"))
    backend = load(path)
    if "q8_0" not in short_runs.used():
        pytest.skip("without the kernels R may be 1")
    assert width_of(path, backend) > 1


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_the_excerpt_of_a_shard(load, place, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", RandomSpec(
        n_layer=6, n_embd=256, n_ff=512, qtype="Q4_K_M")))
    start, stop = {"first": (0, 2), "middle": (2, 4), "last": (4, 6)}[place]
    path = extract_shard(model, start, stop, cache_dir=tmp_path)
    backend = load(path, (start, stop), 6)
    assert 1 <= width_of(path, backend) <= exact_width(backend)


def plant(monkeypatch, differs):
    """Let rows of a decode differ from single rows where `differs(first position, rows)`."""
    decode = LlamaCppBackend.decode

    def planted(self, rows, hidden=None, should_stop=None):
        result = decode(self, rows, hidden, should_stop)
        if result is not None and 1 < len(rows) == len(result) and differs(
                self, int(rows.positions[0]), len(rows)):
            result = result.copy()
            result[len(rows) - 1, 3] += 1e-6 + abs(result[len(rows) - 1, 3]) * 1e-6
        return result

    monkeypatch.setattr(LlamaCppBackend, "decode", planted)


def is_head(backend):
    return backend.info.n_layers_total == 2


@pytest.mark.parametrize(("differs", "expected"), [
    (lambda backend, position, rows: rows == 7, 6),
    (lambda backend, position, rows: rows > 4, 4),
    (lambda backend, position, rows: position > 512, 1),
    (lambda backend, position, rows: is_head(backend) and rows > 3, 3),
    (lambda backend, position, rows: backend.info.layers[1] == 1 and rows > 8, 8),
], ids=["one width", "a block of four", "beyond 512 cells", "the output matrix", "a layer"])
def test_a_kernel_that_differs_is_found(load, differs, expected, monkeypatch, tmp_path):
    path = write_random_model(tmp_path / "m.gguf", RandomSpec(
        n_embd=256, n_ff=512, qtype="Q8_0", n_layer=4))
    backend = load(path)
    assert width_of(path, backend) > max(8, expected)
    plant(monkeypatch, differs)
    assert width_of(path, backend) == expected


def nudge(tensor):
    """Move one number of the last of more than five rows by the smallest possible step."""
    if (rows := binding.ggml_nrows(tensor)) > 5:
        values = np.empty((rows, binding.ggml_nelements(tensor) // rows), np.float32)
        binding.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
        values[-1, 3] = np.nextafter(values[-1, 3], np.float32(1e9))
        binding.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)


def test_a_difference_that_quantisation_hides_is_found(load, monkeypatch, tmp_path):
    """Attention of six rows differs by one bit; the product behind it quantises its input."""
    def plant_in(callback):
        call = callback._call

        def planted(self, tensor, ask, data):
            if binding.ggml_get_name(tensor) != b"kqv_out-0":
                return call(self, tensor, ask, data)
            if not ask:
                nudge(tensor)
            return call(self, tensor, ask, data) or ask or not self.ended

        monkeypatch.setattr(callback, "_call", planted)

    path = write_random_model(tmp_path / "m.gguf", RandomSpec(n_embd=256, n_ff=512, qtype="Q8_0"))
    monkeypatch.setattr(eval_callback, "compiled_filter", lambda: None)
    backend = load(path)
    for callback in (EvalCallback, InnerCallback):
        plant_in(callback)
    with closing(excerpt_of(backend, 1, LlamaCppBackend)) as layers:
        assert exact_width(layers) > 5
    assert width_of(path, backend) == 5


def test_a_context_is_filled_without_the_last_feed_forward(load, tmp_path):
    """Rows behind such a context equal those behind one that was computed whole."""
    path = write_random_model(tmp_path / "m.gguf", RandomSpec(n_embd=256, n_ff=512, n_layer=3))
    rows = make_rows([(5 + i, i, (0,), False) for i in range(20)])
    more = make_rows([(50, 20, (0,), True)])
    found = []
    backend = load(path)
    for kind in (InnerBackend, LlamaCppBackend):
        with closing(excerpt_of(backend, 2, kind)) as layers:
            layers.decode(rows)
            assert layers.seq_bounds(0) == (0, 19)
            found.append(layers.decode(more)[0, :256])
            assert layers.seq_bounds(0) == (0, 20)
    assert found[0].tobytes() == found[1].tobytes()


def whole(model):
    return kinds_of(model, 0, model.n_layers, last=True)


def test_kinds_are_the_same_for_other_weights_and_more_layers(tmp_path):
    def kinds(number, **changes):
        spec = RandomSpec(n_embd=256, **{"qtype": "Q8_0", "n_ff": 512, "seed": number} | changes)
        return whole(ModelFile(write_random_model(tmp_path / f"{number}.gguf", spec)))

    first = kinds(0)
    assert first.n_layers == 1
    assert first == kinds(1) == kinds(2, n_layer=9)
    for number, changes in enumerate(({"n_ff": 768}, {"qtype": "Q4_0"}, {"n_head": 8}), 3):
        assert kinds(number, **changes).names != first.names


def test_as_many_layers_as_show_every_kind(tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny("gemma3")))
    assert whole(model).n_layers == 6  # the sixth has no sliding window
    model = ModelFile(write_random_model(tmp_path / "d.gguf", tiny("glm4moe")))
    assert whole(model).n_layers == 3  # two are dense
    model = ModelFile(write_random_model(tmp_path / "s.gguf", tiny("mamba")))
    assert whole(model).n_layers == 1
    model = ModelFile(write_random_model(tmp_path / "h.gguf", tiny("qwen35", n_layer=8)))
    assert whole(model).n_layers == 4  # the fourth has attention


def test_times_come_from_layers_that_caches_cannot_hold(load, monkeypatch):
    path = EMBEDDED / "target.gguf"
    model = ModelFile(path)
    layer = model.layer_bytes[0]
    monkeypatch.setattr(excerpt, "last_level_cache", lambda: layer // 2)
    assert excerpt.layers_to_time(model.layer_reads) == 2
    backend = load(path)
    with LoadedExcerpt.opened(path, backend) as found:
        assert found.timed.info.layers == (0, 2)
        assert len(found.curve()) == 6
    monkeypatch.setattr(excerpt, "last_level_cache", lambda: model.nbytes)
    with LoadedExcerpt.opened(path, backend) as found:
        assert found.timed is backend
    assert backend.decode is not None


def test_the_backend_decodes_as_before_after_its_excerpt_was_measured(load):
    path = EMBEDDED / "target.gguf"
    rows = make_rows([(5, 0, (0,), True), (6, 1, (0,), True)])
    backend = load(path)
    before = backend.decode(rows).tobytes()
    backend.seq_rm(0, 0, 1 << 20)
    width_of(path, backend)
    assert backend.decode(rows).tobytes() == before
