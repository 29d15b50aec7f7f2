"""Examines mutated input of every kind, prints a table, keeps what failed.

    python -m benchmarks.fuzz --cases 10000 --seed 0
    python -m benchmarks.fuzz --kind gguf --kind frames --cases 50000

The same seed gives the same inputs. Exit code 1 when an input did what none may: those are in
benchmarks/fuzz/corpus/<kind>/, which test_fuzz.py replays.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path

import click

from benchmarks.fuzz import (
    config_case,
    frame_case,
    gguf_case,
    http_case,
    lora_case,
    runner,
    safetensors_case,
)

KINDS = {module.KIND.name: module.KIND for module in (
    gguf_case, safetensors_case, frame_case, http_case, config_case)}
if gguf_case.has_torch():
    KINDS[lora_case.KIND.name] = lora_case.KIND
CORPUS = Path(__file__).with_name("corpus")


@click.command()
@click.option("--cases", type=click.IntRange(1), default=10_000, show_default=True,
              help="Inputs of each kind.")
@click.option("--seed", default=0, show_default=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(sorted(KINDS)),
              help="Only this kind (repeatable).")
@click.option("--seconds", type=click.FloatRange(0.1), default=runner.LIMIT_SECONDS,
              show_default=True, help="Longest that one input may take.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(cases: int, seed: int, kinds: tuple[str, ...], seconds: float, as_json: bool) -> None:
    """Examine mutated input of every kind."""
    runner.LIMIT_SECONDS = seconds
    results = []
    for name in kinds or tuple(KINDS):
        kind, start = KINDS[name], time.monotonic()
        done = runner.run(kind, functools.partial(runner.case, kind, seed), cases,
                          lambda line: click.echo(f"\r\x1b[K{line}", err=True, nl=False))
        click.echo("\r\x1b[K", err=True, nl=False)
        results.append((done, time.monotonic() - start))
        for failure in done.failures:
            where = runner.store(failure, CORPUS / name)
            click.echo(f"{where}: {failure.what.strip()}\n", err=True)
    if as_json:
        click.echo(json.dumps({r.kind: {
            "cases": r.cases, "accepted": r.accepted, "refused": r.refused,
            "slowest": round(r.slowest, 3), "failures": len(r.failures), "seconds": round(s)}
            for r, s in results}))
    else:
        click.echo(f"{'kind':12}{'cases':>9}{'accepted':>10}{'refused':>9}{'slowest':>9}"
                   f"{'failures':>10}{'seconds':>9}")
        for r, s in results:
            click.echo(f"{r.kind:12}{r.cases:9}{r.accepted:10}{r.refused:9}{r.slowest:8.2f}s"
                       f"{len(r.failures):10}{s:9.0f}")
    sys.exit(int(any(r.failures for r, _ in results)))


if __name__ == "__main__":
    main()
