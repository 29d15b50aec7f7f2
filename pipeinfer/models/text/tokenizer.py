"""Text to token ids and back, with llama.cpp's own tokenizer on a GGUF file.

Only the vocabulary is loaded, no weights. Independent of requests and sampling. Incomplete UTF-8 is
handled here; the head handles stop strings and partial matches.
"""

from __future__ import annotations

import codecs
import ctypes
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from pipeinfer.errors import ModelError, RequestError, UsageError
from pipeinfer.llama import binding
from pipeinfer.llama.library import clear_log, ensure_llama, last_log, model_params
from pipeinfer.models.llama_rules import check_file
from pipeinfer.models.text.helper import Apart
from pipeinfer.models.text.marks import MarkGuard, Marks

_NULL = -1  #: llama.cpp's "no such token"
_SPACES = " \t\n\v\f\r"  #: llama.cpp strips these next to marks with the attributes for it
_PROBE = "pipeinfer"
_PARSED = binding.LLAMA_TOKEN_ATTR_CONTROL | binding.LLAMA_TOKEN_ATTR_UNKNOWN

PADDING = 128  #: by how many ids at the end a draft's vocabulary may differ in size
#: characters up to which no text overflows the stack: the worst take under a KiB each
SAFE_CHARACTERS = 2048
_MANY_MARKS = 1000  #: in a text; llama.cpp searches them in a time that grows with their square


