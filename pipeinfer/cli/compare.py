"""`pipeinfer compare`: one set of prompts, every method, one table.

Methods share one loaded pipeline: the head takes another scheduler for each, what the stages hold
stays. It knows how to ask and what to count; the methods themselves are elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from pipeinfer import host
from pipeinfer.cli.options import JOB, config_options
from pipeinfer.cli.terminal import fetch_models, progress_hook
from pipeinfer.cluster.generate import (
    Generated,
    draw_seed,
    open_response,
    run_request,
    sampling_params,
)
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.session import Session
from pipeinfer.cluster.sizing import row_sizes
from pipeinfer.config import JobConfig, Resolved
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import PipeinferError, RequestError, UsageError
from pipeinfer.models.text import chat_template
from pipeinfer.scheduler.settings import lanes_per_response
from pipeinfer.strategies import registry

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question, and how good an answer to it is: text to 0 .. 1 (None: unknown)."""

    question: str
    score: Callable[[str], float] | None = None
    exact: Callable[[str], bool] | None = None


@dataclass(slots=True)
class Answer:
    """How a method answered a prompt.

    method: as the user named it
    seconds: from asking to the last token, prompt included
    tokens: all tokens that the model chose
    visible: tokens of which the reader sees something
    steps: passes through the pipeline that had to follow one another
    runs: runs issued
    cells: maximum cells in use
    busy: share of the stages' time spent on runs
    wasted: share of that spent on wrong guesses
    acceptance: share of guesses that were right, None without guesses
    quality: score of the answer from 0 to 1, None where it is not scored
    exact: whether the answer is right in every item, None where it is not known
    text: the answer
    """

    method: str
    seconds: float
    tokens: int
    visible: int
    steps: int
    runs: int
    cells: int
    busy: float
    wasted: float
    acceptance: float | None
    quality: float | None
    exact: bool | None
    text: str = field(repr=False, default="")


def parse_method(text: str, base: JobConfig) -> JobConfig:
    """A config for `[decomposer][+proposer ...][@policy]`, or `plain`. Raises UsageError."""
    name, _, policy = text.partition("@")
    parts = [] if name == PLAIN else name.split("+")
    decomposers = [part for part in parts if part in registry.decomposers()]
    proposers = tuple(part for part in parts if part in registry.proposers())
    wrong = [part for part in parts if part not in registry.specs()]
    if wrong or len(decomposers) > 1 or policy not in ("", *Policy):
        raise UsageError(
            f"--method {text}: write {PLAIN}, or strategies joined by +: at most one of "
            f"{', '.join(registry.decomposers())}, any number of "
            f"{', '.join(registry.proposers())}; then optionally @speculative"
        )
    return base.replace(
        decomposer=decomposers[0] if decomposers else "", proposer=proposers,
        policy=policy or (Policy.PIPEINFER if proposers else Policy.ITERATIVE).value,
        speculation="off" if not proposers else base.speculation.speculation)


def superset(configs: Sequence[JobConfig], base: JobConfig) -> JobConfig:
    """What has to be loaded so that every one of `configs` can be used."""
    decomposers = {config.speculation.decomposer for config in configs} - {""}
    proposers = tuple(dict.fromkeys(p for config in configs for p in config.speculation.proposer))
    demanding = sorted(decomposers, key=lambda name: (not registry.decomposer(name).gaps, name))
    first = next(iter(demanding), "")
    whole = base.replace(decomposer=first, proposer=proposers, policy="",
                         speculation=base.speculation.speculation if proposers else "off")
    rows = row_sizes(whole.speculation)
    if rows.paths and decomposers and base.speculation.partitions < 0:
        lanes = lanes_per_response(base.speculation.decompose_threads)
        whole = whole.replace(partitions=16 + rows.paths * lanes)
    return whole


def ask(session: Session, config: JobConfig, prompt: Prompt, method: str, params: SamplingParams,
        n_predict: int) -> Answer:
    """One prompt by the method that the session is set to."""
    opening = open_response(session, [{"role": "user", "content": prompt.question}])
    out, cells = Generated(), 0

    def sample(_: str) -> None:
        nonlocal cells
        cells = max(cells, session.head.snapshot()["cells_used"])

    session.head.observe(True)
    started = time.monotonic()
    run_request(session, opening, params, n_predict, into=out, on_text=sample)
    seconds = time.monotonic() - started
    session.head.drain(config.cluster.timeout)
    busy, wasted = use_of_stages(session.head.take_runs())
    session.head.observe(False)
    return Answer(
        method, seconds, out.lane.accepted, out.visible, out.lane.steps, out.lane.runs, cells,
        busy / (seconds * session.n_stages), wasted / busy if busy else 0.0,
        out.acceptance if config.speculation.proposer else None,
        prompt.score(out.text) if prompt.score else None,
        prompt.exact(out.text) if prompt.exact else None, out.text)


