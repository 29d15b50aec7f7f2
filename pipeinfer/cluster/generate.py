"""Runs one request from prompt to text: streaming, stop strings, timing.

Used by the command line, benchmarks and tests. It depends on the session and the tokenizer, not on
click or MPI.
"""

from __future__ import annotations

import itertools
import math
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field, structs

from pipeinfer.cluster.session import Session
from pipeinfer.config import GrammarConfig, SamplingConfig
from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import Media, Request, SamplingParams
from pipeinfer.errors import UsageError
from pipeinfer.models.locate import model_paths, open_tokenizer
from pipeinfer.models.text.grammar import compile_grammar
from pipeinfer.models.text.text_stream import TextStream
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.scheduler.events import Emit, Finish, LaneStats, Refuse
from pipeinfer.strategies.decomposers.base import Decomposer, Specification
from pipeinfer.strategies.decomposers.prompts import (
    Opening,
    decomposer_factory,
    opening,
    texts_of,
)

_request_ids = itertools.count()


class Generated(Struct):
    """The outcome of a request.

    tokens: ids of the output; in reading order where the response has threads
    text: the output as text
    reason: why it ended: stop (end of text or stop string), length, context, interrupted
    n_prompt: tokens of the prompt
    times: seconds from submission to each token
    speculated: per token, whether it was in flight before it was accepted
    logprobs: per token; None where it is not known
    lane: counters of its lane
    seed: of the noise, as used
    threads: per token, the thread of the response that it comes from
    visible: tokens of which the reader sees something
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    n_prompt: int = 0
    times: list[float] = field(default_factory=list)
    speculated: list[bool] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    lane: LaneStats = field(default_factory=LaneStats)
    seed: int = 0
    threads: list[int] = field(default_factory=list)
    visible: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token. The prompt's time is not included, as in the paper."""
        span = self.times[-1] - self.times[0] if len(self.times) > 1 else 0.0
        return (len(self.times) - 1) / span if span > 0 else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the positions with a speculative token in flight at which it was accepted."""
        tested = self.lane.guesses_tested
        return self.lane.accepted_speculative / tested if tested else 0.0

    def stats(self) -> dict[str, Any]:
        """Return the figures for `--json` and the summary. Times are in seconds.

        time_to_first_token: from submission.
        time_to_first_after_prompt: from the first token, which exists when the prompt is
            evaluated, to the second, as in PipeInfer's paper.
        """
        gaps = [b - a for a, b in itertools.pairwise(self.times)]
        return {
            "n_prompt": self.n_prompt, "n_output": len(self.tokens), "reason": self.reason,
            "seed": self.seed, "visible": self.visible,
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token": self.times[0] if self.times else None,
            "time_to_first_after_prompt": gaps[0] if gaps else None,
            "inter_token_latency_mean": statistics.fmean(gaps) if gaps else None,
            "inter_token_latency_median": statistics.median(gaps) if gaps else None,
            "acceptance": self.acceptance, **structs.asdict(self.lane),
        }


def sampling_params(config: SamplingConfig, seed: int) -> SamplingParams:
    """Return the sampling parameters of a config. Raises UsageError for a malformed logit bias."""
    return SamplingParams(
        temperature=config.temp, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p,
        repeat_penalty=config.repeat_penalty, presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty, repeat_last_n=config.repeat_last_n,
        logit_bias=tuple(map(_bias, config.logit_bias)), key=noise_key(seed),
    )


def grammar_text(config: GrammarConfig) -> tuple[str, str]:
    """Return the kind (gbnf or json_schema) and the text of a config's grammar; "" and "" if
    none.

    Raises UsageError for options that exclude each other or a file that cannot be read.
    """
    given = [kind for kind in ("grammar", "grammar_file", "json_schema") if getattr(config, kind)]
    if not given:
        return "", ""
    if len(given) > 1:
        flags = " and ".join(f"--{kind.replace('_', '-')}" for kind in given)
        raise UsageError(f"give one of {flags}, not both")
    kind, text = "gbnf", config.grammar
    if config.json_schema:
        kind, text = "json_schema", config.json_schema
    elif config.grammar_file:
        try:
            text = Path(config.grammar_file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {config.grammar_file}: {error}") from error
    return kind, text


def compiled_grammar(config: GrammarConfig, target: Path) -> str:
    """Return the config's grammar, compiled for the model at `target`; "" if there is none.

    Raises UsageError as `grammar_text` does, and RequestError for one that cannot be used.
    """
    kind, text = grammar_text(config)
    if not kind:
        return ""
    tokenizer = open_tokenizer(target)
    vocabulary = Vocabulary.of(tokenizer)
    try:
        return compile_grammar(kind, text, vocabulary)
    finally:
        vocabulary.compiler.close()
        tokenizer.close()


def draw_seed(config: SamplingConfig) -> int:
    """Return the config's seed, or a random one if it has none."""
    return config.seed if config.seed >= 0 else secrets.randbits(31)


