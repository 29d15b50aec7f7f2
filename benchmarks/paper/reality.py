"""The emulator held against real hosts: predicted, then measured.

    python -m benchmarks.paper.reality                       # at a pace; needs root, ten minutes
    python -m benchmarks.paper.reality --pace 240            # slower: sums count less
    python -m benchmarks.paper.reality --local               # ranks of this host, sums in memory
    python -m benchmarks.paper.reality --quota big.gguf      # by quotas of processor time
    python -m benchmarks.paper.reality --local --pipeline    # every policy, the papers' too
    python -m benchmarks.paper.reality --local --heads       # models with heads of their own

Five hosts in network namespaces with links of 1 Gbit/s: the head with the draft, and four for the
layers, as four stages or as two wide ones. Everything is real, the links, the launch over ssh, MPI,
the scheduler, both models, but how long a stage computes, which is set (`--pace`, `ROW`). The
prediction knows that, the link's rate, what a row of the draft takes on the head's host, what a sum
took when the members of the first job of a grid loaded, and what the runtime costs elsewhere
(`Overheads`). The tokens are those of the pair itself, played back (`paper.recorded`).

With --local there are no hosts and no links to predict: what remains is the clock of wide stages.
With --heads the models have a head that is always right if it is given the right rows; one of them
keeps a state. The prediction knows how long the head takes for a token.
With --quota stages compute for as long as their host's share of a processor makes them, which is
predicted from runs of the whole model on one such host. The model must be inflated from the
embedded target, so that its draft fits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.recorded import RecordedPair, Text, record
from pipeinfer.backends.factory import EXACT_LIMIT
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.cluster.sizing import controller_for, limits_for, sizes_for, spare_cells
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import END, SamplingParams, make_rows
from pipeinfer.emulation.synthetic import SyntheticPair
from pipeinfer.emulation.virtual import (
    Overheads,
    Scenario,
    VirtualStage,
    Wire,
    prompt_of,
    simulate,
)
from pipeinfer.models import locate
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.planning.judge import relative
from tests.kit import launch
from tests.kit.clockwork import write_clockwork
from tests.kit.namespaces import Cluster
from tests.kit.plain_loop import PlainLoop

ROWS = (1, 2, 4, 8)
CODE = "parser = argparse.ArgumentParser(description='Count words in a file')\n"
QUESTION = "Write a Python class for a stack with push, pop and peek."
GRIDS = {"four stages": (1, 1, 1, 1), "two wide stages": (2, 2)}
WIRE = Wire(60e-6, 1e9 / 8)
PACE = 60.0  #: milliseconds of a stage for a row
ROW = 0.2  #: of that, for each further one
_DEPTH, _REPEATS, _CTX = 96, 12, 512
_DEPTHS = 16  #: distances at which a head guesses


@dataclasses.dataclass(frozen=True)
class Way:
    """A policy, and options of the job besides, by the names of the config."""

    name: str
    policy: Policy
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def flags(self) -> list[str]:
        """The options as a command line has them."""
        return [word for name, value in self.options.items()
                for word in ("--set", f"{name}={value}")]


WAYS = (Way("iterative", Policy.ITERATIVE), Way("speculative", Policy.SPECULATIVE),
        Way("pipeinfer", Policy.PIPEINFER))
PAPERS = {"tree_max": 4, "draft_p_min": 0.1}  #: of a synchronous tree, in the paper
ALL_WAYS = (*WAYS, Way("speculative, as published", Policy.SPECULATIVE, PAPERS),
            Way("the same, 2 paths", Policy.SPECULATIVE, {**PAPERS, "branches": 2, "p_split": 0.1}),
            Way("published", Policy.PUBLISHED),
            Way("published, 2 paths", Policy.PUBLISHED, {"branches": 2}))


def kernels(path: Path) -> dict[int, float]:
    """Median seconds of a run of so many rows of a whole model on this host, one thread."""
    n_layers = ModelFile(path).n_layers
    backend = LlamaCppBackend.load(
        path, layers=(0, n_layers), n_layers_total=n_layers, first=True, last=True, n_ctx=_CTX,
        n_seq_max=2, n_batch=128, n_threads=1)
    backend.decode(make_rows([(k % 97, k, (0,), k == _DEPTH - 1) for k in range(_DEPTH)]))
    found = {}
    for rows in ROWS:
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            backend.decode(make_rows([(5, _DEPTH + k, (0,), True) for k in range(rows)]))
            times.append(time.perf_counter() - start)
            backend.seq_rm(0, _DEPTH, END)
        found[rows] = statistics.median(times)
    backend.close()
    return found


class Local:
    """Ranks of this host in the place of a cluster's."""

    n_nodes = 5

    def run(self, command: list[str], *, timeout: float, node: int
            ) -> subprocess.CompletedProcess[str]:
        """See `Cluster.run`."""
        del node
        return launch.run(1, command, timeout=timeout)

    def pipeinfer(self, arguments: list[str], *, timeout: float, ranks: int
                  ) -> subprocess.CompletedProcess[str]:
        """See `Cluster.pipeinfer`. Guesses are made throughout: ranks of one host would try whether
        they pay there, which hosts of their own do not."""
        if "--proposer" in arguments:
            arguments = [*arguments, "--speculation", "on"]
        return launch.run(ranks, [sys.executable, "-m", "pipeinfer", *arguments], timeout=timeout)


