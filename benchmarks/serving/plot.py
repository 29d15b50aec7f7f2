"""Draws what `benchmarks.serving throughput` and `benchmarks.serving.cluster` have kept.

    python -m benchmarks.serving.plot          # results/serving/*.json -> docs/serving.png
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks import pictures

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parents[1] / "results" / "serving"
OUT = ROOT / "docs" / "serving.png"
PANELS = (("embedded", "embedded pair, 4 ranks on two cores"),
          ("1b", "0.91 B target, 4 ranks on two cores"),
          ("cluster-c", "cluster C, 8 nodes, 70 B (virtual time)"))
STYLE = {"auto": ("#2563c9", "o", "auto"), "on": ("#c2601c", "^", "on"),
         "off": ("#7a8594", "s", "off")}


def points(data: dict[str, Any], mode: str, key: str) -> tuple[list[int], list[float], list[float]]:
    """Clients, the median of a figure over the rounds, and its range."""
    xs, ys, ranges = [], [], []
    for clients, found in sorted(data["figures"][mode].items(), key=lambda item: int(item[0])):
        rounds = [f[key] for f in (found if isinstance(found, list) else [found])]
        xs.append(int(clients))
        ys.append(statistics.median(rounds))
        ranges.append(max(rounds) - min(rounds))
    return xs, ys, ranges


def main() -> None:
    figure, axes = plt.subplots(2, len(PANELS), figsize=(12, 6), sharex=True)
    for column, (name, title) in zip(axes.T, PANELS, strict=True):
        path = RESULTS / f"{name}.json"
        column[0].set_title(title, fontsize=10)
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        for mode, (colour, mark, label) in STYLE.items():
            xs, ys, spread = points(data, mode, "tokens_per_second")
            column[0].errorbar(xs, ys, yerr=[s / 2 for s in spread], color=colour, marker=mark,
                               label=f"speculation {label}", capsize=2, lw=1.5)
            gap = "gap_mean_ms" if name != "cluster-c" else "gap_mean"
            scale = 1.0 if name != "cluster-c" else 1e3
            xs, ys, _ = points(data, mode, gap)
            column[1].plot(xs, [scale * y for y in ys], color=colour, marker=mark, lw=1.5)
    for row, text in zip(axes, ("tokens/s of all clients", "mean time per token of a client, ms"),
                         strict=True):
        row[0].set_ylabel(text)
        for axis in row:
            axis.set_xscale("log", base=2)
            axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[1]:
        axis.set_xlabel("clients")
    axes[0][0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    pictures.save(figure, OUT, 110)
    print(f"wrote {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
