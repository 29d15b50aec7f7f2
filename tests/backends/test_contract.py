"""One body of tests for every backend, through the Backend protocol alone."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest

from pipeinfer.backends.composed import ChainBackend
from pipeinfer.backends.exact_width import exact_width
from pipeinfer.backends.llamacpp import context, eval_callback
from pipeinfer.backends.llamacpp.context import LlamaOptions
from pipeinfer.core.types import ALL_SEQS, END, Rows, make_rows
from pipeinfer.errors import BackendError, ModelError
from pipeinfer.llama import binding
from pipeinfer.llama.library import has_gpu
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import extract_shard
from tests.backends.conftest import GPU_LAYERS
from tests.kit.llama import load
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.rows import chain
from tests.kit.toy import ToyBackend, ToySpec, draft_of

N_LAYERS = 4


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_random_model(path, RandomSpec(n_layer=N_LAYERS, n_head=2, n_head_kv=1,
                                               qtype="Q8_0"))


@pytest.fixture(scope="session")
def shard_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


class Chain(ChainBackend):
    """Says what its parts hold, where all of them hold the same."""

    def __init__(self, parts):
        super().__init__(parts)
        self.parts = parts

    def seq_bounds(self, seq_id):
        (bounds,) = {part.seq_bounds(seq_id) for part in self.parts}
        return bounds


@pytest.fixture(params=["toy", "llamacpp", "llamacpp without C", "torch", "chain"])
def make(request, tiny_model, shard_cache, monkeypatch):
    """A factory of backends over layers [start, stop) of one model; closes what it made."""
    made = []
    if request.param == "llamacpp without C":
        monkeypatch.setattr(eval_callback, "compiled_filter", lambda: None)
    if request.param == "torch":
        for package in ("torch", "transformers", "safetensors"):
            pytest.importorskip(package, reason=f"the torch backend needs {package}")

    def llama(start, stop, n_ctx, n_seq_max, n_batch):
        path = extract_shard(ModelFile(tiny_model), start, stop, cache_dir=shard_cache)
        return load(path, (start, stop), N_LAYERS, n_ctx=n_ctx, n_seq_max=n_seq_max,
                    n_batch=n_batch)

    def factory(start=0, stop=N_LAYERS, n_ctx=256, n_seq_max=8, n_batch=32):
        sizes = (n_ctx, n_seq_max, n_batch)
        if request.param == "toy":
            backend = ToyBackend.load(ToySpec(), start, stop, n_ctx=n_ctx, n_seq_max=n_seq_max,
                                      n_batch=n_batch)
        elif request.param == "torch":
            from pipeinfer.backends.pytorch.options import TorchOptions
            from tests.kit.checked_torch import CheckedTorch

            backend = CheckedTorch.load(
                tiny_model, layers=(start, stop), n_ctx=n_ctx, n_seq_max=n_seq_max,
                n_batch=n_batch, n_threads=1, options=TorchOptions(device="cpu"))
        elif request.param == "chain" and stop - start > 1:
            middle = (start + stop + 1) // 2
            backend = Chain([llama(start, middle, *sizes), llama(middle, stop, *sizes)])
        else:
            backend = llama(start, stop, *sizes)
        made.append(backend)
        return backend

    yield factory
    for backend in made:
        backend.close()


def test_info_says_what_was_loaded(make):
    info = make(1, 3).info
    assert info.layers == (1, 3)
    assert (info.first, info.last, info.n_layers_total) == (False, False, N_LAYERS)
    assert info.n_ctx >= 256
    assert info.weight_bytes > 0
    assert info.cache_bytes > 0
    assert make().info.n_vocab == info.n_vocab


def test_logits_are_those_of_the_wanted_rows_and_the_callers_own(make):
    backend = make()
    rows = make_rows([(5, 0, (0,), False), (6, 1, (0,), True), (7, 2, (0,), True)])
    logits = backend.decode(rows)
    assert logits.shape == (2, backend.info.n_vocab)
    assert logits.dtype == np.float32
    assert logits.std() > 0.5
    kept = logits.copy()
    backend.decode(chain([8, 9], 3))
    assert np.array_equal(logits, kept)


def test_a_prompt_chunk_without_wanted_rows_gives_no_logits(make):
    backend = make()
    logits = backend.decode(chain([5, 6, 7], outputs=False))
    assert logits.shape == (0, backend.info.n_vocab)
    after = backend.decode(chain([8], 3))
    whole = make()
    assert np.array_equal(after, whole.decode(chain([5, 6, 7, 8]))[3:])


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 3, 4), (0, 1, 2, 3, 4)])
def test_a_pipeline_of_shards_gives_the_whole_models_bits(make, cuts):
    whole = make()
    shards = [make(a, b) for a, b in pairwise(cuts)]
    tree = make_rows([(3, 5, (0, 1), True), (4, 6, (0,), True), (5, 6, (1,), False),
                      (6, 7, (0,), True)])
    for step in (chain([1, 2, 3, 4, 5]), tree, chain([9], 8)):
        for backend in (whole, *shards):
            if step is tree:
                backend.seq_cp(0, 1, 0, 5)
        expected = whole.decode(step)
        hidden = None
        for shard in shards:
            hidden = shard.decode(step, hidden)
            if not shard.info.last:
                assert hidden.shape == (len(step), whole.info.n_embd)
        assert np.array_equal(hidden, expected)


def test_branches_do_not_see_each_other(make):
    backend, alone = make(), make()
    backend.decode(chain([1, 2, 3], ids=(0,)))
    backend.seq_cp(0, 1, 0, 3)
    backend.decode(chain([10, 11], 3, (0,)))
    branch = backend.decode(chain([20, 21], 3, (1,)))
    assert np.array_equal(branch, alone.decode(chain([1, 2, 3, 20, 21]))[3:])


def test_removed_cells_are_gone(make):
    backend, alone = make(), make()
    backend.decode(chain([1, 2, 3, 4, 5]))
    backend.seq_rm(0, 2, END)
    assert np.array_equal(backend.decode(chain([9], 2)), alone.decode(chain([1, 2, 9]))[2:])
    backend.seq_rm(ALL_SEQS, 0, END)
    again = backend.decode(chain([1, 2, 9]))
    alone.seq_rm(0, 0, END)
    assert np.array_equal(again, alone.decode(chain([1, 2, 9])))


def test_keep_frees_everything_else(make):
    backend = make()
    backend.decode(chain([1, 2, 3]))
    backend.seq_cp(0, 1, 0, 3)
    backend.decode(chain([4, 5], 3, (0,)))
    backend.decode(chain([6, 7], 3, (1,)))
    backend.seq_keep(1)
    assert backend.seq_bounds(0) is None
    assert backend.seq_bounds(1) == (0, 4)


@pytest.mark.parametrize("args", [(3, 0, END), (0, 100, 200), (ALL_SEQS, 5, 9), (0, 4, 4)])
def test_removing_nothing_is_fine(make, args):
    backend = make()
    backend.decode(chain([1, 2, 3]))
    backend.seq_rm(*args)
    assert backend.seq_bounds(0) == (0, 2)


@pytest.mark.parametrize("layers", [(0, 4), (0, 3), (2, 4)])
@pytest.mark.parametrize("allowed", [0, 1])
def test_a_stopped_decode_leaves_no_cell(make, layers, allowed):
    backend, fresh = make(*layers), make(*layers)

    def hidden(n):
        rng = np.random.default_rng(n)
        return (None if layers[0] == 0
                else rng.standard_normal((n, backend.info.n_embd)).astype(np.float32))

    for one in (backend, fresh):
        one.decode(chain([1, 2, 3]), hidden(3))
    asked = []

    def should_stop():
        asked.append(True)
        return len(asked) > allowed

    assert backend.decode(chain([4, 5], 3), hidden(2), should_stop) is None
    assert len(asked) == allowed + 1
    assert backend.seq_bounds(0) == (0, 2)
    result = backend.decode(chain([6, 7], 3), hidden(2))
    assert np.array_equal(result, fresh.decode(chain([6, 7], 3), hidden(2)))


def test_a_decode_that_is_never_stopped_is_like_any(make):
    backend, fresh = make(), make()
    result = backend.decode(chain([1, 2, 3]), should_stop=lambda: False)
    assert np.array_equal(result, fresh.decode(chain([1, 2, 3])))


@pytest.mark.parametrize("layers", [(0, 4), (0, 2)])
def test_an_exception_of_should_stop_arrives_and_leaves_no_cell(make, layers):
    backend = make(*layers)
    backend.decode(chain([1, 2]))

    def should_stop():
        raise KeyError("from inside")

    with pytest.raises(KeyError, match="from inside"):
        backend.decode(chain([3, 4], 2), should_stop=should_stop)
    assert backend.seq_bounds(0) == (0, 1)
    backend.decode(chain([3, 4], 2))


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 5, (0,), True)],  # a gap
        [(1, 2, (0,), True)],  # a position that is there
        [(1, 3, (0,), True), (2, 3, (0,), True)],  # one id twice at a position
        [(1, 3, (1,), True), (1, 3, (0,), True), (1, 4, (0, 1), True)],  # joined after apart
        [(1, 3, (99,), True)],
        [(1, 0, (8,), True)],  # one beyond the last id
        [(-1, 3, (0,), True)],
        [(1, 3, (), True)],
    ],
)
def test_broken_rows_are_refused_and_change_nothing(make, rows):
    backend, fresh = make(), make()
    for one in (backend, fresh):
        one.decode(chain([1, 2, 3]))
        one.seq_cp(0, 1, 0, 3)
    with pytest.raises(BackendError) as caught:
        backend.decode(make_rows(rows))
    assert "\n" not in str(caught.value)
    assert backend.seq_bounds(0) == backend.seq_bounds(1) == (0, 2)
    assert np.array_equal(backend.decode(chain([4], 3)), fresh.decode(chain([4], 3)))


def test_views_are_refused_where_they_would_be_ignored(make):
    backend = make()
    assert not backend.capabilities.separate_views  # the torch backend validates here
    rows = chain([1, 2])
    with pytest.raises(BackendError, match="need the torch backend"):
        backend.decode(Rows(rows.tokens, rows.positions, rows.seq_ids, rows.outputs, ((1,), (0,))))
    assert backend.seq_bounds(0) is None


def test_a_full_cache_is_an_error_that_leaves_nothing(make):
    backend = make()
    for start in range(0, 256, 32):
        backend.decode(chain(range(32), start, outputs=False))
    with pytest.raises(BackendError, match="no free cells"):
        backend.decode(chain([1], 256))
    assert backend.seq_bounds(0) == (0, 255)
    backend.seq_rm(0, 250, END)
    backend.decode(chain([1, 2], 250))


def test_dead_cells_are_reused_before_the_cache_counts_as_full(make):
    backend = make()
    for start in range(0, 224, 32):
        backend.decode(chain(range(32), start, outputs=False))
    backend.seq_cp(0, 1, 0, 224)
    for _ in range(10):  # a branch that dies below a living one, every time
        backend.seq_rm(1, 224, END)
        backend.decode(chain([1, 2, 3], 224, (1,)))
        backend.decode(chain([4], 224, (0,)))
        backend.seq_rm(0, 224, END)
        backend.decode(chain([5], 224, (0,)))
        backend.seq_rm(0, 224, END)
    assert backend.seq_bounds(1) == (0, 226)


def test_more_sequences_than_rows_of_a_batch(make):
    backend = make(n_seq_max=40, n_batch=2)
    backend.decode(chain([1, 2]))
    backend.seq_cp(0, 39, 0, 2)
    assert backend.decode(chain([3], 2, (39,))).shape == (1, backend.info.n_vocab)
    with pytest.raises(BackendError, match="3 rows"):
        backend.decode(chain([3, 4, 5], 2))


def test_wrong_shapes_are_refused(make):
    first, last = make(0, 2), make(2, 4)
    with pytest.raises(BackendError, match="hidden"):
        last.decode(chain([1]))
    with pytest.raises(BackendError, match="shape"):
        last.decode(chain([1]), np.zeros((2, last.info.n_embd), np.float32))
    with pytest.raises(BackendError, match="33 rows"):
        first.decode(chain(range(33)))
    with pytest.raises(BackendError, match="0 rows"):
        first.decode(make_rows([]))


def test_closing_twice_is_fine_and_decoding_afterwards_is_not(make):
    backend = make()
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.decode(chain([1]))
    backend.seq_rm(0, 0, END)
    backend.seq_cp(0, 1, 0, 4)
    backend.seq_keep(0)


@pytest.mark.parametrize("layers", [(0, 4), (1, 3), (3, 4)])
def test_exact_width_leaves_the_cache_empty(make, layers):
    backend = make(*layers)
    assert 1 <= exact_width(backend) <= 16
    assert all(backend.seq_bounds(i) is None for i in range(8))


def test_two_backends_work_in_two_threads(make):
    backends = [make(), make()]
    expected = backends[0].decode(chain([1, 2, 3]))
    backends[0].seq_rm(0, 0, END)
    wrong = []

    def work(backend):
        for _ in range(20):
            if not np.array_equal(backend.decode(chain([1, 2, 3])), expected):
                wrong.append(backend)
            backend.seq_rm(0, 0, END)

    threads = [threading.Thread(target=work, args=(b,)) for b in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_toy_draft_agrees_at_about_the_given_rate():
    spec = ToySpec(n_layers=2)
    target, draft = ToyBackend.load(spec), ToyBackend.load(draft_of(spec, 0.7))
    token, agreed = 1, 0
    for pos in range(400):
        rows = make_rows([(token, pos, (0,), True)])
        choice = int(target.decode(rows)[0].argmax())
        agreed += choice == int(draft.decode(rows)[0].argmax())
        token = (choice + 7 * pos) % 64
    assert 0.6 < agreed / 400 < 0.8


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"n_ctx": 2**31}, BackendError, "context of"),
        ({"n_ctx": 2**30 - 1}, BackendError, "cells"),
        ({"n_seq_max": 256}, BackendError, "must be from 1 to 255"),
        ({"n_threads": 0}, BackendError, "threads"),
        ({"type_k": "f8"}, BackendError, "f8"),
        ({"flash_attn": "off", "type_v": "q8_0"}, BackendError, "V cache"),
        ({"layers": (0, 3)}, ModelError, "4 layers"),
    ],
)
def test_llama_load_errors_are_one_line(tiny_model, change, error, text):
    with pytest.raises(error, match=text) as caught:
        load(tiny_model, **{"layers": (0, 4), "total": 4} | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_llama_refuses_a_truncated_file(tiny_model, tmp_path, keep):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_model.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        load(path, (0, 4))


@pytest.mark.parametrize("supports", [False, True])
def test_layers_on_a_gpu_that_is_not_there_change_nothing(monkeypatch, supports):
    """-ngl must not lift the processor's bounds on a build without GPU support, nor where one with
    it finds no GPU, such as llama.cpp's with RPC."""
    if has_gpu():
        pytest.skip("there is one")
    monkeypatch.setattr(binding, "llama_supports_gpu_offload", lambda: supports)
    assert not has_gpu()
    options = LlamaOptions(n_gpu_layers=9).resolved(64)
    assert options.type_k == "q8_0"
    plain = LlamaOptions(n_gpu_layers=9, type_k="f16", type_v="f16").resolved(64)
    assert plain.exact_limit(4096, 2) == 1