def measured_on(cluster: Cluster | Local, node: int, path: Path) -> dict[int, float]:
    """`kernels` on a host."""
    done = cluster.run([sys.executable, "-m", "benchmarks.paper.reality", "--kernels", str(path)],
                       timeout=240, node=node)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return {int(rows): seconds for rows, seconds in json.loads(done.stdout).items()}


def curve_of(seconds: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """Times of 2 and more rows over that of one."""
    return tuple((rows, seconds[rows] / seconds[1]) for rows in ROWS[1:])


@dataclasses.dataclass(frozen=True)
class Case:
    """A pair and what it says. options: of the job. seconds: of a stage with this part of the
    layers, the last or not, for so many rows. guesses: options for them. by_depth: how often a head
    is right at each distance; none for a draft. stages: another number of them than the grids'."""

    name: str
    target: Path
    draft: Path
    text: Text
    prompt: tuple[str, ...]
    draft_seconds: dict[int, float]
    seconds: Callable[[float, bool, int], float]
    options: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ("--proposer", "draft")
    by_depth: tuple[float, ...] = ()
    stages: int = 0

    @property
    def grids(self) -> dict[str, tuple[int, ...]]:
        """Widths of the stages, by name."""
        return {f"{self.stages} stages": (1,) * self.stages} if self.stages else GRIDS

    def layers(self, stages: int) -> list[int]:
        """How many of them each stage has."""
        each, more = divmod(ModelFile(self.target).n_layers, stages)
        return [each + (k < more) for k in range(stages)]

    def predicted(self, widths: tuple[int, ...], way: Way, exchange_seconds: float) -> float:
        """Tokens per second in virtual time."""
        row_bytes = 4 * ModelFile(self.target).n_embd
        counts = self.layers(len(widths))

        def stage(count: int, width: int, *, last: bool) -> VirtualStage:
            def seconds(rows: int) -> float:
                exchange = exchange_seconds + (rows - 1) * row_bytes / WIRE.bandwidth
                return self.seconds(count / sum(counts) / width, last, rows) \
                    + (width > 1) * 2 * count * exchange
            return VirtualStage(seconds, count)

        stages = tuple(stage(count, width, last=k == len(widths) - 1)
                       for k, (count, width) in enumerate(zip(counts, widths, strict=True)))
        policy = way.policy
        config = JobConfig.of(policy=policy.value, **way.options).speculation
        curve = tuple((rows, stages[0].seconds(rows) / stages[0].seconds(1)) for rows in ROWS[1:])
        spare = spare_cells(EXACT_LIMIT, len(widths) + 1)
        limits, pinned = limits_for(
            config, policy, sizes_for(curve[0][1] - 1.0), n_ctx=_CTX, chunk=64, exact=EXACT_LIMIT,
            n_stages=len(widths), curve=curve, spare=spare)
        draft = curve_of(self.draft_seconds)
        pair = SyntheticPair(1.0, by_depth=self.by_depth if policy is not Policy.ITERATIVE else ()
                             ) if self.by_depth else RecordedPair(self.text)
        scenario = Scenario(
            stages, (WIRE,) * (len(widths) + 1),
            lambda rows: self.draft_seconds[1] * relative(draft, rows), limits, pair,
            row_bytes=row_bytes, prompt=len(self.text.prompt), tokens=len(self.text.answer),
            overheads=Overheads(),
            direct_cancel=policy is not Policy.PUBLISHED)
        controller = controller_for(config, limits, pinned, curve, spare)
        result = simulate(scenario, controller)
        assert result.tokens == pair.plain(prompt_of(scenario), len(self.text.answer))
        return result.tokens_per_second

    def measured(self, cluster: Cluster | Local, widths: tuple[int, ...], way: Way
                 ) -> tuple[float, float]:
        """Tokens per second of a job over the hosts, and what a sum took when it loaded; says so
        where tokens are not the pair's."""
        found = self.job(cluster, widths, way)
        if found["tokens"] != self.text.answer.tolist():
            print(f"{self.name} {widths} {way.name}: other tokens than the pair alone", flush=True)
        stats = found["stats"]
        return float(stats["tokens_per_second"]), statistics.median(
            stage["sum_seconds"] for stage in stats["stages"].values())

    def job(self, cluster: Cluster | Local, widths: tuple[int, ...], way: Way) -> dict[str, Any]:
        """What a job over the hosts says."""
        grid = ["--grid", f"{len(widths)}x{widths[0]}"] if widths[0] > 1 else []
        guesses = self.guesses if way.policy is not Policy.ITERATIVE else ()
        draft = ("none" if self.by_depth else str(self.draft))
        done = cluster.pipeinfer(
            ["generate", "-m", str(self.target), "-md", draft, "-c", str(_CTX), "-t", "1",
             *self.prompt, "-n", str(len(self.text.answer)), "--temp", "0", "--json", "--layers",
             ",".join(map(str, self.layers(len(widths)))), "--policy", way.policy.value,
             *grid, *guesses, *way.flags, *self.options], timeout=400,
            ranks=len(widths) + 1 if self.stages else cluster.n_nodes)
        if done.returncode:
            sys.exit(f"{self.name} {widths} {way.name}: {done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def answer_of(target: Path, draft: Path, prompt: str, tokens: int, *, chat: bool) -> Text:
    """What a pair says to a prompt."""
    tokenizer = open_tokenizer(target)
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat \
        else tokenizer.encode(prompt)
    found = record(PlainLoop(target), PlainLoop(draft), "", list(ids))
    if found is None:
        sys.exit(f"{target}: the answer is too short")
    return dataclasses.replace(found, answer=found.answer[:tokens], names=found.names[:tokens],
                               claims=np.asarray(found.claims[:tokens]))


def at_a_pace(cluster: Cluster | Local, tokens: int, pace: float) -> list[Case]:
    """Both pairs that come along, at a set pace in milliseconds."""
    options = ("--hook", f"pace={pace}+{ROW * pace}")
    cases = []
    for name, prompt, chat in (("embedded", CODE, False), ("smollm2", QUESTION, True)):
        target, draft = locate.file_of(name), locate.draft_of(name)
        assert draft is not None
        cases.append(Case(
            name, target, draft, answer_of(target, draft, prompt, tokens, chat=chat),
            ("-p", prompt, *(("--chat",) if chat else ())), measured_on(cluster, 1, draft),
            lambda share, last, rows: pace * (1 + ROW * (rows - 1)) / 1e3, options))  # noqa: ARG005
    return cases


def with_heads(cluster: Cluster | Local, tokens: int, pace: float, folder: Path) -> list[Case]:
    """Models with heads of their own, at a set pace; the second keeps a state."""
    options = ("--hook", f"pace={pace}+{ROW * pace}", "--ignore-eos")
    cases = []
    for name, stages, layers in (("glm4moe", 4, 4), ("qwen35-mtp", 2, 8)):
        target = write_clockwork(folder / f"{name}.gguf", name, "F32", n_layer=layers)
        tokenizer, loop = open_tokenizer(target), PlainLoop(target)
        prompt = tokenizer.encode("abc")
        answer = np.array(loop.generate(list(prompt), tokens, SamplingParams()))
        loop.close()
        tokenizer.close()
        case = Case(
            name, target, target, Text("", np.array(prompt), answer, answer, np.ones(tokens)),
            ("-p", "abc"), {rows: 0.0 for rows in ROWS},
            lambda share, last, rows: pace * (1 + ROW * (rows - 1)) / 1e3,  # noqa: ARG005
            options, ("--proposer", "mtp"), (1.0,) * _DEPTHS, stages)
        took = case.job(cluster, (1,) * stages, WAYS[-1])["stats"]
        one = took["draft_seconds"] / took["drafted"]
        print(f"{name}: the head takes {1e3 * one:.1f} ms for a token", flush=True)
        cases.append(dataclasses.replace(case, draft_seconds={rows: one for rows in ROWS}))
    return cases


def by_quota(cluster: Cluster, path: Path, tokens: int) -> Case:
    """An inflated model on hosts that have a part of a processor."""
    small, draft = locate.file_of("embedded"), locate.draft_of("embedded")
    assert draft is not None
    whole, model = measured_on(cluster, 2, path), ModelFile(path)
    print(f"{path.stem}: the whole model on a host:",
          ", ".join(f"{rows} rows {1e3 * s:.0f} ms" for rows, s in whole.items()), flush=True)
    output = next(model.tensors[name].nbytes for name in ("output.weight", "token_embd.weight")
                  if name in model.tensors)
    head, curve = output / (sum(model.layer_bytes) + output), curve_of(whole)
    return Case(
        path.stem, path, draft, answer_of(small, draft, CODE, tokens, chat=False), ("-p", CODE),
        measured_on(cluster, 1, draft),
        lambda share, last, rows: whole[1] * relative(curve, rows) * (
            (1.0 - head) * share + head * last))


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quota", type=Path, nargs="+", default=[])
    parser.add_argument("--cores", type=float, default=0.35, help="of each host, with --quota")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pace", type=float, default=PACE, help="milliseconds of a stage")
    parser.add_argument("--local", action="store_true", help="ranks of this host, at a pace")
    parser.add_argument("--pipeline", action="store_true",
                        help="four stages alone, but the papers' policies too")
    parser.add_argument("--heads", action="store_true", help="models with heads of their own")
    parser.add_argument("--kernels", type=Path, help="measure one model here, print JSON")
    given = parser.parse_args()
    if given.kernels:
        print(json.dumps(kernels(given.kernels)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| pair | hosts | policy | predicted | measured | error |\n" + "| --- " * 6 + "|")
    if given.heads:
        with tempfile.TemporaryDirectory() as folder, (
                contextlib.nullcontext(Local()) if given.local else Cluster(5)) as hosts:
            compare(hosts, with_heads(hosts, given.tokens, given.pace, Path(folder)),
                    pipeline=False)
        return
    if given.local:
        compare(Local(), at_a_pace(Local(), given.tokens, given.pace), pipeline=given.pipeline)
        return
    with Cluster(5, cpu=given.cores if given.quota else 0.0) as cluster:
        compare(cluster, [by_quota(cluster, path, given.tokens) for path in given.quota]
                or at_a_pace(cluster, given.tokens, given.pace), pipeline=given.pipeline)


def compare(cluster: Cluster | Local, cases: list[Case], *, pipeline: bool) -> None:
    """A row for each pair, grid and policy."""
    for case in cases:
        for name, widths in list(case.grids.items())[:1 if pipeline else None]:
            exchange = 0.0 if pipeline else case.measured(cluster, widths, WAYS[0])[1]
            if exchange:
                print(f"a sum takes {1e6 * exchange:.0f} us", flush=True)
            for way in ALL_WAYS if pipeline else WAYS:
                expected = case.predicted(widths, way, exchange)
                speed, _ = case.measured(cluster, widths, way)
                print(f"| {case.name} | {name} | {way.name} | {expected:.2f} | {speed:.2f} "
                      f"| {100 * (expected / speed - 1):+.0f} % |", flush=True)


if __name__ == "__main__":
    main()
