"""Every method on SmolLM2: 60 questions of four kinds over four stages in virtual time.

    python -m benchmarks.methods.instruct run --work .work/instruct   # two hours on one core
    python -m benchmarks.methods.instruct tables --work .work/instruct
    python -m benchmarks.methods.instruct show --work .work/instruct --number 3

Greedy. Tokens, steps and cells are the model's and the scheduler's own; a stage takes 10 ms for a
decode and 0.5 ms for each further row, the draft its share of the weights of that. Each answer is
written down as soon as it is there, and what is written down is not asked again, so `run` goes on
where it was stopped; several may run at a time, with questions of their own (--first, --count).
Right answers go by rule; marks and pairs are those of `judge_stub`, served here while tables are
made.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.methods import judge_stub
from pipeinfer import host
from pipeinfer.backends.exact_width import known_widths
from pipeinfer.backends.factory import llama_options
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.cluster.draft_ranks import cache_sizes, load_draft, paths_of
from pipeinfer.cluster.policy_choice import choose_policy
from pipeinfer.cluster.sizing import (
    cells_for,
    chunk_of,
    controller_for,
    hint_cells,
    ids_for,
    limits_for,
    row_proposer,
    sizes_for,
    spare_cells,
)
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import ALL_SEQS, END, Request, SamplingParams
from pipeinfer.lab.commands.compare import configs_for, judge_all, normals, parse_method
from pipeinfer.lab.commands.comparison import PLAIN, Answer, geometric, mean, rows_of, table_text
from pipeinfer.lab.emulation.decoded import DecodedSimulation
from pipeinfer.lab.emulation.synthetic import SyntheticPair
from pipeinfer.lab.emulation.virtual import Scenario, VirtualStage, Wire
from pipeinfer.lab.quality import task_sets
from pipeinfer.lab.quality.judge import controlled
from pipeinfer.lab.quality.prompt import Prompt
from pipeinfer.llama.library import llama_identity
from pipeinfer.models.locate import model_paths, open_model, open_tokenizer
from pipeinfer.models.text.text_stream import TextStream
from pipeinfer.scheduler.controller import linear
from pipeinfer.strategies import registry
from pipeinfer.strategies.decomposers.factory import Decomposition
from pipeinfer.strategies.decomposers.prompts import opening, texts_of
from pipeinfer.strategies.proposers import draft_model
from pipeinfer.strategies.proposers.base import Proposer
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.registry import job_config
from pipeinfer.strategies.spec import Need, ProposerSetup

METHODS = (PLAIN, "pdos", "pdos-plain", "skeleton", "cod", "cod-pdos", "prompt-lookup", "lookahead",
           "draft", "pdos+draft", "cod-pdos+lookahead")
STAGES = 4
COUNT = 60  #: questions, as many of each kind
ROUND = 12  #: that one method answers before the next one does, so that a stop leaves whole sets
CONTEXT = 4096
DECODE, ROW = 10e-3, 0.5e-3  #: seconds of a stage, for a decode and for each further row
_ids = itertools.count()


@click.group()
def main() -> None:
    """See the module docstring."""


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--model", default="smollm2", show_default=True)
@click.option("--tokens", default=48, show_default=True, help="Of an answer, at most.")
@click.option("--first", default=0, show_default=True, help="Question to begin with.")
@click.option("--count", default=COUNT, show_default=True, help="Question to end before.")
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS),
              help="Only these; repeatable.")
def run(work: Path, model: str, tokens: int, first: int, count: int, methods: tuple[str, ...]
        ) -> None:
    """Answer what is not answered yet."""
    work.mkdir(parents=True, exist_ok=True)
    task = {"model": model, "tokens": tokens}
    if (known := work / "task.json").exists() and json.loads(known.read_text()) != task:
        sys.exit(f"{work} holds answers with other settings: {known.read_text()}")
    known.write_text(json.dumps(task))
    asked = task_sets.prompts("mixed", count)
    done = {(one["method"], one["number"]) for one in written(work)}
    models = Models(job_config(model=model, ctx=CONTEXT))
    with (work / "answers.jsonl").open("a", encoding="utf-8") as out:
        chosen = {name: config for name, config in models.configs.items()
                  if name in (methods or METHODS)}
        for begun, (name, config) in itertools.product(range(first, count, ROUND),
                                                       chosen.items()):
            todo = [k for k in range(begun, min(begun + ROUND, count)) if (name, k) not in done]
            simulation = models.simulation(config) if todo else None
            for number in todo:
                assert simulation is not None
                answer = models.ask(simulation, config, asked[number], name, tokens)
                out.write(json.dumps({"number": number, **dataclasses.asdict(answer)}) + "\n")
                out.flush()
            click.echo(f"{name}, questions {begun + 1} to {min(begun + ROUND, count)}", err=True)
    (work / "memory.json").write_text(json.dumps(models.memory))


class Models:
    """Target and draft, loaded once, and what each method makes of them."""

    def __init__(self, base: JobConfig) -> None:
        self.configs, whole = configs_for(base, METHODS)
        self.path, self.draft_path = model_paths(whole)
        assert self.draft_path is not None
        model = open_model(self.path)
        self.cells = cells_for(whole.speculation, CONTEXT) + hint_cells(whole.speculation) \
            + spare_cells(32, STAGES + 1)
        self.target = LlamaCppBackend.load(
            self.path, layers=(0, model.n_layers), n_layers_total=model.n_layers, first=True,
            last=True, n_ctx=self.cells, n_seq_max=ids_for(whole.speculation, STAGES + 1),
            n_batch=256, n_threads=1, options=llama_options(base.model))
        self.exact = known_widths(self.target, (model.fingerprint, llama_identity())).exact
        place = host.Place(0, 1, None, 1, 0, 1)
        small = open_model(self.draft_path)
        self.draft = load_draft(base, place, self.draft_path, (0, small.n_layers),
                                cache_sizes(whole, self.cells, small, draft_model.SPEC))[0]
        self.tokenizer = open_tokenizer(self.path)
        self.row_bytes = 4 * self.target.info.n_embd
        share = self.draft.info.weight_bytes / self.target.info.weight_bytes
        self.draft_seconds = lambda rows: share * STAGES * seconds(rows)
        self.memory = {"weights": self.target.info.weight_bytes,
                       "draft": self.draft.info.weight_bytes,
                       "cell": self.target.info.cache_bytes / self.target.info.n_ctx}

    def simulation(self, config: JobConfig) -> DecodedSimulation:
        """Four stages that answer by a method, with empty caches."""
        for backend in (self.target, self.draft):
            backend.seq_rm(ALL_SEQS, 0, END)
        own, curve = config.speculation, linear(ROW / DECODE)
        policy = choose_policy(config, self.draft_path)
        speculates = policy is not Policy.ITERATIVE
        hints = row_proposer(own, self.target.info.n_vocab, 0, curve) if speculates else None
        found: list[Proposer] = []
        for spec in registry.named(own):
            if spec.worker is not None:
                found += spec.worker(ProposerSetup(
                    registry.values_of(spec, own), self.target.info.n_vocab,
                    [self.draft] if Need.DRAFT in spec.needs else [],
                    paths_of(config, [open_model(self.draft_path)])))
        spare = spare_cells(32, STAGES + 1)
        limits, pinned = limits_for(
            own, policy, sizes_for(ROW / DECODE), n_ctx=CONTEXT, chunk=chunk_of(config),
            exact=self.exact, n_stages=STAGES, curve=curve, spare=spare)
        controller = controller_for(own, limits, pinned, curve, spare)
        wire = Wire(100e-6, 125e6)
        scenario = Scenario(
            (VirtualStage(seconds, 8),) * STAGES, (wire,) * (STAGES + 1), self.draft_seconds,
            limits if controller is None else controller.limits, SyntheticPair(0.0),
            row_bytes=self.row_bytes, direct_cancel=True)
        return DecodedSimulation(scenario, self.target, Cascade(found) if found else None, hints,
                                 controller)

    def ask(self, simulation: DecodedSimulation, config: JobConfig, prompt: Prompt, method: str,
            tokens: int) -> Answer:
        """One question."""
        begun = opening(self.tokenizer, texts_of(self.path), config.speculation.decomposer,
                        [{"role": "user", "content": prompt.question}])
        decompose = None
        if begun.decompose is not None:
            decompose = Decomposition(self.tokenizer, config.speculation, n_ctx=CONTEXT,
                                      overlap=False).factory(begun.decompose, len(begun.prompt))
        outcome = simulation.ask(Request(
            next(_ids), begun.prompt, tokens, SamplingParams(),
            frozenset(self.tokenizer.eog_ids)), decompose)
        stream, text = TextStream(self.tokenizer, ()), ""
        for one in outcome.emitted:
            stream.push(one.choice.token, one.text)
            text += stream.take()
        stream.finish()
        text += stream.take()
        stats = outcome.stats
        return Answer(
            method, outcome.seconds, stats.accepted, sum(e.text != b"" for e in outcome.emitted),
            stats.steps, stats.runs, outcome.cells, outcome.busy / (outcome.seconds * STAGES),
            outcome.wasted / outcome.busy,
            stats.accepted_speculative / stats.guesses_tested if stats.guesses_tested else None,
            prompt.score(text) if prompt.score else None,
            prompt.exact(text) if prompt.exact else None, text, prompt.kind,
            outcome.cells * self.memory["cell"] / 2**20,
            len({e.thread for e in outcome.emitted} | {0}), prompt.rouge(text))


def seconds(rows: int) -> float:
    """Of a run of so many rows at a stage."""
    return DECODE + ROW * (rows - 1)


def written(work: Path) -> list[dict[str, Any]]:
    """The answers that are there, as `job` has written them; a line that was cut off is none."""
    path, found = work / "answers.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def answers_of(work: Path) -> tuple[list[Prompt], dict[str, list[Answer]]]:
    """Questions that every method has answered, and the answers in their order."""
    found: dict[str, dict[int, Answer]] = {}
    for line in written(work):
        number = line.pop("number")
        found.setdefault(line["method"], {})[number] = Answer(**line)
    common = sorted(set.intersection(*(set(given) for given in found.values())))
    asked = task_sets.prompts("mixed", COUNT)
    return [asked[k] for k in common], {
        name: [found[name][k] for k in common] for name in METHODS if name in found}


def judged(asked: Sequence[Prompt], answers: Mapping[str, Sequence[Answer]]) -> None:
    """The stub's marks and verdicts into the answers."""
    with judge_stub.server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1"
        if trouble := judge_all(address, "stub", "both", asked, answers):
            click.echo(f"note: {trouble}", err=True)
        server.shutdown()


