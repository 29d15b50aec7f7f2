"""Makes tables of records again from their raw results, and compares; looks for what records lack.

    python -m benchmarks.records.check

Raw results are the numbers of the plots (paper/paper-*.csv) and the files in `raw`. A record whose
raw results are not stored cannot be made again; how many those are is printed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from benchmarks.methods import draft_ranks, lookahead, lossless
from benchmarks.paper import heads
from benchmarks.records import pages, paper_tables, raw_files
from benchmarks.records.pages import Record
from benchmarks.records.paper_tables import Paper
from benchmarks.wide import grids as wide_grids
from pipeinfer.emulation.profiles import load_profiles

PAPER = pages.HERE / "paper"
PAIRS = {
    "dolphin-tinyllama": "Dolphin 70B + TinyLlama", "dolphin-orca2": "Dolphin 70B + Orca 2 7B",
    "goliath-xwin7b": "Goliath 120B + XWin 7B", "goliath-xwin13b": "Goliath 120B + XWin 13B",
    "falcon-7b": "Falcon 180B + Falcon 7B", "falcon-40b": "Falcon 180B + Falcon 40B"}
ACCEPTED = {"dolphin-tinyllama": ", 79 % accepted", "dolphin-orca2": ", 66 %",
            "goliath-xwin7b": ", 52 %", "goliath-xwin13b": ", 61 %", "falcon-7b": ", 69 %",
            "falcon-40b": ", 69 %"}
SMALL = {"dolphin-tinyllama": "Dolphin + TinyLlama", "goliath-xwin7b": "Goliath + XWin 7B",
         "falcon-7b": "Falcon + Falcon 7B"}
BASELINE = "speculative-published"
RAW = pages.HERE / "raw"
Rows = list[list[str]]


def gain(paper: Paper) -> Rows:
    """`published-gain`."""
    rows = []
    for pair, title in PAIRS.items():
        def speed(nodes: int, policy: str, pair: str = pair) -> float:
            return paper.mean("speed", f"c {nodes} nodes {pair}", policy)

        found = [speed(nodes, "published") / speed(nodes, BASELINE) for nodes in (4, 8, 15, 32)]
        found.append(speed(8, "pipeinfer") / speed(8, "published"))
        rows.append([title + ACCEPTED[pair], *(f"{value:.2f}" for value in found)])
    return rows


def first_tokens(paper: Paper) -> Rows:
    """`published-ttft`."""
    rows = []
    for figure, cluster, counts in (("ttft", "c", (4, 8, 15, 32)), ("constrained", "a", (4, 8)),
                                    ("constrained", "b", (13,))):
        for nodes in counts:
            for pair, title in PAIRS.items():
                case = f"{cluster} {nodes} nodes {pair}"
                if (figure, case, "iterative", "ttft") not in paper.values:
                    continue
                plain = paper.mean(figure, case, "iterative", "ttft")
                others = [paper.mean(figure, case, policy, "ttft")
                          for policy in ("published", "pipeinfer", BASELINE, "speculative")]
                rows.append([title, f"{cluster.upper()}, {nodes}", f"{plain:.2f}",
                             *(f"{one:.2f} ({one / plain:.2f})" for one in others)])
    return rows


def grids(paper: Paper) -> Rows:
    """`policies-on-grids`."""
    rows = []
    for case in paper.cases("wide"):
        start, found, shape = case.partition(" grid ")
        if not found or shape == "none":
            continue
        cluster, nodes, _, pair = start.split()
        plain = paper.mean("wide", f"{start} pipeline", "iterative")

        def times(policy: str, case: str = case, start: str = start, plain: float = plain) -> str:
            return ", ".join(f"{paper.mean('wide', where, policy) / plain:.2f}"
                             for where in (f"{start} pipeline", case))

        rows.append([f"{cluster.upper()}, {nodes} nodes, {SMALL[pair]}", shape,
                     f"{paper.mean('wide', case, 'iterative') / plain:.2f}",
                     *map(times, (BASELINE, "speculative", "published", "pipeinfer"))])
    return rows


def ablations(paper: Paper) -> Rows:
    """`published-ablations`."""
    rows = []
    for pair in SMALL:
        found = [paper.values["ablations-published", f"c 8 nodes {pair}", f"without {part}",
                              "contribution"]
                 for part in ("cancel", "continuous", "multibuffer", "async")]
        rows.append([PAIRS[pair], *(f"{mean:+.0%} ({spread:.0%})".replace("%", " %")
                                    for mean, spread in found)])
    return rows


def workers() -> Rows:
    """`peers-workers-three`: medians of runs, and ratios to llama.cpp's best in the same round."""
    rows, runs = [], _raw("peers-workers.json")
    for entry in dict.fromkeys(run["entry"] for run in runs):
        cells = [entry]
        for kept in dict.fromkeys((run["file"], run["workers"]) for run in runs):
            mine = [run for run in runs if (run["file"], run["workers"]) == kept]
            best = {turn: max(run["tokens_per_second"] for run in mine if run["round"] == turn
                              and run["entry"].startswith("llama"))
                    for turn in {run["round"] for run in mine}}
            own = [run for run in mine if run["entry"] == entry]
            speed = statistics.median(run["tokens_per_second"] for run in own)
            ratio = statistics.median(run["tokens_per_second"] / best[run["round"]] for run in own)
            cells.append(f"{speed:.1f} ({ratio:.2f})" if entry.startswith("pipeinfer") else
                         f"{speed:.1f}")
        rows.append(cells)
    return rows


