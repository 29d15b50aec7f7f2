"""Cells of the torch backend: what rows see, against a forward pass with the mask written out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from pipeinfer.backends.base import apply
from pipeinfer.backends.pytorch.cells import CellTable
from pipeinfer.core.types import ALL_SEQS, END, Rows, SeqJoin, make_rows
from pipeinfer.errors import BackendError
from tests.backends.test_torch_backend import TOLERANCE
from tests.kit.rows import chain
from tests.kit.tiny_torch import (
    LAYERS,
    VOCAB,
    load,
    masked_forward,
    reference,
    save,
    tokens_of,
    torch,
)
from tests.kit.toy import ToyBackend


@pytest.fixture(scope="module", params=["llama", "mistral-window", "gemma2"])
def pair(request, models):
    return models(request.param)


@pytest.fixture(scope="module")
def llama(models):
    return models("llama")


def rows_of(entries):
    """Rows from (token, position, store, view, output)."""
    tokens, positions, stores, views, outputs = zip(*entries, strict=True)
    return Rows(np.array(tokens, np.int32), np.array(positions, np.int32), tuple(stores),
                np.array(outputs, np.bool_), tuple(views))


@dataclass
class Oracle:
    """Every row ever evaluated, who it saw, and which of their cells are left."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seen: list[set[int]] = field(default_factory=list)
    sets: dict[int, set[int]] = field(default_factory=dict)  #: living cells
    joined: set[int] = field(default_factory=set)

    def evaluate(self, entries):
        """Note the rows; returns their numbers."""
        new = range(len(self.tokens), len(self.tokens) + len(entries))
        for i, (token, pos, store, _, _) in zip(new, entries, strict=True):
            self.tokens.append(token)
            self.positions.append(pos)
            self.sets[i] = set(store)
        for _, pos, _, view, _ in entries:
            self.seen.append({c for c, ids in self.sets.items() if ids & set(view)
                              and (self.positions[c] <= pos or c in self.joined)})
        return list(new)

    def remove(self, seq_id, p0, p1):
        for c in list(self.sets):
            if self._within(c, p0, p1):
                self.sets[c] -= {seq_id} if seq_id != ALL_SEQS else set(self.sets[c])
                self._free(c)

    def copy(self, src, dst, p0, p1):
        added = {c for c, ids in self.sets.items()
                 if src in ids and dst not in ids and self._within(c, p0, p1)}
        for c in added:
            self.sets[c].add(dst)
        return added

    def _within(self, c, p0, p1):
        """Joined cells belong to the start of a sequence."""
        return p0 == 0 if c in self.joined else p0 <= self.positions[c] < p1

    def keep(self, seq_id):
        for c in list(self.sets):
            self.sets[c] &= {seq_id}
            self._free(c)

    def _free(self, c):
        if not self.sets[c]:
            del self.sets[c]
            self.joined.discard(c)

    def listing(self):
        return sorted(((self.positions[c], frozenset(ids)) for c, ids in self.sets.items()),
                      key=lambda pair: (pair[0], sorted(pair[1])))

    def logits(self, model):
        n = len(self.tokens)
        seen = np.zeros((n, n), bool)
        for i, cells in enumerate(self.seen):
            seen[i, list(cells)] = True
        return masked_forward(model, self.tokens, self.positions, seen)


