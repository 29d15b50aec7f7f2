"""Sizes on which llama.cpp ends the process are refused, and good files of no architecture are."""

from __future__ import annotations

import gguf
import pytest

from pipeinfer.errors import ModelError
from pipeinfer.models.architectures import declared
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.llama_rules import check_file, check_vocabulary
from pipeinfer.models.locate import open_tokenizer
from tests.kit import random_model
from tests.kit.gguf_files import altered
from tests.kit.random_architectures import RECIPES, STATEFUL
from tests.kit.random_model import finish, tiny, write_random_model


@pytest.mark.parametrize("name", RECIPES)
def test_good_files_are_taken(name, tmp_path):
    path = write_random_model(tmp_path / "m.gguf", tiny(name))
    assert declared(RECIPES[name].architecture).checked
    check_file(path)


@pytest.mark.parametrize(("name", "key", "value", "said"), [
    ("qwen3moe", "rope.dimension_count", 2, "must be equal and even"),
    ("gpt-oss", "rope.dimension_count", 32, "must be equal and even"),
    ("granite", "rope.dimension_count", 15, "must be equal and even"),
    ("gemma3", "rope.dimension_count", 0, "cannot use"),
    ("gemma2", "rope.dimension_count", 4094, "the last even and no more"),
    ("glm4", "rope.dimension_count", 17, "the last even"),
    ("gemma4", "rope.dimension_count_swa", 17, "the last even"),
    ("gemma4", "attention.shared_kv_layers", 1, "shared_kv_layers"),
    ("gemma4", "attention.shared_kv_layers", 4, "shared_kv_layers"),
    ("phi3", "attention.head_count", 2, "head_count"),
    ("deepseek2", "attention.head_count_kv", 2, "head_count_kv"),
    ("deepseek2", "attention.kv_lora_rank", 32, "do not fit each other"),
    ("deepseek2", "rope.dimension_count", 128, "do not fit each other"),
    ("deepseek4", "attention.indexer.key_length", 256, "indexer.key_length"),
])
def test_sizes_that_do_not_fit_are_refused(name, key, value, said, tmp_path):
    good = write_random_model(tmp_path / "m.gguf", tiny(name))
    bad = altered(good, tmp_path / "bad.gguf",
                  numbers={f"{(RECIPES | STATEFUL)[name].architecture}.{key}": value})
    with pytest.raises(ModelError, match=said):
        check_file(bad)


def test_a_cache_without_layers_is_refused(tmp_path):
    """llama.cpp would divide by its size."""
    with pytest.raises(ModelError, match="compress_ratios is 'a list without 4'"):
        check_file(write_random_model(tmp_path / "m.gguf", tiny("deepseek4", n_layer=1)))
    check_file(write_random_model(tmp_path / "m.gguf", tiny("deepseek4", n_layer=3)))


def test_caches_of_the_right_kind_may_be_shared(tmp_path):
    good = write_random_model(tmp_path / "m.gguf", tiny("gemma4"))
    shared = altered(good, tmp_path / "shared.gguf",
                     numbers={"gemma4.attention.shared_kv_layers": 2})
    check_file(shared)


def test_the_vocabulary_of_a_gemma_4_needs_its_bytes(tmp_path):
    """It has merges, and bytes written out like those of SentencePiece."""

    def write(path, tokens):
        writer = gguf.GGUFWriter(path, "gemma4")
        writer.add_block_count(1)
        writer.add_embedding_length(8)
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_merges(["a b"])
        finish(writer)
        return ModelFile(path)

    every = ["<pad>", "<eos>", "<bos>", "ab", *(f"<0x{i:02X}>" for i in range(256))]
    check_vocabulary(write(tmp_path / "good.gguf", every))
    with pytest.raises(ModelError, match="no token for 1 of the 256"):
        check_vocabulary(write(tmp_path / "bad.gguf", every[:-1]))


@pytest.mark.parametrize(("kind", "one", "pieces"), [
    ("rwkv", "\\x%02x", []), ("plamo2", "<0x%02X>", ["<|plamo:unk|>"])])
def test_tokenizers_of_rwkv_and_plamo_2_are_taken(kind, one, pieces, tmp_path, monkeypatch):
    """Which run in one process."""
    def add_tokenizer(writer, n_vocab):
        tokens = [*pieces, *(one % byte for byte in range(256)), "the"]
        byte = gguf.TokenType.NORMAL if kind == "rwkv" else gguf.TokenType.BYTE
        kinds = [gguf.TokenType.UNKNOWN] * len(pieces) + [byte] * 256
        more = n_vocab - len(kinds)
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens + [f"further {i}" for i in range(more - 1)])
        writer.add_token_scores([0.0] * n_vocab)
        writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * more)

    monkeypatch.setattr(random_model, "add_tokenizer", add_tokenizer)
    path = write_random_model(tmp_path / "m.gguf", random_model.RandomSpec(n_layer=1))
    check_file(path)
    tokenizer = open_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("the wörld", add_bos=False)) == "the wörld"
    tokenizer.close()
