"""`pipeinfer race`: the same prompt by three policies over stages that are paced as slow hosts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from msgspec import to_builtins

from pipeinfer import host
from pipeinfer.cli.generate import prompt_text
from pipeinfer.cli.loading import progress_hook
from pipeinfer.cli.options import JOB, config_options
from pipeinfer.cli.terminal import Stopped, fetch_models, note, progress_stream, watch_signals
from pipeinfer.cluster.generate import draw_seed, run_request, sampling_params
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.pace_hook import pace_ms
from pipeinfer.cluster.session import Session
from pipeinfer.config import JobConfig, RequestConfig, Resolved
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import UsageError
from pipeinfer.files import check_writable, write_atomically
from pipeinfer.models.text import chat_template
from pipeinfer.supervise import launcher as launchers
from pipeinfer.supervise.race_view import (
    RACERS,
    Finished,
    RaceLines,
    as_svg,
    as_text,
    lanes_of,
    result_fields,
    result_line,
)

RANKS = 6  #: a head and five stages
_TOKENS = 80
_WARM_UP = 4  #: tokens of an answer that is not shown: some work is slow only once


@config_options(*JOB, "sampling", "request", hook=("pace=40+10",), turns="off", adapt=False,
                n_predict=_TOKENS)
@click.option("-o", "--picture", type=click.Path(path_type=Path, dir_okay=False),
              help="Draw what the stages computed there, such as race.svg.")
@click.option("--events", is_flag=True,
              help="Print the texts and results as lines of JSON while they come, and end with the "
                   "process that started this.")
def race_command(resolved: Resolved, picture: Path | None, events: bool) -> None:
    """Answer a prompt one token at a time, by synchronous speculation and by PipeInfer.

    The stages are paced as slow hosts (--hook pace=MS+ROW_MS), so this is emulated. Nothing is
    tuned while it runs, since short answers would mostly show the tuning (--set adapt=true).

    Without a launcher it starts a head and five stages on this machine.

    \b
    pipeinfer race -m smollm2 --chat -p "What is photosynthesis?" -o race.svg
    """
    base, request = resolved.config.job, resolved.config.request
    if base.speculation.policy or base.speculation.decomposer or base.speculation.ablate:
        raise UsageError("race decides about --policy, --decomposer and --ablate: leave them out")
    if host.launched() and host.launched_size() == 1:
        raise UsageError("a race needs stages: start it with mpirun -np 4, or without mpirun")
    if picture is not None and picture.suffix != ".svg":
        raise UsageError(f"-o {picture}: give the name of an SVG file, such as race.svg")
    if not host.launched():
        _start_ranks(end_with_parent=events)
    fetch_models(base)
    interrupts = watch_signals()
    text, seed = "", draw_seed(resolved.config.sampling)
    if host.launched_rank() == 0:
        text = prompt_text(request)
        if picture is not None:
            check_writable(picture)
        if request.chat:
            chat_template.prepare()
    joined = join(base.replace(trace=base.cluster.trace or "race"))
    if joined.place.rank:
        joined.serve()
        return
    with joined.lead(progress_hook(request)) as session:
        session.on_change = note
        if not session.draft_name and not base.speculation.proposer:
            raise UsageError("there is nothing to propose tokens with, so every racer would decode "
                             "alike: give -md or --proposer")
        prompt = session.tokenizer.encode_chat([{"role": "user", "content": text}]) \
            if request.chat else session.tokenizer.encode(text, special=request.special)
        race = _run(session, base, prompt, sampling_params(resolved.config.sampling, seed), request,
                    events, lambda: bool(interrupts))
    _show(base, session, race, request, events, picture)
    if any(one.tokens != race[0].tokens for one in race):
        raise SystemExit(1)


def _start_ranks(*, end_with_parent: bool) -> NoReturn:
    """Become the launcher of the same command over ranks of this machine. Raises UsageError."""
    if end_with_parent:
        host.end_with_parent()
    environ = launchers.settings()
    launcher = launchers.needed(environ, "a race")
    command = launcher.command(RANKS, sys.argv[1:], environ, tagged=False)
    os.execvpe(command[0], command, environ)


def _event(kind: str, **fields: Any) -> None:
    click.echo(json.dumps({"event": kind, **fields}))


def _run(session: Session, base: JobConfig, prompt: list[int], params: SamplingParams,
         request: RequestConfig, events: bool, stopped: Callable[[], bool]) -> list[Finished]:
    """Let every policy answer; show the texts as they come."""
    out, live = progress_stream()
    shown = not request.json and not events
    lines = RaceLines(out) if live and shown else None
    if shown:
        click.echo(f"racing over {session.n_stages} stages paced as slow hosts "
                   f"({pace_ms(base.cluster.hook):g} ms and more for each run: emulated)")
    if events:
        _event("begin", stages=session.n_stages, pace_ms=pace_ms(base.cluster.hook), racers=[
            {"policy": policy.value, "name": name} for policy, name in RACERS.items()])
    race: list[Finished] = []
    session.use(base.replace(policy=Policy.ITERATIVE.value))
    run_request(session, prompt, params, _WARM_UP, ignore_eos=True, interrupted=stopped)
    for policy in RACERS:
        session.use(base.replace(policy=policy.value))
        trace = session.head.trace
        assert trace is not None
        before = len(trace.issues)

        def show(piece: str, policy: Policy = policy) -> None:
            if lines is not None:
                lines.add(policy, piece)
            if events:
                _event("text", policy=policy.value, text=piece)

        found = run_request(session, prompt, params, request.n_predict, stops=request.stop,
                            ignore_eos=request.ignore_eos, on_text=show, interrupted=stopped)
        session.head.drain(base.cluster.timeout)
        if stopped():
            raise Stopped
        ids = [run_id for run_id, *_ in trace.issues[before:]]
        race.append(Finished(policy, tuple(found.tokens), found.text, found.tokens_per_second,
                             found.times[-1] if found.times else 0.0, (ids[0], ids[-1])))
        if events:
            _event("end", **result_fields(race[-1], race[0]))
        elif shown and lines is None:
            click.echo(result_line(race[-1], race[0]))
    if lines is not None:
        lines.clear()
        for one in race:
            click.echo(result_line(one, race[0]))
    return race


def _show(base: JobConfig, session: Session, race: list[Finished], request: RequestConfig,
          events: bool, picture: Path | None) -> None:
    from pipeinfer.cli.summary import chrome_trace

    seen = session.head.trace
    assert seen is not None
    trace = chrome_trace(seen.issues, seen.cancels, seen.results, session.reports, seen.fates())
    if base.cluster.trace:
        write_atomically(Path(base.cluster.trace), json.dumps(trace))
    span, lanes = lanes_of(trace, race)
    if request.json:
        click.echo(json.dumps([{**to_builtins(one), "ratio": one.speed / race[0].speed}
                               for one in race]))
    elif events:
        _event("lanes", span=span, lanes=to_builtins(lanes))
    elif span > 0:
        click.echo(f"\nwhat the stages computed:\n{as_text(span, lanes)}")
    if picture is not None and span > 0:
        title = (f"{session.model_name}, draft {session.draft_name or 'none'}: "
                 f"{session.n_stages} stages paced at {pace_ms(base.cluster.hook):g} ms (emulated)")
        write_atomically(picture, as_svg(title, span, lanes,
                                         [result_line(one, race[0]) for one in race]))
        if not request.json and not events:
            click.echo(f"picture: {picture}")
