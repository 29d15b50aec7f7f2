"""Saved cells: taken apart by layer, put into contexts with other layers, they have equal bits."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.saved_cells import SavedCells, from_bytes, to_bytes
from pipeinfer.core.types import END, make_rows
from pipeinfer.errors import BackendError
from pipeinfer.models.architectures import declared
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.layers import barred, has_ranges
from pipeinfer.models.shard import ShardSource
from tests.kit.llama import load as load_stage
from tests.kit.random_architectures import ALONE, RECIPES, STATEFUL
from tests.kit.random_model import tiny, write_random_model
from tests.kit.sample import examples, mostly_full

CHUNK, CHUNKS = 32, 4
STOP = CHUNK * CHUNKS
_SAMPLE = ("gemma3", "gpt-oss", "qwen3vl", "deepseek32", "qwen35", "falcon-h1", "kimi-linear",
           "mamba2", "deepseek4", "minimax-m3")


def load(model, cuts):
    """Stages that begin at 0 and at the cuts."""
    ends = [*cuts, model.n_layers]
    return [load_stage(ShardSource(model, a, b), (a, b), model.n_layers, kind=LlamaCppBackend,
                       n_ctx=1024, n_seq_max=6, n_batch=CHUNK, huge_pages=False, saves=True)
            for a, b in zip([0, *cuts], ends, strict=True)]


def decode(stages, tokens, start, stop, seq_id):
    hidden = None
    rows = make_rows([(int(tokens[i]), i, (seq_id,), True) for i in range(start, stop)])
    for one in stages:
        hidden = one.decode(rows, hidden)
    return hidden.copy()


def continued(stages, tokens, seq_id):
    """Logits of a continuation: single rows, a short run, single rows."""
    ends = [*range(STOP, STOP + 5), STOP + 8, *range(STOP + 9, STOP + 13)]
    return b"".join(decode(stages, tokens, a, b, seq_id).tobytes()
                    for a, b in itertools.pairwise(ends))


def saved(stages, tokens, seq_id=0):
    """Compute a prompt; return the bytes of each chunk and of the state behind it, by stage."""
    chunks = []
    for k in range(CHUNKS):
        decode(stages, tokens, k * CHUNK, (k + 1) * CHUNK, seq_id)
        if stages[0].saver.by_range:
            chunks.append([to_bytes(one.saver.layout.parse(one.saver.save(
                seq_id, k * CHUNK, (k + 1) * CHUNK))) for one in stages])
    state = [to_bytes(one.saver.layout.parse(
        one.saver.save_state(seq_id), states_only=one.saver.by_range))
        for one in stages] if stages[0].keeps_state else []
    return chunks, state


def restore(stages, chunks, state, seq_id):
    for k, pieces in enumerate(chunks):
        joined = SavedCells.joined(map(from_bytes, pieces))
        for one in stages:
            blob = one.saver.layout.build(joined)
            assert blob is not None
            assert one.saver.put(seq_id, k * CHUNK, (k + 1) * CHUNK, blob)
    if state:
        joined = SavedCells.joined(map(from_bytes, state))
        for one in stages:
            blob = one.saver.layout.build(joined, states_only=one.saver.by_range)
            assert blob is not None
            assert one.saver.put_state(seq_id, blob)


@pytest.mark.parametrize("name", mostly_full([*RECIPES, *STATEFUL, *ALONE], *_SAMPLE))
def test_another_split_continues_with_equal_bits(name, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "model.gguf", tiny(name)))
    n, bars, own = model.n_layers, barred(model)[0], declared(model.architecture)
    cuts = [k for k in range(1, n) if not {(0, k), (k, n)} & bars]
    joins = cuts if has_ranges(model) or not own.copied_whole else []
    first, others = joins[:1], [[], joins[-1:]] if joins else [[]]
    tokens = np.random.default_rng(3).integers(0, model.n_vocab, STOP + 12)
    stages = load(model, first)
    chunks, state = saved(stages, tokens)
    if joins:
        assert not [one for row in [*chunks, state] for data in row
                    if (one := from_bytes(data)).whole], "a cache that is not taken apart"
    wanted = continued(stages, tokens, 0)
    for one in stages:
        one.close()
    for other in others:
        stages = load(model, other)
        target = 0 if own.one_sequence else 3
        if target:
            decode(stages, tokens, 0, 11, 1)  # the cells of another request lie before
        restore(stages, chunks, state, target)
        assert continued(stages, tokens, target) == wanted, other
        assert own.copied_whole or stages[0]._cells is None or stages[0].in_order
        for one in stages:
            one.close()


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    model = ModelFile(write_random_model(
        tmp_path_factory.mktemp("saved") / "model.gguf", tiny("gemma3")))
    stages = load(model, [])
    yield stages, np.random.default_rng(1).integers(0, model.n_vocab, STOP + 12)
    stages[0].close()


@given(data=st.data())
@examples(60)
def test_altered_bytes_are_refused_or_taken_and_hurt_no_other_request(dense, data):
    stages, tokens = dense
    one = stages[0]
    one.seq_rm(-1, 0, END)
    chunks, _ = saved(stages, tokens)
    wanted = continued(stages, tokens, 0)
    one.seq_rm(0, STOP, END)
    kept = bytearray(chunks[0][0])
    if data.draw(st.booleans()):
        del kept[data.draw(st.integers(0, len(kept) - 1)):]
    else:
        at = data.draw(st.integers(0, len(kept) - 4))
        kept[at : at + 4] = struct.pack("<I", data.draw(st.integers(0, 2**32 - 1)))
    try:
        blob = one.saver.layout.build(from_bytes(bytes(kept)))
    except BackendError:
        blob = None
    if blob is not None:
        one.saver.put(4, 0, CHUNK, blob)
    one.seq_rm(4, 0, END)
    assert continued(stages, tokens, 0) == wanted


def test_pieces_of_other_ranges_are_not_joined(dense):
    stages, tokens = dense
    stages[0].seq_rm(-1, 0, END)
    chunks, _ = saved(stages, tokens)
    with pytest.raises(ValueError, match="other cells"):
        SavedCells.joined([from_bytes(chunks[0][0]), from_bytes(chunks[1][0])])


def test_a_full_cache_takes_nothing(dense):
    stages, tokens = dense
    one = stages[0]
    one.seq_rm(-1, 0, END)
    chunks, _ = saved(stages, tokens)
    for start in range(STOP, 1024, CHUNK):
        decode(stages, np.resize(tokens, 1024), start, start + CHUNK, 0)
    blob = one.saver.layout.build(from_bytes(chunks[0][0]))
    assert not one.saver.put(2, 0, CHUNK, blob)
    one.seq_rm(0, 0, END)
    assert one.saver.put(2, 0, CHUNK, blob)
