"""The command line. Turns declarations of `config` into options and errors into exit codes.

It knows what to print and nothing of how it is computed; heavy modules are imported by the
command that needs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn, TextIO

import click

from pipeinfer import __version__, host, nodes
from pipeinfer.config import Config, Option, Resolved, options, resolve
from pipeinfer.core import SamplingParams
from pipeinfer.errors import (
    ClusterError,
    PipeinferError,
    RequestError,
    UsageError,
    WorkerFailed,
)
from pipeinfer.leaving import end_job, note_exit
from pipeinfer.observe import check_writable
from pipeinfer.transport.base import Dismissed

INTERRUPTED = 130
_AFTER_RANK_0 = 2.0  #: seconds in which rank 0 says what every rank would say


class Stopped(BaseException):
    """The user wants to leave at once."""


def config_options(*groups: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options of these groups, collected into one `given` mapping of values on the line."""

    def wrap(command: Callable[..., Any]) -> Callable[..., Any]:
        names = [n for n, o in options().items() if o.group in groups]

        def inner(config_file: str | None, show_config: bool, **values: Any) -> Any:
            given = {n: values.pop(n) for n in names if n in values}
            given = {n: v for n, v in given.items() if v is not None and v != ()}
            resolved = resolve(given, config_file=config_file)
            if show_config:
                if host.launched_rank() == 0:
                    if "runtime" in groups:  # every rank takes its settings when it starts
                        resolved = nodes.apply(resolved, socket.gethostname())
                    click.echo(resolved.show())
                return None
            return command(resolved=resolved, **values)

        inner.__doc__ = command.__doc__
        inner.__name__ = command.__name__
        decorated: Callable[..., Any] = inner
        for name in reversed(names):
            decorated = _click_option(name, options()[name])(decorated)
        decorated = click.option("--show-config", is_flag=True,
                                 help="Print every value and where it came from.")(decorated)
        return click.option("--config", "config_file", metavar="FILE",
                            help="TOML file with option values.")(decorated)

    return wrap


def _click_option(name: str, option: Option) -> Callable[[Any], Any]:
    default = {f.name: f.default for f in Config.__dataclass_fields__.values()}[name]
    text = option.help
    if option.kind != "flag" and default not in ("", ()) and "[default" not in text:
        text += f" [default: {default}]"
    if option.kind == "flag":
        flags = "/".join(filter(None, (" ".join(option.flags), option.off_flag or "")))
        return click.option(flags, name, default=None, is_flag=True, help=text)
    kind: Any = {"int": click.INT, "float": click.FLOAT}.get(option.kind, click.STRING)
    if option.choices:
        kind = click.Choice([c for c in option.choices if c])
    return click.option(*option.flags, name, default=None, type=kind,
                        multiple=option.kind == "list", help=text)


class _Main(click.Group):
    """Prints pipeinfer's errors as one line and exits with their code; loads commands late."""

    elsewhere: ClassVar[dict[str, tuple[str, str]]] = {
        "inflate": ("pipeinfer.models.inflate", "inflate_command"),
        "doctor": ("pipeinfer.doctor", "doctor_command"),
        "plan": ("pipeinfer.plan", "plan_command"),
        "bench": ("pipeinfer.bench", "bench_command"),
        "chaos": ("pipeinfer.chaos.command", "chaos_command"),
        "chat": ("pipeinfer.chat", "chat_command"),
        "compare": ("pipeinfer.compare", "compare_command"),
        "rebalance": ("pipeinfer.rebalance", "rebalance_command"),
        "train": ("pipeinfer.training.__main__", "main"),
        "serve": ("pipeinfer.server.serve", "serve_command"),
    }

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if host.launched_rank() == 0:
            try:
                return super().main(*args, **kwargs)
            except SystemExit as error:
                note_exit(error.code if isinstance(error.code, int) else int(bool(error.code)))
                raise
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            time.sleep(_AFTER_RANK_0)
            raise SystemExit(error.exit_code) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.elsewhere})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.elsewhere:
            module, name = self.elsewhere[cmd_name]
            command: click.Command = getattr(importlib.import_module(module), name)
            return command
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PipeinferError as error:
            if host.launched_rank() > 0:
                time.sleep(_AFTER_RANK_0)  # rank 0 most likely says the same and ends the job
            fail(error)
        except Stopped:
            leave(INTERRUPTED)
        except Dismissed:  # rank 0 has ended the job
            leave(0)
        except BrokenPipeError:  # the reader of our output has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            leave(1)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:  # a bug: its traceback is wanted, and no rank may stay behind
            import traceback

            click.echo(traceback.format_exc(), err=True, nl=False)
            click.echo(f"pipeinfer: error: {type(error).__name__}: {error} (this is a bug)",
                       err=True)
            leave(1)


