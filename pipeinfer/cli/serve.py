"""`pipeinfer serve`: starts and ends the HTTP process and the cluster.

It determines the order of start and end; `engine` (rank 0) and `app` (the HTTP process) serve.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click

from pipeinfer import host
from pipeinfer.cli.loading import progress_hook, progress_text
from pipeinfer.cli.options import JOB, config_options
from pipeinfer.cli.terminal import Stopped, fetch_models, note
from pipeinfer.cluster import cleanup
from pipeinfer.cluster.assembly import ProgressHook
from pipeinfer.cluster.generate import sampling_params
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.session import Session
from pipeinfer.config import AUTO, NO_DRAFT, JobConfig, Resolved, SamplingConfig, ServeConfig
from pipeinfer.errors import PipeinferError, UsageError
from pipeinfer.models.locate import advice, model_paths, open_model, projector, targeted
from pipeinfer.server import http_process, journal, tls
from pipeinfer.server.engine import Engine
from pipeinfer.server.frames import STOPPED, Loading
from pipeinfer.server.keys import Allowance, parse_line
from pipeinfer.server.settings import Settings
from pipeinfer.strategies.decomposers.prompts import methods_for

PARALLEL = 16  #: requests decoded at the same time unless --parallel says otherwise
_CHILD_SECONDS = 10.0
_COMMENT = re.compile(r"(^|\s)#.*")  #: of a key file; a key may have this sign inside
_LOCAL = ("127.0.0.1", "::1", "localhost")


@config_options(*JOB, "sampling", "serve", parallel=PARALLEL, model=AUTO)
def serve_command(resolved: Resolved) -> None:
    """Serve the model over HTTP, as the OpenAI API does.

    \b
    pipeinfer serve
    pipeinfer up -np 4 -- serve -m model.gguf             # over 4 processes of this machine
    pipeinfer up --hosts FILE -- serve -m big.gguf -md small.gguf    # over the hosts of a file
    """
    config = resolved.config
    if host.launched_rank() > 0:
        join(config.job).serve()
        return
    fetch_models(config.job)
    if advised := advice(config.job):
        note(advised)
    settings, signals = child_settings(config.job, config.serve, config.sampling), _Signals()
    check_no_trace(config.job)

    def listener() -> socket.socket:
        return http_process.listen(config.serve.host, config.serve.port,
                                   config.serve.client_timeout)

    door = http_process.door_here()
    child = http_process.start_own(settings, listener()) if door is None \
        else http_process.enter(door, settings, listener)

    def begin(engine: Engine, session: Session) -> None:
        signals.engine = engine
        signals.check()
        _show(config.serve, settings, child, session)

    shown = progress_hook(config.request)

    def progress(states: Any) -> None:
        signals.check()
        if shown is not None:
            shown(states)

    try:
        serve(config.job, config.serve, child, progress, begin)
    finally:
        if signals.seen and cleanup.VARIABLE not in os.environ:  # else the supervisor says so
            click.echo("pipeinfer: stopped", err=True)


def check_no_trace(job: JobConfig) -> None:
    """Raise UsageError if the job is to keep a trace."""
    if job.cluster.trace:
        raise UsageError("--trace keeps every run in memory, so a server cannot use it: use it "
                         "with generate or bench")


def serve(job: JobConfig, config: ServeConfig, child: http_process.HttpProcess,
          show: ProgressHook, begin: Callable[[Engine, Session], None]) -> None:
    """Run rank 0's part.

    child: the HTTP process. show: called with the stages' loading progress.
    begin: called when the engine is about to serve.
    Raises whatever ends the job, after sending it to the HTTP process.
    """

    def progress(states: Any) -> None:
        child.link.send(Loading({
            f"spare rank {s.spare}" if s.spare else str(node):
                {"phase": s.phase, "done": s.done, "total": s.total, "text": progress_text(s)}
            for node, s in states.items()}))
        show(states)

    with _telling(child), join(job).lead(progress) as session:
        engine = Engine(session, child.link, config.drain_seconds)
        begin(engine, session)
        with _telling(child):  # before the session ends, which takes longer than a launcher waits
            engine.run()
    child.end(_CHILD_SECONDS)


def _show(config: ServeConfig, settings: Settings, child: http_process.HttpProcess, session: Session
          ) -> None:
    is_private = child.url.startswith(http_process.UNIX)
    if not is_private:  # else the command that has made its name shows it
        click.echo(f"pipeinfer: {settings.name} on {child.url} with {session.n_stages} "
                   f"stage{'s' * (session.n_stages != 1)}", err=True)
    for text in filter(None, [session.fatal, *session.notes]):
        note(text)
    if config.remember_answers and not session.looks_up:
        note("--remember-answers has no effect without prompt lookup: add --proposer "
             "prompt-lookup")
    if not settings.keys and config.host not in _LOCAL and not is_private:
        note("anyone who can reach this address can use the server; require keys with "
             "--api-key-file")


@contextlib.contextmanager
def _telling(child: http_process.HttpProcess) -> Iterator[None]:
    """Send an error that ends the job to the HTTP process."""
    try:
        yield
    except Stopped as stop:
        child.fail(str(stop))
        raise
    except BaseException as error:
        name = "" if isinstance(error, PipeinferError) else f"{type(error).__name__}: "
        child.fail(f"{name}{error}")
        raise


class _Signals:
    """Handles signals: the first lets open requests complete, the second ends the process at
    once.

    Under mpirun, SIGTERM precedes SIGKILL by a quarter of a second, because the user has ended the
    job or another rank has died: enough only for a message to the HTTP process. There SIGUSR1,
    which mpirun forwards and launch/run sends, lets open requests complete.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.seen, self._stopped = 0, ""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)  # the shell sends a second one
        self.seen += 1
        at_once = number in (signal.SIGTERM, signal.SIGHUP) and host.launched()
        if self.engine is None or self.seen > 1 or at_once:
            asked = self.seen > 1 or number != signal.SIGTERM or not host.launched()
            self._stopped = STOPPED if asked else (
                "the job was terminated, by a user or by its launcher after another rank died")
            raise Stopped(self._stopped)
        self.engine.leave()

    def check(self) -> None:
        """Raise Stopped if a signal came while C code called Python, which lost the exception."""
        if self._stopped:
            raise Stopped(self._stopped)


