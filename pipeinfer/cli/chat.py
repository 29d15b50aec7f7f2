"""`pipeinfer chat`: a conversation in the terminal, with a server or with ranks of its own.

A `Partner` answers; the conversation is in `chat_loop`, the terminal in `chat_terminal`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
from msgspec import structs

from pipeinfer import host
from pipeinfer.cli.chat_loop import ChatLoop, Interrupts, Partner, Wishes
from pipeinfer.cli.chat_terminal import INPUT, TERMINAL, capable, own_terminal
from pipeinfer.cli.client import Remote
from pipeinfer.cli.loading import progress_hook
from pipeinfer.cli.options import JOB, config_options
from pipeinfer.cli.terminal import (
    INTERRUPTED,
    Stopped,
    fetch_models,
    leave,
    note,
    note_forwarded_input,
)
from pipeinfer.config import AUTO, Config, RequestConfig, Resolved, SamplingConfig
from pipeinfer.errors import ClusterError, PipeinferError, RequestError, UsageError

DEFAULT_URL = "http://127.0.0.1:8080"
#: names of our options in the OpenAI API and llama.cpp's server
_FIELDS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repeat_penalty": "repeat_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "repeat_last_n": "repeat_last_n",
}


@config_options(*JOB, "sampling", "grammar", model=AUTO)
@click.option("--url", default="", metavar="URL",
              help=f"Server to talk to [default: {DEFAULT_URL}, unless -m or a launcher starts "
                   "ranks here].")
@click.option("--api-key", default="", envvar="PIPEINFER_API_KEY",
              help="Key for that server. PIPEINFER_API_KEY keeps it off the command line.")
@click.option("--system", default="", metavar="TEXT", help="System prompt.")
@click.option("-n", "--n-predict", type=click.IntRange(1, 2**24), default=1024, show_default=True,
              help="Maximum number of tokens of an answer.")
@click.option("--plain", is_flag=True, help="Show answers as they come, not as Markdown.")
def chat_command(
    resolved: Resolved, url: str, api_key: str, system: str, n_predict: int, plain: bool
) -> None:
    """Talk to a model in the terminal.

    \b
    pipeinfer chat --url http://head:8080
    pipeinfer chat -m model.gguf
    launch/run 4 chat -m big.gguf -md small.gguf
    """
    config = resolved.config
    named = resolved.origin["model"] != "default"
    own = named or (host.launched() and not url)
    if named and url:
        raise UsageError("--url talks to a running server and -m loads a model here: give only one "
                         "of them")
    if host.launched_rank() > 0:
        if own:
            from pipeinfer.cluster.launch import join

            join(config.job).serve()
        return
    if own:
        fetch_models(config.job)
    if not {INPUT, TERMINAL} & set(os.environ):
        note_forwarded_input("launch/run")
    interrupts = Interrupts()
    with own_terminal() as (lines, out), contextlib.ExitStack() as stack:
        if own:
            partner: Partner = stack.enter_context(
                _own_ranks(config, n_predict)
            )
        else:
            remote = Remote(url or DEFAULT_URL, api_key.split(",")[0], config.job.cluster.timeout)
            partner = ServerConnection(
                remote, request_fields(config, resolved.origin) | {"max_tokens": n_predict}
            )
        try:
            formatted = lines.by_hand and out.isatty() and capable()
            failed = ChatLoop(partner, lines, out, interrupts, system, config.sampling.seed,
                          formatted=formatted and not plain).run()
        except Stopped:
            if own:
                leave(INTERRUPTED)
            raise SystemExit(INTERRUPTED) from None
    if failed:
        raise SystemExit(RequestError.exit_code)


# --- a server ---------------------------------------------------------------------------------


class ServerConnection:
    """A `Partner` behind a URL. fields: added to every request."""

    def __init__(self, remote: Remote, fields: dict[str, Any]) -> None:
        """Wait until the server is ready. Raises RequestError."""
        self._remote, self._fields = remote, fields
        remote.wait_until_ready(lambda text: click.echo(text, err=True))
        self.name = f"{remote.model()} at {remote.url}"

    def answer(
        self, messages: list[dict[str, str]], wishes: Wishes, interrupts: Interrupts,
        write: Callable[[str], None],
    ) -> str:
        """See `Partner.answer`."""
        wanted = {"seed": wishes.seed, "temperature": wishes.temperature}
        fields = self._fields | {name: v for name, v in wanted.items() if v is not None}
        interrupts.expect(KeyboardInterrupt)
        timings: dict[str, Any] = {}
        reason = ""
        chunks = self._remote.chat(messages, fields)
        try:
            with contextlib.closing(chunks):
                for chunk in chunks:
                    timings = chunk.get("timings") or timings
                    for choice in chunk.get("choices") or ():
                        if piece := (choice.get("delta") or {}).get("content"):
                            write(piece)
                        reason = choice.get("finish_reason") or reason
        except KeyboardInterrupt:
            reason = "interrupted"
        return _summary(timings.get("predicted_n"), timings.get("predicted_per_second"), reason)


def request_fields(config: Config, origin: Mapping[str, str]) -> dict[str, Any]:
    """Return the sampling options that were given, in the server's form; others keep its
    defaults.

    origin: where each option's value came from. Raises UsageError for invalid options.
    """
    from pipeinfer.cluster.generate import grammar_text, sampling_params

    fields: dict[str, Any] = {
        theirs: getattr(config.sampling, ours) for ours, theirs in _FIELDS.items()
        if origin[ours] != "default"}
    if config.sampling.logit_bias:
        bias = sampling_params(config.sampling, 0).logit_bias
        fields["logit_bias"] = {str(token): value for token, value in bias}
    kind, text = grammar_text(config.grammar)
    if kind == "gbnf":
        fields["grammar"] = text
    elif kind:
        try:
            schema = json.loads(text)
        except ValueError as error:
            raise UsageError(f"--json-schema is not valid JSON: {error}") from error
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    return fields


def _summary(count: int | None, speed: float | None, reason: str) -> str:
    parts = [] if count is None else [f"{count} token{'s' * (count != 1)}"]
    if speed:
        parts.append(f"{speed:.1f} per second")
    ends = {"length": "cut off at -n", "context": "the context is full: /clear starts over",
            "interrupted": "stopped"}
    if reason in ends:
        parts.append(ends[reason])
    return ", ".join(parts)


# --- own ranks --------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_ranks(config: Config, n_predict: int) -> Iterator[Partner]:
    from pipeinfer.cluster.generate import compiled_grammar, sampling_params
    from pipeinfer.cluster.launch import join
    from pipeinfer.models.locate import advice, model_paths
    from pipeinfer.models.text import apart, chat_template

    job, sampling = config.job, config.sampling
    chat_template.prepare()
    helper = None  # for conversations that grow long; a process that uses MPI must not fork
    if host.launched_size() > 1:
        helper = apart.started(model_paths(job)[0])
    if advised := advice(job):
        note(advised)
    params = structs.replace(
        sampling_params(sampling, 0), grammar=compiled_grammar(config.grammar, model_paths(job)[0]))
    leading = join(job).lead(progress_hook(RequestConfig()), grammars=bool(params.grammar))
    with leading as session:
        session.tokenizer.apart = helper or session.tokenizer.apart
        yield Own(session, params, n_predict, sampling)


class Own:
    """A `Partner` that uses this job's ranks."""

    def __init__(self, session: Any, params: Any, n_predict: int, sampling: SamplingConfig
                 ) -> None:
        self._session, self._params, self._n_predict = session, params, n_predict
        self._sampling = sampling
        stages = session.n_stages
        self.name = f"{session.model_name} on {stages} stage{'s' * (stages != 1)}"

    def answer(
        self, messages: list[dict[str, str]], wishes: Wishes, interrupts: Interrupts,
        write: Callable[[str], None],
    ) -> str:
        """See `Partner.answer`."""
        from pipeinfer.cluster.generate import draw_seed, run_request
        from pipeinfer.core.noise import noise_key

        tokenizer = self._session.tokenizer
        prompt = tokenizer.encode_chat(messages)
        seed = draw_seed(self._sampling) if wishes.seed is None else wishes.seed
        params = structs.replace(self._params, key=noise_key(seed))
        if wishes.temperature is not None:
            params = structs.replace(params, temperature=wishes.temperature)
        interrupts.expect(None)
        try:
            out = run_request(
                self._session, prompt, params, self._n_predict, on_text=write,
                interrupted=lambda: interrupts.count > 0)
        except ClusterError:
            raise
        except RequestError as error:
            raise RequestError(f"{error} (/clear starts a new conversation)") from error
        except PipeinferError as error:
            raise RequestError(str(error)) from error
        return _summary(len(out.tokens), out.tokens_per_second, out.reason)