@pytest.mark.parametrize("seed", range(4))
def test_any_rows_and_operations_see_what_the_mask_says(llama, seed):
    """Gaps, overlaps, branches, own views, joins, removals; narrow and wide decodes."""
    model, path = llama
    rng = np.random.default_rng(seed)
    stages = [load(path, (0, 1)), load(path, (1, 4))]
    oracle, results, joined = Oracle(), [], 0
    for _ in range(26):
        for backend_op, oracle_op in operations(rng):
            for stage in stages:
                backend_op(stage)
            oracle_op(oracle)
        entries = []
        for _ in range(int(rng.choice([1, 2, 5, 9, 24]))):
            store = tuple(rng.choice(6, int(rng.integers(1, 4)), replace=False).tolist())
            extra = tuple(rng.choice(6, int(rng.integers(0, 3)), replace=False).tolist())
            view = store if rng.random() < 0.4 else tuple({store[0], *extra})
            entries.append((int(rng.integers(VOCAB)), int(rng.integers(0, 60)), store, view,
                            rng.random() < 0.7))
        numbers = oracle.evaluate(entries)
        hidden = stages[0].decode(rows_of(entries))
        logits = stages[1].decode(rows_of(entries), hidden)
        results.append(([i for i, e in zip(numbers, entries, strict=True) if e[4]], logits))
        for stage in stages:
            assert stage.cells() == oracle.listing()
        joined += len(oracle.joined)
    assert joined
    expected = oracle.logits(model)
    for wanted, logits in results:
        assert logits.shape == (len(wanted), VOCAB)
        if wanted:
            assert np.abs(logits - expected[wanted]).max() < TOLERANCE


def operations(rng):
    """Random sequence operations, for a backend and for the oracle."""
    found = []
    for _ in range(int(rng.integers(0, 3))):
        a, b = map(int, rng.choice(6, 2, replace=False))
        p0 = int(rng.integers(0, 60)) if rng.random() < 0.8 else 0
        p1 = END if rng.random() < 0.5 else p0 + int(rng.integers(0, 30))
        kind = rng.choice(["rm", "all", "cp", "join", "keep"], p=[0.35, 0.1, 0.3, 0.2, 0.05])
        if kind == "rm":
            found.append((lambda s, x=(a, p0, p1): s.seq_rm(*x),
                          lambda o, x=(a, p0, p1): o.remove(*x)))
        elif kind == "all":
            found.append((lambda s, x=(ALL_SEQS, p0, p0 + 9): s.seq_rm(*x),
                          lambda o, x=(ALL_SEQS, p0, p0 + 9): o.remove(*x)))
        elif kind == "cp":
            found.append((lambda s, x=(a, b, p0, p1): s.seq_cp(*x),
                          lambda o, x=(a, b, p0, p1): o.copy(*x)))
        elif kind == "join":
            found.append((lambda s, x=(a, b): s.seq_join(*x),
                          lambda o, x=(a, b): o.joined.update(o.copy(*x, 0, END))))
        else:
            found.append((lambda s, x=a: s.seq_keep(x), lambda o, x=a: o.keep(x)))
    return found


def test_a_token_tree_sees_its_ancestors(pair):
    """One run with two branches of different depth, on models with windows and caps as well."""
    model, path = pair
    backend, text = load(path), tokens_of(14)
    backend.decode(chain(text, outputs=False))
    backend.seq_cp(0, 1, 0, END)
    tree = make_rows([(3, 14, (0, 1), True), (4, 15, (0,), True), (5, 16, (0,), True),
                      (6, 15, (1,), True), (7, 16, (1,), True), (8, 17, (1,), True)])
    logits = backend.decode(tree)
    for path_tokens, rows in (((3, 4, 5), (0, 1, 2)), ((3, 6, 7, 8), (0, 3, 4, 5))):
        whole = model(torch.tensor([[*text, *path_tokens]])).logits[0, 14:].detach().numpy()
        assert np.abs(logits[list(rows)] - whole).max() < TOLERANCE


