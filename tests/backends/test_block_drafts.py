"""Drafts of blocks propose what llama.cpp's own server drafts with the same files."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from pipeinfer.backends.llamacpp.backend import LlamaOptions
from pipeinfer.backends.llamacpp.head import LlamaBlocks
from pipeinfer.core.drafting import FeedDraft
from pipeinfer.core.types import make_rows
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.heads import BLOCKS, BlockShape, CompletedHead
from pipeinfer.models.shard import extract_shard
from pipeinfer.strategies.proposers.dflash import BlockDraft
from tests.kit.block_files import BLOCK, write_block_draft
from tests.kit.block_server import COUNT, PROMPT, rounds_of
from tests.kit.drafting import job
from tests.kit.llama import load
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.sample import full

TAPS = (1, 3, 5)
OPTIONS = LlamaOptions(head="dflash", keep_order=False, layer_callbacks=False, huge_pages=False,
                       type_k="f16", type_v="f16", flash_attn="off")
with_server = pytest.mark.skipif(find_spec("xllamacpp") is None,
                                 reason="a library that pipeinfer has compiled has no server")
TIE = 0.05  #: gap of logits, whose deviation is 3, that other kernels' rounding closes


def written(folder, kind, arch="llama", **keys):
    """A target, and a completed draft for it."""
    target = ModelFile(write_random_model(folder / "m.gguf", RandomSpec(
        architecture=arch, n_layer=6, n_embd=256, n_vocab=320, seed=5)))
    file = ModelFile(write_block_draft(folder / "draft.gguf", target.path, TAPS, kind, **keys))
    whole = folder / "whole.gguf"
    whole.write_bytes(b"".join(CompletedHead(file, target, BLOCKS).blocks()))
    return target, whole, BlockShape.of(file, target)


def opened(whole, shape, n_ctx=512):
    return LlamaBlocks.open(whole, shape, 2, {"n_ctx": n_ctx, "n_seq_max": 4, "n_batch": 16}, 1,
                            OPTIONS)


class Stages:
    """Three stages and a draft that gets their rows."""

    def __init__(self, folder, target, draft):
        self.draft = draft
        self.backends = [load(extract_shard(target, a, b, cache_dir=folder), (a, b), 6,
                              type_k="f16", type_v="f16") for a, b in ((0, 2), (2, 4), (4, 6))]
        for one in self.backends:
            one.tap(TAPS)

    def step(self, tokens, first):
        """Evaluate tokens, give the draft their rows, and return the next one."""
        hidden, rows = None, []
        for one in self.backends:
            hidden = one.decode(make_rows([(token, first + k, (0,), k == len(tokens) - 1)
                                           for k, token in enumerate(tokens)]), hidden)
            rows.append(one.tapped)
        self.draft.feed(FeedDraft(0, first, np.concatenate(rows, axis=1)))
        return int(np.asarray(hidden)[-1].argmax())

    def close(self):
        for one in (*self.backends, self.draft):
            one.close()


@with_server
@pytest.mark.parametrize(("kind", "arch", "keys"), [
    ("dflash", "llama", {}), ("dspark", "llama", {}), full("dflash", "qwen3", {}),
    full("dspark", "qwen3", {}), full("dspark", "llama", {"sample_from_anchor": False}),
    full("dflash", "llama", {"attention__causal": True}),
    full("dflash", "llama", {"chosen": range(0, 320, 3)}),
    full("dspark", "llama", {"chosen": range(0, 320, 3)}),
    full("dflash", "llama", {"rope__dimension_sections": [32, 0, 0, 0]}),
    full("dflash", "llama", {"attention__sliding_window": 16,
                             "attention__sliding_window_pattern": [True, False]})])
def test_drafted_tokens_are_those_of_the_server(kind, arch, keys, tmp_path):
    target, whole, shape = written(tmp_path, kind, arch, **keys)
    rounds = rounds_of(target.path, whole, kind, BLOCK - shape.first)
    backend = opened(whole, shape)
    stages = Stages(tmp_path, target, BlockDraft(backend, target.n_vocab))
    text = [*PROMPT, stages.step(PROMPT, 0)]
    ties = 0
    assert len(rounds) >= 20
    for one in rounds:
        assert (text[-1], len(text) - 1) == (one.token, one.position)
        found = stages.draft.propose(job(text, depth=BLOCK), lambda: False)
        logits, _ = backend.block(0, one.position, one.token)
        assert len(found) == len(one.tokens) == BLOCK - shape.first
        for mine, theirs, row in zip(found, one.tokens, logits, strict=True):
            if mine.token != theirs:  # later places of DSpark follow another token
                assert row[mine.token] - row[theirs] < TIE, one
                ties += 1
                break
        text.append(stages.step(text[-1:], len(text) - 1))
    assert ties <= 2
    stages.close()


@with_server
def test_the_path_through_a_lattice_is_as_long_as_the_servers(tmp_path):
    """The log has no tokens of DFlash2: a path ends where its next score is too small."""
    least = 0.35
    target, whole, shape = written(tmp_path, "dflash2")
    rounds = rounds_of(target.path, whole, "dflash2", BLOCK - 1, least)
    stages = Stages(tmp_path, target, BlockDraft(opened(whole, shape), target.n_vocab))
    text = [*PROMPT, stages.step(PROMPT, 0)]
    for one in rounds:
        while len(text) - 1 < one.position:
            text.append(stages.step(text[-1:], len(text) - 1))
        assert text[-1] == one.token
        found = stages.draft.propose(job(text, depth=BLOCK), lambda: False)
        length = next((k for k, it in enumerate(found) if it.confidence < least), len(found))
        room = len(PROMPT) + COUNT - one.position - 2
        assert one.count == min(length, room)
    assert len({one.count for one in rounds}) > 4
    stages.close()


@pytest.mark.parametrize("kind", ["dflash", full("dflash2"), "dspark"])
def test_rejected_blocks_and_other_lanes_change_no_proposal(kind, tmp_path):
    """Of a cache that is too small for two lanes, too, whose rows come in other parts."""
    target, whole, shape = written(tmp_path, kind)
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((2, 200, len(TAPS) * target.n_embd)).astype(np.float32)
    texts = rng.integers(0, 300, (2, 201)).tolist()
    plain = BlockDraft(opened(whole, shape), target.n_vocab)
    plain.feed(FeedDraft(0, 0, rows[0]))
    expected = plain.propose(job(texts[0], depth=BLOCK), lambda: False)
    draft = BlockDraft(opened(whole, shape, n_ctx=256), target.n_vocab, lanes=2)
    for at in range(0, 200, 40):
        for lane in (1, 0) if at < 80 else (0,):
            draft.feed(FeedDraft(lane, at, rows[lane][at : at + 40]))
            path = texts[lane][: at + 41]
            assert draft.propose(job(path, lane=lane, depth=BLOCK), lambda: True) is None
            draft.propose(job(path, lane=lane, depth=BLOCK), lambda: False)
    found = draft.propose(job(texts[0], depth=BLOCK), lambda: False)
    assert [one.token for one in found] == [one.token for one in expected]
    np.testing.assert_allclose([one.confidence for one in found],
                               [one.confidence for one in expected], rtol=0.05)
    assert draft.propose(job(texts[1][:81], lane=1, depth=BLOCK), lambda: False) == ()  # made place
    for one in (plain, draft):
        one.close()
