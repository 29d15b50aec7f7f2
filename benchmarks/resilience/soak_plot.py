"""Draws what `benchmarks.resilience.soak` has recorded: memory of every process, and what is open.

    python -m benchmarks.resilience.soak_plot [results/soak/soak.jsonl [docs/soak.png]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks import pictures

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).parents[1] / "results" / "soak" / "soak.jsonl"
HEAD, HTTP, STAGE, KILL = "#2563c9", "#c2601c", "#7a8594", "#b3261e"


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines of a record by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        found.setdefault(entry["kind"], []).append(entry)
    return found


def draw(record: Path, out: Path) -> None:
    """The figure of one soak."""
    found = read(record)
    samples, kills = found.get("memory", []), found.get("kill", [])
    figure, (memory, state) = plt.subplots(2, 1, figsize=(10, 6.5), sharex=True,
                                           height_ratios=(2, 1))
    names = sorted({n for s in samples for n in s["processes"]}, key=lambda n: n.zfill(4))
    for name in names:
        seen = [(s["t"] / 60, s["processes"][name]["uss"] / 2**20) for s in samples
                if name in s["processes"]]
        colour, label = {"0": (HEAD, "rank 0"), "http": (HTTP, "HTTP process")}.get(
            name, (STAGE, "other ranks" if name == "1" else "_"))
        memory.plot(*zip(*seen, strict=True), color=colour, label=label,
                    lw=1.8 if name in ("0", "http") else 0.8, zorder=3 if name == "0" else 2)
    for axis in (memory, state):
        for kill in kills:
            axis.axvline(kill["t"] / 60, color=KILL, lw=0.8, ls=":",
                         label="a stage dies" if axis is memory and kill is kills[0] else "_")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    states = [s for s in found.get("state", []) if s["gauges"]]
    minutes = [s["t"] / 60 for s in states]
    for gauge, colour, label in (("lanes", HEAD, "requests being decoded"),
                                 ("waiting", HTTP, "requests waiting")):
        state.plot(minutes, [s["gauges"].get(gauge, 0) for s in states], color=colour, lw=1,
                   label=label)
    memory.set_ylabel("memory of its own, MiB")
    state.set_ylabel("requests")
    state.set_xlabel("minutes")
    for axis in (memory, state):
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=9, loc="lower right" if axis is memory else "best")
    figure.tight_layout()
    pictures.save(figure, out, 110)
    plt.close(figure)


def main() -> None:
    record = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORD
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs" / "soak.png"
    draw(record, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