def _raw(name: str) -> Any:
    return raw_files.read(RAW / name)


def trees(paper: Paper) -> Rows:
    """`published-trees`."""
    def speed(case: str, policy: str) -> str:
        return f"{paper.mean('trees', case, policy):.2f}"

    rows = []
    for pair in SMALL:
        for policy, name in (("published", "published"), (BASELINE, "synchronous")):
            small, large = (f"c 8 nodes {pair}, {size}" for size in (
                "the paper's size", "twice the size"))
            rows.append([PAIRS[pair] + ACCEPTED[pair].removesuffix(" accepted"), name,
                         *(speed(f"{small}, {n} paths", policy) for n in (1, 2, 4)),
                         *(speed(f"{small}, {n} paths, two drafts", policy) for n in (2, 4)),
                         *(speed(f"{large}, {n} paths", policy) for n in (1, 2, 4))])
    return rows


def readings(found: Sequence[tuple[str, str, str, float]]) -> Rows:
    """`readings`: both of each figure, of 8 nodes of C."""
    values = {(case.removeprefix("c 8 nodes "), policy, metric): mean
              for case, policy, metric, mean in found}

    def both(pair: str, policy: str, metric: str, form: str = ".2f") -> str:
        return ", ".join(format(values[f"{pair}, a share {name}", policy, metric], form)
                         for name in ("of positions", "of drafted tokens"))

    return [[title + ACCEPTED[pair].removesuffix(" accepted"),
             both(pair, BASELINE, "accepted of drafted"),
             f"{load_profiles().pair(pair).positions:.2f}",
             *(both(pair, policy, "over iterative") for policy in (BASELINE, "published")),
             both(pair, "published", f"over {BASELINE}"),
             both(pair, "pipeinfer", "over iterative")] for pair, title in PAIRS.items()]


FROM_PAPER: Mapping[str, Callable[[Paper], Rows]] = {
    "published-gain": gain, "published-ttft": first_tokens, "policies-on-grids": grids,
    "published-ablations": ablations, "published-trees": trees,
    "emulated-8-nodes": paper_tables.eight_nodes, "emulated-figures": paper_tables.figures,
    "emulated-time": paper_tables.time, "emulated-useless-draft": paper_tables.useless_draft,
    "emulated-tuning": paper_tables.tuning}
#: tables in virtual time, each from one file
FROM_RAW: Mapping[str, tuple[str, Callable[[Any], Rows]]] = {
    "emulated-heads": ("heads.json", heads.rows_of),
    "readings": ("readings.json", readings),
    "draft-ranks": ("draft-ranks.json", draft_ranks.rows_of),
    "losslessness": ("lossless.json", lossless.rows_of),
    "lookahead-s": ("lookahead.json", lookahead.table_rows),
    "lookahead-figure-4": ("lookahead.json", lookahead.sweep_rows),
}
KEPT_SINCE = "2026-11-28"  #: of tables of this day and later ones the raw results are kept
#: columns that no program makes: what others say, or what an earlier version did
BY_HAND: Mapping[str, tuple[int, ...]] = {"emulated-figures": (1,)}


def wrong_rows(kept: Sequence[Sequence[str]], made: Rows) -> list[str]:
    """What differs, a line each."""
    if len(kept) != len(made):
        return [f"{len(kept)} rows, {len(made)} by the raw results"]
    return [f"{' | '.join(one)}: by the raw results {' | '.join(two)}"
            for one, two in zip(kept, as_on_pages(made), strict=True) if list(one) != two]


def as_on_pages(rows: Rows) -> Rows:
    """Rows as a page has them: an empty cell is a dash."""
    return [[cell.strip() or "-" for cell in row] for row in rows]


def kept_rows(record: Record) -> Rows:
    """A record's rows without the columns that no program makes."""
    left_out = BY_HAND.get(record.name, ())
    return [[cell for k, cell in enumerate(row) if k not in left_out] for row in record.rows]


def without_raw(records: Mapping[str, Record], made: Container[str]) -> list[str]:
    """The tables that are new and whose raw results are not stored."""
    return [name for name, record in records.items()
            if len(record.rows[0]) > 1 and record.date >= KEPT_SINCE and name not in made]


def main() -> int:
    """Compare every table whose raw results are kept."""
    records = pages.read()
    paper = Paper(max(PAPER.glob("paper-*.csv"), key=lambda path: path.name))
    made = {name: make(paper) for name, make in FROM_PAPER.items()}
    made["peers-workers-three"] = workers()
    made |= {name: make(_raw(path)) for name, (path, make) in FROM_RAW.items()}
    made |= wide_grids.rows_of(_raw("grids.json.gz"))
    lacking = pages.problems(records, pages.CLAIMS.read_text(encoding="utf-8"))
    for line in lacking:
        print(line, file=sys.stderr)
    wrong = len(lacking)
    for name, rows in made.items():
        for line in wrong_rows(kept_rows(records[name]), rows):
            wrong += 1
            print(f"{name}: {line}", file=sys.stderr)
    for name in without_raw(records, made):
        wrong += 1
        print(f"{name}: a new table needs its raw results: keep them in records/raw, and name "
              "what makes its rows here", file=sys.stderr)
    print(f"{len(made)} of {len(records)} records were made again from raw results, "
          f"{wrong} differences and lacks")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