def test_pasta_spawn_overrun_and_join(llama):
    """A block that overruns its promised length lies above its reader, who sees it after a join."""
    model, path = llama
    backend, oracle = load(path), Oracle()

    def step(*entries):
        numbers = oracle.evaluate(entries)
        return numbers, backend.decode(rows_of(entries))

    for at, token in enumerate(tokens_of(10)):
        step((token, at, (0,), (0,), False))
    backend.seq_cp(0, 1, 0, END)
    oracle.copy(0, 1, 0, END)
    # The promise's last token belongs to both; the block starts behind it, main goes on after a gap
    step((40, 10, (0, 1), (0,), False), (41, 11, (1,), (1,), True))
    found = [step((50 + i, 15 + i, (0,), (0,), True), (60 + i, 12 + i, (1,), (1,), True))
             for i in range(4)]
    found += [step((70 + i, 16 + i, (1,), (1,), True)) for i in range(5)]  # up to 20, over main
    backend.seq_join(1, 0)
    oracle.joined |= oracle.copy(1, 0, 0, END)
    last = step((90, 19, (0,), (0,), True))
    assert max(oracle.positions[c] for c in oracle.seen[last[0][0]]) == 20
    expected = oracle.logits(model)
    for numbers, logits in [*found, last]:
        assert np.abs(logits - expected[numbers]).max() < TOLERANCE


@pytest.mark.parametrize(("family", "window", "cuts"), [
    ("llama", 99, [(0, 4)]), ("llama", 99, [(0, 2), (2, 3), (3, 4)]),
    ("mistral-window", 9, [(0, 4)])])
def test_learned_prefixes_are_seen_by_their_readers_alone(tmp_path, family, window, cuts):
    """BiTA: mask rows see the prompts, also from beyond a window; ordinary rows compute as if
    there were none."""
    model = reference(family)
    path = save(model, tmp_path / "m")
    torch.manual_seed(1)
    prefix = {i: (torch.randn(5, 2, 16) * 2, torch.randn(5, 2, 16)) for i in range(LAYERS)}
    stages = [load(path, layers) for layers in cuts]
    bare = load(path)
    for stage in stages:
        stage.preload(prefix, (7,))
        assert len(stage.cells()) == 5
    text = [(t, i, (0,), (0,), True) for i, t in enumerate(tokens_of(11))]
    masks = [(90 + r, 11 + r, (6,), (0, 6, 7), True) for r in range(3)]
    hidden = None
    for stage in stages:
        hidden = stage.decode(rows_of(text + masks), hidden)
    plain = bare.decode(chain([e[0] for e in text]))
    assert np.array_equal(hidden[:11], plain)
    seen = np.tril(np.ones((14, 14), bool)) & ~np.tril(np.ones((14, 14), bool), -window)
    who = np.arange(14) >= 11
    expected = masked_forward(model, [e[0] for e in text + masks], range(14), seen, (prefix, who))
    assert np.abs(hidden - expected).max() < TOLERANCE
    without = masked_forward(model, [e[0] for e in text + masks], range(14), seen)
    assert np.abs(hidden[11:] - without[11:]).max() > 0.01
    for stage in stages:
        for remove in (lambda s: s.seq_rm(ALL_SEQS, 0, END), lambda s: s.seq_rm(7, 0, END),
                       lambda s: s.seq_keep(3), lambda s: s.seq_cp(7, 0, 0, END)):
            remove(stage)
        assert len(stage.cells()) == 5
        assert stage.seq_bounds(0) is None


def test_prefixes_that_do_not_fit_are_refused(llama):
    _, path = llama
    backend = load(path, (1, 3), n_ctx=8)
    good = torch.zeros(3, 2, 16)
    for prefix, says in (({1: (good, good)}, r"layers \[2\]"),
                         ({1: (good, good), 2: (good, good[:2])}, "layer 2 has shapes"),
                         ({1: (good[:, :1], good), 2: (good, good)}, "layer 1 has shapes")):
        with pytest.raises(BackendError, match=says):
            backend.preload(prefix, (0,))
    many = torch.zeros(9, 2, 16)
    with pytest.raises(BackendError, match="no free cells for a prefix of 9"):
        backend.preload({1: (many, many), 2: (many, many)}, (0,))
    assert len(backend.cells()) == 0


