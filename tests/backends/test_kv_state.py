"""Random cache operations against an oracle that recomputes every logit from the visible tokens."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pipeinfer.backends.llamacpp.cells import CellOrder
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.errors import BackendError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import extract_shard
from tests.kit.kv_oracle import KvOracle, from_scratch
from tests.kit.llama import load
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.toy import ToyBackend

N_SEQS = 5
IDS = st.integers(0, N_SEQS - 1)
TOKENS = st.lists(st.integers(0, 63), min_size=1, max_size=4)


def cells_of(order, seq_id):
    """The id's cells in order of position."""
    row = order._cells[seq_id, : order._length[seq_id]]
    return row[row >= 0]


class KvMachine(RuleBasedStateMachine):
    """Rules that keep to the contract; every one may be followed by any other."""

    one_by_one = False  # where the matrices of several rows are not exact anyway

    def load(self):
        raise NotImplementedError

    def decode(self, rows):
        if not self.one_by_one:
            return self.backend.decode(rows)
        columns = zip(rows.tokens.tolist(), rows.positions.tolist(), rows.seq_ids, strict=True)
        return np.concatenate(
            [self.backend.decode(make_rows([(t, p, ids, True)])) for t, p, ids in columns]
        )

    @initialize()
    def start(self):
        self.backend, self.scratch = self.load()
        self.backend.seq_rm(ALL_SEQS, 0, END)
        self.oracle = KvOracle()

    def room(self, rows):
        return sum(len(v) for v in self.oracle.visible.values()) + rows <= 200

    @rule(seq_id=IDS, tokens=TOKENS, shared=st.booleans())
    def decode_chain(self, seq_id, tokens, shared):
        if not self.room(len(tokens) * N_SEQS):
            return
        ids = (seq_id, *self.oracle.twins(seq_id)) if shared else (seq_id,)
        first = self.oracle.next_position(seq_id)
        rows = make_rows([(t, first + i, ids, True) for i, t in enumerate(tokens)])
        logits = self.decode(rows)
        self.oracle.add(rows)
        self.check(logits[-1], seq_id)

    @rule(seq_id=IDS, other=IDS, tokens=TOKENS, branch=TOKENS)
    def decode_tree(self, seq_id, other, tokens, branch):
        """A shared trunk of one row, then a branch per id, in one batch."""
        if seq_id == other or not self.room(20):
            return
        self.rm(other, 0, END)
        self.cp(seq_id, other, 0, END)
        first = self.oracle.next_position(seq_id)
        specs = [(tokens[0], first, (seq_id, other), True)]
        specs += [(t, first + 1 + i, (seq_id,), True) for i, t in enumerate(tokens[1:])]
        specs += [(t, first + 1 + i, (other,), True) for i, t in enumerate(branch)]
        rows = make_rows(specs)
        logits = self.decode(rows)
        self.oracle.add(rows)
        self.check(logits[len(tokens) - 1], seq_id)
        self.check(logits[-1], other)

    @rule(seq_id=IDS, tokens=TOKENS, asks=st.integers(1, 3))
    def decode_stopped(self, seq_id, tokens, asks):
        left = [asks]
        tokens = tokens[:1] if self.one_by_one else tokens

        def should_stop():
            left[0] -= 1
            return left[0] <= 0

        first = self.oracle.next_position(seq_id)
        rows = make_rows([(t, first + i, (seq_id,), True) for i, t in enumerate(tokens)])
        result = self.backend.decode(rows, should_stop=should_stop)
        if result is not None:
            assert left[0] > 0
            self.oracle.add(rows)

    @rule(seq_id=IDS, gap=st.integers(1, 3))
    def decode_with_a_gap(self, seq_id, gap):
        if self.oracle.of(seq_id):
            rows = make_rows([(1, self.oracle.next_position(seq_id) + gap, (seq_id,), True)])
            with pytest.raises(BackendError):
                self.backend.decode(rows)

    @rule(seq_id=IDS, cut=st.integers(0, 12))
    def remove_tail(self, seq_id, cut):
        self.rm(seq_id, cut, END)

    @rule(src=IDS, dst=IDS, cut=st.integers(1, 40))
    def copy_prefix(self, src, dst, cut):
        if src != dst:
            self.rm(dst, 0, END)
            self.cp(src, dst, 0, cut)

    @rule(seq_id=IDS)
    @precondition(lambda self: len(self.oracle.visible) > 2)
    def keep(self, seq_id):
        self.backend.seq_keep(seq_id)
        self.oracle.keep(seq_id)

    @rule(token=st.integers(0, 63))
    @precondition(lambda self: self.oracle.visible)
    def compare_one(self, token):
        seq_id = sorted(self.oracle.visible)[token % len(self.oracle.visible)]
        first = self.oracle.next_position(seq_id)
        rows = make_rows([(token, first, (seq_id,), True)])
        logits = self.backend.decode(rows)
        self.oracle.add(rows)
        self.check(logits[0], seq_id)
        self.rm(seq_id, first, END)

    @invariant()
    def bounds_agree(self):
        for seq_id in range(N_SEQS):
            pairs = self.oracle.of(seq_id)
            expected = (pairs[0][1], pairs[-1][1]) if pairs else None
            assert self.backend.seq_bounds(seq_id) == expected

    def rm(self, seq_id, p0, p1):
        self.backend.seq_rm(seq_id, p0, p1)
        self.oracle.remove(seq_id, p0, p1)

    def cp(self, src, dst, p0, p1):
        self.backend.seq_cp(src, dst, p0, p1)
        self.oracle.copy(src, dst, p0, p1)

    def check(self, logits, seq_id):
        expected = from_scratch(self.scratch, self.oracle.of(seq_id))
        assert np.array_equal(logits, expected)