def use_of_stages(reports: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds that stages spent on runs (`Head.take_runs`), and those of wrong guesses."""
    spent: dict[int, float] = {}
    wrong: set[int] = set()
    for report in reports:
        if "spans" in report:
            spent[report["id"]] = sum(seconds for _, seconds, _ in report["spans"])
        if report.get("fate") == "rejected":
            wrong.add(report["id"])
    return sum(spent.values()), sum(spent.get(run, 0.0) for run in wrong)


def geometric(values: Sequence[float]) -> float:
    """The geometric mean, nan of nothing."""
    good = [v for v in values if v > 0]
    return math.exp(statistics.fmean(map(math.log, good))) if good else math.nan


def rows_of(answers: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    """The table: one row per method, against the plain answers to the same prompts.

    speedup: of wall-clock time; steps_speedup: of steps (theoretical speedup, PASTA section 5.1),
    both geometric means; compression: chosen tokens per step; parallelism: visible ones.
    """
    plain = answers.get(PLAIN, ())
    table = []
    for method, given in answers.items():
        pairs = list(zip(plain, given, strict=False))
        accepted = [a.acceptance for a in given if a.acceptance is not None]
        quality = [a.quality for a in given if a.quality is not None]
        exact = [a.exact for a in given if a.exact is not None]
        table.append({
            "method": method, "prompts": len(given),
            "tokens_per_second": geometric([a.visible / a.seconds for a in given]),
            "seconds": geometric([a.seconds for a in given]),
            "speedup": geometric([p.seconds / a.seconds for p, a in pairs]),
            "steps": statistics.fmean([a.steps for a in given]),
            "steps_speedup": geometric([p.steps / max(a.steps, 1) for p, a in pairs]),
            "compression": geometric([a.tokens / max(a.steps, 1) for a in given]),
            "parallelism": geometric([a.visible / max(a.steps, 1) for a in given]),
            "acceptance": statistics.fmean(accepted) if accepted else None,
            "quality": statistics.fmean(quality) if quality else None,
            "exact": statistics.fmean(exact) if exact else None,
            "busy": statistics.fmean([a.busy for a in given]),
            "wasted": statistics.fmean([a.wasted for a in given]),
            "cells": max(a.cells for a in given),
            "same_text": sum(p.text == a.text for p, a in pairs),
        })
    return table


_COLUMNS = (("method", "method", "{}"), ("tokens_per_second", "tokens/s", "{:.1f}"),
            ("speedup", "speedup", "{:.2f}"), ("steps", "steps", "{:.1f}"),
            ("steps_speedup", "in steps", "{:.2f}"), ("compression", "S", "{:.2f}"),
            ("parallelism", "parallel", "{:.2f}"), ("acceptance", "accepted", "{:.0%}"),
            ("quality", "quality", "{:.3f}"), ("exact", "exact", "{:.1%}"),
            ("busy", "busy", "{:.0%}"), ("wasted", "wasted", "{:.0%}"), ("cells", "cells", "{}"),
            ("same_text", "same text", "{}"))


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """The table as Markdown that also reads well as it is."""
    lines = [[title for _, title, _ in _COLUMNS]]
    for row in table:
        lines.append(["" if row[key] is None else form.format(row[key])
                      for key, _, form in _COLUMNS])
    widths = [max(len(line[k]) for line in lines) for k in range(len(_COLUMNS))]
    text = ["| " + " | ".join(cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in
                              enumerate(zip(line, widths, strict=True))) + " |" for line in lines]
    rule = "|" + "|".join("-" * (w + 1) + (":" if k else "-") for k, w in enumerate(widths)) + "|"
    return "\n".join([text[0], rule, *text[1:]])


def task_prompts(count: int, kind: str, seed: int) -> Iterator[Prompt]:
    """Held-out generated tasks with their scorers. Raises UsageError for an unknown kind."""
    from pipeinfer.training.tasks import tasks

    if kind not in tasks.KINDS:
        raise UsageError(f"--kind {kind}: choose from {', '.join(tasks.KINDS)}")
    for task in itertools.islice(tasks.stream(seed, held_out=True, kind=kind), count):
        yield Prompt(task.question, functools.partial(tasks.score, task),
                     functools.partial(tasks.exact_match, task))


def file_prompts(path: Path) -> list[Prompt]:
    """A prompt per line, or per JSON object with "question" and maybe "answer" (exact match).

    Raises UsageError.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [json.loads(line) if line.lstrip().startswith("{") else {"question": line}
                 for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read prompts from {path}: {error}") from error
    prompts = []
    for number, entry in enumerate(found, 1):
        question, answer = entry.get("question"), entry.get("answer")
        if not isinstance(question, str) or not question:
            raise UsageError(f"{path}: prompt {number} has no \"question\"")
        if answer is None:
            prompts.append(Prompt(question))
        else:
            equal = functools.partial(_equal, str(answer).strip())
            prompts.append(Prompt(question, equal, equal))
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return prompts


def _equal(wanted: str, text: str) -> bool:
    return text.strip() == wanted


@config_options(*JOB, "sampling", "request")
@click.option("--method", "methods", multiple=True, metavar="M",
              help="plain, or [decomposer][+proposer...][@policy], such as pasta, lookahead, "
                   "pasta+lookahead or draft@speculative (repeatable) [default: plain and every "
                   "method that the model supports].")
@click.option("--tasks", type=click.IntRange(1), default=20, show_default=True,
              help="How many generated tasks to answer (without --prompts).")
@click.option("--kind", default="retrieval", show_default=True,
              help="Which kind of tasks to generate.")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE",
              help='Your own prompts: one per line, or JSON lines with "question" and "answer".')
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Write table.md, results.json and plots there.")
def compare_command(resolved: Resolved, methods: tuple[str, ...], tasks: int, kind: str,
                    prompts: Path | None, out: Path | None) -> None:
    """Answer the same prompts by every method and compare.

    \b
    pipeinfer compare --tasks 10
    mpirun -np 5 pipeinfer compare --backend torch --method plain --method pasta --pace-ms 20
    """
    base, request = resolved.config.job, resolved.config.request
    own = base.speculation
    if own.decomposer or own.proposer or own.policy:
        raise UsageError("compare chooses strategies with --method: leave out --decomposer, "
                         "--proposer and --policy")
    if not (base.model.model or base.model.hf_repo):
        base = base.replace(model="task")
    fetch_models(base)
    torch = base.model.backend == "torch" or Path(base.model.model).is_dir()
    if not methods:
        methods = (PLAIN, *(name for name, spec in registry.decomposers().items()
                            if torch or not spec.gaps),
                   *(name for name, spec in registry.proposers().items() if not spec.needs))
    names = tuple(dict.fromkeys((PLAIN, *methods)))
    configs = {name: parse_method(name, base) for name in names}
    whole = superset(list(configs.values()), base)
    configs = {name: config.replace(partitions=whole.speculation.partitions)
               for name, config in configs.items()}
    asked = file_prompts(prompts) if prompts else list(task_prompts(tasks, kind, 1))
    params = sampling_params(resolved.config.sampling, draw_seed(resolved.config.sampling))
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    if host.launched_rank() == 0:
        chat_template.prepare()
    joined = join(whole)
    if joined.place.rank:
        joined.serve()
        return
    with joined.lead(progress_hook(request)) as session:
        session.use(configs[PLAIN])
        ask(
            session, configs[PLAIN], asked[0], PLAIN, params, request.n_predict
        )  # what is slow only once
        for name in names:
            session.use(configs[name])
            for number, prompt in enumerate(asked, 1):
                click.echo(f"\r\x1b[K{name}: {number}/{len(asked)}", nl=False, err=True)
                try:
                    answers[name].append(
                        ask(session, configs[name], prompt, name, params, request.n_predict))
                except RequestError as error:
                    raise UsageError(f"{name}, prompt {number}: {error}") from error
        click.echo("\r\x1b[K", nl=False, err=True)
        stages = session.n_stages
        notes = session.notes
    table = rows_of(answers)
    pace = f", {base.cluster.pace_ms:g} ms per decode" if base.cluster.pace_ms else ""
    title = f"{len(asked)} prompts, {stages} stages{pace}"
    click.echo(f"{title}\n\n{table_text(table)}")
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if out is not None:
        write(out, title, table, answers)


def write(out: Path, title: str, table: Sequence[Mapping[str, Any]],
          answers: Mapping[str, Sequence[Answer]]) -> None:
    """Leave the table, every answer and the plots in a folder. Raises PipeinferError."""
    from pipeinfer.experiments.plots import draw

    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "table.md").write_text(f"{title}\n\n{table_text(table)}\n", encoding="utf-8")
        (out / "results.json").write_text(json.dumps({
            "title": title, "table": table,
            "answers": {name: [dataclasses.asdict(a) for a in given]
                        for name, given in answers.items()}}, indent=1), encoding="utf-8")
        draw(out, title, table)
    except OSError as error:
        raise PipeinferError(f"cannot write to {out}: {error}") from error
    click.echo(f"wrote {out}/table.md, results.json, speedup.png, quality.png", err=True)
