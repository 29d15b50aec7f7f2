"""The table of a comparison: what is counted of each answer, and means against plain decoding, or
against another model's plain answers.

Plain data; it knows no session, and no methods but that one of them is plain decoding.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.summary import slower_than_plain
from pipeinfer.errors import PipeinferError, UsageError

PLAIN = "plain"
BASELINE = "baseline"  #: another model's plain answers


@dataclass(slots=True)
class Answer:
    """How a method answered a prompt.

    method: as the user named it
    seconds: from asking to the last token, prompt included
    tokens: all tokens that the model chose
    visible: tokens of which the reader sees something
    steps: passes through the pipeline that had to follow one another
    runs: runs issued
    cells: most cells that its threads had at a time
    busy: share of the stages' time spent on runs
    wasted: share of that spent on wrong guesses
    acceptance: share of guesses that were right, None without guesses
    quality: score of the answer from 0 to 1, None where it is not scored
    exact: whether the answer is right in every item, None where it is not known
    text: the answer
    kind: of the prompt
    mib: of the stages' caches together that its cells took
    threads: of the response, the main one included
    rouge: by name (rouge1, rouge2, rougeL), where there is a reference
    rating: a judge's mark from 1 to 5
    flops: about how many, without the prompt's
    gave_up: threads that were ended because they were too long
    blocks: tokens of each thread but the main one, with those that PASTA's interpreter feeds
    won: share of a judge's verdicts against the plain answer (or the baseline's), both orders; ties
        count half
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
    kind: str = ""
    mib: float = 0.0
    threads: int = 1
    rouge: Mapping[str, float] = field(default_factory=dict)
    rating: float | None = None
    won: float | None = None
    flops: float = 0.0
    gave_up: int = 0
    blocks: Sequence[int] = ()