class ToyMachine(KvMachine):
    def load(self):
        make = {"n_ctx": 400, "n_seq_max": N_SEQS}
        return ToyBackend.load(**make), ToyBackend.load(**make)

    def teardown(self):
        self.backend.seq_rm(ALL_SEQS, 0, END)
        assert self.backend.used_cells() == 0


class LlamaMachine(KvMachine):
    path = None
    loaded: tuple = ()

    def load(self):
        if not LlamaMachine.loaded:
            LlamaMachine.loaded = tuple(load(self.path, n_seq_max=N_SEQS) for _ in range(2))
        return LlamaMachine.loaded

    @invariant()
    def cells_in_order(self):
        order = self.backend._cells.order
        assert order.in_order
        for seq_id in range(N_SEQS):
            assert (np.diff(cells_of(order, seq_id)) > 0).all()
            assert len(cells_of(order, seq_id)) == len(self.oracle.of(seq_id))


TestToyState = ToyMachine.TestCase
TestToyState.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["Q8_0", "F32"])
def test_llama_state(tmp_path, qtype):
    """With F32 weights nothing rounds a changed order of sums away, as int8 activations do."""
    LlamaMachine.path = write_random_model(
        tmp_path / "m.gguf", RandomSpec(n_layer=2, n_embd=64, n_head=2, n_head_kv=1, qtype=qtype)
    )
    LlamaMachine.one_by_one = qtype == "F32"
    LlamaMachine.loaded = ()
    try:
        run_state_machine_as_test(
            LlamaMachine,
            settings=settings(
                max_examples=25, stateful_step_count=20, deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        for backend in LlamaMachine.loaded:
            backend.close()
        LlamaMachine.loaded = ()


def test_removed_cells_below_used_ones_wait_until_the_cache_is_full():
    order = CellOrder(16, 3)
    order.place(make_rows([(0, p, (0,), True) for p in range(4)]))
    order.copy(0, 1, 0, 4)
    order.place(make_rows([(0, 4, (0,), True), (0, 5, (0,), True)]))  # cells 4, 5
    order.place(make_rows([(0, 4, (1,), True)]))  # cell 6
    assert order.remove(0, 4, END) == [(4, 6)]  # 4 and 5 lie below the living 6
    assert order.n_buried == 2
    order.place(make_rows([(0, 5, (1,), True)]))
    assert cells_of(order, 1).tolist() == [0, 1, 2, 3, 6, 7]
    assert order.remove(1, 5, END) == []  # 7 was above everything
    order.compact()
    assert order.in_order
    assert order.n_buried == 0
    assert cells_of(order, 0).tolist() == [0, 1, 2, 3]
    assert cells_of(order, 1).tolist() == [0, 1, 2, 3, 4]
    order.place(make_rows([(0, 5, (1,), True)]))
    assert cells_of(order, 1).tolist() == [0, 1, 2, 3, 4, 5]


def test_an_empty_cache_is_in_order_again():
    order = CellOrder(8, 2)
    order.place(make_rows([(0, 0, (0,), True), (0, 0, (1,), True)]))
    assert order.remove(0, 0, END) == [(0, 1)]
    order.empty_grave()
    assert not order.in_order
    assert order.remove(1, 0, END) == []
    assert order.is_empty()
    order.empty_grave()
    assert order.in_order
    assert order.n_buried == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"flash_attn": "off"}, {"type_v": "q8_0"},
                                     {"type_v": "f16"}])
@pytest.mark.parametrize("layers", [(0, 2), (0, 1)])
def test_a_cache_full_of_dead_cells_is_moved_together(llama, tmp_path, options, layers):
    """Side branches die below living cells until the cache is full, several times over."""
    path = write_random_model(
        tmp_path / "m.gguf", RandomSpec(n_layer=2, n_embd=64, n_head=2, n_head_kv=1)
    )
    path = extract_shard(ModelFile(path), *layers, cache_dir=tmp_path)

    small, plain = (llama(path, layers, 2, n_ctx=n_ctx, **options) for n_ctx in (256, 1024))
    # Without flash attention, holes between cells alone change the last bits.
    same = partial(np.allclose, atol=4e-3) if options.get("flash_attn") == "off" else np.array_equal
    compactions = []
    original = small._cells.compact
    small._cells.compact = lambda: (compactions.append(True), original())
    for pos in range(150):
        small.seq_cp(0, 1, 0, pos)
        small.decode(make_rows([(9, pos + i, (1,), False) for i in range(3)]))
        rows = make_rows([(pos % 64, pos, (0,), True)])
        assert same(small.decode(rows), plain.decode(rows))
        if pos % 7 == 0:  # a sibling that lives on over a compaction
            small.seq_rm(2, 0, END)
            small.seq_cp(0, 2, 0, pos + 1)
        small.seq_rm(1, 0, END)
        plain.seq_rm(1, 0, END)
    assert len(compactions) >= 2
    assert small.in_order
    assert small.seq_bounds(2) == (0, 147)
    rows = make_rows([(5, 148, (2,), True)])
    plain.seq_rm(0, 148, END)
    expected = plain.decode(make_rows([(5, 148, (0,), True)]))
    assert same(small.decode(rows), expected)
