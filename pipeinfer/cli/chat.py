"""`pipeinfer chat`: a conversation in the terminal, with a running server or one of its own.

The conversation is in `chat_loop`, the terminal in `chat_terminal`, its own server in
`chat_server`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from pipeinfer import host
from pipeinfer.cli.chat_loop import ChatLoop, Interrupts, Message, Wishes
from pipeinfer.cli.chat_terminal import own_terminal
from pipeinfer.cli.options import JOB, config_options, words_of
from pipeinfer.cli.terminal import INTERRUPTED, Stopped
from pipeinfer.config import AUTO, Config, Resolved
from pipeinfer.errors import RequestError, UsageError

if TYPE_CHECKING:
    from pipeinfer.cli.chat_server import OwnServer
    from pipeinfer.cli.client import Remote

DEFAULT_URL = "http://127.0.0.1:8080"
#: names of our options in the OpenAI API and llama.cpp's server
_FIELDS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repeat_penalty": "repeat_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "repeat_last_n": "repeat_last_n",
}


@config_options(*JOB, "sampling", "grammar", model=AUTO)
@click.option("--url", default="", metavar="URL",
              help=f"Server to talk to [default: {DEFAULT_URL}, unless -m, --ranks or --hosts "
                   "starts one].")
@click.option("--ranks", type=click.IntRange(1), metavar="N",
              help="Start a server over so many ranks.")
@click.option("--hosts", metavar="HOSTFILE", help="Start a server over these hosts.")
@click.option("--api-key", default="", envvar="PIPEINFER_API_KEY",
              help="Key for that server. PIPEINFER_API_KEY keeps it off the command line.")
@click.option("--system", default="", metavar="TEXT", help="System prompt.")
@click.option("-n", "--n-predict", type=click.IntRange(1, 2**24), default=1024, show_default=True,
              help="Maximum number of tokens of an answer.")
@click.option("--plain", is_flag=True, help="Show answers as they come, not as Markdown.")
def chat_command(
    resolved: Resolved, url: str, ranks: int | None, hosts: str | None, api_key: str, system: str,
    n_predict: int, plain: bool,
) -> None:
    """Talk to a model in the terminal.

    \b
    pipeinfer chat --url http://head:8080
    pipeinfer chat -m model.gguf
    pipeinfer run -np 4 chat -m big.gguf -md small.gguf
    """
    config, named = resolved.config, resolved.origin["model"] != "default"
    own = named or bool(ranks or hosts)
    if own and url:
        raise UsageError("--url talks to a running server; -m, --ranks and --hosts start one: give "
                         "only one of them")
    if host.launched() and not url:
        raise UsageError("chat starts its ranks itself: write `pipeinfer run -np N chat` instead "
                         "of `mpirun -np N pipeinfer chat`, with --hosts FILE before chat for "
                         "other hosts")
    if host.launched_rank() > 0:
        return
    fields = request_fields(config, resolved.origin) | {"max_tokens": n_predict}
    interrupts = Interrupts()
    lines, out = own_terminal()
    with contextlib.ExitStack() as stack:
        if own:
            from pipeinfer.cli.chat_server import OwnServer

            partner: ServerConnection = OwnRanks(stack.enter_context(
                OwnServer(words_of(resolved, *JOB), ranks, hosts)), fields)
        else:
            from pipeinfer.cli.client import Remote

            remote = Remote(url or DEFAULT_URL, api_key.split(",")[0], config.job.cluster.timeout)
            partner = ServerConnection(remote, fields)
        formatted = lines.by_hand and out.isatty() and host.moves_cursor()
        try:
            failed = ChatLoop(partner, lines, out, interrupts, system, config.sampling.seed,
                              formatted=formatted and not plain).run()
        except Stopped:
            raise SystemExit(INTERRUPTED) from None
        interrupts.expect(Stopped)
        if failed:
            raise SystemExit(RequestError.exit_code)


# --- a server ---------------------------------------------------------------------------------


class ServerConnection:
    """What answers: a server. fields: added to every request."""

    def __init__(self, remote: Remote, fields: dict[str, Any]) -> None:
        """Wait until the server is ready. Raises RequestError."""
        self._remote, self._fields = remote, fields
        remote.wait_until_ready(lambda text: click.echo(text, err=True))
        self.name = f"{remote.model()} at {remote.url}"

    def answer(
        self, messages: list[Message], wishes: Wishes, interrupts: Interrupts,
        write: Callable[[str], None],
    ) -> str:
        """Write the answer as it arrives; return a summary of it, such as its speed."""
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


class OwnRanks(ServerConnection):
    """What answers: this command's own server."""

    def __init__(self, server: OwnServer, fields: dict[str, Any]) -> None:
        """Wait until the server is ready. Raises SystemExit if the job ends before that."""
        server.wait_until_ready()
        super().__init__(server.remote, fields)
        self._server = server
        facts = server.remote.facts()
        stages = len({stage["stage"] for stage in facts["stages"]})
        self.name = f"{facts['model']} on {stages} stage{'s' * (stages != 1)}"

    @override
    def answer(
        self, messages: list[Message], wishes: Wishes, interrupts: Interrupts,
        write: Callable[[str], None],
    ) -> str:
        try:
            return super().answer(messages, wishes, interrupts, write)
        except RequestError:
            if self._server.has_failed():  # the job prints why
                raise SystemExit(self._server.joined()) from None
            raise
