"""A draft with a state takes rows back: what it says is what a fresh sequence says."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends.rewinding import COPIES, RewindingBackend, ids_for
from pipeinfer.core.types import END, make_rows
from pipeinfer.errors import BackendError
from pipeinfer.strategies.proposers.draft_model import DraftModel
from tests.kit.drafting import job
from tests.kit.kv_oracle import KvOracle
from tests.kit.random_model import tiny, write_random_model
from tests.kit.sample import full


@pytest.mark.parametrize("name", ["qwen35", full("granitehybrid"), full("mamba"), full("lfm2")])
def test_random_operations_equal_a_fresh_sequence(name, llama, tmp_path):
    path = write_random_model(tmp_path / "m.gguf", tiny(name))
    backend = RewindingBackend(llama(path, n_seq_max=ids_for(3)), 3)
    fresh = llama(path, n_seq_max=1)
    rng, oracle = np.random.default_rng(4), KvOracle()

    def decode(seq_id, count):
        first = oracle.next_position(seq_id)
        rows = make_rows([(int(rng.integers(0, 300)), first + i, (seq_id,), i == count - 1)
                          for i in range(count)])
        oracle.add(rows)
        return backend.decode(rows)

    tried = 0
    for _ in range(120):
        seq_id = int(rng.integers(0, 3))
        length = oracle.next_position(seq_id)
        kind = rng.integers(0, 4)
        if kind == 0 and length:
            back = max(0, length - int(rng.integers(1, 2 * COPIES)))
            backend.seq_rm(seq_id, back, END)
            oracle.remove(seq_id, back, END)
        elif kind == 1 and length:
            other = (seq_id + 1) % 3
            backend.seq_rm(other, 0, END)
            oracle.remove(other, 0, END)
            stop = length - int(rng.integers(0, min(length, 4)))
            backend.seq_cp(seq_id, other, 0, stop)
            oracle.copy(seq_id, other, 0, stop)
        elif length < 60:
            found = decode(seq_id, int(rng.integers(1, 20)) if kind == 2 else 1)
            fresh.seq_rm(0, 0, END)
            for token, pos in oracle.of(seq_id):
                expected = fresh.decode(make_rows([(token, pos, (0,), True)]))
            np.testing.assert_allclose(found[-1], expected[-1], atol=0.2)
            tried += 1
    assert tried > 30
    with pytest.raises(BackendError, match="does not follow"):
        backend.decode(make_rows([(1, 99, (0,), True)]))


@pytest.mark.parametrize("base", [100, 240], ids=["copied", "cut"])
def test_what_is_computed_again_takes_the_cells_of_other_paths(base, llama, tmp_path):
    """Texts that begin alike, each nearly as long as the cache."""
    path = write_random_model(tmp_path / "m.gguf", tiny("lfm2"))
    draft, fresh = (DraftModel(RewindingBackend(llama(
        path, n_ctx=256, n_seq_max=ids_for(ids)), ids), paths=paths) for ids, paths in (
            (3, 2), (1, 1)))
    tokens = [3 + 7 * i % 250 for i in range(240)]
    for lane, text in enumerate((tokens, [*tokens[:base], 1, 2], [*tokens[:50], 3], tokens)):
        found, wanted = (one.propose(job(text, job_id=lane, lane=lane), lambda: False)
                         for one in (draft, fresh))
        assert [one.token for one in found] == [one.token for one in wanted]