def fail(error: PipeinferError) -> NoReturn:
    """Say what is wrong and end every rank."""
    if isinstance(error, WorkerFailed) and error.remote_traceback:
        click.echo(f"### rank {error.rank} on {error.host}\n{error.remote_traceback}", err=True)
    click.echo(f"pipeinfer: error: {error}", err=True)
    leave(error.exit_code)


def leave(code: int) -> NoReturn:
    """Exit with `code`, and end the other ranks."""
    end_job(code)
    raise SystemExit(code)


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"],
                                          "max_content_width": 100})
@click.version_option(__version__, prog_name="pipeinfer")
def main() -> None:
    """Run a large language model over a cluster, as fast as one user's text can come."""


@main.command()
@config_options("model", "runtime", "sampling", "request")
def generate(resolved: Resolved) -> None:
    """Continue a prompt and stream the text.

    \b
    pipeinfer generate -p "def fibonacci(n):"
    mpirun -np 4 pipeinfer generate -m big.gguf -md small.gguf -f prompt.txt
    """
    from pipeinfer import generate as gen
    from pipeinfer.cluster import open_session
    from pipeinfer.decompose import Decomposition
    from pipeinfer.decompose import check as check_decomposer

    config = resolved.config
    out = gen.Generated()
    interrupts = _watch_signals()
    text, params, seed = "", SamplingParams(), gen.draw_seed(config)
    if host.launched_rank() == 0:  # what can be wrong is found before anything loads
        check_decomposer(config)
        text, params = _prompt_text(config), gen.sampling_params(config, seed)
        params = dataclasses.replace(params, grammar=gen.compiled_grammar(config))
        if config.trace:
            check_writable(Path(config.trace))
    with open_session(config, progress_hook(config), grammars=bool(params.grammar)) as session:
        if session is None:
            return
        prompt: Any
        if config.decomposer:
            prompt = Decomposition.of(session, config).opening(
                config.decomposer, [{"role": "user", "content": text}])
        elif config.chat:
            chat = session.tokenizer.apply_chat([{"role": "user", "content": text}])
            prompt = session.tokenizer.encode(chat, special=True)
        else:
            prompt = session.tokenizer.encode(text)
        bare = not (config.chat or config.decomposer)
        if not config.json and not config.no_display_prompt and bare:
            _write(text)
        try:
            gen.run_request(
                session, prompt, params, config.n_predict,
                stops=config.stop, ignore_eos=config.ignore_eos, seed=seed, into=out,
                on_text=None if config.json else _write,
                interrupted=lambda: bool(interrupts),
            )
        except Stopped:
            out.reason = "interrupted"
            _talk_past_the_launcher()
            _report(config, out, session, {})
            leave(INTERRUPTED)
    _report(config, out, session, session.reports)
    if config.trace:
        _write_trace(Path(config.trace), session)
    if out.reason == "interrupted":
        raise SystemExit(INTERRUPTED)
    if out.reason == "poison":
        click.echo("pipeinfer: error: several stages failed one after the other while they worked "
                   "on this request: it was given up", err=True)
        raise SystemExit(ClusterError.exit_code)
    if out.reason == "context":
        click.echo(
            f"pipeinfer: error: the context of {session.limits.n_ctx} tokens is full after "
            f"{len(out.tokens)} new tokens: raise it with -c", err=True)
        raise SystemExit(RequestError.exit_code)


def _watch_signals() -> list[int]:
    """Count interrupts: the first asks to finish the token, the second leaves at once.

    mpirun turns Ctrl-C into SIGTERM and kills 0.25 s later: then print what there is at once.
    """
    seen: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        seen.append(number)
        if len(seen) > 1 or number == signal.SIGTERM:
            raise Stopped

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, on_signal)
    return seen


def _talk_past_the_launcher() -> None:
    """After an interrupt mpirun drops what its ranks write: use the terminal if there is one."""
    if host.launched_size() > 1 and (terminal := _terminal()) is not None:
        os.dup2(terminal, 2)


def _terminal() -> int | None:
    """The user's terminal past mpirun's pipes: the controlling one, or the one that launch/run
    names (its mpirun has a session of its own) when rank 0 is on the same host."""
    where, _, path = os.environ.get("PIPEINFER_TERMINAL", "").partition(":")
    for candidate in ("/dev/tty", path if where == socket.gethostname() else ""):
        if candidate.startswith("/dev/"):
            with contextlib.suppress(OSError):
                return os.open(candidate, os.O_WRONLY | os.O_NOCTTY)
    return None


