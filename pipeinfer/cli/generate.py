"""`pipeinfer generate`."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from pipeinfer import host
from pipeinfer.cli.loading import progress_hook
from pipeinfer.cli.options import JOB, config_options
from pipeinfer.cli.terminal import (
    INTERRUPTED,
    Stopped,
    fetch_models,
    leave,
    note_forwarded_input,
    plain,
    reaches_terminal,
    talk_past_the_launcher,
    watch_signals,
)
from pipeinfer.config import JobConfig, RequestConfig, Resolved
from pipeinfer.core.types import Media, SamplingParams
from pipeinfer.errors import ClusterError, RequestError, UsageError
from pipeinfer.files import check_writable
from pipeinfer.models.text.tokenizer import SAFE_CHARACTERS, Tokenizer

if TYPE_CHECKING:
    from pipeinfer.cluster.generate import Generated
    from pipeinfer.cluster.session import Session
    from pipeinfer.models.text.helper import Apart
    from pipeinfer.strategies.decomposers.prompts import Opening


@config_options(*JOB, "sampling", "grammar", "request")
def generate(resolved: Resolved) -> None:
    """Continue a prompt and stream the text.

    \b
    pipeinfer generate -p "def fibonacci(n):"
    mpirun -np 4 pipeinfer generate -m big.gguf -md small.gguf -f prompt.txt
    """
    from pipeinfer.cluster import generate as gen
    from pipeinfer.cluster.launch import join
    from pipeinfer.models.locate import model_paths
    from pipeinfer.strategies.decomposers.prompts import validate

    config = resolved.config
    job, request, sampling = config.job, config.request, config.sampling
    decomposer, trace = job.speculation.decomposer, job.cluster.trace
    out = gen.Generated()
    fetch_models(job)
    interrupts = watch_signals()
    text, params, seed = "", SamplingParams(), gen.draw_seed(sampling)
    helper, shown = None, None
    if host.launched_rank() == 0:  # errors in options are to be found before anything loads
        validate(job.speculation)
        text, params = prompt_text(request), gen.sampling_params(sampling, seed)
        params = structs.replace(
            params, grammar=gen.compiled_grammar(config.grammar, model_paths(job)[0]))
        if trace:
            check_writable(Path(trace))
        helper = _helper(text, job, request)
        shown = Shown(job, model_paths(job)[0], request.image) if request.image else None
    joined = join(job)
    if joined.place.rank:
        joined.serve()
        return
    with joined.lead(progress_hook(request), grammars=bool(params.grammar)) as session:
        if session.fatal:
            click.echo(f"pipeinfer: note: {session.fatal}", err=True)
        session.tokenizer.apart = helper or session.tokenizer.apart
        (prompt, media), write = _encoded(text, request, session, shown), _writer()
        bare = not (request.chat or decomposer)
        if not request.json and not request.no_display_prompt and bare:
            write(text)
        try:
            gen.run_request(
                session, prompt, params, request.n_predict,
                stops=request.stop, ignore_eos=request.ignore_eos, seed=seed, into=out,
                on_text=None if request.json else write,
                interrupted=lambda: bool(interrupts), media=media,
            )
        except Stopped:
            out.reason = "interrupted"
            talk_past_the_launcher()
            _report(request, out, session, {})
            leave(INTERRUPTED)
    _report(request, out, session, session.reports)
    if trace:
        _write_trace(Path(trace), session)
    _exit_for(out, session.limits.n_ctx)


def _helper(text: str, job: JobConfig, request: RequestConfig) -> Apart | None:
    """Start the processes for templates and for long texts, None for a short one.

    A process that uses MPI must not fork.
    """
    from pipeinfer.models.locate import model_paths
    from pipeinfer.models.text import chat_template, helper

    if request.chat or job.speculation.decomposer:
        chat_template.prepare()
    return helper.started(model_paths(job)[0]) if len(text) > SAFE_CHARACTERS else None


class Shown:
    """The pictures of a prompt, whose rows are computed while the stages load."""

    def __init__(self, job: JobConfig, target: Path, names: Sequence[str]) -> None:
        """names: of their files. Raises UsageError for one that cannot be read, or no picture."""
        from pipeinfer.models import locate, media

        options = locate.projector(job, target)
        if options is None:
            raise UsageError(f"--image: {target.name} has no projector of pictures: give one with "
                             "--mmproj")
        if len(names) > media.MOST_OF_REQUEST:
            raise UsageError(f"--image: {len(names)} files, of {media.MOST_OF_REQUEST} at most")
        self._names, files = names, []
        for name in names:
            try:
                files.append(Path(name).read_bytes())
                media.check(files[-1])
            except OSError as error:
                raise UsageError(f"cannot read {name}: {error.strerror}") from error
            except RequestError as error:
                raise UsageError(f"--image {name}: {error}") from error
        self._pictures = media.Pictures(options)
        self._pictures.ready()
        self._rows: list[Future[Any]] = [Future() for _ in files]
        # a daemon: a job that fails must not wait for a picture, which may take minutes
        threading.Thread(target=self._compute, args=(files,), daemon=True).start()

    def _compute(self, files: Sequence[bytes]) -> None:
        for data, rows in zip(files, self._rows, strict=True):
            try:
                rows.set_result(self._pictures.show(data))
            except Exception as error:  # raised again where they are used
                rows.set_exception(error)

    def marked(self, text: str) -> str:
        """Return a prompt with marks, at its beginning if it has none."""
        from pipeinfer.models.media import MARK

        return text if MARK in text else MARK * len(self._rows) + text

    def into(self, text: str, encode: Callable[[str, bool], list[int]]
             ) -> tuple[list[int], tuple[Media, ...]]:
        """Return the prompt with the pictures at its marks.

        encode: takes a piece of text, and whether it is the first
        Raises UsageError for a text with another number of marks than there are pictures.
        """
        from pipeinfer.models.media import MARK, joined

        pieces = self.marked(text).split(MARK)
        if len(pieces) - 1 != len(self._rows):
            raise UsageError(f"the prompt has {len(pieces) - 1} marks {MARK} for {len(self._rows)} "
                             "of --image: write one for each, or none")
        parts: list[Any] = [encode(pieces[0], True)]
        for name, rows, piece in zip(self._names, self._rows, pieces[1:], strict=True):
            try:
                parts += [rows.result(), encode(piece, False)]
            except RequestError as error:
                raise RequestError(f"--image {name}: {error}") from error
        self._pictures.close()
        return joined(parts)


def _encoded(text: str, request: RequestConfig, session: Session, shown: Shown | None
             ) -> tuple[Sequence[int] | Opening, tuple[Media, ...]]:
    tokenizer = session.tokenizer
    if shown is None:
        return _encoded_text(text, request, session), ()
    if not request.chat:
        return shown.into(text, lambda piece, first: tokenizer.encode(
            piece, None if first else False, request.special))
    content = shown.marked(text)
    text, seam = tokenizer.guarded_chat([{"role": "user", "content": content}])
    return shown.into(text, lambda piece, first: tokenizer.encode_guarded(piece, seam, first))


def _encoded_text(text: str, request: RequestConfig, session: Session) -> Sequence[int] | Opening:
    from pipeinfer.cluster.generate import open_response

    messages = [{"role": "user", "content": text}]
    if session.config.speculation.decomposer:
        return open_response(session, messages)
    if request.chat:
        return session.tokenizer.encode_chat(messages)
    _note_marks(text, request, session.tokenizer)
    return session.tokenizer.encode(text, special=request.special)


def _exit_for(out: Generated, n_ctx: int) -> None:
    """Exit with the status that the end of the request requires; return after a normal one."""
    if out.reason == "interrupted":
        raise SystemExit(INTERRUPTED)
    if out.reason == "poison":
        click.echo("pipeinfer: error: stages failed repeatedly while working on this request, so "
                   "it was abandoned", err=True)
        raise SystemExit(ClusterError.exit_code)
    if out.reason == "context":
        click.echo(f"pipeinfer: error: the context of {n_ctx} tokens is full after "
                   f"{len(out.tokens)} new tokens: raise -c", err=True)
        raise SystemExit(RequestError.exit_code)


def _note_marks(text: str, config: RequestConfig, tokenizer: Tokenizer) -> None:
    """Print a note if the prompt looks like a rendered conversation but is taken as text."""
    if not config.special and (mark := tokenizer.marks.first(text)):
        click.echo(f"pipeinfer: note: the prompt holds {mark}, which is a control token of this "
                   "model but is taken as text here: --special makes it the token, --chat puts a "
                   "question into the model's chat template", err=True)


def prompt_text(config: RequestConfig) -> str:
    """Return the prompt of -p or -f. Raises UsageError."""
    if config.prompt and config.file:
        raise UsageError("give either -p or -f, not both")
    if not config.file:
        if not config.prompt:
            raise UsageError('no prompt was given: use -p "...", -f FILE or -f -')
        return config.prompt
    if config.file == "-":
        note_forwarded_input("launch/run or -f FILE")
    try:
        data = sys.stdin.buffer.read() if config.file == "-" else Path(config.file).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {config.file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{config.file} is not UTF-8 text: {error}") from error
    if not text:
        raise UsageError(f"{config.file} is empty: write a prompt into it")
    return text


def _writer() -> Callable[[str], None]:
    """Return what writes the answer: unchanged to a pipe."""
    is_shown = reaches_terminal(sys.stdout)

    def write(text: str) -> None:
        sys.stdout.write(plain(text) if is_shown else text)
        sys.stdout.flush()

    return write


def _report(
    config: RequestConfig, out: Generated, session: Session, reports: Mapping[int, dict[str, Any]]
) -> None:
    from pipeinfer.cli.summary import flops_of, memory_figures, summary
    from pipeinfer.cluster.notes import undrafted
    from pipeinfer.models.flops import row_flops

    figures = out.stats()
    stages = {node: {**ready, **reports.get(node, {})} for node, ready in session.stages.items()}
    span = out.times[-1] if out.times else 0.0
    for stage in stages.values():
        if "busy" in stage and span:
            stage["busy_share"] = min(1.0, (stage["busy"] - stage["waited"]) / span)
            stage["waited_share"] = min(1.0, stage["waited"] / span)
        stage.pop("events", None)
    others = sum(one.rss for one in session.draft_ranks)
    figures["flops"] = flops_of(out.lane, row_flops(session.loaded.job.model))
    figures |= memory_figures(out.tokens_per_second, stages, host.memory_parts()["rss"], others)
    if config.json:
        limits = session.limits
        head = session.head.stats
        figures |= {
            "model": session.model_name, "draft": session.draft_name,
            "policy": limits.policy.value, "ablations": sorted(limits.ablations),
            "tuned": session.head.tuned,
            "stages": stages, "exact_width": limits.exact_width, "notes": session.notes,
            "load_seconds": session.load_seconds,
            "head_seconds_per_token": head.busy / max(1, len(out.tokens)),
            "draft_seconds": session.draft.busy_seconds if session.draft else 0.0,
        }
        click.echo(json.dumps({"text": out.text, "tokens": out.tokens, "stats": figures}))
    else:
        click.echo()
        further = [*filter(None, [undrafted(session.limits, out.lane)])]
        click.echo(f"\n{summary(figures, stages, session.notes + further)}", err=True)


def _write_trace(path: Path, session: Session) -> None:
    from pipeinfer.cli.summary import chrome_trace
    from pipeinfer.files import write_atomically

    seen = session.head.trace
    assert seen is not None
    data = chrome_trace(seen.issues, seen.cancels, seen.results, session.reports, seen.fates())
    write_atomically(path, json.dumps(data))
    click.echo(f"trace written to {path}", err=True)
