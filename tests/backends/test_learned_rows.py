"""Token ids beyond the vocabulary on llama.cpp: vectors, and bits of the rows beside them."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends.composed import LearnedRows
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.errors import BackendError
from pipeinfer.models.embedding import EmbeddingTable
from pipeinfer.models.gguf import ModelFile
from tests.kit.gguf_files import write_sliceable
from tests.kit.llama import load

N_TOKENS = 12


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def loaded(tmp_path_factory, request):
    path = tmp_path_factory.mktemp("learned") / "tiny.gguf"
    model = write_sliceable(path, request.param)
    backend = load(path)
    masks = np.random.default_rng(0).normal(0, 1, (2, backend.info.n_embd)).astype(np.float32)
    yield backend, LearnedRows(backend, EmbeddingTable.open(model), masks), masks
    backend.close()


def test_ordinary_rows_keep_their_bits_beside_learned_ones(loaded):
    backend, learned, masks = loaded
    n_vocab = backend.info.n_vocab
    tokens = np.random.default_rng(1).integers(5, n_vocab - 5, N_TOKENS).tolist()

    def prompt():
        backend.seq_rm(ALL_SEQS, 0, END)
        backend.decode(make_rows([(t, i, (0, 1), False) for i, t in enumerate(tokens[:-1])]))

    last = (tokens[-1], N_TOKENS - 1, (0, 1), True)
    prompt()
    # as many rows: products of floats depend on their number, which loading finds out
    plain = backend.decode(make_rows([
        last, (7, N_TOKENS, (1,), True), (8, N_TOKENS + 1, (1,), True)]))
    prompt()
    beside = learned.decode(make_rows([
        last, (n_vocab, N_TOKENS, (1,), True), (n_vocab + 1, N_TOKENS + 1, (1,), True)]))
    assert (beside[0] == plain[0]).all()
    assert not np.allclose(beside[1], beside[2])
    backend.seq_rm(1, N_TOKENS, END)
    again = backend.decode(make_rows([(tokens[0], N_TOKENS, (0,), True)]), masks[:1])
    assert np.allclose(again[0], beside[1], atol=1e-3)  # the vector itself, whatever the token


def test_what_is_no_row(loaded):
    backend, learned, masks = loaded
    with pytest.raises(BackendError, match="and 2 learned rows"):
        learned.decode(make_rows([(backend.info.n_vocab + 2, 0, (0,), True)]))
    with pytest.raises(BackendError, match="vectors of shape"):
        LearnedRows(backend, EmbeddingTable.open(ModelFile(
            "pipeinfer/models/embedded/target.gguf")), masks[:, :8])
