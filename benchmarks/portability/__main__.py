"""What differs on older processors: this one imitates them, by libraries and by variables.

    python -m benchmarks.portability --work DIR [--only avx2,avx,sse] [--backends llamacpp,torch]
        [--source LLAMA_CPP] [--json FILE] [--no-tests]

llama.cpp is built for AVX alone, with and without llamafile's kernels, and for SSE 4.2 alone (kept
in --work; some minutes), and pipeinfer loads it by PIPEINFER_LLAMA_LIBRARY. For AVX2 it is the
prebuilt library. torch, oneDNN and numpy are told by variables to leave newer instructions alone.
What a real old processor does besides, such as its caches and clock, is not imitated: times are
good for ratios only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.portability import builds, measure
from benchmarks.records.write import table
from pipeinfer.llama.loader import LIBRARY_VARIABLE


@dataclass(frozen=True, slots=True)
class Environment:
    """variables: beside those of the library. numpy: its instruction sets that are left alone."""

    like: str
    variables: dict[str, str]
    numpy: tuple[str, ...] = ()
    build: str = ""


_NEW = ("X86_V4", "AVX512_ICL", "AVX512_SPR")
_NO_AVX2 = {"PIPEINFER_SHORT_RUNS": "one-by-one"}
ENVIRONMENTS = {
    "native": Environment("this processor", {}),
    "avx2": Environment("Haswell (2013)", {
        "PIPEINFER_LLAMA": "prebuilt", "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, _NEW),
    "avx": Environment("Sandy Bridge (2011)", {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX",
        "MKL_ENABLE_INSTRUCTIONS": "AVX", **_NO_AVX2}, ("X86_V3", *_NEW), "avx"),
    "avx-no-llamafile": Environment("Sandy Bridge (2011)", _NO_AVX2, ("X86_V3", *_NEW),
                                    "avx-no-llamafile"),
    "sse": Environment("Nehalem (2008)", {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", **_NO_AVX2}, ("X86_V3", *_NEW), "sse"),
}
_POLICIES = "tests/mpi/test_matrix.py::test_every_policy_writes_the_tokens_of_plain_decoding"
#: a minute or so each: splits, cache operations, widths, losslessness over 1 and 3 ranks, sampling
TESTS = {
    "llamacpp": (
        "tests/backends/test_split_parity.py::test_splits_are_bit_equal",
        "tests/backends/test_split_parity.py::"
        "test_the_embedded_target_splits_and_has_a_wide_exact_width",
        "tests/backends/test_split_parity.py::"
        "test_logits_up_to_the_exact_width_ignore_neighbours_beyond_512_cells",
        "tests/backends/test_kv_state.py",
        f"{_POLICIES}[plain-1 ranks]",
        f"{_POLICIES}[plain-3 ranks]",
        "tests/core/test_sampling.py",
    ),
    "torch": (
        "tests/backends/test_torch_backend.py::test_every_position_has_the_logits_of_transformers",
        "tests/backends/test_torch_backend.py::test_rows_up_to_the_exact_width_are_single_rows",
        "tests/backends/test_torch_backend.py::test_bits_do_not_depend_on_where_cells_lie",
        "tests/backends/test_torch_cells.py",
        f"{_POLICIES}[torch-1 ranks]",
        f"{_POLICIES}[torch-3 ranks]",
    ),
}


def variables(environment: Environment, work: Path, source: Path | None, jobs: int
              ) -> dict[str, str]:
    """The whole environment of a process that imitates this one."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    left = [name for name in environment.numpy
            if name in __cpu_dispatch__ and __cpu_features__.get(name)]
    found = {**os.environ, **environment.variables}
    if left:
        found["NPY_DISABLE_CPU_FEATURES"] = " ".join(left)
    if environment.build:
        path = builds.library(environment.build, work, source, jobs)
        found[LIBRARY_VARIABLE] = str(path.absolute())
    return found


def tested(kind: str, env: dict[str, str]) -> str:
    """pytest's last line for the essential tests, and what failed why."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "--durations=0", "-p",
         "no:cacheprovider", *TESTS[kind]], env=env | {"COLUMNS": "240"}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "; ".join([lines[-1].strip("= "), *failed])


def equal(one: list[list[int]], other: list[list[int]]) -> str:
    """How many tokens of all prompts are the same up to each one's first difference."""
    same = 0
    for ours, theirs in zip(one, other, strict=True):
        differs = (k for k, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1)
        same += next(differs, len(ours))
    total = sum(map(len, one))
    return "all" if same == total else f"{same} of {total}"


def rows_of(kind: str, found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A row per environment and model."""
    rows = []
    wanted = found["native"][kind]
    for name, both in found.items():
        for model, one in both[kind]["models"].items():
            ms = {int(rows): value for rows, value in one["ms"].items()}
            curve = ", ".join(f"{value / ms[1]:.1f}" for rows, value in ms.items() if rows > 1)
            rows.append([name, model, str(one["exact_width"]), f"{ms[1]:.2f}", curve,
                         equal(one["tokens"], wanted["models"][model]["tokens"])])
    return rows


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True,
              help="Keeps builds and models.")
@click.option("--only", default=",".join(list(ENVIRONMENTS)[1:]), show_default=True)
@click.option("--backends", default=",".join(TESTS), show_default=True)
@click.option("--source", type=click.Path(path_type=Path, exists=True),
              help="A folder of llama.cpp; downloaded otherwise.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="Of the builds.")
@click.option("--tests/--no-tests", default=True, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(work: Path, only: str, backends: str, source: Path | None, jobs: int, tests: bool,
         output: Path | None) -> None:
    """Print a table per backend, and what the tests say in each environment."""
    work.mkdir(parents=True, exist_ok=True)
    names = ["native", *(name for name in only.split(",") if name)]
    kinds = backends.split(",")
    for what, unknown in (("environment", set(names) - set(ENVIRONMENTS)),
                          ("backend", set(kinds) - set(TESTS))):
        if unknown:
            raise click.BadParameter(f"no {what} {', '.join(sorted(unknown))}")
    measure.write_models(work)
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            env = variables(ENVIRONMENTS[name], work, source, jobs) | {"PIPEINFER_CACHE": cache}
            for kind in kinds:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.portability.measure", kind, str(work)],
                    env=env, check=True, stdout=subprocess.PIPE, text=True)
                found[name][kind] = json.loads(done.stdout)
                found[name][kind]["tests"] = tested(kind, env) if tests else "not run"
                click.echo(f"{name}, {kind}: {found[name][kind]['tests']}", err=True)
        if output is not None:
            output.write_text(json.dumps(found, indent=1))
    for kind in kinds:
        click.echo(table(["environment", "model", "R", "ms", "2, 4, 8, 16 rows", "same tokens"],
                         rows_of(kind, found)) + "\n")
        click.echo(table(["environment", "kernels", "sampled", "tests"], [
            [name, both[kind]["kernels"], both[kind]["sampled"], both[kind]["tests"]]
            for name, both in found.items()]) + "\n")


if __name__ == "__main__":
    main()
