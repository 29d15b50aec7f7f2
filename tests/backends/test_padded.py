"""Padded decodes and parts of the cache for each sequence, where the bits of a row depend on how
many there are without: f16 keys and values behind 512 cells on two threads."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends.exact_width import FAR, exact_width
from pipeinfer.backends.llamacpp.padded import PaddedBackend, by_gain, holds, known_padding
from pipeinfer.core.types import ALL_SEQS, CURVE_ROWS, END, make_rows
from pipeinfer.errors import BackendError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.models.shard import extract_shard
from tests.kit.llama import load as kit_load
from tests.kit.rows import chain
from tests.kit.sample import mostly_full

PATH = EMBEDDED / "draft.gguf"
ROWS, N_VOCAB = 4, 4096


def load(start=0, stop=2, path=PATH, **options):
    return kit_load(path, (start, stop), 2, kind=PaddedBackend, n_ctx=3072, n_seq_max=3,
                    n_threads=2, **{"streams": True, "type_k": "f16", "type_v": "f16",
                                    "lend": True} | options)


@pytest.fixture(scope="module")
def loaded():
    made = load()
    yield made
    made.close()


@pytest.fixture
def backend(loaded):
    """Empty, without padding, and with nothing that would rule it out."""
    loaded.width, loaded.exact_limit = 0, 16
    loaded.seq_rm(ALL_SEQS, 0, END)
    return loaded


def test_single_rows_and_chains_differ_until_they_are_padded(backend):
    assert exact_width(backend, 4, contexts=(FAR,)) == 1
    for rows in (2, ROWS, 8):
        assert holds(backend, rows)
        assert backend.width == 0
    assert backend.seq_bounds(0) is None


def test_what_holds_is_not_taken_for_granted(backend, monkeypatch):
    def without_padding(self, rows, start, stop, hidden, stops):
        part = chain(rows.lists.tokens[start:stop], rows.lists.positions[start],
                     rows.seq_ids[start])
        return super(PaddedBackend, self).decode(part, hidden, stops)

    monkeypatch.setattr(PaddedBackend, "_decode_part", without_padding)
    assert not holds(backend, ROWS)


@pytest.mark.parametrize("seed", mostly_full(range(12), 0, 1))
@pytest.mark.parametrize("length", [5, 253, 507])
def test_a_row_has_the_bits_of_plain_decoding_whatever_came_before(backend, length, seed):
    """Chains of any length, wrong and cut back, copied to another id, across a block of cells."""
    backend.width = ROWS
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, N_VOCAB, length + 20).tolist()
    for start in range(0, length, 64):
        backend.decode(chain(tokens[start : min(start + 64, length)], start, outputs=False))
    backend.seq_cp(0, 2, 0, length)
    wanted = {at: backend.decode(chain([tokens[at]], at))[0].copy()
              for at in range(length, length + 20)}
    seq_id, done = 2, length
    while done < length + 20:
        right = min(int(rng.integers(0, ROWS + 1)), length + 20 - done)
        wrong = rng.integers(0, N_VOCAB, rng.integers(0 if right else 1, ROWS - right + 1))
        guess = [*tokens[done : done + right], *wrong.tolist()]
        found = backend.decode(chain(guess, done, (seq_id,)))
        for i in range(right):
            assert found[i].tobytes() == wanted[done + i].tobytes()
        done += right
        backend.seq_rm(seq_id, done, END)
        if rng.random() < 0.2:  # a later request begins with this text
            backend.seq_rm(3 - seq_id, 0, END)
            backend.seq_cp(seq_id, 3 - seq_id, 0, done)
            seq_id = 3 - seq_id


@pytest.mark.parametrize("layers", [(0, 1), (1, 2)])
def test_stages_pad_hidden_rows(layers, tmp_path):
    path = extract_shard(ModelFile(PATH), *layers, cache_dir=tmp_path)
    stage = load(*layers, path=path)
    assert holds(stage, ROWS)
    stage.width = ROWS
    hidden = None if layers[0] == 0 else np.random.default_rng(1).standard_normal(
        (3, stage.info.n_embd)).astype(np.float32)
    rows = make_rows([(5, 0, (0,), False), (6, 1, (0,), True), (7, 2, (0,), False)])
    found = stage.decode(rows, hidden)
    assert len(found) == (1 if stage.info.last else 3)
    assert stage.seq_bounds(0) == (0, 2)
    stage.close()


def test_rows_are_cut_where_a_block_of_cells_or_a_sequence_ends(backend):
    backend.width = ROWS
    cut = [stop - start for start, stop in backend._parts(chain([1] * 4, 251))]
    assert cut == [2, 2], "behind position 252 four rows take a cell of the next block"
    assert [*backend._parts(chain([1] * 3, 253))] == [(0, 3)]
    assert [*backend._parts(chain([1] * 60, 200))] == [(0, 60)], "a chunk of a prompt"
    two = make_rows([(1, 7, (0,), True), (1, 8, (0,), True), (1, 3, (1,), True)])
    assert [*backend._parts(two)] == [(0, 2), (2, 3)]
    with pytest.raises(BackendError, match="each row is in one"):
        backend.decode(make_rows([(1, 0, (0, 1), True)]))


def test_a_stopped_run_leaves_no_cells(backend):
    backend.width = ROWS
    backend.decode(chain([1, 2, 3], 0))
    assert backend.decode(chain([4, 5], 3), None, lambda: True) is None
    assert backend.seq_bounds(0) == (0, 2)


def test_how_many_rows_pay():
    # as measured on one H200
    h200 = dict(zip(CURVE_ROWS, (1.10, 1.22, 1.31, 1.55, 1.90, 2.60), strict=True))
    assert by_gain(h200)[0] == 4
    assert by_gain(dict.fromkeys(CURVE_ROWS, 1.0))[0] == 16
    assert by_gain({rows: float(rows) for rows in CURVE_ROWS}) == []


def test_the_choice_is_stored_by_what_it_depends_on(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEINFER_CACHE", str(tmp_path))
    seen = []
    first = known_padding(backend, ("file", "gpu"), ROWS, progress=lambda *_: seen.append(1))
    assert (first.exact, first.padded, backend.width) == (ROWS, ROWS, ROWS)
    assert first.curve[:3] == (1.0, 1.0, 1.0), "up to four rows cost what one costs"
    assert first.curve[-1] == 4.0
    assert seen
    seen.clear()
    again = known_padding(backend, ("file", "gpu"), ROWS, progress=lambda *_: seen.append(1))
    assert again == first
    assert len(seen) <= 1
    assert known_padding(backend, ("file", "gpu"), 1).padded == 1
    backend.width = 0
    known_padding(backend, ("file", "another gpu"), ROWS, progress=lambda *_: seen.append(1))
    assert len(seen) > 2, "another GPU is measured"
    seen.clear()
    stage = load(0, 1, path=extract_shard(ModelFile(PATH), 0, 1, cache_dir=tmp_path))
    known_padding(stage, ("file", "gpu"), progress=lambda *what: seen.append(what))
    stage.close()
    assert (0, 1) not in seen, "times are those of the first stage, so all have one width"


def test_models_without_parts_of_the_cache_keep_the_shared_one(tmp_path):
    made = load(gaps=True)
    assert not made.options.streams
    assert made._cells is None
    made.close()


def test_a_head_gets_the_rows_that_were_asked_for():
    """Not those of the padding; also where a run is cut at a block of cells."""
    found = {}
    for width in (0, ROWS):
        made = load()
        made.tap((0, 1))
        made.width = width
        made.decode(chain(range(100, 164), 0, outputs=False))
        made.decode(chain(range(100, 164), 64, outputs=False))
        made.decode(chain(range(100, 164), 128, outputs=False))
        made.decode(chain(range(100, 159), 192, outputs=False))
        made.decode(chain([7, 8, 9], 251))
        found[width] = made.tapped.copy()
        made.close()
    assert found[ROWS].shape == found[0].shape == (3, 2 * 256)
    assert np.abs(found[0]).max() > 0.5
    assert np.allclose(found[ROWS], found[0], atol=0.05)