def open_response(session: Session, messages: Sequence[Mapping[str, str]]) -> Opening:
    """Prepare a conversation for `run_request`, with the decomposer of the session's config.

    Raises UsageError, and RequestError when the chat template refuses the messages.
    """
    config = session.config
    return opening(session.tokenizer, texts_of(model_paths(config)[0]),
                   config.speculation.decomposer, messages)


def decomposition_of(session: Session, wanted: Specification, n_prompt: int
                     ) -> Callable[[], Decomposer]:
    """Return what makes the decomposer of a response over the session's present stages; see
    `decomposer_factory`."""
    return decomposer_factory(
        session.tokenizer, session.config.speculation, wanted, n_prompt, n_ctx=session.limits.n_ctx,
        overlap=all(stage["backend"] == "torch" for stage in session.stages.values()))


def run_request(  # noqa: PLR0913 - what a request has
    session: Session, prompt: Sequence[int] | Opening, params: SamplingParams, max_tokens: int, *,
    stops: Sequence[str] = (), ignore_eos: bool = False, seed: int = 0,
    on_text: Callable[[str], None] | None = None, media: tuple[Media, ...] = (),
    interrupted: Callable[[], bool] = lambda: False, into: Generated | None = None,
) -> Generated:
    """Run a request; return after its terminal event.

    prompt: tokens, or the result of `open_response`.
    max_tokens: of the output.
    stops: strings that end the output.
    ignore_eos: whether to continue after an end-of-text token.
    seed: of the noise; only recorded here.
    on_text: called with each new piece of text.
    interrupted: called repeatedly; True ends the request.
    media: pictures of the prompt, which has NO_TOKEN for their rows.
    into: filled while tokens arrive, so that the caller keeps them if it is interrupted.
    Raises ContextOverflow, UsageError for an empty prompt, and ModelError for a decomposer whose
    tokens the vocabulary lacks.
    """
    out = Generated() if into is None else into
    prompt, decompose = _decomposed(session, prompt)
    out.n_prompt, out.seed = len(prompt), seed
    if not prompt:
        raise UsageError("the prompt is empty: write at least one token")
    if params.grammar:
        params = structs.replace(params, grammar_start=len(prompt))
    tokenizer, head = session.tokenizer, session.head
    request = Request(next(_request_ids), tuple(prompt), max_tokens, params,
                      frozenset(tokenizer.eog_ids), ignore_eos, media=media)
    stream = TextStream(tokenizer, stops)
    start = time.monotonic()

    def show() -> None:
        if text := stream.take():
            out.text += text
            if on_text is not None:
                on_text(text)

    head.submit(request, decompose)
    asked_to_end = False
    # short waits, so that Ctrl-C ends a request of which no token comes
    while True:
        if interrupted() and not asked_to_end:
            asked_to_end = True
            head.abort(request.request_id, "interrupted")
        match head.next_news(0.1):
            case Emit(_, choice, speculated, thread, seen) if not stream.stopped:
                out.tokens.append(choice.token)
                out.threads.append(thread)
                out.visible += seen != b""
                out.times.append(time.monotonic() - start)
                out.speculated.append(speculated)
                out.logprobs.append(choice.logprob)
                stream.push(choice.token, seen)
                show()
                if stream.stopped:
                    head.abort(request.request_id, "stop")
            case Finish(_, reason, lane):
                stream.finish()
                show()
                out.reason, out.lane = "stop" if stream.stopped else reason, lane
                return out
            case Refuse(_, error):
                raise error
            case _:
                pass


def _decomposed(session: Session, prompt: Sequence[int] | Opening
                ) -> tuple[Sequence[int], Callable[[], Decomposer] | None]:
    if not isinstance(prompt, Opening):
        return prompt, None
    if prompt.decompose is None:
        return prompt.prompt, None
    return prompt.prompt, decomposition_of(session, prompt.decompose, len(prompt.prompt))


def _bias(text: str) -> tuple[int, float]:
    for sign in "+-":
        token, found, value = text.partition(sign)
        if found and token.isdigit() and int(token) < 2**31:
            try:
                bias = float(sign + value)
            except ValueError:
                break
            if math.isfinite(bias):
                return int(token), bias
    raise UsageError(f"--logit-bias {text!r} is not TOKEN_ID+BIAS or TOKEN_ID-BIAS")
