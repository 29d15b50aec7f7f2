"""Virtual time against the real runtime at the emulated cluster's pace, one mpirun after the other.

    python -m benchmarks.paper.validate                 # 8 and 9 ranks
    python -m benchmarks.paper.validate --case 33 --case 33-slow  # 33 ranks: wants a quiet machine
    python -m benchmarks.paper.validate --case all

Each job is `pipeinfer bench` on one rank per stage and one for the head. Finished ones are kept in
a file; --again runs them anew.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeinfer.errors import PipeinferError
from pipeinfer.lab.emulation.profiles import lookup
from tests.rig import launch

OUT = Path(__file__).parents[1] / "results" / "paper"


@dataclass(frozen=True, slots=True)
class Case:
    """A job: its ranks and the options of `bench`."""

    ranks: int
    options: tuple[str, ...]
    usual: bool = True
    timeout: float = 600.0


def _case(ranks: int, cluster: str, pair: str, nodes: int, policy: str, scale: float,
          tokens: int, *more: str, usual: bool = True) -> Case:
    return Case(ranks, (
        "--cluster", cluster, "--pair", pair, "--nodes", str(nodes), "--policy", policy,
        "--scale", str(scale), "--tokens", str(tokens), *more), usual)


CASES = {
    "c8": _case(8, "c", "dolphin-tinyllama", 8, "pipeinfer", 1, 256),
    "c8-slow": _case(8, "c", "dolphin-tinyllama", 8, "pipeinfer", 4, 128),
    "c8-goliath": _case(8, "c", "goliath-xwin7b", 8, "pipeinfer", 1, 192),
    "a8": _case(8, "a", "dolphin-tinyllama", 8, "pipeinfer", 1, 192),
    "a8-slow": _case(8, "a", "dolphin-tinyllama", 8, "pipeinfer", 4, 96),
    "c8-iterative": _case(9, "c", "dolphin-tinyllama", 8, "iterative", 1, 128),
    "c8-speculative": _case(9, "c", "dolphin-tinyllama", 8, "speculative", 1, 128),
    "33": _case(33, "c", "dolphin-tinyllama", 33, "pipeinfer", 1, 256, "--split", "equal",
                usual=False),
    "33-falcon": _case(33, "c", "falcon-7b", 33, "pipeinfer", 1, 96, "--split", "equal",
                       usual=False),
    "33-slow": _case(33, "c", "dolphin-tinyllama", 33, "pipeinfer", 4, 128, "--split", "equal",
                     usual=False),
}


@click.command()
@click.option("--case", "names", multiple=True, help=f"{', '.join(CASES)} or all "
              "[default: all but those of 33 ranks].")
@click.option("--out", default=str(OUT), help="Folder of the results.")
@click.option("--again", is_flag=True, help="Run what is finished once more.")
def main(names: tuple[str, ...], out: str, again: bool) -> None:
    """Print how near the two are, and what the emulator costs."""
    try:
        for name in names:
            lookup({**CASES, "all": None}, name, "case")
    except PipeinferError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    path = Path(out) / "validation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    click.echo(HEAD)
    for name, case in CASES.items():
        if not ("all" in names or name in names or (not names and case.usual)):
            continue
        if again or name not in found:
            found[name] = job(case)
            path.write_text(json.dumps(found, indent=1))
        click.echo(line(name, found[name]))
    ratios = [one["ratio"] for one in found.values()]
    if ratios:
        click.echo(f"wall clock over virtual: {min(ratios):.3f} to {max(ratios):.3f}")


def job(case: Case) -> dict[str, Any]:
    """Run a case. Raises AssertionError at its deadline, RuntimeError when it fails."""
    before = os.getloadavg()[0]
    done = launch.run(
        case.ranks, [sys.executable, "-m", "pipeinfer", "bench", *case.options, "--json"],
        timeout=case.timeout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(case.options)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    now = datetime.datetime.now().isoformat("T", "minutes")
    return found | {"load_before": before, "date": now}


HEAD = (f"{'case':15}{'ranks':>6}{'scale':>6}{'virtual':>9}{'wall':>9}{'ratio':>7}{'TTFT':>7}"
        f"{'stages':>8}{'link us':>9}{'+ us':>7}{'cpu/hop us':>11}{'cpu':>6}{'tokens':>8}"
        f"{'load':>6}")


def line(name: str, found: Mapping[str, Any]) -> str:
    """A case in the table: stages and TTFT as measured over wanted, link wanted and what is added
    to it in real time, processor time per run and stage and of all ranks per second."""
    wall, virtual = found["wall"], found["virtual"]
    extra = wall["link_extra"] or 0.0
    return (
        f"{name:15}{found['ranks']:>6}{found['scale']:>6g}{virtual['tokens_per_second']:>9.3f}"
        f"{wall['tokens_per_second']:>9.3f}{found['ratio']:>7.3f}"
        f"{wall['ttft'] / virtual['ttft']:>7.3f}{wall['stage_ratio']:>8.3f}"
        f"{1e6 * wall['link_seconds']:>9.0f}{1e6 * extra:>7.0f}"
        f"{1e6 * wall['processor_seconds_per_hop']:>11.0f}"
        f"{sum(wall['processor_seconds']) / wall['wall_seconds']:>6.2f}"
        f"{'equal' if wall['tokens_equal'] else 'DIFFER':>8}{found['load_before']:>6.1f}")


if __name__ == "__main__":
    main()