@pytest.mark.parametrize(("entry", "says"), [
    ((1, 3, (), (0,), True), r"row 1 has bad sequence ids \(\)"),
    ((1, 3, (0,), (), True), r"row 1 has bad sequence ids \(\)"),
    ((1, 3, (8,), (0,), True), r"bad sequence ids \(8,\)"),
    ((1, 3, (0,), (1, 1), True), r"bad sequence ids \(1, 1\)"),
    ((1, 3, (0,), (-1,), True), r"bad sequence ids \(-1,\)"),
    ((1, 3, (0,), (5,), True), "row 1 sees no cell"),
    ((1, -3, (0,), (0,), True), "negative position"),
])
def test_rows_that_cannot_be_are_refused_and_leave_nothing(llama, entry, says):
    backend = load(llama[1])
    backend.decode(chain([1, 2]))
    for filler in (1, 20):  # as part of a narrow and of a wide decode
        good = [(5, 2 + i, (0,), (0,), True) for i in range(filler)]
        with pytest.raises(BackendError, match=says):
            backend.decode(rows_of([good[0], entry, *good[1:]]))
        assert backend.cells() == [(0, frozenset([0])), (1, frozenset([0]))]


def test_a_long_context_with_rows_far_apart(llama):
    """Over 512 cells, where kernels work block by block and early rows see none of a block."""
    model, path = llama
    backend, oracle = load(path, n_ctx=1024), Oracle()
    for first in range(0, 640, 40):
        entries = [(int(t), first + i, (0,), (0,), False)
                   for i, t in enumerate(tokens_of(40, first))]
        oracle.evaluate(entries)
        backend.decode(rows_of(entries))
    entries = [(i, 5 + 31 * i, (1,), (0, 1), True) for i in range(20)]
    numbers = oracle.evaluate(entries)
    wide = backend.decode(rows_of(entries))
    assert np.abs(wide - oracle.logits(model)[numbers]).max() < TOLERANCE


def test_a_table_with_many_ids():
    table = CellTable(10, 200)
    table.claim(make_rows([(1, i, (i, 199, 64), True) for i in range(3)]))
    assert table.bounds(199) == (0, 2)
    assert table.bounds(63) is None
    table.remove(64, 0, END)
    table.copy(199, 130, 1, END)
    assert table.listing() == [(0, frozenset({0, 199})), (1, frozenset({1, 199, 130})),
                               (2, frozenset({2, 199, 130}))]
    table.keep(130)
    assert table.listing() == [(1, frozenset({130})), (2, frozenset({130}))]
    assert len(table.listing()) == 2


@pytest.mark.parametrize("first_over", [1, 2, 3])
def test_joined_cells_are_read_in_the_order_of_threads_whichever_ended_first(first_over):
    """Blocks 1 to 3 stand at the same positions behind one prompt; they wait for the join in the
    id of the one that ended first. Tokens' numbers say which is which."""
    table = CellTable(32, 8)
    cells = {0: table.claim(chain([0, 0], 0, (0,)))}
    for block in (1, 2, 3):
        table.copy(0, block, 0, END)
    for block in (2, 3, 1):
        cells[block] = table.claim(chain([0, 0, 0], 2, (block,)))
    others = [block for block in (3, 1, 2) if block != first_over]
    for block in others:
        table.remove(block, 0, 2)
        table.join(block, first_over, block)
        table.remove(block, 0, END)
    table.join(first_over, 0, first_over)
    table.remove(first_over, 0, END)
    reader = chain([0], 1, (0,))
    own = table.claim(reader)
    (group,) = table.groups(reader, None)
    assert [c for c in group.cells if c not in own] == [
        *cells[0], *(cells[block][at] for at in range(3) for block in (1, 2, 3))]


def test_joins_are_sequence_operations_that_other_backends_refuse(llama):
    backend = load(llama[1])
    backend.decode(chain([1, 2], ids=(3,)))
    apply(backend, SeqJoin(3, 0))
    assert backend.cells() == [(0, frozenset([0, 3])), (1, frozenset([0, 3]))]
    assert backend.decode(chain([5], 0)).shape == (1, VOCAB)
    with pytest.raises(BackendError, match="ToyBackend cannot join"):
        apply(ToyBackend.load(), SeqJoin(3, 0))
