"""The paper's experiments and some more, in virtual time: results, plots, one HTML report.

    python -m benchmarks.paper                    # everything, resumes where it was stopped
    python -m benchmarks.paper --only speed --only gpu
    python -m benchmarks.paper --quick            # minutes become seconds; figures mean little

Every experiment runs the real scheduler and draft logic on emulated machines (docs/emulation.md).
Its tokens are compared with plain decoding's.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.paper import results
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.plots import Drawn, Figure, Row, Size
from benchmarks.paper.report import page
from pipeinfer.emulation.profiles import lookup
from pipeinfer.errors import PipeinferError
from pipeinfer.files import write_atomically

MAIN = ("speed", "gain", "ttft", "ablations-published", "trees", "controller", "time", "wide")
OUT = Path(__file__).parents[1] / "results" / "paper"


@click.command()
@click.option("--only", multiple=True, help=f"One of {', '.join(f.name for f in FIGURES)}.")
@click.option("--out", default=str(OUT), help="Folder for results, plots and the report.")
@click.option("--seeds", type=click.IntRange(1), default=10, help="Texts of the main figures.")
@click.option("--jobs", type=click.IntRange(0), default=2, help="Processes; 0: this one.")
@click.option("--quick", is_flag=True, help="Few points, one text, 96 tokens.")
@click.option("--publish", default="", help="Folder for the table, its numbers and the main "
              "plots (benchmarks/records/paper).")
def main(only: tuple[str, ...], out: str, seeds: int, jobs: int, quick: bool, publish: str
         ) -> None:
    """Run what is missing, then draw."""
    try:
        size = Size(1, 96, quick=True) if quick else Size(seeds)
        run(chosen(only), size, Path(out), jobs)
        if publish:
            copy_main(Path(out), Path(publish))
    except PipeinferError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("\nstopped; what is finished is kept, and the same command goes on", err=True)
        sys.stderr.flush()
        os._exit(130)


def chosen(names: Sequence[str]) -> list[Figure]:
    """The figures in the report's order. Raises UsageError."""
    known = {figure.name: figure for figure in FIGURES}
    for name in names:
        lookup(known, name, "figure")
    return [figure for figure in FIGURES if not names or figure.name in names]


def run(wanted: Sequence[Figure], size: Size, out: Path, workers: int, *, show: bool = True
        ) -> Path:
    """Fill the results file, draw, write; returns the report's path."""
    store = results.Store(out / "results.jsonl")
    for notice in store.notices:
        click.echo(f"note: {notice}", err=True)
    jobs = list(dict.fromkeys(job for figure in wanted for job in figure.needs(size)))
    before = len(store)
    seconds = results.fill(store, jobs, workers, show=show)
    found: list[tuple[Figure, Drawn]] = []
    for figure in wanted:
        if show:
            click.echo(f"drawing {figure.name}", err=True)
        found.append((figure, figure.draw(store, size, out)))
    report = write(found, jobs, store, size, out, (seconds, len(store) - before))
    store.close()
    if show:
        for figure, drawn in found:
            click.echo(f"\n{figure.title}\n  paper: {figure.paper}")
            for line in drawn.measured:
                click.echo(f"  {line}")
        click.echo("")
        for what, value, met in (aim for _, drawn in found for aim in drawn.aims):
            click.echo(f"{'met ' if met else 'MISS'}  {what}: {value}")
        click.echo(token_line(jobs, store))
        click.echo(f"report: {report}")
    return report


def token_line(jobs: Sequence[results.Job], store: results.Store) -> str:
    """How many experiments gave the tokens of plain decoding."""
    records = [store.get(job.experiment, timed=job.timed) for job in jobs]
    ran = [record for record in records if "error" not in record]
    differ = sum(not record["tokens_equal"] for record in ran)
    return (f"{len(ran)} experiments, {sum(record['tokens'] for record in ran)} tokens; tokens "
            f"differ from those of iterative decoding in {differ}; {len(records) - len(ran)} do "
            "not fit their machines")


def write(found: Sequence[tuple[Figure, Drawn]], jobs: Sequence[results.Job],
          store: results.Store, size: Size, out: Path, took: tuple[float, int]) -> Path:
    """Dated JSON and CSV, and the report."""
    today = datetime.date.today().isoformat()
    rows = [row for _, drawn in found for row in drawn.rows]
    lines = [
        "Emulated clusters: the real scheduler, draft logic and controller in virtual time, over "
        "machines described by data sheets and measured kernels (docs/emulation.md).",
        f"Texts of {size.tokens} tokens after 128: {size.seeds} for the main figures, "
        f"{size.few} for sweeps; greedy. Nodes are counted as in the paper: the baselines spread "
        "the layers over all of them, PipeInfer keeps one for the head and the draft.",
        token_line(jobs, store) + ".",
    ]
    if took[1]:
        lines.append(f"{took[1]} experiments of this run took {took[0] / 60:.1f} minutes.")
    data = {
        "date": today, "version": results.version(), "size": dataclasses.asdict(size),
        "lines": lines, "figures": {
            figure.name: {
                "title": figure.title, "paper": figure.paper, "measured": drawn.measured,
                "aims": [{"aim": a, "measured": m, "met": met} for a, m, met in drawn.aims],
                "rows": [dataclasses.asdict(row) for row in drawn.rows],
            } for figure, drawn in found},
    }
    write_atomically(out / f"paper-{today}.json", json.dumps(data, indent=1))
    names = [field.name for field in dataclasses.fields(Row)]
    with (out / f"paper-{today}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            writer.writerow([f"{v:.5g}" if isinstance(v, float) else v
                             for v in (getattr(row, name) for name in names)])
    write_atomically(out / "summary.md", summary(data))
    report = out / "report.html"
    write_atomically(report, page(found, data))
    return report


def summary(data: Mapping[str, Any]) -> str:
    """What came out, as a table: the paper beside what was measured, and the aims."""
    lines = [f"# Results of {data['date']}", "", *data["lines"], f"Sources {data['version']}.", "",
             "| figure | the paper | measured |", "|---|---|---|"]
    lines += [f"| {one['title']} | {one['paper']} | {'<br>'.join(one['measured'])} |"
              for one in data["figures"].values()]
    lines += ["", "| aim | measured | met |", "|---|---|---|"]
    lines += [f"| {aim['aim']} | {aim['measured']} | {'yes' if aim['met'] else '**no**'} |"
              for one in data["figures"].values() for aim in one["aims"]]
    return "\n".join(lines) + "\n"


def copy_main(out: Path, folder: Path) -> None:
    """The table, the newest numbers and the main plots, in place of older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("paper-*.csv"):
        old.unlink()
    newest = max(out.glob("paper-*.csv"), key=lambda path: path.name)
    pictures = [path for name in MAIN if (path := out / f"{name}.png").exists()]
    for path in (newest, out / "summary.md", *pictures):
        shutil.copy(path, folder / path.name)
