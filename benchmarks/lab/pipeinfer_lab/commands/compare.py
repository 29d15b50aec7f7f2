"""`pipeinfer compare`: one set of prompts, every method, one table.

Methods share one loaded pipeline: the head takes another scheduler for each, what the stages hold
stays. It knows how to ask and what to count; the methods themselves are elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from pipeinfer import host
from pipeinfer.cli.loading import progress_hook
from pipeinfer.cli.options import JOB, config_options
from pipeinfer.cli.summary import flops_of
from pipeinfer.cli.terminal import fetch_models, show_over
from pipeinfer.cluster.generate import (
    Generated,
    draw_seed,
    open_response,
    run_request,
    sampling_params,
)
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.pace_hook import pace_ms
from pipeinfer.cluster.session import Session
from pipeinfer.cluster.sizing import row_sizes
from pipeinfer.config import JobConfig, Resolved
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import RequestError, UsageError
from pipeinfer.models.flops import row_flops
from pipeinfer.models.locate import TASK_MODEL
from pipeinfer.models.text import chat_template
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import lanes_per_response
from pipeinfer.strategies import registry
from pipeinfer.strategies.decomposers.pasta import ASYNC
from pipeinfer_lab.commands.comparison import (
    BASELINE,
    PLAIN,
    Answer,
    by_kind,
    prepare,
    read_baseline,
    reference_of,
    rows_of,
    slow_answers,
    table_text,
    use_of_stages,
    write,
)
from pipeinfer_lab.quality.prompt import Prompt
from pipeinfer_lab.quality.prompt_sets import file_prompts

ORACLE = "oracle"
ASKED = ("cod", "cod-pdos")  #: by prompts that the task model was not trained for


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
    """Answer a prompt by the method that the session is set to."""
    opening = open_response(session, prompt.messages)
    out, scheduler = Generated(), session.head.scheduler
    assert isinstance(scheduler, Scheduler)
    scheduler.most_cells = 0
    session.head.observe(True)
    started = time.monotonic()
    run_request(session, opening, params, n_predict, into=out)
    seconds = time.monotonic() - started
    session.head.drain(config.cluster.timeout)
    busy, wasted = use_of_stages(session.head.take_runs())
    session.head.observe(False)
    cells = scheduler.most_cells
    cache = sum(ready.cache_bytes for ready in session.assembly.ready.values())
    return Answer(
        method, seconds, out.lane.accepted, out.visible, out.lane.steps, out.lane.runs, cells,
        busy / (seconds * session.n_stages), wasted / busy if busy else 0.0,
        out.acceptance if config.speculation.proposer else None,
        prompt.score(out.text) if prompt.score else None,
        prompt.exact(out.text) if prompt.exact else None, out.text, prompt.kind,
        cells * cache / session.loaded.cells / 2**20, len(set(out.threads) | {0}),
        prompt.rouge(out.text), flops=flops_of(out.lane, row_flops(session.loaded.job.model)),
        gave_up=out.lane.gave_up, blocks=block_lengths(session, out))


def block_lengths(session: Session, out: Generated) -> tuple[int, ...]:
    """Return the tokens of each thread of a response but the main one, by its order, with those
    that PASTA's interpreter feeds."""
    fed = len(session.tokenizer.split(ASYNC.decode(), special=True))
    counts = Counter(out.threads)
    return tuple(fed + counts[thread] for thread in sorted(counts) if thread)


def ask_again(session: Session, config: JobConfig, prompt: Prompt, before: Answer, method: str,
              params: SamplingParams, n_predict: int) -> Answer:
    """Answer a prompt with the true lengths of the blocks of an answer that is there (PASTA,
    section 6.2: the oracle), and set the session back to the method."""
    if not before.blocks:
        return dataclasses.replace(before, method=method)
    lengths = ",".join(map(str, before.blocks))
    own = {**config.speculation.own, "pasta_positions": f"{ORACLE}:{lengths}"}
    again = dataclasses.replace(config, speculation=dataclasses.replace(
        config.speculation, own=own))
    session.use(again)
    try:
        return ask(session, again, prompt, method, params, n_predict)
    finally:
        session.use(config)


def behind(prompt: Prompt, asked: Sequence[Prompt], answers: Sequence[Answer]) -> Prompt:
    """Return a prompt with the conversation that it continues, if it does.

    asked: the prompts as they were asked before it; answers: the answers to them
    """
    if not prompt.follows:
        return prompt
    answer = {"role": "assistant", "content": answers[-1].text}
    return dataclasses.replace(prompt, before=[*asked[-1].messages, answer])


def check_lengths(session: Session, method: str, asked: Sequence[Prompt], n_predict: int) -> None:
    """Raise UsageError for prompts that the context cannot hold, before any is answered.

    The session is set to the method. Of second turns the conversation before them is not counted.
    """
    longest, beyond = 0, []
    for number, prompt in enumerate(asked, 1):
        try:
            tokens = len(open_response(session, prompt.messages).prompt)
        except RequestError as error:
            raise UsageError(f"{method}, prompt {number}: {error}") from error
        longest = max(longest, tokens)
        if tokens >= session.limits.n_ctx:
            beyond.append(number)
    if beyond:
        raise UsageError(f"{method}: {len(beyond)} of {len(asked)} prompts are longer than the "
                         f"context of {session.limits.n_ctx} tokens (the first is prompt "
                         f"{beyond[0]}): leave them out, or raise the context with -c "
                         f"{longest + n_predict}")


