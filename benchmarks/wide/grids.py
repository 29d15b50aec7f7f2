"""Grids of wide stages against the plain pipeline and tensor parallelism alone, in virtual time.

    python -m benchmarks.wide.grids             # all tables as text
    python -m benchmarks.wide.grids --write     # and benchmarks/records/grids.toml from them
    python -m benchmarks.wide.grids --raw FILE  # and every number, for benchmarks.records.check
    python -m benchmarks.wide.grids --quick     # a few tokens of one pair; figures mean little

Clusters C (InfiniBand) with 8, 9 and 32 nodes and A (gigabit) with 8 and 9, three pairs; N nodes
are N in all, head and draft included. Machines, links and kernels are those of the emulator
(docs/emulation.md), what a sum costs besides the wire is measured on one machine (docs/
wide-planning.md): so nothing here was measured on the clusters that are named.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import raw_files
from pipeinfer.emulation import wide
from pipeinfer.emulation.profiles import Profiles, load_profiles
from pipeinfer.emulation.wide import APART, BESIDE, TURNS, WideExperiment
from pipeinfer.files import write_atomically
from pipeinfer.forecast import grids
from pipeinfer.forecast.grids import Row, Table

OUT = Path(__file__).parents[1] / "records" / "grids.toml"
PAIRS = ("dolphin-tinyllama", "goliath-xwin7b", "falcon-7b")
GROUNDS = (("c", 8, "f32"), ("c", 9, "f32"), ("c", 32, "f32"), ("a", 8, "f16"), ("a", 9, "f16"),
           ("a", 8, "f32"))
EXCHANGES = (10e-6, 28e-6, 100e-6)
AIMS = {("c", 8, "f32"): 7.0, ("c", 32, "f32"): 15.0, ("a", 8, "f16"): 4.5, ("a", 9, "f16"): 5.5}
COMMAND = "python -m benchmarks.wide.grids --write"
COLUMNS = ["pair", "what", "head and draft", "iterative", "synchronous", "asynchronous",
           "over plain", "MB per member"]


def main(argv: list[str] | None = None) -> int:
    """Run everything, print it, and write the records."""
    parser = argparse.ArgumentParser(description="grids of wide stages in virtual time")
    parser.add_argument("--write", action="store_true", help=f"write {OUT.name}")
    parser.add_argument("--quick", action="store_true", help="one pair, 64 tokens")
    parser.add_argument("--raw", type=Path,
                        help="keep every number as JSON, compressed if the name ends in .gz")
    args = parser.parse_args(argv)
    profiles = load_profiles()
    tokens, seeds, pairs = (64, 1, PAIRS[:1]) if args.quick else (256, 4, PAIRS)
    tables = []
    for cluster, nodes, kind in GROUNDS:
        for pair in pairs:
            tables.append(grids.compare(profiles, WideExperiment(
                cluster, pair, nodes=nodes, tokens=tokens, sum_type=kind), seeds=seeds))
            print(grids.as_text(tables[-1]) + "\n", flush=True)
    prices = sensitivity(profiles, tokens, seeds)
    for line in map(price_line, prices):
        print("  ".join(line))
    for line in aims(tables):
        print(line)
    places = heads(profiles, 1024) if args.write or args.raw else []
    if args.raw:
        raw_files.write(args.raw, {"tables": [grids.as_data(table) for table in tables],
                                   "prices": prices, "heads": places})
    if args.write:
        write_atomically(OUT, records(tables, prices, places))
    return 0


def sensitivity(profiles: Profiles, tokens: int, seeds: int) -> list[dict[str, Any]]:
    """What the price of an exchange does to the fastest grid of the first pair."""
    found = []
    for cluster, nodes, kind in (("c", 8, "f32"), ("c", 32, "f32"), ("a", 8, "f16")):
        for price in EXCHANGES:
            table = grids.compare(profiles, WideExperiment(
                cluster, PAIRS[0], nodes=nodes, tokens=tokens, sum_type=kind, exchange=price),
                most=3, seeds=seeds)
            row = table.best
            found.append({"cluster": cluster, "nodes": nodes, "price": price, "grid": row.grid,
                          "head": row.head, "speed": row.best, "over": row.over})
    return found


def price_line(found: Mapping[str, Any]) -> list[str]:
    """A row of `grids-exchange`."""
    return [found["cluster"], str(found["nodes"]), f"{1e6 * found['price']:.0f} us",
            found["grid"], found["head"], f"{found['speed']:.2f}", f"{found['over']:.2f}"]


def heads(profiles: Profiles, tokens: int) -> list[dict[str, Any]]:
    """The same grids with head and draft on a node of their own, or beside a member."""
    found = []
    for cluster, nodes, apart, beside in (("c", 8, (7,), (8,)), ("c", 8, (3, 4), (4, 4)),
                                          ("c", 32, (8, 8, 8, 7), (8, 8, 8, 8)),
                                          ("a", 8, (3, 4), (4, 4)), ("a", 9, (4, 4), (5, 4))):
        base = WideExperiment(cluster, PAIRS[0], nodes=nodes, tokens=tokens,
                              sum_type="f16" if cluster == "a" else "f32")
        speeds = [wide.run(profiles, dataclasses.replace(
            base, head=head, part=part, widths=widths))[1].tokens_per_second
            for head, part, widths in ((APART, 0.5, apart), (BESIDE, 0.1, beside),
                                       (BESIDE, 0.25, beside), (BESIDE, 0.5, beside))]
        found.append({"cluster": cluster, "nodes": nodes, "apart": grids.name_of(apart),
                      "beside": grids.name_of(beside), "speeds": speeds})
    return found


def head_line(found: Mapping[str, Any]) -> list[str]:
    """A row of `grids-head`."""
    return [found["cluster"], str(found["nodes"]), found["apart"], found["beside"],
            *(f"{speed:.2f}" for speed in found["speeds"])]


def aims(tables: Sequence[Table]) -> list[str]:
    """What was hoped for, for the first pair, and what came out."""
    found = []
    for table in tables:
        aim = AIMS.get((table.cluster, table.nodes, table.sum_type))
        if aim is not None and table.pair == PAIRS[0]:
            row = table.best
            verdict = "met" if row.over >= aim else "missed"
            found.append(f"{table.cluster.upper()}, {table.nodes} nodes, sums in "
                         f"{table.sum_type}: {row.over:.2f} times the plain pipeline with "
                         f"{row.grid} ({row.head}), aim {aim:g}: {verdict}")
    return found


# --- records ----------------------------------------------------------------------------------


def rows_of(raw: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """The rows of every record, from what `--raw` wrote."""
    tables = [Table(**{**table, "rows": tuple(Row(**row) for row in table["rows"])})
              for table in raw["tables"]]
    return rows_by_record(tables, raw["prices"], raw["heads"])


def rows_by_record(tables: Sequence[Table], prices: Sequence[Mapping[str, Any]],
                   places: Sequence[Mapping[str, Any]]) -> dict[str, list[list[str]]]:
    """The rows of every record, by its name."""
    found: dict[str, list[list[str]]] = {}
    for table in tables:
        name = f"grids-{table.cluster}-{table.nodes}-{table.sum_type}"
        found.setdefault(name, []).extend(line(table, row) for row in shown(table))
    return {**found, "grids-exchange": [price_line(one) for one in prices],
            "grids-head": [head_line(one) for one in places],
            "grids-aims": [[text] for text in aims(tables)]}


def records(tables: Sequence[Table], prices: Sequence[Mapping[str, Any]],
            places: Sequence[Mapping[str, Any]]) -> str:
    """The TOML file for the page of benchmarks."""
    date, commit = datetime.date.today().isoformat(), _commit()
    parts = [HEADER]

    rows = rows_by_record(tables, prices, places)

    def record(name: str, what: str, columns: list[str]) -> None:
        parts.append("\n".join([
            "[[record]]", f'id = "{name}"', f'what = "{what}"', f"columns = {_list(columns)}",
            "rows = [", *(f"  {_list(row)}," for row in rows[name]), "]",
            'labels = ["emulated", "virtual time"]', f'date = "{date}"', f'commit = "{commit}"',
            ""]))  # claims are added by hand

    for cluster, nodes, kind in dict.fromkeys((t.cluster, t.nodes, t.sum_type) for t in tables):
        record(f"grids-{cluster}-{nodes}-{kind}",
               f"cluster {cluster.upper()}, {nodes} nodes in all, sums in {kind}, tokens/s",
               COLUMNS)
    record("grids-exchange", f"{PAIRS[0]}: the fastest grid by the price of an exchange besides "
           "the wire", ["cluster", "nodes", "exchange", "grid", "head and draft", "tokens/s",
                        "over plain"])
    record("grids-head", f"{PAIRS[0]}, asynchronous: where head and draft are", [
        "cluster", "nodes", "grid, apart", "grid, beside", "apart", "beside, 10 %",
        "beside, 25 %", "beside, 50 %"])
    record("grids-aims", f"{PAIRS[0]}: what was hoped for", ["result"])
    return "\n".join(parts)


HEADER = f'''order = 65
title = "Grids of wide stages on emulated clusters"
intro = """
Nothing here was measured on the machines that are named: the real scheduler in virtual time over
[profiles](../../docs/emulation.md), wide stages as
[wide-planning.md](../../docs/wide-planning.md) says, 28 us for an
exchange besides the wire. N nodes are N in all, head and draft included; *beside*: head and draft
have this share of the first member's machine, which holds a smaller slice then; *by turns*: they
have all of that machine while no run is under way. *Over plain*: the fastest policy over plain
decoding on the plain pipeline. Synchronous speculation has the best of trees of 1, 2, 4 and 8 with
cutoffs of 0 and 0.4. Tensor parallelism alone is one stage of as many
nodes as the model can be cut for, without guesses. Four texts of 256 tokens after 128; 1,024 tokens
for places of the head.
"""
processor = "none: virtual time (the profiles' kernels: virtual Sapphire Rapids, 4.0 GHz)"
command = "{COMMAND}"
'''


def shown(table: Table) -> list[Row]:
    """The baselines, the best grid with the head apart and beside, and the best of several stages.
    """
    plain, alone, *others = table.rows
    found = [plain, alone]
    for wanted in (lambda row: row.head == APART, lambda row: row.head.startswith(BESIDE),
                   lambda row: row.head == TURNS,
                   lambda row: not row.grid.startswith("1x")):
        best = max(filter(wanted, others), key=lambda row: row.best, default=None)
        if best is not None and best not in found:
            found.append(best)
    return found


def line(table: Table, row: Row) -> list[str]:
    """A row of a record."""
    grid, *rest = grids.cells(row)
    head, iterative, synchronous, asynchronous, over, size = rest[:6]
    return [table.pair, grid, head, iterative, synchronous, asynchronous, over, size]


def _list(cells: list[str]) -> str:
    return "[" + ", ".join(f'"{cell}"' for cell in cells) + "]"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                          check=False, cwd=OUT.parent)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