def child_settings(job: JobConfig, config: ServeConfig, sampling: SamplingConfig) -> Settings:
    """Return the settings of the HTTP process. Raises UsageError, ModelError."""
    target = targeted(job)
    open_model(target.path)  # raises for a bad file before anything starts
    files = tls.check(config.ssl_cert_file, config.ssl_key_file)
    serve = dataclasses.replace(
        config, api_key=(), cors_origin=origins(config), allow_host=host_names(config),
        ssl_cert_file=files.certificate, ssl_key_file=files.key,
        journal=str(journal.check(config.journal)) if config.journal else "")
    return Settings(
        str(target.path), config.alias or target.name, serve, api_keys(config),
        parallel=job.speculation.parallel, check_hosts=bool(config.allow_host), seed=sampling.seed,
        defaults=sampling_params(sampling, 0), decomposer=job.speculation.decomposer,
        decomposers=tuple(methods_for(job)), race=race_words(job, config),
        projector=projector(job, target.path))


def race_words(job: JobConfig, config: ServeConfig) -> tuple[str, ...]:
    """Return the words of `pipeinfer race` with the job's models and proposers.

    There are none where nothing proposes tokens, and where other hosts can reach the server: a race
    takes memory and processor time of this host.
    """
    target, draft = model_paths(job)
    proposers = job.speculation.proposer
    if not config.race or config.host not in _LOCAL or not (draft or proposers):
        return ()
    words = ["-m", str(target), "-md", str(draft or NO_DRAFT), "--temp", "0",
             "--backend", job.model.backend]
    return (*words, *(word for name in proposers for word in ("--proposer", name)))


def host_names(config: ServeConfig) -> tuple[str, ...]:
    """Return the host names of the server. Raises UsageError for an invalid one."""
    for name in config.allow_host:
        if not name or not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise UsageError(f"--allow-host {name!r} is not the name of a host: leave out the "
                             "scheme, the port and the path")
    return tuple(name.lower().rstrip(".") for name in (*config.allow_host, config.host))


def origins(config: ServeConfig) -> tuple[str, ...]:
    """Return the allowed origins as browsers send them: in lower case, without a slash at the end.

    Raises UsageError for what is none.
    """
    found = tuple(one.lower().removesuffix("/") for one in config.cors_origin)
    for given, one in zip(config.cors_origin, found, strict=True):
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[\w.-]+)(:\d+)?", one):
            raise UsageError(f"--cors-origin {given!r} is not an origin: write scheme, host and "
                             "port of one site, such as https://chat.example.org, or * for all")
    return found


def api_keys(config: ServeConfig) -> dict[str, Allowance]:
    """Return every valid API key and its permissions.

    Raises UsageError for a file that cannot be used.
    """
    keys = {key.strip(): Allowance() for key in config.api_key}
    if config.api_key_file:
        try:
            text = Path(config.api_key_file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read --api-key-file {config.api_key_file}: {error}") from (
                error)
        lines = [_COMMENT.sub("", line).strip() for line in text.splitlines()]
        found: dict[str, Allowance] = {}
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            where = f"--api-key-file {config.api_key_file}, line {number}"
            key, allowance = parse_line(line, where)
            if found.get(key, keys.get(key, allowance)) != allowance:
                raise UsageError(f"{where}: this key was given before with other scopes or "
                                 "limits: keep one of the two")
            found[key] = allowance
        if not found:
            raise UsageError(f"--api-key-file {config.api_key_file} contains no key: write one key "
                             "per line")
        keys |= found
    if not all(key.strip() for key in keys):
        raise UsageError("an API key is empty: give one, or leave out --api-key to serve without "
                         "keys")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise UsageError("an API key contains characters that are not allowed in an HTTP header: "
                         "use ASCII letters, digits and punctuation")
    return keys
