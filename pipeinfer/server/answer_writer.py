"""Writes answers in the OpenAI API's form: chunks of a stream, whole answers, usage, timings.

Uses choices and their text, no HTTP and no engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.answer_parser import AnswerParser, object_of
from pipeinfer.server.choice import AnswerPiece, Delta, Generation, PromptProgress, Reading
from pipeinfer.server.errors import ApiError
from pipeinfer.server.families import family_of
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.schema_replies import Detail, End, Finish, Timings, Usage
from pipeinfer.server.tools import Call, More, Part, Thought, Words, joined

_ENDS: dict[str, End] = {"context": "length", "length": "length", "stop": "stop"}


@dataclass(slots=True)
class ResponseChoice:
    """The part of a choice that was written already. text: the prompt, when it is echoed."""

    reading: Reading
    parser: AnswerParser | None = None
    text: str = ""
    called: int = 0  #: calls found so far
    arguments: str = ""  #: of the last one
    cut: bool = False  #: whether a stop text cut it: then it is no call
    progress: PromptProgress | None = None  #: that was written last
    thinks: bool = False  #: whether the last part was reasoning
    done: bool = False

    @property
    def generation(self) -> Generation:
        """What the engine has returned for it."""
        return self.reading.generation

    @property
    def complete(self) -> bool:
        """Whether all of it was read, without a failure."""
        return self.reading.ended and self.generation.failure is None


@dataclass(slots=True)
class AnswerWriter:
    """Writes one request's answer.

    asked: the request. model: name in the answer. answer_id: "" for a new one.
    """

    asked: EngineRequest
    model: str
    tokenizer: Tokenizer
    is_chat: bool
    answer_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    kept: bool = False  #: whether it is journaled, so that it can be requested again
    ends_with_mark: ClassVar[bool] = True  #: whether [DONE] ends a stream
    #: an event of this API for silences of a stream; none: a comment
    ping: Mapping[str, Any] = field(default_factory=dict)
    choices: list[ResponseChoice] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind = "chatcmpl" if self.is_chat else "cmpl"
        self.answer_id = self.answer_id or f"{kind}-{secrets.token_hex(14)}"

    def start(self, readings: Sequence[Reading]) -> None:
        """Set the choices, in the order of their indices."""
        for reading in readings:
            parser = AnswerParser(family_of(self.tokenizer.chat_template or ""), self.asked.tools,
                                  self.asked.inside) if self.is_chat else None
            text = self.asked.texts[reading.generation.index // self.asked.n] \
                if self.asked.echo else ""
            self.choices.append(ResponseChoice(reading, parser, text, thinks=self.asked.inside))

    # --- streams ------------------------------------------------------------------------------

    def opening(self) -> Sequence[Mapping[str, Any]]:
        """Return the chunks that come before any token."""
        if self.is_chat:
            return [self._delta(choice, {"role": "assistant", "content": ""})
                    for choice in self.choices]
        return [self._text(choice, choice.text) for choice in self.choices if choice.text]

    def chunks(self, choice: ResponseChoice) -> Sequence[Mapping[str, Any]]:
        """Return the chunks for text that has become final, and the last one when the choice has
        ended."""
        generation, ended = choice.generation, choice.complete
        delta = choice.reading.take()
        number = choice.called - 1
        parts = self._split(choice, delta, ended)
        content = _text_of(Words, parts)
        out = []
        if self.asked.progress and not choice.reading.read and \
                generation.progress not in (None, choice.progress):
            out.append(self._read(choice))
        if thought := _text_of(Thought, parts):
            out.append(self._delta(choice, {"reasoning_content": thought}))
        if content or (delta.pieces and (self.asked.logprobs or self.asked.detail)):
            out.append(self._piece(choice, delta, content))
        for call in parts:
            if isinstance(call, Call | More):
                number += isinstance(call, Call)
                out.append(self._delta(choice, {"tool_calls": [call.to_json(number)]}))
        if ended:
            choice.done = True
            last = self._delta(choice, {}, self._reason(choice)) if self.is_chat else (
                self._text(choice, "", _end(choice)))
            last["timings"] = timings([generation])
            if self.asked.notes:
                last["notes"] = self.asked.notes
            out.append(last)
        return out

    def closing(self) -> Sequence[Mapping[str, Any]]:
        """Return the chunks after the end of every choice."""
        if not self.asked.usage:
            return []
        chunk = self._chunk([])
        chunk["usage"] = self.usage()
        return [chunk]

    def failed(self, error: ApiError) -> Mapping[str, Any]:
        """Return the last chunk of a stream that failed."""
        return error.body()

    def _delta(self, choice: ResponseChoice, delta: dict[str, Any],
               reason: Finish | None = None) -> dict[str, Any]:
        return self._chunk([{"index": choice.generation.index, "delta": delta, "logprobs": None,
                             "finish_reason": reason}])

    def _text(self, choice: ResponseChoice, text: str, reason: End | None = None
              ) -> dict[str, Any]:
        return self._chunk([{"index": choice.generation.index, "text": text, "logprobs": None,
                             "finish_reason": reason}])

    def _read(self, choice: ResponseChoice) -> dict[str, Any]:
        """Return the chunk, as llama.cpp's server has it, that says how much of the prompt is
        computed."""
        progress = choice.progress = choice.generation.progress
        assert progress is not None
        spent = 1e3 * (time.monotonic() - choice.generation.counts.submitted)
        chunk = self._delta(choice, {}) if self.is_chat else self._text(choice, "")
        chunk["prompt_progress"] = {"total": progress.total, "cache": progress.cache,
                                    "processed": progress.processed, "time_ms": round(spent)}
        return chunk

    def _piece(self, choice: ResponseChoice, delta: Delta, content: str) -> dict[str, Any]:
        chunk = self._delta(choice, {"content": content}) if self.is_chat else (
            self._text(choice, content))
        chunk["choices"][0]["logprobs"] = self._logprobs(choice, delta)
        if self.asked.detail:
            chunk["pipeinfer"] = _detail(delta.pieces)
        return chunk

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head("chat.completion.chunk" if self.is_chat else "text_completion", choices)
        if self.asked.usage:
            chunk["usage"] = None
        return chunk

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model,
                "system_fingerprint": None, "choices": choices}

    # --- whole answers ------------------------------------------------------------------------

    def whole(self) -> Mapping[str, Any]:
        """Return the answer once every choice has ended without failure."""
        deltas = [choice.reading.take() for choice in self.choices]
        kind, write = ("chat.completion", self._chat_choice) if self.is_chat else (
            "text_completion", self._text_choice)
        answer = self._head(kind, [write(*one) for one in zip(self.choices, deltas, strict=True)])
        answer |= {"usage": self.usage(),
                   "timings": timings([choice.generation for choice in self.choices])}
        if self.asked.notes:
            answer["notes"] = self.asked.notes
        if self.asked.detail:
            details = [_detail(delta.pieces) for delta in deltas]
            answer["pipeinfer"] = details[0] if len(details) == 1 else {"choices": details}
        return answer

    def _chat_choice(self, choice: ResponseChoice, delta: Delta) -> dict[str, Any]:
        parts = self._split(choice, delta, ended=True)
        content, thought = _text_of(Words, parts), _text_of(Thought, parts)
        calls = [call for call in parts if isinstance(call, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [call.to_json() for call in calls]
        return {"index": choice.generation.index, "logprobs": self._logprobs(choice, delta),
                "finish_reason": self._reason(choice), "message": message}

    def _text_choice(self, choice: ResponseChoice, delta: Delta) -> dict[str, Any]:
        return {"index": choice.generation.index, "logprobs": self._logprobs(choice, delta),
                "finish_reason": _end(choice), "text": choice.text + delta.text}

    def usage(self) -> Usage:
        """Return the token counts. A prompt counts once for all its choices."""
        generations = [choice.generation for choice in self.choices]
        firsts = generations[:: self.asked.n]
        prompt = sum(g.counts.prompt for g in firsts)
        output = sum(g.counts.output for g in generations)
        return {
            "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(_reused(g) for g in firsts)},
        }

    # --- parts --------------------------------------------------------------------------------

    def _split(self, choice: ResponseChoice, delta: Delta, ended: bool) -> list[Part]:
        """Return the parts of the answer's text; in whole answers calls with their arguments."""
        if choice.parser is None:
            return [Words(delta.text)]
        parts = choice.parser.push(delta.text, ended)
        for part in parts:
            if isinstance(part, Call | More):
                begun = choice.arguments if isinstance(part, More) else ""
                choice.arguments = begun + part.arguments
        called = choice.called or any(isinstance(part, Call) for part in parts)
        choice.cut = bool(ended and called and choice.reading.stop) and (
            not choice.arguments or object_of(choice.arguments) is None)
        parts = parts if self.asked.stream else joined(parts)
        if choice.cut and not self.asked.stream:
            del parts[max(at for at, part in enumerate(parts) if isinstance(part, Call)):]
        if self.asked.marked:
            parts = [one for part in parts for one in self._in_marks(choice, part)]
        return [self._named(choice, part) for part in parts]

    def _in_marks(self, choice: ResponseChoice, part: Part) -> list[Part]:
        """Return a part as it is, or reasoning as words between the marks of its family."""
        opened, closed = family_of(self.tokenizer.chat_template or "").think
        thinks = isinstance(part, Thought)
        mark = "" if thinks == choice.thinks else f"{opened}\n" if thinks else f"\n{closed}\n\n"
        choice.thinks = thinks
        if isinstance(part, Words | Thought):
            return [Words(mark + part.text)]
        return [Words(mark), part] if mark else [part]

    def _named(self, choice: ResponseChoice, part: Part) -> Part:
        choice.called += isinstance(part, Call)
        if not isinstance(part, Call) or not self.kept:
            return part
        name = f"call_{self.name_of(choice, 'call', choice.called)}"
        return dataclasses.replace(part, call_id=name)

    def name_of(self, choice: ResponseChoice, kind: str, number: int) -> str:
        """Return a name for a part of the answer that is the same whenever the answer is written
        again."""
        text = f"{self.answer_id} {choice.generation.index} {kind} {number}"
        return hashlib.blake2b(text.encode(), digest_size=14).hexdigest()

    def _reason(self, choice: ResponseChoice) -> Finish:
        end = _end(choice)
        return "tool_calls" if choice.called and end == "stop" and not choice.cut else end

    def _logprobs(self, choice: ResponseChoice, delta: Delta) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        if self.is_chat:
            return {"content": [{
                **self._alternative(p.token, p.logprob),
                "top_logprobs": [self._alternative(*pair) for pair in p.top]}
                for p in delta.pieces], "refusal": None}
        offset, offsets = delta.offset + len(choice.text), []
        for piece in delta.pieces:
            offsets.append(offset)
            offset += len(piece.text)
        return {
            "tokens": [self._name(p.token) for p in delta.pieces],
            "token_logprobs": [p.logprob for p in delta.pieces],
            "top_logprobs": [{self._name(t): lp for t, lp in p.top} for p in delta.pieces],
            "text_offset": offsets,
        }

    def _alternative(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": logprob,
                "bytes": list(self.tokenizer.piece(token, special=True))}

    def _name(self, token: int) -> str:
        piece = self.tokenizer.piece(token, special=True)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:  # a part of a character; its bytes make the name unique
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _text_of(kind: type[Words | Thought], parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _end(choice: ResponseChoice) -> End:
    return _ENDS.get(choice.generation.reason or "", "stop")


def timings(generations: Sequence[Generation]) -> Timings:
    """Return counts and speeds, named as in llama.cpp's server, of several choices together.

    Times are in milliseconds. prompt: until the first token, including the wait in the queue.
    predicted: from the first token to the last. restored_n: tokens of `cache_n` that came from
    disks (--kv-disk). If a new job has taken over, the result also
    has the number of times, and whether it computes the same bits, so that tokens are those of
    an undisturbed answer.
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
    spent: Timings = {
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
    if restored := sum(int(g.stats.get("restored", 0)) for g in generations):
        spent["restored_n"] = restored
    if restarts := sum(g.restarts for g in generations):
        spent["restarts_n"] = restarts
        spent["same_arithmetic"] = all(g.same_bits for g in generations)
    return spent


def _reused(generation: Generation) -> int:
    if generation.reused is not None:  # later, a replay may have found more
        return generation.reused
    return int(generation.stats.get("reused", 0))


def _detail(pieces: Sequence[AnswerPiece]) -> Detail:
    return {"tokens": [p.token for p in pieces], "texts": [p.text for p in pieces],
            "speculated": [p.speculated for p in pieces]}