def kinds_of(answers: Mapping[str, Sequence[Answer]]) -> list[list[str]]:
    """A line per method: right answers, steps, tokens and seconds against plain, by kind."""
    lines = []
    for name, given in answers.items():
        line = [name]
        for kind in task_sets.KINDS:
            pairs = [(p, a) for p, a in zip(answers[PLAIN], given, strict=True) if a.kind == kind]
            right = mean([a.quality for _, a in pairs])
            line.append(
                f"{statistics.fmean(a.steps for _, a in pairs):.1f} / "
                f"{statistics.fmean(a.tokens for _, a in pairs):.1f} / "
                f"{geometric([p.seconds / a.seconds for p, a in pairs]):.2f}"
                + ("" if right is None else f" / {right * len(pairs):.0f}"))
        lines.append(line)
    return lines


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
def tables(work: Path) -> None:
    """Judge by the stub, and print the tables."""
    asked, answers = answers_of(work)
    judged(asked, answers)
    base = job_config(model="smollm2")
    click.echo(table_text(rows_of(answers, controlled, normals(
        {name: parse_method(name, base) for name in answers}))))
    columns = ["steps / tokens / speed-up / right", *task_sets.KINDS]
    for line in [columns, ["---"] * len(columns), *kinds_of(answers)]:
        click.echo(f"| {' | '.join(line)} |")
    for name in answers:
        own, _, proposer = name.partition("+")
        against = own if proposer else PLAIN if name in registry.proposers() else ""
        if against in answers:
            same = sum(a.text == b.text for a, b in zip(answers[name], answers[against],
                                                        strict=True))
            click.echo(f"{name}: {same} of {len(asked)} answers are those of {against}")
    if (memory := work / "memory.json").exists():
        known = json.loads(memory.read_text())
        click.echo(f"weights {known['weights'] / 2**20:.0f} MiB, draft "
                   f"{known['draft'] / 2**20:.0f} MiB, a cell {known['cell'] / 1024:.1f} KiB")


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--number", default=0, show_default=True, help="Of the question.")
def show(work: Path, number: int) -> None:
    """Print a question and every method's answer."""
    asked, answers = answers_of(work)
    click.echo(asked[number].question)
    for name, given in answers.items():
        click.echo(f"\n== {name}, {given[number].steps} steps, quality {given[number].quality}\n"
                   + given[number].text)


if __name__ == "__main__":
    main()
