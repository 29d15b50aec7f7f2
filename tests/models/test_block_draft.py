"""Which drafts of blocks are taken, and how their blocks are read."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from pipeinfer.errors import ModelError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.heads import BLOCKS, BlockShape, CompletedHead, taps_of
from pipeinfer.models.llama_rules import check_file
from tests.kit.block_files import BLOCK, TOP, write_block_draft
from tests.kit.random_model import RandomSpec, write_random_model

MASK = 300


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return ModelFile(write_random_model(path, RandomSpec(n_layer=4, n_embd=64, n_head=2,
                                                         n_head_kv=1, n_vocab=320)))


def opened(folder, target, kind="dflash", taps=(1, 3), **keys):
    return ModelFile(write_block_draft(folder / "draft.gguf", target.path, taps, kind, **keys))


@pytest.mark.parametrize(("kind", "keys", "shape"), [
    ("dflash", {}, BlockShape(BLOCK, MASK)),
    ("dflash", {"attention__causal": True}, BlockShape(BLOCK, MASK, causal=True)),
    ("dflash2", {}, BlockShape(BLOCK, MASK, candidates=TOP, chained=True)),
    ("dspark", {}, BlockShape(BLOCK, MASK, 0, confident=True, chained=True)),
    ("dspark", {"sample_from_anchor": None},
     BlockShape(BLOCK, MASK, 0, confident=True, chained=True)),
    ("dspark", {"sample_from_anchor": False},
     BlockShape(BLOCK, MASK, 1, confident=True, chained=True))])
def test_a_draft_says_how_its_blocks_are_read(kind, keys, shape, tmp_path, target):
    draft = opened(tmp_path, target, kind, **keys)
    assert BlockShape.of(draft, target) == shape
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(b"".join(CompletedHead(draft, target, BLOCKS).blocks()))
    check_file(whole)


@pytest.mark.parametrize(("kind", "keys", "why"), [
    ("dflash", {"block_size": None}, "no usable dflash.block_size"),
    ("dflash", {"block_size": 65}, "no usable dflash.block_size"),
    ("dflash", {"mask": 320}, "no usable tokenizer.ggml.mask_token_id"),
    ("dflash", {"mask": None}, "no usable tokenizer.ggml.mask_token_id"),
    ("dflash2", {"selector_top_k": 8}, "no usable dflash.selector_top_k"),
    ("dspark", {"hyper_connection__count": 4}, "DeepSeek V4's layers is not supported")])
def test_blocks_that_llama_cpp_cannot_evaluate_are_refused(kind, keys, why, tmp_path, target):
    with pytest.raises(ModelError, match=why):
        BlockShape.of(opened(tmp_path, target, kind, **keys), target)


def test_sections_of_a_rotation_fit_a_head(tmp_path, target):
    for sections, fits in (([8, 8, 0, 0], True), ([8, 9, 0, 0], False)):
        draft = opened(tmp_path, target, rope__dimension_sections=sections)
        whole = tmp_path / "whole.gguf"
        whole.write_bytes(b"".join(CompletedHead(draft, target, BLOCKS).blocks()))
        with nullcontext() if fits else pytest.raises(ModelError, match="dimension_sections"):
            check_file(whole)


@pytest.mark.parametrize("taps", [(), (3, 1), (1, 1), (1, 4)])
def test_taps_are_layers_of_the_target_in_order(taps, tmp_path, target):
    draft = opened(tmp_path, target, taps=taps or (1,), target_layers=list(taps) or None)
    with pytest.raises(ModelError, match="does not name layers of target"):
        taps_of(draft, target)


@pytest.mark.parametrize(("keys", "why"), [
    ({"target_hidden_size": 32}, "is for a target with target_hidden_size 32"),
    ({"target_layers": [1, 2, 3]}, "fc.weight has the shape"),
    ({"chosen": (1, 320)}, "names tokens outside of the target's 320"),
    ({"block_count": 3}, "has no blk.2.attn_q.weight")])
def test_a_draft_of_another_target_is_refused(keys, why, tmp_path, target):
    with pytest.raises(ModelError, match=why):
        CompletedHead(opened(tmp_path, target, **keys), target, BLOCKS)
    with pytest.raises(ModelError, match="not an EAGLE-3 head"):
        CompletedHead(opened(tmp_path, target, **keys), target)
