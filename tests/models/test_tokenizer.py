"""Text to tokens and back, chat templates, and whether two models share a vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.errors import ModelError, RequestError, UsageError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.shard import extract_shard
from pipeinfer.models.text.tokenizer import Tokenizer, check_draft_vocab
from tests.kit.random_model import RandomSpec, write_random_model

EMBEDDED = Path(__file__).parents[2] / "pipeinfer" / "models" / "embedded"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("tok") / "m.gguf", RandomSpec(n_layer=2))


@pytest.fixture(scope="module")
def tokenizer(path):
    tokenizer = open_tokenizer(path)
    yield tokenizer
    tokenizer.close()
    tokenizer.close()


@given(text=st.text(max_size=40))
def test_text_survives_the_round_trip(tokenizer, text):
    tokens = tokenizer.encode(text, add_bos=False)
    assert all(0 <= t < tokenizer.n_vocab for t in tokens)
    assert tokenizer.decode(tokens) == text


@given(text=st.text(max_size=20))
def test_streaming_gives_the_same_text_in_whole_characters(tokenizer, text):
    stream = tokenizer.stream()
    pieces = [stream.push(t) for t in tokenizer.encode(text, add_bos=False)]
    assert "".join(pieces) == text


def test_an_incomplete_character_is_held_back(tokenizer):
    tokens = tokenizer.encode("€", add_bos=False)
    assert len(tokens) == 3
    stream = tokenizer.stream()
    assert [stream.push(t) for t in tokens] == ["", "", "€"]
    stream = tokenizer.stream()
    assert stream.push(tokens[0]) == ""
    assert stream.push(tokenizer.encode("a", add_bos=False)[0]) == "�a"


def test_a_leading_bos_is_never_doubled(tokenizer):
    bos = tokenizer.bos_id
    assert tokenizer.encode("a")[0] == bos
    assert bos not in tokenizer.encode("a", add_bos=False)
    assert tokenizer.encode("<|endoftext|>a", special=True).count(bos) == 1
    assert tokenizer.encode("") == [bos]


def test_control_tokens_are_text_unless_asked_for(tokenizer):
    end = tokenizer.encode("<|im_end|>", add_bos=False, special=True)
    assert len(end) == 1
    assert tokenizer.is_control(end[0])
    assert len(tokenizer.encode("<|im_end|>", add_bos=False)) > 1
    assert tokenizer.decode(end) == ""
    assert tokenizer.decode(end, special=True) == "<|im_end|>"
    assert tokenizer.eog_ids == {tokenizer.eos_id, end[0]}


def test_tokens_outside_the_vocabulary(tokenizer):
    for token in (-1, tokenizer.n_vocab):
        with pytest.raises(UsageError, match="vocabulary"):
            tokenizer.piece(token)


def test_chat_uses_the_models_template(tokenizer):
    text = tokenizer.apply_chat([{"role": "user", "content": "hi {{ 1 + 1 }}"}])
    assert text == "<|im_start|>user\nhi {{ 1 + 1 }}<|im_end|>\n<|im_start|>assistant\n"
    assert "im_start" in tokenizer.chat_template


def test_a_template_that_refuses_is_the_requests_fault(tokenizer, monkeypatch):
    monkeypatch.setattr(Tokenizer, "chat_template", "{{ raise_exception('roles alternate') }}")
    with pytest.raises(RequestError, match="roles alternate"):
        tokenizer.apply_chat([{"role": "user", "content": "x"}])
    monkeypatch.setattr(Tokenizer, "chat_template", "{{ ''.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="unsafe"):
        tokenizer.apply_chat([{"role": "user", "content": "x"}])
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    assert tokenizer.apply_chat([{"role": "user", "content": "x"}], False) == (
        "<|im_start|>user\nx<|im_end|>\n"
    )


def test_the_vocabulary_of_a_draft(tokenizer, tmp_path):
    same = open_tokenizer(write_random_model(tmp_path / "s.gguf", RandomSpec(n_layer=1, seed=5)))
    check_draft_vocab(tokenizer, same)
    smaller = open_tokenizer(
        write_random_model(tmp_path / "x.gguf", RandomSpec(n_layer=1, n_vocab=500)))
    with pytest.raises(ModelError, match="500 tokens, the target has 320"):
        check_draft_vocab(tokenizer, smaller)


def test_the_first_ids_that_differ_are_named(tokenizer, path, tmp_path):
    raw = path.read_bytes()
    changed = tmp_path / "c.gguf"
    changed.write_bytes(raw.replace(b"<unused3>", b"<UNUSED3>"))
    with pytest.raises(ModelError, match=r"UNUSED3.*family"):
        check_draft_vocab(tokenizer, open_tokenizer(changed))


def test_files_without_a_tokenizer(path, tmp_path):
    shard = extract_shard(ModelFile(path), 0, 1, cache_dir=tmp_path)
    with pytest.raises(ModelError, match="no tokenizer"):
        open_tokenizer(shard)
    with pytest.raises(ModelError, match="no such file"):
        open_tokenizer(tmp_path / "absent.gguf")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(50))
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        open_tokenizer(bad)


@pytest.mark.skipif(not EMBEDDED.exists(), reason="the embedded models are not built")
def test_the_embedded_pair_shares_its_vocabulary():
    target, draft = (open_tokenizer(EMBEDDED / f"{name}.gguf") for name in ("target", "draft"))
    check_draft_vocab(target, draft)
    text = "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
    assert target.decode(target.encode(text)) == text
