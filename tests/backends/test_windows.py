"""Layers with a sliding window have a cache of their own, in which llama.cpp takes cells for free
that are out of the window. The cells of a branch that is taken back, or is copied later, must stay
all the same, in their order."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends.base import ALL_IDS
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.errors import BackendError
from tests.kit.llama import load
from tests.kit.random_model import tiny, write_random_model
from tests.kit.sample import matrix

_SEQS, _CELLS = 6, 256


class Walk:
    """Sequences that grow, lose their ends and are copied, as lanes and guesses do."""

    def __init__(self, backend, seed):
        self.backend, self.rng = backend, np.random.default_rng(seed)
        self.texts: dict[int, list[int]] = {}

    def step(self):
        """One operation; a sequence and the logits after its last token where it was decoded."""
        rng, ids = self.rng, list(self.texts)
        kind = rng.integers(0, 10)
        if kind < 6 or not ids:
            return self.grow(int(rng.integers(_SEQS)) if not ids or rng.random() < 0.1
                             else int(rng.choice(ids)))
        one = int(rng.choice(ids))
        if kind < 8:
            self.cut(one, max(0, len(self.texts[one]) - int(rng.integers(1, 12))))
        elif kind == 8 and len(ids) < _SEQS:
            other = next(i for i in range(_SEQS) if i not in self.texts)
            count = int(rng.integers(1, len(self.texts[one]) + 1))
            self.backend.seq_cp(one, other, 0, count)
            self.texts[other] = self.texts[one][:count]
        elif len(ids) > 1 and rng.random() < 0.5:
            self.cut(one, 0)
        return None

    def grow(self, one):
        text = self.texts.setdefault(one, [])
        if len(text) > 60 or sum(map(len, self.texts.values())) > 200:
            self.cut(one, 0)
            return None
        for token in self.rng.integers(0, 300, self.rng.integers(1, 4)).tolist():
            logits = self.backend.decode(make_rows([(token, len(text), (one,), True)]))
            text.append(token)
        return text, logits

    def cut(self, one, count):
        self.backend.seq_rm(one, count, END)
        del self.texts[one][count:]
        if not self.texts[one]:
            del self.texts[one]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), matrix(("gemma3", "gpt-oss", "gemma4"), (1, 2, 4)))
def test_what_is_taken_back_and_copied_leaves_no_trace(name, seed, llama, tmp_path):
    path = write_random_model(tmp_path / "m.gguf", tiny(name))
    backend, fresh = (llama(path, n_ctx=_CELLS, n_seq_max=_SEQS, keep_order=keeps)
                      for keeps in (False, True))
    walk, checked, compactions = Walk(backend, seed), 0, []
    compact = backend._cells.compact
    backend._cells.compact = lambda: (compactions.append(1), compact())
    for _ in range(600):
        found = walk.step()
        if found is not None and walk.rng.random() < 0.15:
            text, logits = found
            fresh.seq_rm(ALL_SEQS, 0, END)
            for place, token in enumerate(text):
                alone = fresh.decode(make_rows([(token, place, (0,), True)]))
            assert np.array_equal(logits, alone)
            checked += 1
    assert checked > 30
    assert compactions
    assert backend.in_order


def test_windows_need_sequence_ids_of_their_own(tmp_path):
    path = write_random_model(tmp_path / "m.gguf", tiny("gemma3", n_layer=1))
    with pytest.raises(BackendError, match="at most"):
        load(path, n_ctx=_CELLS, n_seq_max=ALL_IDS)
