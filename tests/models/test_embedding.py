"""The embedding's rows are those that llama.cpp looks up, from a model or from its companion."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends.llamacpp import backend, eval_callback
from pipeinfer.errors import BackendError, ModelError
from pipeinfer.models import embedding
from pipeinfer.models.embedding import EmbeddingSource, EmbeddingTable
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.models.shard import extract_shard
from tests.kit.embeddings import extract_embedding
from tests.kit.llama import load
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.rows import chain

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")


class Listener(eval_callback.EvalCallback):
    """Takes what the graph begins with: the rows that were looked up."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = None

    def _call(self, tensor, ask, data):
        if eval_callback.binding.ggml_get_name(tensor) != b"embd":
            return False
        if not ask:
            out = np.empty(eval_callback.binding.ggml_nbytes(tensor) // 4, np.float32)
            eval_callback.binding.ggml_backend_tensor_get(tensor, out.ctypes.data, 0, out.nbytes)
            self.seen = out
        return True


def looked_up(path, tokens, monkeypatch):
    """float32[n, n_embd]: llama.cpp's own rows."""
    monkeypatch.setattr(eval_callback, "compiled_filter", lambda: None)
    monkeypatch.setattr(backend.LlamaCppBackend, "callback_type", Listener)
    loaded = load(path)
    loaded.decode(chain(tokens))
    seen = loaded._callback.seen
    loaded.close()
    return seen.reshape(len(tokens), -1)


@pytest.mark.parametrize("qtype", TYPES)
def test_rows_are_llama_cpps_own(tmp_path, monkeypatch, qtype):
    path = write_random_model(tmp_path / "m.gguf", RandomSpec(n_layer=1, n_embd=256, n_ff=256,
                                                              qtype=qtype))
    model = ModelFile(path)
    tokens = np.random.default_rng(2).integers(0, model.n_vocab, 64).astype(np.int32)
    tokens[:2] = 0, model.n_vocab - 1
    expected = looked_up(path, tokens, monkeypatch)
    for source in (model, ModelFile(extract_embedding(model, cache_dir=tmp_path))):
        rows = EmbeddingTable.open(source).rows(tokens)
        assert rows.dtype == np.float32
        assert np.array_equal(rows.view(np.uint32), expected.view(np.uint32))  # also signs of zero


def test_the_companion_has_the_embedding_alone(tmp_path):
    model = ModelFile(EMBEDDED / "draft.gguf")
    path = extract_embedding(model, cache_dir=tmp_path)
    companion = ModelFile(path)
    source = EmbeddingSource(model)
    assert path.name == source.name
    assert path.read_bytes() == b"".join(source.blocks())
    assert list(companion.tensors) == ["token_embd.weight"]
    assert companion.get("pipeinfer.fingerprint") == model.fingerprint
    assert companion.nbytes < model.tensors["token_embd.weight"].nbytes + 2000
    assert path.name != extract_shard(model, 0, 1, cache_dir=tmp_path).name


def test_a_token_that_is_none():
    table = EmbeddingTable.open(ModelFile(EMBEDDED / "draft.gguf"))
    assert (table.n_vocab, table.n_embd) == (4096, 256)
    assert table.rows(np.zeros(0, np.int32)).shape == (0, 256)
    for bad in (-1, 4096):
        with pytest.raises(BackendError, match="a token outside the vocabulary of 4096"):
            table.rows(np.array([5, bad], np.int32))


def test_a_file_without_its_embedding(tmp_path, monkeypatch):
    path = write_random_model(tmp_path / "m.gguf", RandomSpec(n_layer=1))
    model = ModelFile(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ModelError, match="cannot be read"):
        EmbeddingTable.open(model)
    del model.tensors["token_embd.weight"]
    with pytest.raises(ModelError, match="has no embedding of 64 elements"):
        EmbeddingTable.open(model)


def test_a_library_that_lays_out_types_otherwise(tmp_path, monkeypatch):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", RandomSpec(n_layer=1, qtype="Q8_0")))
    traits = embedding.binding.ggml_get_type_traits
    monkeypatch.setattr(embedding.binding, "ggml_get_type_traits", lambda _: traits(2))
    with pytest.raises(BackendError, match="cannot turn Q8_0 into floats as expected"):
        EmbeddingTable.open(model)