class Tokenizer:
    """The vocabulary of one model, thread-safe after loading.

    This class reads GGUF files with llama.cpp; `open_tokenizer` opens Hugging Face folders, too.
    apart: the processes for texts that native code may not survive
    """

    _most_here = SAFE_CHARACTERS

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Load the vocabulary of the GGUF file at `path`. Raises ModelError when there is none."""
        ensure_llama()
        clear_log()
        if not os.path.exists(path):
            raise ModelError(f"{os.fspath(path)}: no such file")
        check_file(path)
        params = model_params()
        params.vocab_only = True
        self._model: Any = binding.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ModelError(f"{os.fspath(path)}: llama.cpp cannot load its vocabulary: "
                             f"{last_log()}")
        self._vocab: Any = binding.llama_model_get_vocab(self._model)
        self.path = os.fspath(path)
        self.apart = Apart(path)
        self._pieces: dict[tuple[int, bool], bytes] = {}  # those that were used before
        self.n_vocab: int = binding.llama_vocab_n_tokens(self._vocab)
        if binding.llama_vocab_type(self._vocab) == 0:
            self.close()
            raise ModelError(f"{self.path}: has no tokenizer; give the model that it was cut from")

    def close(self) -> None:
        """Release the vocabulary. May be called twice."""
        self.apart.close()
        model, self._model = self._model, None
        if model:
            binding.llama_model_free(model)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text; None if the vocabulary has none."""
        return _or_none(binding.llama_vocab_bos(self._vocab))

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text; None if the vocabulary has none."""
        return _or_none(binding.llama_vocab_eos(self._vocab))

    @property
    def adds_bos(self) -> bool:
        """Whether prompts of the model should begin with `bos_id`."""
        return bool(binding.llama_vocab_get_add_bos(self._vocab))

    @property
    def adds_eos(self) -> bool:
        """Whether texts that the model embeds should end with `eos_id`."""
        return bool(binding.llama_vocab_get_add_eos(self._vocab))

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """Every token that ends a generation: end of text, of turn, and the like."""
        is_eog = binding.llama_vocab_is_eog
        return frozenset(i for i in range(self.n_vocab) if is_eog(self._vocab, i))

    def is_control(self, token: int) -> bool:
        """Return whether the token is a control token, which is no text."""
        return bool(binding.llama_vocab_is_control(self._vocab, token))

    def is_markup(self, token: int) -> bool:
        """Return whether the token is a control token, or one that was added like `<tool>`."""
        if self.is_control(token):
            return True
        attributes = binding.llama_vocab_get_attr(self._vocab, token)
        if not attributes & binding.LLAMA_TOKEN_ATTR_USER_DEFINED:
            return False
        text = self.piece(token, special=True)
        return text.startswith(b"<") and text.endswith(b">")

    def encode(self, text: str, add_bos: bool | None = None, special: bool = False) -> list[int]:
        """Return the token ids of `text`.

        add_bos: whether to put `bos_id` first (never a second one); None: as the model's file
            states
        special: whether control tokens written out in the text, such as `<|im_end|>`, become those
            tokens; leave it False for text that a user typed
        Raises RequestError for a text that cannot be tokenised.
        """
        return self._begun(self.split(text, special), add_bos)

    def _begun(self, tokens: list[int], add_bos: bool | None) -> list[int]:
        bos = self.bos_id
        if (self.adds_bos if add_bos is None else add_bos) and bos is not None:
            if tokens[:1] != [bos]:
                tokens.insert(0, bos)
        return tokens

    def split(self, text: str, special: bool) -> list[int]:
        """Return the tokens of the text alone, without `bos_id`; arguments as for `encode`."""
        return self._tokens("split", text, special)

    def keep_apart(self) -> None:
        """Let no text reach native code in this process from now on."""
        self._most_here = 0
        self.apart.start()

    def _tokens(self, how: str, text: str, detail: bool | str) -> list[int]:
        if len(text) <= self._most_here:
            return self.tokens_here(how, text, detail)
        return self.apart.tokens(how, text, detail)

    def tokens_here(self, how: str, text: str, detail: bool | str) -> list[int]:
        """Return the tokens of a text, whatever that does to this process.

        how: "split", and detail: `special` as for `encode`; or "guarded", and detail: the seam
        Raises RequestError for a text that cannot be tokenised.
        """
        return (self._guarded(text, str(detail)) if how == "guarded"
                else self._split(text, bool(detail)))

    def _split(self, text: str, special: bool) -> list[int]:
        if special and self.marks.exceed(text, _MANY_MARKS):
            return self._guarded(text, "")
        raw = text.encode("utf-8", "replace")
        size = len(raw) + 8
        buffer = (ctypes.c_int32 * size)()
        count = binding.llama_tokenize(
            self._vocab, raw, len(raw), buffer, size, False, special
        )
        if count < 0:
            size = -count
            buffer = (ctypes.c_int32 * size)()
            count = binding.llama_tokenize(
                self._vocab, raw, len(raw), buffer, size, False, special
            )
        if count < 0:
            raise RequestError(f"a text of {len(raw)} bytes cannot be tokenised: {last_log()}")
        tokens = list(buffer[:count])
        if min(tokens, default=0) < 0:  # damaged: every sound one has a token for each byte
            raise RequestError(f"the vocabulary of {self.n_vocab} tokens has none for a part of a "
                               f"text of {len(raw)} bytes")
        return tokens

    @cached_property
    def longest(self) -> int:
        """The bytes of the longest token."""
        return max(len(self.piece(token, special=True)) for token in range(self.n_vocab))

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of one token; control tokens are empty unless `special`.

        Raises UsageError for a token outside the vocabulary.
        """
        if (known := self._pieces.get((token, special))) is not None:
            return known
        piece = self._pieces[token, special] = self._piece(token, special)
        return piece

    def _piece(self, token: int, special: bool) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token {token} is outside the vocabulary of {self.n_vocab}")
        for size in (64, 4096, 1 << 20):
            buffer = ctypes.create_string_buffer(size)
            length = binding.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if length >= 0:
                return buffer.raw[:length]
        raise ModelError(f"{self.path}: token {token} is longer than a megabyte")

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """Return the text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.piece(t, special) for t in tokens).decode("utf-8", "replace")

    def stream(self, shown: Iterable[int] = ()) -> Detokenizer:
        """Return a new streaming decoder. shown: control tokens that are text to it."""
        return Detokenizer(self, shown)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template (Jinja); None if there is none."""
        text = binding.llama_model_chat_template(self._model, None)
        return text.decode("utf-8", "replace") if text else None

    def apply_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None, continued: bool = False,
    ) -> str:
        """Return the prompt text of a conversation, for display; `encode_chat` returns the tokens.

        messages: each with "role" and "content"
        add_generation_prompt: whether the text ends with the beginning of the model's answer
        tools: functions that the template may describe
        variables: further variables of this template, such as enable_thinking
        continued: whether the text ends with the last message's content, to be continued
        The model's own template renders it in a sandbox; "chatml" without one. Raises RequestError
        when the template refuses the messages.
        """
        if continued:
            *before, last = messages
            end = str(10**30 + secrets.randbelow(10**30))
            text, found, _ = self.apply_chat(
                [*before, {**last, "content": last["content"] + end}], False,
                tools=tools, variables=variables).rpartition(end)
            if not found:
                raise RequestError("the model's chat template does not show the last message, so "
                                   "it cannot be continued: set continue_final_message to false")
            return text
        template = self.chat_template
        if template is None:
            parts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
            return "".join(parts) + ("<|im_start|>assistant\n" if add_generation_prompt else "")
        if self._wants_parts:
            messages = [{**m, "content": _parts(m["content"])}
                        if isinstance(m.get("content"), str) else m for m in messages]
        return self._rendered(template, messages, add_generation_prompt, tools, variables)

    def _rendered(
        self, template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any] | None,
    ) -> str:
        from pipeinfer.models.text.chat_template import render

        return render(template, {
            "documents": None,
            **(variables or {}),
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._text(self.bos_id),
            "eos_token": self._text(self.eos_id),
        })

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template shows contents in parts and passes over those that are one text."""
        template = self.chat_template or ""

        def shows(content: Any) -> bool:
            try:
                return _PROBE in self._rendered(
                    template, [{"role": "user", "content": content}], True, None, None)
            except RequestError:
                return False

        return "text" in template and not shows(_PROBE) and shows(_parts(_PROBE))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None, continued: bool = False,
    ) -> list[int]:
        """Return the tokens of a conversation; only the template's own marks become control tokens.

        The contents of messages, tools and variables stay text, whatever is written there.
        Arguments and errors as for `apply_chat`.
        """
        return self.encode_guarded(*self.guarded_chat(
            messages, add_generation_prompt, tools=tools, variables=variables,
            continued=continued))

    def guarded_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None, continued: bool = False,
    ) -> tuple[str, str]:
        """Return the text that `encode_chat` tokenises, with seams in it, and the seam.

        Arguments and errors as for `apply_chat`.
        """
        guard = MarkGuard(self.marks)
        try:
            text = self.apply_chat(
                guard.messages(messages), add_generation_prompt,
                tools=None if tools is None else guard.value(tools),
                variables={k: guard.value(v) for k, v in (variables or {}).items()},
                continued=continued)
        except RecursionError:
            raise RequestError("the messages are nested too deeply") from None
        return text, guard.seam

    def encode_guarded(self, text: str, seam: str, begins: bool = True) -> list[int]:
        """Return the tokens of a text without its seams; its whole marks become control tokens.

        begins: whether it is the beginning of a prompt, which may need `bos_id`
        """
        add_bos = None if begins else False
        if seam not in text:
            return self.encode(text, add_bos, special=True)
        return self._begun(self._tokens("guarded", text, seam), add_bos)

    @cached_property
    def marks(self) -> Marks:
        """The control tokens as they are written."""
        kinds = binding.llama_vocab_get_attr
        return Marks({self._text(i): i for i in range(self.n_vocab)
                      if kinds(self._vocab, i) & _PARSED})

    def _guarded(self, text: str, seam: str) -> list[int]:
        parts = self.marks.split(text)
        tokens: list[int] = []
        for at, part in enumerate(parts):
            if isinstance(part, int):
                tokens.append(part)
                continue
            plain = part.replace(seam, "")
            if at and self._kind(int(parts[at - 1])) & binding.LLAMA_TOKEN_ATTR_RSTRIP:
                plain = plain.lstrip(_SPACES)
            if parts[at + 1 :] and self._kind(int(parts[at + 1])) & binding.LLAMA_TOKEN_ATTR_LSTRIP:
                plain = plain.rstrip(_SPACES)
            tokens += self._split(plain, special=False) if plain else []
        return tokens

    def token_text(self, token: int) -> bytes:
        """Return the token as the vocabulary writes it, with placeholders for bytes."""
        text: bytes = binding.llama_vocab_get_text(self._vocab, token)
        return text

    def _kind(self, token: int) -> int:
        return int(binding.llama_vocab_get_attr(self._vocab, token))

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.token_text(token).decode("utf-8", "replace")


class Detokenizer:
    """Converts tokens to text one at a time.

    Holds back the start of an incomplete character, so a character that is cut off at the end is
    left out. Bytes that begin no character become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Iterable[int] = ()) -> None:
        self._tokenizer, self._shown = tokenizer, frozenset(shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that became complete with `token`; often empty inside a character."""
        return self.push_bytes(self._tokenizer.piece(token, token in self._shown))

    def push_bytes(self, data: bytes) -> str:
        """Return the text that became complete with these bytes."""
        return self._decoder.decode(data)


def check_draft_vocab(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ModelError unless both models give every token id the same meaning.

    Families pad their vocabularies differently: sizes may differ by up to PADDING ids at the end
    (the draft's proposals beyond the target's vocabulary are dropped).
    """
    if abs(draft.n_vocab - target.n_vocab) > PADDING:
        raise ModelError(
            f"{draft.path}: {draft.n_vocab} tokens, the target has {target.n_vocab}; "
            "use a draft model of the target's family"
        )
    differing = (
        i
        for i in range(min(target.n_vocab, draft.n_vocab))
        if target.token_text(i) != draft.token_text(i)
    )
    first = [token for token, _ in zip(differing, range(3), strict=False)]
    if first:
        shown = ", ".join(
            f"{i}: {draft.token_text(i)!r} for {target.token_text(i)!r}" for i in first
        )
        raise ModelError(
            f"{draft.path}: its vocabulary differs from the target's ({shown}); "
            "use a draft model of the target's family"
        )


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _or_none(token: int) -> int | None:
    return None if token == _NULL else int(token)
