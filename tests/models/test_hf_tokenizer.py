"""The tokenizer of a Hugging Face folder against llama.cpp's on the same vocabulary."""

# ruff: noqa: E402  (skipped where a package is missing)
from __future__ import annotations

import json

import pytest

for _package in ("tokenizers", "safetensors"):
    pytest.importorskip(_package, reason=f"model folders need {_package}")

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.errors import ModelError, UsageError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.grammar import compile_grammar
from pipeinfer.models.text.hf_tokenizer import FolderTokenizer
from pipeinfer.models.text.tokenizer import check_draft_vocab
from pipeinfer.models.text.vocabulary import Vocabulary
from tests.kit import launch
from tests.kit.embedded_folder import write_folder

EMBEDDED = launch.ROOT / "pipeinfer" / "models" / "embedded"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(EMBEDDED / "draft.gguf", tmp_path_factory.mktemp("hf") / "draft")


@pytest.fixture(scope="module")
def pair(folder):
    own, theirs = open_tokenizer(folder), open_tokenizer(EMBEDDED / "draft.gguf")
    yield own, theirs
    own.close()
    theirs.close()


texts = st.text(max_size=40) | st.lists(
    st.sampled_from(["def ", "(self", "<|im_end|>", "<|endoftext|>", "\n    ", "é", "€", " "]),
    max_size=8).map("".join)


@given(text=texts, special=st.booleans())
def test_texts_get_the_same_tokens(pair, text, special):
    own, theirs = pair
    for add_bos in (None, True, False):
        tokens = own.encode(text, add_bos, special)
        assert tokens == theirs.encode(text, add_bos, special)
    if not special:
        assert own.decode(own.encode(text, add_bos=False)) == text


def test_tokens_mean_the_same(pair):
    own, theirs = pair
    assert isinstance(own, FolderTokenizer)
    assert own.n_vocab == theirs.n_vocab
    for name in ("bos_id", "eos_id", "adds_bos", "eog_ids", "chat_template"):
        assert getattr(own, name) == getattr(theirs, name), name
    for token in range(own.n_vocab):
        for special in (False, True):
            assert own.piece(token, special) == theirs.piece(token, special)
        assert own.token_text(token) == theirs.token_text(token)
        assert own.is_control(token) == theirs.is_control(token)
        assert own.is_markup(token) == theirs.is_markup(token)
    check_draft_vocab(own, theirs)
    assert own.apply_chat(MESSAGES) == theirs.apply_chat(MESSAGES)
    chat = own.apply_chat(MESSAGES)
    assert own.encode(chat, special=True) == theirs.encode(chat, special=True)
    with pytest.raises(UsageError, match="outside the vocabulary"):
        own.piece(own.n_vocab)


def test_a_grammar_over_a_folders_vocabulary(pair):
    vocabularies = [Vocabulary.of(tokenizer) for tokenizer in pair]
    assert vocabularies[0] == vocabularies[1]
    assert compile_grammar("gbnf", 'root ::= "a"+', vocabularies[0])
    for vocabulary in vocabularies:
        vocabulary.compiler.close()


def rewritten(folder, target, **files):
    """The folder with some of its files changed: None leaves one out, a dict changes values."""
    target.mkdir()
    for file in folder.iterdir():
        name = file.name.replace(".", "_")
        if name not in files:
            (target / file.name).symlink_to(file)
        elif files[name] is not None:
            change = files[name]
            text = change if isinstance(change, str) else json.dumps(
                {k: v for k, v in {**json.loads(file.read_text()), **change}.items()
                 if v != "absent"})
            (target / file.name).write_text(text)
    return target


@pytest.mark.parametrize(("files", "says"), [
    ({"tokenizer_json": None}, r"has no tokenizer\.json"),
    ({"tokenizer_json": "{"}, r"tokenizer\.json: cannot be read"),
    ({"tokenizer_json": '{"version": "1.0"}'}, "cannot be read"),
    ({"tokenizer_json": {"decoder": None}}, "neither byte-level nor SentencePiece-like"),
    ({"tokenizer_config_json": "[1]"}, "is not a JSON object"),
    ({"config_json": {"vocab_size": 100}},
     "its tokenizer has token 4095, but the model has only 100 tokens"),
])
def test_folders_without_a_usable_tokenizer_are_refused(folder, tmp_path, files, says):
    with pytest.raises(ModelError, match=says) as caught:
        open_tokenizer(rewritten(folder, tmp_path / "f", **files))
    assert "\n" not in str(caught.value)


def test_a_vocabulary_that_is_smaller_than_the_model(folder, tmp_path):
    """Families pad their embeddings: ids without a token are no text and never markup of use."""
    tokenizer = open_tokenizer(rewritten(folder, tmp_path / "f", config_json={"vocab_size": 4100}))
    assert tokenizer.n_vocab == 4100
    assert tokenizer.piece(4099) == b""
    assert tokenizer.is_markup(4099)
    assert tokenizer.token_text(4099) == b"[PAD4099]"


def test_special_tokens_from_config_and_templates(folder, tmp_path):
    bare = rewritten(folder, tmp_path / "a", tokenizer_config_json=None,
                     generation_config_json=None, config_json={"eos_token_id": [1, 3]})
    tokenizer = open_tokenizer(bare)
    assert tokenizer.bos_id == 0
    assert not tokenizer.adds_bos
    assert tokenizer.eos_id == 1
    assert tokenizer.eog_ids == {0, 1, 2, 3}  # 0 and 2 by name
    assert tokenizer.chat_template is None
    several = rewritten(folder, tmp_path / "b", tokenizer_config_json={
        "bos_token": None, "chat_template": [{"name": "tools", "template": "x"},
                                             {"name": "default", "template": "y"}]})
    assert open_tokenizer(several).bos_id is None
    assert open_tokenizer(several).chat_template == "y"
    (several / "chat_template.jinja").write_text("z")
    assert open_tokenizer(several).chat_template == "z"


def test_a_sentencepiece_like_vocabulary(folder, tmp_path):
    """As Llama 2, Mistral and Gemma have: a stand-in for spaces, bytes for what is unknown."""
    from tokenizers import Tokenizer as Reader
    from tokenizers import decoders, models, normalizers, processors

    texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", "a", "b",
             "\u2581a", "ab", "\u2581ab"]
    ids = {text: i for i, text in enumerate(texts)}
    reader = Reader(models.BPE(ids, [("\u2581", "a"), ("a", "b"), ("\u2581a", "b")],
                               unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    reader.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
                                              normalizers.Replace(" ", "\u2581")])
    reader.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                        decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    reader.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)])
    reader.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = rewritten(folder, tmp_path / "spm", tokenizer_config_json=None,
                     config_json={"vocab_size": len(texts), "bos_token_id": 1, "eos_token_id": 2,
                                  "tie_word_embeddings": True},
                     generation_config_json=None, tokenizer_json=None)
    reader.save(str(path / "tokenizer.json"))
    tokenizer = open_tokenizer(path)
    assert tokenizer.adds_bos
    tokens = tokenizer.encode("ab aé")
    assert tokens[:3] == [1, ids["\u2581ab"], ids["\u2581a"]]
    assert b"".join(map(tokenizer.piece, tokens)) == " ab aé".encode()
    assert tokenizer.eog_ids == {2}
    assert tokenizer.piece(2) == b""
    assert tokenizer.piece(2, special=True) == b"</s>"
    assert tokenizer.encode("</s>", special=True)[-1] == 2
    assert 2 not in tokenizer.encode("</s>")
