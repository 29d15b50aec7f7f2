"""A head's file is completed with the target's matrices and vocabulary, byte for byte."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pipeinfer.errors import ModelError, UsageError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.heads import CompletedHead, complete
from pipeinfer.models.shard_cache import store
from tests.kit.random_model import RandomSpec, finish, write_random_model

VOCABULARY, WIDTH = 320, 64
CHOSEN = np.array([3, 4, 5, 9, 200, 201, 319], np.int64)


def write(path, own=(), chosen=CHOSEN, architecture="eagle3", width=WIDTH, tokenizer=False):
    """A file with the tensors that matter here."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32(f"{architecture}.block_count", 1)
    writer.add_uint32(f"{architecture}.embedding_length", width)
    writer.add_uint32(f"{architecture}.target_hidden_size", width)
    writer.add_uint32(f"{architecture}.vocab_size", VOCABULARY)
    if tokenizer:
        writer.add_tokenizer_model("none")
    rng = np.random.default_rng(1)
    shapes = {"fc": (width, 3 * width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width,) for name in ("attn_norm", "attn_norm_2", "ffn_norm")}
    shapes |= {f"blk.0.{name}": (width, width) for name in (
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    for name in own:
        writer.add_tensor(name, rng.normal(size=(VOCABULARY, width)).astype(np.float32))
    if chosen is not None:
        writer.add_tensor("d2t", chosen)
    finish(writer)
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return write_random_model(path, RandomSpec(n_layer=2, n_embd=WIDTH, n_ff=64, n_head=2,
                                               n_head_kv=1, n_vocab=VOCABULARY, qtype="Q8_0"))


def tensors(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("chosen", [CHOSEN, None], ids=["some tokens", "all tokens"])
def test_embedding_output_and_vocabulary_are_the_targets(tmp_path, target, chosen):
    head = write(tmp_path / "head.gguf", chosen=chosen)
    complete(head, target, tmp_path / "whole.gguf")
    found, its, own = tensors(tmp_path / "whole.gguf"), tensors(target), tensors(head)
    rows = slice(None) if chosen is None else chosen
    output = its.get("output.weight", its["token_embd.weight"])
    assert (found["token_embd.weight"].data == its["token_embd.weight"].data).all()
    assert (found["output.weight"].data == output.data[rows]).all()
    assert found["output.weight"].tensor_type == output.tensor_type
    for name, tensor in own.items():
        assert (found[name].data == tensor.data).all()
    whole, model = ModelFile(tmp_path / "whole.gguf"), ModelFile(target)
    for key in model.meta_keys():
        if key.startswith("tokenizer."):
            assert whole.raw_entry(key) == model.raw_entry(key)
    assert [path.name for path in tmp_path.iterdir() if "whole" in path.name] == ["whole.gguf"]


def test_what_a_head_has_stays_its_own(tmp_path, target):
    both = ("token_embd.weight", "output.weight")
    head = write(tmp_path / "head.gguf", own=both, chosen=None, tokenizer=True)
    complete(head, target, tmp_path / "whole.gguf")
    found, own = tensors(tmp_path / "whole.gguf"), tensors(head)
    assert found.keys() == own.keys()
    assert all((found[name].data == own[name].data).all() for name in own)
    assert ModelFile(tmp_path / "whole.gguf").get("tokenizer.ggml.model") == "none"


def test_it_is_stored_in_a_cache_as_it_is_written(tmp_path, target):
    head = write(tmp_path / "head.gguf")
    complete(head, target, tmp_path / "whole.gguf")
    stored = store(CompletedHead(ModelFile(head), ModelFile(target)), tmp_path)
    assert stored.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


@pytest.mark.parametrize(("change", "says"), [
    ({"architecture": "llama"}, "is a llama model, not an EAGLE-3 head"),
    ({"width": 32}, "is for a target with target_hidden_size 32"),
    ({"chosen": np.array([1, VOCABULARY], np.int64)}, "names tokens outside of the target's 320"),
])
def test_what_does_not_fit_is_refused(tmp_path, target, change, says):
    head = write(tmp_path / "head.gguf", **change)
    with pytest.raises(ModelError, match=says):
        complete(head, target, tmp_path / "whole.gguf")
    assert not (tmp_path / "whole.gguf").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, target):
    head = write(tmp_path / "head.gguf")
    with pytest.raises(UsageError, match=r"cannot write .*: No such file"):
        complete(head, target, tmp_path / "missing" / "whole.gguf")
