"""`pipeinfer chat`: a conversation in the terminal, with a server or with ranks of its own.

Knows lines, commands and interrupts; who answers is a `Partner`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol, TextIO

import click

from pipeinfer import host
from pipeinfer.cli.client import Remote
from pipeinfer.cli.options import JOB, config_options
from pipeinfer.cli.terminal import INTERRUPTED, Stopped, leave, progress_hook
from pipeinfer.config import JobConfig, RequestConfig, Resolved, SamplingConfig
from pipeinfer.errors import ClusterError, PipeinferError, RequestError, UsageError

DEFAULT_URL = "http://127.0.0.1:8080"
HELP = """\
/clear         start over with an empty conversation
/system TEXT   begin the conversation with this system prompt (without TEXT: show it)
/seed N        use this seed from now on (without N: a new one for every answer)
/quit          leave (as does Ctrl-D)
A line that ends in \\ continues on the next. Ctrl-C stops an answer; press it twice to leave."""
#: names of our options in the OpenAI API and llama.cpp's server
_FIELDS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repeat_penalty": "repeat_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "repeat_last_n": "repeat_last_n",
}


class Partner(Protocol):
    """What the loop talks to: a server, or this job's own ranks."""

    name: str

    def answer(
        self, messages: list[dict[str, str]], seed: int | None, interrupts: Interrupts,
        write: Callable[[str], None],
    ) -> str:
        """Write the answer as it comes; returns what is to be said of it (speed and the like).

        An interrupt ends it early. Raises RequestError when there is no answer.
        """


