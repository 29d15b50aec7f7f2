"""Answers in the OpenAI API's form: chunks of a stream, whole answers, usage, timings.

Knows choices and their text, no HTTP and no engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.choice import Delta, Generation, Piece
from pipeinfer.server.requests import Asked
from pipeinfer.server.tools import Call, CallParser

_FINISH = {"context": "length", "length": "length", "stop": "stop"}


@dataclass(slots=True)
class Choice:
    """What has been told to the client of one choice. text: the prompt, when it is echoed."""

    generation: Generation
    parser: CallParser | None = None
    text: str = ""
    told: int = 0  #: calls told so far
    done: bool = False


@dataclass(slots=True)
class Writer:
    """Writes one request's answer. hermes: style of calls to look for, None for no tools."""

    asked: Asked
    model: str
    tokenizer: Tokenizer
    is_chat: bool
    hermes: bool | None = None
    answer_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind = "chatcmpl" if self.is_chat else "cmpl"
        self.answer_id = f"{kind}-{secrets.token_hex(14)}"

    def start(self, generations: Sequence[Generation]) -> None:
        """The choices, in order."""
        for generation in generations:
            parser = None if self.hermes is None else CallParser(self.hermes)
            text = self.asked.texts[generation.index // self.asked.n] if self.asked.echo else ""
            self.choices.append(Choice(generation, parser, text))

    # --- streams ------------------------------------------------------------------------------

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before any token."""
        out = []
        for choice in self.choices:
            index = choice.generation.index
            if self.is_chat:
                out.append(self._chunk({"index": index, "delta": {
                    "role": "assistant", "content": ""}, "logprobs": None,
                    "finish_reason": None}))
            elif choice.text:
                out.append(self._chunk({"index": index, "text": choice.text, "logprobs": None,
                                        "finish_reason": None}))
        return out

    def chunks(self, choice: Choice) -> list[dict[str, Any]]:
        """Chunks for what has become certain, and the last one when the choice has ended."""
        generation = choice.generation
        ended = generation.ended and generation.failure is None
        delta = generation.take()
        content, calls = self._split(choice, delta, ended)
        out = []
        if content or (delta.pieces and (self.asked.logprobs or self.asked.detail)):
            out.append(self._piece(choice, delta, content))
        for call in calls:
            out.append(self._chunk({"index": generation.index, "delta": {"tool_calls": [
                {"index": choice.told, **call.to_json()}]}, "logprobs": None,
                "finish_reason": None}))
            choice.told += 1
        if ended:
            choice.done = True
            empty: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
            chunk = self._chunk({"index": generation.index, **empty, "logprobs": None,
                                 "finish_reason": self._reason(choice)})
            chunk["timings"] = timings([generation])
            out.append(chunk)
        return out

    def closing(self) -> list[dict[str, Any]]:
        """What comes after every choice has ended."""
        if not self.asked.usage:
            return []
        return [{**self._head(chunk=True), "choices": [], "usage": self.usage()}]

    def _piece(self, choice: Choice, delta: Delta, content: str) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": choice.generation.index, "finish_reason": None,
            "logprobs": self._logprobs(delta, len(choice.text)),
        }
        if self.is_chat:
            entry["delta"] = {"content": content}
        else:
            entry["text"] = content
        chunk = self._chunk(entry)
        if self.asked.detail:
            chunk["pipeinfer"] = _detail(delta.pieces)
        return chunk

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(chunk=True), "choices": [choice]}
        if self.asked.usage:
            chunk["usage"] = None
        return chunk

    # --- whole answers ------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """The answer once every choice has ended well."""
        entries, details = [], []
        for choice in self.choices:
            delta = choice.generation.take()
            content, calls = self._split(choice, delta, ended=True)
            choice.told = len(calls)
            entry: dict[str, Any] = {
                "index": choice.generation.index,
                "logprobs": self._logprobs(delta, len(choice.text)),
                "finish_reason": self._reason(choice),
            }
            if self.is_chat:
                message: dict[str, Any] = {"role": "assistant", "content": content,
                                           "refusal": None}
                if calls:
                    message["content"] = content or None
                    message["tool_calls"] = [call.to_json() for call in calls]
                entry["message"] = message
            else:
                entry["text"] = choice.text + content
            if self.asked.detail:
                details.append(_detail(delta.pieces))
            entries.append(entry)
        answer = {**self._head(chunk=False), "choices": entries, "usage": self.usage(),
                  "timings": timings([c.generation for c in self.choices])}
        if self.asked.detail:
            answer["pipeinfer"] = details[0] if len(details) == 1 else {"choices": details}
        return answer

    def usage(self) -> dict[str, Any]:
        """Token counts; a prompt counts once for all its choices."""
        generations = [choice.generation for choice in self.choices]
        firsts = generations[:: self.asked.n]
        prompt = sum(g.counts.prompt for g in firsts)
        output = sum(g.counts.output for g in generations)
        return {
            "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(_reused(g) for g in firsts)},
        }

    # --- parts --------------------------------------------------------------------------------

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.answer_id, "object": kind, "created": self.created,
                "model": self.model, "system_fingerprint": None}

    def _split(self, choice: Choice, delta: Delta, ended: bool) -> tuple[str, list[Call]]:
        if choice.parser is None:
            return delta.text, []
        content, calls = choice.parser.push(delta.text)
        if ended:
            more, rest = choice.parser.finish()
            content, calls = content + more, calls + rest
        return content, calls

    def _reason(self, choice: Choice) -> str:
        reason = _FINISH.get(choice.generation.reason or "", "stop")
        return "tool_calls" if choice.told and reason == "stop" else reason

    def _logprobs(self, delta: Delta, shift: int) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        if self.is_chat:
            return {"content": [self._chat_logprob(p) for p in delta.pieces], "refusal": None}
        offset, offsets = delta.offset + shift, []
        for piece in delta.pieces:
            offsets.append(offset)
            offset += len(piece.text)
        return {
            "tokens": [self._name(p.token) for p in delta.pieces],
            "token_logprobs": [p.logprob for p in delta.pieces],
            "top_logprobs": [{self._name(t): lp for t, lp in p.top} for p in delta.pieces],
            "text_offset": offsets,
        }

    def _chat_logprob(self, piece: Piece) -> dict[str, Any]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            return {"token": self._name(token), "logprob": logprob,
                    "bytes": list(self.tokenizer.piece(token, special=True))}

        return {**entry(piece.token, piece.logprob),
                "top_logprobs": [entry(token, logprob) for token, logprob in piece.top]}

    def _name(self, token: int) -> str:
        return self.tokenizer.piece(token, special=True).decode("utf-8", "replace")


def timings(generations: Sequence[Generation]) -> dict[str, Any]:
    """Counts and speeds, named as llama.cpp's server names them; of several choices together.

    Times in milliseconds. prompt: until the first token, the wait in the queue included.
    predicted: from the first token to the last.
    """
    counts = [g.counts for g in generations]
    reused = sum(_reused(g) for g in generations)
    prompt_n = sum(c.prompt for c in counts) - reused
    output = sum(c.output for c in counts)
    start = min(c.submitted for c in counts)
    firsts = [c.first for c in counts if c.first is not None]
    lasts = [c.last for c in counts if c.last is not None]
    prompt_s = min(firsts) - start if firsts else 0.0
    span = max(lasts) - min(firsts) if firsts and lasts else 0.0
    after_first = output - len(firsts)
    return {
        "prompt_n": prompt_n, "cache_n": reused, "prompt_ms": 1e3 * prompt_s,
        "prompt_per_second": prompt_n / prompt_s if prompt_s > 0 else None,
        "predicted_n": output, "predicted_ms": 1e3 * span,
        "predicted_per_token_ms": 1e3 * span / after_first if after_first > 0 else None,
        "predicted_per_second": after_first / span if span > 0 else None,
        "drafted_n": sum(int(g.stats.get("drafted", 0)) for g in generations),
        "accepted_n": sum(int(g.stats.get("accepted_speculative", 0)) for g in generations),
        "runs_n": sum(int(g.stats.get("runs", 0)) for g in generations),
        "cancelled_runs_n": sum(int(g.stats.get("cancelled_runs", 0)) for g in generations),
    }


def _reused(generation: Generation) -> int:
    return int(generation.stats.get("reused", 0))


def _detail(pieces: Sequence[Piece]) -> dict[str, Any]:
    return {"tokens": [p.token for p in pieces], "texts": [p.text for p in pieces],
            "speculated": [p.speculated for p in pieces]}