def task_prompts(count: int | None, kind: str, seed: int) -> Iterator[Prompt]:
    """Questions of a kind with their scorers: held-out tasks of those that the task model was
    trained on, or of those for instruction models. count: None for the usual 20, or all there are.
    Raises UsageError for an unknown kind, or more than there are."""
    from pipeinfer_lab.quality import task_sets
    from pipeinfer_lab.training.tasks import tasks

    if count is None:
        count = min(20, task_sets.written(kind) or 20)
    if kind in (*task_sets.KINDS, "mixed"):
        yield from task_sets.prompts(kind, count, seed)
        return
    if kind not in tasks.KINDS:
        raise UsageError(f"--kind {kind}: choose from {', '.join(tasks.KINDS)} (for the task "
                         f"model), {', '.join(task_sets.KINDS)}, mixed")
    for task in itertools.islice(tasks.stream(seed, held_out=True, kind=kind), count):
        yield Prompt(task.question, functools.partial(tasks.score, task),
                     functools.partial(tasks.exact_match, task), kind=kind)


def judge_all(address: str, model: str, by: str, asked: Sequence[Prompt],
              answers: Mapping[str, Sequence[Answer]]) -> str:
    """A judge's marks and verdicts into the answers; what went wrong, empty for nothing."""
    from pipeinfer_lab.quality import judge
    from pipeinfer_lab.training.pasta.endpoint import Endpoint, EndpointError

    endpoint, missing, against = Endpoint(address, model), 0, reference_of(answers)
    try:
        endpoint.ask([{"role": "user", "content": "Are you there?"}], max_tokens=8)
    except EndpointError as error:  # the answers are there, and took their time
        return f"nothing was judged: {error}"
    for name, given in answers.items():
        for number, (prompt, answer) in enumerate(zip(asked, given, strict=True)):
            show_over(f"judging {name}: {number + 1}/{len(asked)}")
            if by in ("marks", "both"):
                answer.rating = judge.rate(endpoint, prompt.question, prompt.reference,
                                           answer.text)
                missing += answer.rating is None
            if by in ("pairs", "both") and name != against:
                answer.won = judge.prefer(endpoint, prompt.question, answer.text,
                                          answers[against][number].text)
                missing += answer.won is None
    show_over("")
    return f"{missing} judgements could not be had or read" if missing else ""


@config_options(*JOB, "sampling", "request")
@click.option("--method", "methods", multiple=True, metavar="M",
              help="plain, or [decomposer][+proposer...][@policy], such as pasta, lookahead, "
                   "pasta+lookahead or draft@speculative (repeatable) [default: plain and every "
                   "method that the model supports].")
@click.option("--tasks", type=click.IntRange(1), help="How many tasks to answer (without "
              "--prompts) [default: 20, or as many as there are].")
@click.option("--kind", help="Which kind of tasks (without --prompts): of those that the task "
              "model knows, or students, documents, planning, general, mixed [default: retrieval].")
@click.option("--prompts", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Your own prompts: one per line, JSON lines, or files in the forms of MT-Bench, "
                   "GSM8K, HumanEval and others (docs/decomposers.md).")
@click.option("--pasta-oracle", "oracle", is_flag=True, help="Answer every prompt of pasta again, "
              "with the lengths that the blocks of its answer had as their promised ones.")
@click.option("--judge", metavar="URL", help="Address of a model that judges the answers, such as "
              "http://127.0.0.1:8080/v1 (key: OPENAI_API_KEY).")
@click.option("--judge-model", default="default", show_default=True, metavar="NAME",
              help="Model to ask there.")
@click.option("--judge-by", type=click.Choice(["marks", "pairs", "both"]), default="both",
              show_default=True, help="Marks from 1 to 5, pairs against plain in both orders.")
@click.option("--baseline", type=click.Path(path_type=Path, exists=True, file_okay=False),
              metavar="DIR", help="Compare with the plain answers that another compare -o has left "
              "there, such as those of a model from baseline-sft.")
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Write table.md, results.json and plots there.")
@click.option("--plots/--no-plots", default=True, show_default=True,
              help="Draw speedup.png and quality.png, too.")