def use_of_stages(reports: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds that stages spent on runs (`Head.take_runs`), and those of wrong guesses."""
    spent: dict[int, float] = {}
    wrong: set[int] = set()
    for report in reports:
        if "spans" in report:
            spent[report["id"]] = sum(seconds for _, seconds, *_ in report["spans"])
        if report.get("fate") == "rejected":
            wrong.add(report["id"])
    return sum(spent.values()), sum(spent.get(run, 0.0) for run in wrong)


def geometric(values: Sequence[float]) -> float:
    """The geometric mean, nan of nothing."""
    good = [v for v in values if v > 0]
    return math.exp(statistics.fmean(map(math.log, good))) if good else math.nan


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of what is known, None of nothing."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def reference_of(answers: Mapping[str, Sequence[Answer]]) -> str:
    """The method that the others are compared with."""
    return BASELINE if BASELINE in answers else PLAIN


def rows_of(answers: Mapping[str, Sequence[Answer]],
            controlled: Callable[[Sequence[float], Sequence[int]], float | None] | None = None,
            normals: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The table: one row per method, against the plain answers to the same prompts, or the
    baseline's.

    speedup: of wall-clock time; steps_speedup: of steps (theoretical speedup, PASTA section 5.1),
    both geometric means; compression: chosen tokens per step; parallelism: visible ones.
    controlled: win rate at equal length, of wins and of how many characters longer each text is.
    normals: by method, the one that decodes such a prompt in sequence (the PDOS paper's "Normal");
        speed-ups over it are columns of their own.
    """
    plain = answers.get(reference_of(answers), ())
    table = []
    for method, given in answers.items():
        pairs = list(zip(plain, given, strict=False))
        equal = list(zip(answers.get((normals or {}).get(method, ""), ()), given,
                         strict=False))
        judged = [(p, a) for p, a in pairs if a.won is not None]
        table.append({
            "method": method, "prompts": len(given),
            "tokens_per_second": geometric([a.visible / a.seconds for a in given]),
            "seconds": geometric([a.seconds for a in given]),
            "speedup": geometric([p.seconds / a.seconds for p, a in pairs]),
            "steps": statistics.fmean([a.steps for a in given]),
            "steps_speedup": geometric([p.steps / max(a.steps, 1) for p, a in pairs]),
            "speedup_over_normal": geometric([p.seconds / a.seconds for p, a in equal])
            if equal else None,
            "steps_speedup_over_normal": geometric([p.steps / max(a.steps, 1) for p, a in equal])
            if equal else None,
            "gflop_per_step": mean([a.flops / max(a.steps, 1) / 1e9 for a in given if a.flops]),
            "compression": geometric([a.tokens / max(a.steps, 1) for a in given]),
            "parallelism": geometric([a.visible / max(a.steps, 1) for a in given]),
            "acceptance": mean([a.acceptance for a in given]),
            "quality": mean([a.quality for a in given]),
            "exact": mean([a.exact for a in given]),
            "rougeL": mean([a.rouge.get("rougeL") for a in given]),
            "rating": mean([a.rating for a in given]),
            "won": mean([a.won for a in given]),
            "won_at_equal_length": controlled(
                [a.won for _, a in judged if a.won is not None],
                [len(a.text) - len(p.text) for p, a in judged]
            ) if controlled is not None and judged else None,
            "busy": statistics.fmean([a.busy for a in given]),
            "wasted": statistics.fmean([a.wasted for a in given]),
            "threads": statistics.fmean([a.threads for a in given]),
            "cells": max(a.cells for a in given),
            "mib": max(a.mib for a in given),
            "same_text": sum(p.text == a.text for p, a in pairs),
        })
    return table


def slow_answers(answers: Mapping[str, Sequence[Answer]]) -> list[str]:
    """A note for each method that took a tenth more steps than plain decoding, or ended threads."""
    notes = []
    for method, given in answers.items():
        over = [a.steps / max(p.steps, 1) for p, a in zip(answers[PLAIN], given, strict=False)
                if slower_than_plain(a.steps, p.steps)]
        ended = sum(a.gave_up for a in given)
        found = []
        if over and method not in (PLAIN, BASELINE):
            found.append(f"more than a tenth more steps than plain decoding in {len(over)} of "
                         f"{len(given)} answers, at most {max(over):.2f} times as many")
        if ended:
            found.append(f"{ended} threads ended because they were too long, in "
                         f"{sum(a.gave_up > 0 for a in given)} answers")
        if found:
            notes.append(f"{method}: {'; '.join(found)}")
    return notes


def by_kind(answers: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    """A row for each method and kind of prompt; nothing where all are of one kind."""
    kinds = list(dict.fromkeys(a.kind for given in answers.values() for a in given))
    if len(kinds) < 2:
        return []
    rows = []
    for kind in kinds:
        for method, given in answers.items():
            mine = [a for a in given if a.kind == kind]
            rows.append({
                "kind": kind, "method": method, "prompts": len(mine),
                "quality": mean([a.quality for a in mine]),
                "rougeL": mean([a.rouge.get("rougeL") for a in mine]),
                "rating": mean([a.rating for a in mine]), "won": mean([a.won for a in mine]),
                "steps": mean([a.steps for a in mine]),
                "words": mean([len(a.text.split()) for a in mine]),
                "threads": mean([a.threads for a in mine])})
    return rows


_COLUMNS = (("method", "method", "{}"), ("tokens_per_second", "tokens/s", "{:.1f}"),
            ("speedup", "speedup", "{:.2f}"), ("steps", "steps", "{:.1f}"),
            ("steps_speedup", "in steps", "{:.2f}"),
            ("speedup_over_normal", "over Normal", "{:.2f}"),
            ("steps_speedup_over_normal", "its steps", "{:.2f}"), ("compression", "S", "{:.2f}"),
            ("parallelism", "parallel", "{:.2f}"), ("gflop_per_step", "GFLOP/step", "{:.2f}"),
            ("threads", "threads", "{:.1f}"),
            ("acceptance", "accepted", "{:.0%}"),
            ("quality", "quality", "{:.3f}"), ("exact", "exact", "{:.1%}"),
            ("rougeL", "ROUGE-L", "{:.3f}"), ("rating", "mark", "{:.2f}"), ("won", "won", "{:.0%}"),
            ("won_at_equal_length", "at equal length", "{:.0%}"),
            ("busy", "busy", "{:.0%}"), ("wasted", "wasted", "{:.0%}"), ("cells", "cells", "{}"),
            ("mib", "MiB", "{:.2f}"), ("same_text", "same text", "{}"))
_KIND_COLUMNS = (("kind", "kind", "{}"), ("method", "method", "{}"), ("prompts", "prompts", "{}"),
                 ("quality", "quality", "{:.3f}"), ("rougeL", "ROUGE-L", "{:.3f}"),
                 ("rating", "mark", "{:.2f}"), ("won", "won", "{:.0%}"),
                 ("steps", "steps", "{:.1f}"), ("words", "words", "{:.1f}"),
                 ("threads", "threads", "{:.1f}"))


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `rows_of` or of `by_kind` as Markdown that also reads well as it is; columns of
    which nothing is known are left out."""
    columns = [one for one in (_KIND_COLUMNS if "kind" in table[0] else _COLUMNS)
               if any(row[one[0]] is not None for row in table)]
    lines = [[title for _, title, _ in columns]]
    for row in table:
        lines.append(["" if row[key] is None else form.format(row[key])
                      for key, _, form in columns])
    left = sum(key in ("kind", "method") for key, _, _ in columns)
    widths = [max(len(line[k]) for line in lines) for k in range(len(columns))]
    text = ["| " + " | ".join(cell.ljust(w) if k < left else cell.rjust(w) for k, (cell, w) in
                              enumerate(zip(line, widths, strict=True))) + " |" for line in lines]
    rule = "|" + "|".join("-" * (w + 1) + (":" if k >= left else "-")
                          for k, w in enumerate(widths)) + "|"
    return "\n".join([text[0], rule, *text[1:]])


def prepare(out: Path, *, plots: bool) -> None:
    """Find out before any question is asked whether `write` can do its work. Raises UsageError
    without matplotlib, PipeinferError."""
    if plots:
        from pipeinfer.cli.drawing import check_drawing

        check_drawing(", or give --no-plots")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipeinferError(f"cannot write to {out}: {error}") from error


def write(out: Path, title: str, text: str, table: Sequence[Mapping[str, Any]],
          answers: Mapping[str, Sequence[Answer]], questions: Sequence[str] = (), *,
          plots: bool = True) -> None:
    """Leave the tables, every answer and the plots in a folder. Raises PipeinferError."""
    written = ["table.md", "results.json"]
    try:
        (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
        (out / "results.json").write_text(json.dumps({
            "title": title, "table": table, "kinds": by_kind(answers), "questions": questions,
            "answers": {name: [dataclasses.asdict(a) for a in given]
                        for name, given in answers.items()}}, indent=1), encoding="utf-8")
        if plots:
            from pipeinfer_lab.plots import draw

            written += draw(out, title, table)
    except OSError as error:
        raise PipeinferError(f"cannot write to {out}: {error}") from error
    click.echo(f"wrote {out}/{', '.join(written)}", err=True)


def read_baseline(folder: Path, questions: Sequence[str]) -> list[Answer]:
    """The plain answers that `write` has left in a folder. Raises UsageError where there are none,
    or to other questions."""
    path = folder / "results.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        answers = [Answer(**{**one, "method": BASELINE, "won": None})
                   for one in found["answers"][PLAIN]]
        asked = list(found["questions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--baseline {folder}: {path.name} is not what compare -o writes: {error}"
                         ) from error
    if asked != list(questions) or len(answers) != len(asked):
        raise UsageError(f"--baseline {folder} answers other questions: give the same --kind, "
                         "--tasks or --prompts")
    return answers
