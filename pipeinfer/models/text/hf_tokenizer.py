"""The tokenizer of a Hugging Face folder: tokenizer.json, read by the `tokenizers` package.

It has the interface of a GGUF file's tokenizer. Byte-level BPE and SentencePiece-like vocabularies
(with byte fallback) are supported; no weights are loaded, and transformers is not needed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import override

from pipeinfer.errors import ModelError, RequestError, UsageError
from pipeinfer.models.hf_folder import ModelDir
from pipeinfer.models.text.helper import Apart
from pipeinfer.models.text.marks import Marks
from pipeinfer.models.text.tokenizer import Tokenizer

#: special tokens that end a generation wherever they occur, as llama.cpp has them
_END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "<|return|>", "<|call|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
})
_BYTE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_SPACE = "\u2581"  #: SentencePiece's stand-in for a space


class FolderTokenizer(Tokenizer):
    """The vocabulary of one model folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the folder's tokenizer. Raises ModelError when there is none that can be used."""
        self.path = os.fspath(path)
        folder = Path(path)
        model = ModelDir(folder)
        self._model = None
        self._settings = _optional(folder / "tokenizer_config.json")
        self._generation = _optional(folder / "generation_config.json")
        self._config = model.config
        self.n_vocab = model.n_vocab
        self._plain, self._special = (_load(folder, special) for special in (False, True))
        self.apart = Apart(path)
        data = _optional(folder / "tokenizer.json")
        self._byte_level = _mentions(data.get("decoder"), "ByteLevel")
        if not self._byte_level and not _mentions(data.get("decoder"), "ByteFallback", "Metaspace"):
            raise ModelError(f"{self.path}: its tokenizer is neither byte-level nor "
                             "SentencePiece-like, so it is not supported; convert the model "
                             "to GGUF")
        self._added: dict[int, dict[str, Any]] = {
            entry["id"]: entry for entry in data.get("added_tokens") or ()
            if isinstance(entry, dict) and type(entry.get("id")) is int}
        self._texts: dict[int, str] = {
            i: text for text, i in self._special.get_vocab(True).items()}
        if max(self._texts, default=-1) >= self.n_vocab:
            raise ModelError(f"{self.path}: its tokenizer has token {max(self._texts)}, but the "
                             f"model has only {self.n_vocab} tokens; a file belongs to another "
                             "model")
        template = folder / "chat_template.jinja"
        self._template = (_text(template) if template.is_file()
                          else _template(self._settings.get("chat_template")))
        self._bytes = {text: i for i, text in enumerate(byte_tokens())}

    @cached_property
    def _bos(self) -> int | None:
        return self._named("bos_token")

    @property
    @override
    def bos_id(self) -> int | None:
        return self._bos

    @property
    @override
    def eos_id(self) -> int | None:
        return self._named("eos_token")

    @cached_property
    def _adds_bos(self) -> bool:
        asked = self._settings.get("add_bos_token")
        if isinstance(asked, bool):
            return asked and self._bos is not None
        ids = self._special.encode("a", add_special_tokens=True).ids
        return self._bos is not None and ids[:1] == [self._bos]

    @property
    @override
    def adds_bos(self) -> bool:
        return self._adds_bos

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """Every token that ends a generation: end of text, of turn, and the like."""
        found = {self.eos_id}
        for source in (self._config, self._generation):
            ids = source.get("eos_token_id")
            found |= {i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int}
        found |= {i for i, entry in self._added.items()
                  if entry.get("special") and entry.get("content") in _END_TEXTS}
        return frozenset(i for i in found if isinstance(i, int) and 0 <= i < self.n_vocab)

    @override
    def is_control(self, token: int) -> bool:
        return bool(self._added.get(token, {}).get("special"))

    @override
    def is_markup(self, token: int) -> bool:
        """Return whether the token is a control token, one like `<tool>`, or unused."""
        if self.is_control(token) or token not in self._texts:
            return True
        text = self._texts[token]
        return token in self._added and text.startswith("<") and text.endswith(">")

    @override
    def _split(self, text: str, special: bool) -> list[int]:
        return self._read(self._special if special else self._plain, text, {})

    def _read(self, reader: Any, text: str, meant: dict[int, int]) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")  # no lone surrogates
        try:
            found = reader.encode(text, add_special_tokens=False).ids
            ids = [meant.get(i, i) for i in found] if meant else list(found)
        except BaseException as error:  # a damaged vocabulary shows only here, as a panic
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = " ".join(str(error).split())[:300]
            raise RequestError(f"a text of {len(text)} characters cannot be tokenised: {reason}"
                               ) from None
        if max(ids, default=0) >= self.n_vocab:
            raise RequestError(f"the tokenizer gives token {max(ids)}, but the model has only "
                               f"{self.n_vocab} tokens")
        return ids

    @cached_property
    def marks(self) -> Marks:
        """The control tokens as they are written."""
        return Marks({str(entry.get("content")): i for i, entry in self._added.items()
                      if entry.get("special") and i < self.n_vocab})

    @cached_property
    def _stand_ins(self) -> tuple[Any, dict[int, str], dict[int, int]]:
        """A tokenizer that reads marks as text and placeholders as marks.

        Returns the tokenizer, the placeholder of each mark, and the mark of each placeholder's
        token.
        """
        from tokenizers import AddedToken

        reader = _load(Path(self.path), special=False)
        written = {i: f"[{secrets.token_hex(12)}]" for i in self.marks.tokens.values()}
        reader.add_tokens([AddedToken(text, normalized=False, special=False, **{
            name: bool(self._added[i].get(name)) for name in ("single_word", "lstrip", "rstrip")})
            for i, text in written.items()])
        return reader, written, {reader.token_to_id(text): i for i, text in written.items()}

    @override
    def _guarded(self, text: str, seam: str) -> list[int]:
        reader, written, meant = self._stand_ins
        whole = "".join(written[part] if isinstance(part, int) else part.replace(seam, "")
                        for part in self.marks.split(text))
        return self._read(reader, whole, meant)

    @override
    def piece(self, token: int, special: bool = False) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token {token} is outside the vocabulary of {self.n_vocab}")
        text = self._texts.get(token)
        if text is None or (self.is_control(token) and not special):
            return b""
        if token in self._added:
            return text.encode()
        if self._byte_level:
            known = [self._bytes.get(char) for char in text]
            return text.encode() if None in known else bytes(b for b in known if b is not None)
        byte = _BYTE.match(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()

    @property
    @override
    def chat_template(self) -> str | None:
        return self._template

    @override
    def token_text(self, token: int) -> bytes:
        return self._texts.get(token, f"[PAD{token}]").encode()

    def _kind(self, token: int) -> int:
        return 2 * self.is_control(token) + self.is_markup(token)

    def _named(self, name: str) -> int | None:
        """The id of tokenizer_config.json's bos_token or eos_token, else config.json's."""
        given = self._settings.get(name)
        text = given.get("content") if isinstance(given, dict) else given
        if isinstance(text, str):
            found = self._special.token_to_id(text)
            return None if found is None else int(found)
        if name in self._settings:  # null: the model has none
            return None
        ids = self._config.get(f"{name}_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        return first if isinstance(first, int) and 0 <= first < self.n_vocab else None


def _load(folder: Path, special: bool) -> Any:
    """Load the folder's tokenizer; special: whether control tokens written out in a text become
    tokens.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder}: has no tokenizer.json; save the model's fast tokenizer there")
    try:
        from tokenizers import Tokenizer as Reader
    except ImportError:
        raise UsageError("the tokenizer of a Hugging Face folder needs the tokenizers package: "
                         "pip install 'pipeinfer[torch]'") from None
    try:
        reader = Reader.from_file(str(file))
    except BaseException as error:  # the package raises plain Exception, and panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{file}: cannot be read: {reason}") from None
    reader.no_truncation()
    reader.no_padding()
    reader.encode_special_tokens = not special
    return reader


def _optional(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: is not a JSON object; fetch it again")
    return data


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None


def _mentions(part: Any, *kinds: str) -> bool:
    """Whether a component of tokenizer.json is of one of the kinds, or has one inside."""
    if isinstance(part, dict):
        return part.get("type") in kinds or any(_mentions(p, *kinds) for p in part.values())
    return isinstance(part, list) and any(_mentions(p, *kinds) for p in part)


def _template(given: Any) -> str | None:
    """tokenizer_config.json's chat template: a text, or several by name."""
    if isinstance(given, list):
        named = {str(t.get("name")): t.get("template") for t in given if isinstance(t, dict)}
        given = named.get("default")
    return given if isinstance(given, str) and given else None


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins for bytes that byte-level BPE uses, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]