def compare_command(  # noqa: PLR0913  (an option each)
    resolved: Resolved, methods: tuple[str, ...], tasks: int | None, kind: str | None,
    prompts: Path | None, oracle: bool, judge: str | None, judge_model: str,
    judge_by: str, baseline: Path | None, out: Path | None, plots: bool,
) -> None:
    """Answer the same prompts by every method and compare.

    \b
    pipeinfer compare --tasks 10
    mpirun -np 5 pipeinfer compare --backend torch --method plain --method pasta --hook pace=20
    pipeinfer compare -m smollm2 --kind mixed --method pdos --judge http://127.0.0.1:8080/v1
    """
    base, request = resolved.config.job, resolved.config.request
    if prompts and (tasks or kind):
        raise UsageError("--prompts takes the place of generated tasks: leave out --tasks and "
                         "--kind")
    configs, whole = configs_for(base, methods)
    asked = file_prompts(prompts) if prompts else list(
        task_prompts(tasks, kind or "retrieval", 1))
    params = sampling_params(resolved.config.sampling, draw_seed(resolved.config.sampling))
    questions = [prompt.question for prompt in asked]
    known = {} if baseline is None else {BASELINE: read_baseline(baseline, questions)}
    known_lengths = {name: f"{name}, {ORACLE}" for name, config in configs.items()
                     if oracle and config.speculation.decomposer == "pasta"}
    if oracle and not known_lengths:
        raise UsageError("--pasta-oracle answers again what pasta has answered: add --method pasta")
    answers: dict[str, list[Answer]] = {**known, **{
        row: [] for name in configs for row in (name, *filter(None, [known_lengths.get(name)]))}}
    if host.launched_rank() == 0:
        if out is not None:
            prepare(out, plots=plots)
        chat_template.prepare()
    joined = join(whole.replace(turns="off"))  # methods share what one of them has loaded
    if joined.place.rank:
        joined.serve()
        return
    with joined.lead(progress_hook(request)) as session:
        for name in reversed(configs):  # plain is the first
            session.use(configs[name])
            check_lengths(session, name, asked, request.n_predict)
        ask(
            session, configs[PLAIN], asked[0], PLAIN, params, request.n_predict
        )  # what is slow only once
        for name in configs:
            session.use(configs[name])
            so_far: list[Prompt] = []
            for number, prompt in enumerate(asked, 1):
                so_far.append(behind(prompt, so_far, answers[name]))
                show_over(f"{name}: {number}/{len(asked)}")
                try:
                    answers[name].append(
                        ask(session, configs[name], so_far[-1], name, params, request.n_predict))
                    if name in known_lengths:
                        answers[known_lengths[name]].append(ask_again(
                            session, configs[name], so_far[-1], answers[name][-1],
                            known_lengths[name], params, request.n_predict))
                except RequestError as error:
                    raise UsageError(f"{name}, prompt {number}: {error}") from error
        show_over("")
        stages, notes = session.n_stages, session.notes
    memory = sum(report["rss"] for report in session.reports.values() if "rss" in report)
    if judge and (trouble := judge_all(judge, judge_model, judge_by, asked, answers)):
        notes = [*notes, trouble]
    from pipeinfer_lab.quality.judge import controlled

    table, kinds = rows_of(answers, controlled, normals(configs)), by_kind(answers)
    paced = pace_ms(base.cluster.hook)
    pace = f", {paced:g} ms per decode" if paced else ""
    title = f"{len(asked)} prompts, {stages} stages{pace}, {memory / 2**20:.0f} MiB resident"
    text = "\n\n".join([title, table_text(table), *([table_text(kinds)] if kinds else [])])
    click.echo(text)
    for note in (*notes, *slow_answers(answers)):
        click.echo(f"note: {note}", err=True)
    if out is not None:
        write(out, title, text, table, answers, questions, plots=plots)


def normals(configs: Mapping[str, JobConfig]) -> dict[str, str]:
    """By method, the one that decodes such a prompt in sequence, where the method names one."""
    return {name: spec.baseline for name, config in configs.items() if config.speculation.decomposer
            and (spec := registry.decomposer(config.speculation.decomposer)).baseline}


def configs_for(base: JobConfig, methods: Sequence[str]) -> tuple[dict[str, JobConfig], JobConfig]:
    """A config for each method, by name, plain first; and what has to be loaded for all of them.

    Without methods: all that the model supports. What a method is compared with is added.
    Raises UsageError.
    """
    own = base.speculation
    if own.decomposer or own.proposer or own.policy:
        raise UsageError("compare chooses strategies with --method: leave out --decomposer, "
                         "--proposer and --policy")
    if not base.model.model:
        base = base.replace(model="task")
    fetch_models(base)
    torch = base.model.backend == "torch" or Path(base.model.model).is_dir()
    if not methods:
        unknown = ASKED if base.model.model == TASK_MODEL else ()
        methods = (PLAIN, *(name for name, spec in registry.decomposers().items()
                            if (torch or not spec.gaps) and name not in unknown),
                   *(name for name, spec in registry.proposers().items()
                     if not (spec.resource or spec.adapter)))
    names = tuple(dict.fromkeys((PLAIN, *methods)))
    configs = {name: parse_method(name, base) for name in names}
    configs |= {name: parse_method(name, base) for name in normals(configs).values()}
    whole = superset(list(configs.values()), base)
    return {name: config.replace(partitions=whole.speculation.partitions)
            for name, config in configs.items()}, whole
