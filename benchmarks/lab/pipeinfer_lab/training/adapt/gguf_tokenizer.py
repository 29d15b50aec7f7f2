"""The tokenizer of a GGUF file as a Hugging Face folder has it, or an error: it is compared with
llama.cpp's own on texts that tell splits apart.

Knows byte-level BPE; no weights, no training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeinfer.errors import ModelError, UnsupportedArchitecture
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  #: llama.cpp's kinds of tokens
_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
#: by llama.cpp's name of how text is split before merging
_REGEX = {"llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}"}
_PLAIN = ("gpt-2", "smollm")
_PROBES = (
    "Hello, world!", "It's 12345 o'clock; I'LL say don't.", "  two  spaces\n\n\tand tabs\r\n ends ",
    "def f(x):\n    return x ** 2  # caf\u00e9\n", "\u4f60\u597d\uff0c\u4e16\u754c\uff01 \u00e4"
    "\u00f6\u00fc \u00df \U0001f600\u200d \u0661\u0662\u0663 \u00bd",
    '<promise topic="a b" tokens=12/>'
    "<async> x</async><sync/>", "http://x.y/z?q=1&r=%20 a_b-c/d\\e 3.14e-10 $5,000.00", "...!?--  ",
    "e\u0301 A\u030a \u1100\u1161", "\u00a0\u2003x\u3000y", "WHAT'S HE'D 'tis")


def tokenizer_files(path: Path) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json by name. Raises UnsupportedArchitecture for a
    vocabulary that cannot be told exactly."""
    model = ModelFile(path)
    pre = str(model.get("tokenizer.ggml.pre", "gpt-2"))
    known = (*_PLAIN, *_REGEX)
    if model.get("tokenizer.ggml.model") != "gpt2" or pre not in known:
        raise UnsupportedArchitecture(
            f"{path}: a folder needs the tokenizer as tokenizer.json, which can be made of "
            f"byte-level BPE split as {', '.join(known)} only; give the model's original folder")
    made = _made(model, pre)
    _compare(path, made)
    text = Tokenizer(path)
    try:
        names = {"bos_token": text.bos_id, "eos_token": text.eos_id}
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": text.adds_bos,
            "clean_up_tokenization_spaces": False,
            **{key: text.token_text(i).decode() for key, i in names.items() if i is not None}}
        if text.chat_template is not None:
            settings["chat_template"] = text.chat_template
    finally:
        text.close()
    return {"tokenizer.json": made.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(settings, indent=1, ensure_ascii=False)}


def _made(model: ModelFile, pre: str) -> Any:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Made

    tokens = [text.decode("utf-8", "replace") for text in model.texts("tokenizer.ggml.tokens")]
    merges = [text.decode("utf-8", "replace") for text in model.texts("tokenizer.ggml.merges")]
    kinds: Any = model.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{model.path}: has the same token twice; give the model's original "
                         "folder")
    made = Made(models.BPE(vocab=vocabulary, ignore_merges=pre == "llama-bpe", merges=[
        (merge.split(" ", 1)[0], merge.split(" ", 1)[1]) for merge in merges]))
    if pre in _PLAIN:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = level if pre == "gpt-2" else pre_tokenizers.Sequence([digits, level])
    else:
        made.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(_REGEX[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        if pre == "qwen2":
            made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)
                     for token, kind in zip(tokens, kinds, strict=True)
                     if kind in (_CONTROL, _USER_DEFINED)])
    return made


def _compare(path: Path, made: Any) -> None:
    """Raise UnsupportedArchitecture where llama.cpp reads a probe otherwise."""
    theirs = Tokenizer(path)
    try:
        for text in _PROBES:
            mine = made.encode(text, add_special_tokens=False).ids
            if mine != theirs.split(text, special=True):
                raise UnsupportedArchitecture(
                    f"{path}: its tokenizer cannot be written as tokenizer.json exactly: "
                    f"{text[:40]!r} is split differently; give the model's original folder")
    finally:
        theirs.close()