def test_auto_options_take_the_cache_that_is_exact(monkeypatch):
    monkeypatch.setattr(context, "has_gpu", lambda: True)
    options = LlamaOptions()
    assert (options.resolved(64).type_k, options.resolved(64).type_v) == ("q8_0", "q8_0")
    assert options.resolved(64).exact_limit(4096, 2) > 16
    assert LlamaOptions(type_k="f16").resolved(64).type_v == "q8_0", "never both f16"
    assert LlamaOptions(type_v="f16").resolved(64).type_k == "q8_0"
    small = LlamaOptions(type_v="q8_0").resolved(64)
    assert small.type_k == "q8_0", "who asks for small values wants small keys"
    one = options.resolved(64, one_type=True)
    assert one.type_k == one.type_v == "q8_0"
    assert (options.resolved(80).type_k, options.resolved(80).type_v) == ("f16", "bf16")
    assert options.resolved(64, 80).type_k == "f16"
    assert options.resolved(64).flash_attn == "on"
    for elsewhere in (LlamaOptions(flash_attn="off"), LlamaOptions(n_gpu_layers=9)):
        assert (elsewhere.resolved(64).type_k, elsewhere.resolved(64).type_v) == ("f16", "f16")
    plain = LlamaOptions(type_k="f16", type_v="f16").resolved(64)
    assert plain.exact_limit(4096, 2) == 1
    assert plain.exact_limit(4096, 1) > 16
    assert LlamaOptions(type_k="q8_0", type_v="f16").resolved(64).exact_limit(4096, 2) > 16
    assert LlamaOptions(flash_attn="off").resolved(64).exact_limit(4096, 1) == 1
    assert options.resolved(64).exact_limit(1 << 17, 64) > 16


@pytest.mark.parametrize(("name", "layers", "elements"), [
    ("qwen35", 3, 2 * 2 * 64), ("nemotron_h", 2, 2 * 2 * 64), ("deepseek2", 4, 128)])
def test_only_layers_with_attention_count_in_the_cache(name, layers, elements, llama, tmp_path):
    """The first of a hybrid may have a state; latent attention stores no values."""
    whole = llama(write_random_model(tmp_path / "m.gguf", tiny(name)))
    # f16 on devices; q8_0 on processors: 34 bytes for 32 elements
    bytes_of_a_cell = elements * 2 if GPU_LAYERS else elements * 34 // 32
    assert whole.info.cache_bytes == layers * bytes_of_a_cell * whole.info.n_ctx