class Interrupts:
    """Ctrl-C: the first stops what goes on, the next one leaves.

    count: since `expect` was last called. What the first one raises is what was expected: Stopped
    while things start, KeyboardInterrupt while a line or a server is waited for; None: it is
    looked for in `count`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first: type[BaseException] | None = Stopped
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def expect(self, first: type[BaseException] | None) -> None:
        """A new phase begins: count from 0, and let the first Ctrl-C raise `first`."""
        self.count, self._first = 0, first

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.count += 1
        if self.count > 1 or number == signal.SIGTERM:
            raise Stopped
        if self._first is not None:
            raise self._first


@config_options(*JOB, "sampling")
@click.option("--url", default="", metavar="URL",
              help=f"Server to talk to [default: {DEFAULT_URL}, unless -m or a launcher starts "
                   "ranks here].")
@click.option("--api-key", default="", envvar="PIPEINFER_API_KEY",
              help="Key for that server. PIPEINFER_API_KEY keeps it off the command line.")
@click.option("--system", default="", metavar="TEXT", help="System prompt.")
@click.option("-n", "--n-predict", type=click.IntRange(1, 2**24), default=1024, show_default=True,
              help="Maximum number of tokens of an answer.")
def chat_command(resolved: Resolved, url: str, api_key: str, system: str, n_predict: int) -> None:
    """Talk to a model in the terminal.

    \b
    pipeinfer chat --url http://head:8080
    pipeinfer chat -m model.gguf
    launch/run 4 chat -m big.gguf -md small.gguf
    """
    config = resolved.config
    own = bool(config.job.model.model) or host.launched_size() > 1
    if own and url:
        raise UsageError("--url talks to a running server and -m loads a model here: give only one "
                         "of them")
    if host.launched_rank() > 0:
        from pipeinfer.cluster.launch import join

        join(config.job).serve()
        return
    interrupts = Interrupts()
    with own_terminal() as (lines, out), contextlib.ExitStack() as stack:
        if own:
            partner: Partner = stack.enter_context(
                _own_ranks(config.job, config.sampling, n_predict)
            )
        else:
            remote = Remote(url or DEFAULT_URL, api_key.split(",")[0], config.job.cluster.timeout)
            partner = Server(
                remote, request_fields(config.sampling, resolved.origin) | {"max_tokens": n_predict}
            )
        try:
            failed = Chat(partner, lines, out, interrupts, system, config.sampling.seed).run()
        except Stopped:
            if own:
                leave(INTERRUPTED)
            raise SystemExit(INTERRUPTED) from None
    if failed:
        raise SystemExit(RequestError.exit_code)


@contextlib.contextmanager
def own_terminal() -> Iterator[tuple[Lines, TextIO]]:
    """Where lines come from and answers go: standard input and output, or under launch/run the
    terminal that it names (mpirun passes on whole lines only)."""
    where, _, path = os.environ.get("PIPEINFER_TERMINAL", "").partition(":")
    descriptor = -1
    if host.launched_size() > 1 and where == socket.gethostname() and path.startswith("/dev/"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY)
    if descriptor < 0:
        yield Lines(sys.stdin.fileno()), sys.stdout
        return
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as out:
        yield Lines(descriptor), out


class Lines:
    """Lines of a file descriptor; a signal ends the wait for one even just before it begins."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest, self._ended = descriptor, b"", False
        self.by_hand = os.isatty(descriptor)
        self._edits = self.by_hand and descriptor == 0 and sys.stdout.isatty()
        if self._edits:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (input() edits lines with it)
        self._woken, waker = os.pipe()
        for end in (self._woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def next(self, prompt: str, write: Callable[[str], None]) -> str | None:
        """The next line without its end, None at the end of the input."""
        if self._edits:
            try:
                return input(prompt)
            except EOFError:
                write("\n")
                return None
        if self.by_hand:
            write(prompt)
        while b"\n" not in self._rest and not self._ended:
            ready, _, _ = select.select([self._descriptor, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
            if self._descriptor in ready:
                data = os.read(self._descriptor, 65536)
                self._rest, self._ended = self._rest + data, not data
        line, found, self._rest = self._rest.partition(b"\n")
        if not line and not found:
            return None
        return line.decode("utf-8", "replace").rstrip("\r")


# --- the conversation -------------------------------------------------------------------------


class Chat:
    """Reads lines, shows answers."""

    def __init__(
        self, partner: Partner, lines: Lines, out: TextIO, interrupts: Interrupts, system: str,
        seed: int,
    ) -> None:
        self._partner, self._lines, self._out = partner, lines, out
        self._interrupts = interrupts
        self._system, self._seed = system, seed if seed >= 0 else None
        self._said: list[dict[str, str]] = []
        self._by_hand = lines.by_hand

    def run(self) -> bool:
        """Until the input ends; whether an answer failed that nobody saw fail."""
        if self._by_hand:
            self._note(f"{self._partner.name}. /help lists the commands.")
        self._interrupts.expect(KeyboardInterrupt)
        failed, going = False, True
        while going:
            try:
                text = self._read()
                if text is None or text.startswith("/"):
                    going = text is not None and self._command(text)
                elif text.strip():
                    failed |= not self._answer(text)
            except KeyboardInterrupt:  # one that no answer took
                self._write("\n")
                self._note("press Ctrl-C again or type /quit to leave")
        return failed and not self._by_hand

    def _read(self) -> str | None:
        """The next message, None at the end of the input."""
        parts: list[str] = []
        while True:
            line = self._lines.next("> " if not parts else ". ", self._write)
            self._interrupts.expect(KeyboardInterrupt)
            if line is None:
                return "\n".join(parts) if parts else None
            if not line.endswith("\\"):
                return "\n".join([*parts, line])
            parts.append(line[:-1])

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _note(self, text: str) -> None:
        """Something that is no answer: beside it on a terminal, else to standard error."""
        if self._by_hand:
            self._write(click.style(text, dim=True) + "\n")
        else:
            click.echo(text, err=True)

    def _command(self, text: str) -> bool:
        """Whether the conversation goes on."""
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        match name:
            case "/quit" | "/exit":
                return False
            case "/clear":
                self._said.clear()
                self._note("the conversation has been cleared")
            case "/system":
                if rest:
                    self._system = rest
                self._note(f"system prompt: {self._system or '(none)'}")
            case "/seed":
                if rest and not (rest.isascii() and rest.isdigit() and int(rest) < 2**63):
                    self._note("a seed is a whole number of 0 or more")
                else:
                    self._seed = int(rest) if rest else None
                    chosen = "a new one each time" if self._seed is None else self._seed
                    self._note(f"seed: {chosen}")
            case "/help":
                self._note(HELP)
            case _:
                self._note(f"unknown command {name}; /help lists the commands. To send a message "
                           "that begins with /, put a space before it")
        return True

    def _answer(self, text: str) -> bool:
        """Ask and show; whether there was an answer."""
        said = [*self._said, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        parts: list[str] = []

        def write(piece: str) -> None:
            parts.append(piece)
            self._write(piece)

        try:
            summary = self._partner.answer(system + said, self._seed, self._interrupts, write)
        except RequestError as error:
            if parts:
                self._write("\n")
            click.echo(f"pipeinfer: error: {error}", err=True)
            return False
        finally:
            self._interrupts.expect(KeyboardInterrupt)
        self._write("\n")
        if self._by_hand:
            self._note(summary)
        self._said = [*said, {"role": "assistant", "content": "".join(parts)}]
        return True


# --- a server ---------------------------------------------------------------------------------


class Server:
    """A `Partner` behind a URL. fields: of every request."""

    def __init__(self, remote: Remote, fields: dict[str, Any]) -> None:
        """Waits until it is ready. Raises RequestError."""
        self._remote, self._fields = remote, fields
        remote.wait_until_ready(lambda text: click.echo(text, err=True))
        self.name = f"{remote.model()} at {remote.url}"

    def answer(
        self, messages: list[dict[str, str]], seed: int | None, interrupts: Interrupts,
        write: Callable[[str], None],
    ) -> str:
        """See `Partner.answer`."""
        fields = self._fields if seed is None else self._fields | {"seed": seed}
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


def request_fields(config: SamplingConfig, origin: Mapping[str, str]) -> dict[str, Any]:
    """The sampling options that were given, as a server wants them; it knows the others.

    Raises UsageError for options that make no sense here.
    """
    from pipeinfer.cluster.generate import grammar_text, sampling_params

    fields: dict[str, Any] = {
        theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()
        if origin[ours] != "default"}
    if config.logit_bias:
        bias = sampling_params(config, 0).logit_bias
        fields["logit_bias"] = {str(token): value for token, value in bias}
    kind, text = grammar_text(config)
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
def _own_ranks(job: JobConfig, sampling: SamplingConfig, n_predict: int) -> Iterator[Partner]:
    from pipeinfer.cluster.generate import compiled_grammar, sampling_params
    from pipeinfer.cluster.launch import join
    from pipeinfer.models.locate import model_paths
    from pipeinfer.models.text import chat_template

    chat_template.prepare()
    params = dataclasses.replace(
        sampling_params(sampling, 0), grammar=compiled_grammar(sampling, model_paths(job)[0]))
    leading = join(job).lead(progress_hook(RequestConfig()), grammars=bool(params.grammar))
    with leading as session:
        yield Own(session, params, n_predict, sampling)


class Own:
    """A `Partner` on this job's ranks."""

    def __init__(self, session: Any, params: Any, n_predict: int, sampling: SamplingConfig
                 ) -> None:
        self._session, self._params, self._n_predict = session, params, n_predict
        self._sampling = sampling
        stages = session.n_stages
        self.name = f"{session.model_name} on {stages} stage{'s' * (stages != 1)}"

    def answer(
        self, messages: list[dict[str, str]], seed: int | None, interrupts: Interrupts,
        write: Callable[[str], None],
    ) -> str:
        """See `Partner.answer`."""
        from pipeinfer.cluster.generate import draw_seed, run_request
        from pipeinfer.core.sampling import noise_key

        tokenizer = self._session.tokenizer
        prompt = tokenizer.encode_chat(messages)
        key = noise_key(draw_seed(self._sampling) if seed is None else seed)
        interrupts.expect(None)
        try:
            out = run_request(
                self._session, prompt, dataclasses.replace(self._params, key=key),
                self._n_predict, on_text=write, interrupted=lambda: interrupts.count > 0)
        except ClusterError:
            raise
        except RequestError as error:
            raise RequestError(f"{error} (/clear starts a new conversation)") from error
        except PipeinferError as error:
            raise RequestError(str(error)) from error
        return _summary(len(out.tokens), out.tokens_per_second, out.reason)