def _prompt_text(config: Config) -> str:
    if config.prompt and config.file:
        raise UsageError("give either -p or -f, not both")
    if not config.file:
        if not config.prompt:
            raise UsageError('there is no prompt: give one with -p "...", -f FILE or -f -')
        return config.prompt
    if config.file == "-" and "PMIX_RANK" in os.environ and host.launched_size() > 1:
        click.echo("pipeinfer: note: mpirun of Open MPI 5.0 may not return after passing on "
                   "standard input; launch/run and -f FILE do not have that trouble", err=True)
    try:
        data = sys.stdin.buffer.read() if config.file == "-" else Path(config.file).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"can not read {config.file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{config.file} is not UTF-8 text: {error}") from error
    if not text:
        raise UsageError(f"{config.file} is empty: there is no prompt")
    return text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(config: Config, out: Any, session: Any, reports: Mapping[int, dict[str, Any]]) -> None:
    from pipeinfer.observe import summary

    figures = out.stats()
    stages = {node: {**ready, **reports.get(node, {})} for node, ready in session.stages.items()}
    span = out.times[-1] if out.times else 0.0
    for stage in stages.values():
        if "busy" in stage and span:
            stage["busy_share"] = min(1.0, stage["busy"] / span)
        stage.pop("events", None)
    if config.json:
        limits = session.limits
        head = session.head.stats
        figures |= {
            "model": session.model_name, "draft": session.draft_name,
            "policy": limits.policy.value, "ablations": sorted(limits.ablations),
            "stages": stages, "exact_width": limits.exact_width, "notes": session.notes,
            "load_seconds": session.load_seconds,
            "head_seconds_per_token": head.busy / max(1, len(out.tokens)),
            "draft_seconds": session.draft.busy_seconds if session.draft else 0.0,
        }
        click.echo(json.dumps({"text": out.text, "tokens": out.tokens, "stats": figures}))
    else:
        click.echo()
        click.echo(f"\n{summary(figures, stages, session.notes)}", err=True)


def _write_trace(path: Path, session: Any) -> None:
    from pipeinfer.observe import chrome_trace, write_atomically

    stats = session.head.stats
    data = chrome_trace(stats.issues, stats.cancels, stats.results, session.reports,
                        stats.fates())
    write_atomically(path, json.dumps(data))
    click.echo(f"trace written to {path}", err=True)


def progress_hook(config: Config) -> Callable[[Mapping[int, Any]], None] | None:
    """One line on the terminal that shows how far each stage is; none without a terminal.

    mpirun hands its ranks pipes, so there the terminal itself is opened.
    """
    out: TextIO = sys.stderr
    if config.json or host.launched_rank() > 0:
        return None
    if not out.isatty():
        if host.launched_size() == 1:
            return None
        terminal = _terminal()
        if terminal is None:
            return None
        out = os.fdopen(terminal, "w", encoding="utf-8")

    def show(states: Mapping[int, Any]) -> None:
        parts = []
        for node, state in sorted(states.items()):
            share = f" {state.done / state.total:.0%}" if state.total > 1 else ""
            parts.append(f"{state.spare or node} {state.phase}{share}")
        done = all(state.ready for state in states.values())
        spares = any(state.spare for state in states.values())
        line = ("spare ranks: " if spares else "stages: ") + " | ".join(parts)
        out.write("\r\x1b[K" + ("" if done else line[:160]))
        out.flush()

    return show


@main.command()
@click.argument("model")
@click.option("--stages", type=click.IntRange(1), required=True, help="How many stages.")
def shard(model: str, stages: int) -> None:
    """Cut MODEL into shards ahead of time, into the cache directory."""
    from pipeinfer.models.gguf import ModelFile
    from pipeinfer.models.shard import extract_shard, stage_layers

    source = ModelFile(Path(model))
    for node, (start, stop) in enumerate(stage_layers(source.n_layers, stages), 1):
        label = f"stage {node}, layers {start}-{stop - 1}"
        with click.progressbar(length=1, label=label, file=sys.stderr) as bar:
            state = {"done": 0}

            def progress(done: int, total: int, bar: Any = bar,
                         state: dict[str, int] = state) -> None:
                bar.length = total
                bar.update(done - state["done"])
                state["done"] = done

            path = extract_shard(source, start, stop, progress=progress)
            bar.update(max(0, (bar.length or 1) - state["done"]))
        click.echo(f"{label}: {path}")


@main.command()
@click.argument("trace_file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True,
              help="Picture to write (PNG, SVG or PDF).")
@click.option("--start-ms", type=float, default=0.0, help="Skip this much of the beginning.")
@click.option("--span-ms", type=click.FloatRange(min=0.001), default=400.0, show_default=True,
              help="How much time to show.")
def trace(trace_file: Path, output: Path, start_ms: float, span_ms: float) -> None:
    """Draw a trace: stages against time, runs coloured by fate."""
    from pipeinfer.observe import draw_timeline

    draw_timeline(trace_file, output, start_ms=start_ms, span_ms=span_ms)
    click.echo(f"wrote {output}")


