"""Pictures of a comparison: speed-up of each method, and quality against speed-up.

Knows the table of `compare` and matplotlib, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(out: Path, title: str, table: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write speedup.png, and quality.png where quality is known; the names of what was written.

    Raises UsageError without matplotlib.
    """
    from pipeinfer.cli.drawing import pyplot

    plt = pyplot()
    names = [row["method"] for row in table]
    figure, axes = plt.subplots(figsize=(7.5, 0.42 * len(names) + 1.6), layout="constrained")
    for k, (key, label) in enumerate((("speedup", "wall clock"), ("steps_speedup", "steps"))):
        at = [i + (k - 0.5) * 0.38 for i in range(len(names))]
        bars = axes.barh(at, [row[key] for row in table], 0.36, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("times as fast as plain decoding (geometric mean)")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12)
    axes.legend(fontsize=8)
    figure.savefig(out / "speedup.png", dpi=140)
    plt.close(figure)
    known = [row for row in table if row["exact"] is not None]
    if not known:
        return ["speedup.png"]
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    for row in known:
        axes.plot(row["speedup"], 100 * row["exact"], "o")
        axes.annotate(row["method"], (row["speedup"], 100 * row["exact"]), fontsize=8,
                      xytext=(5, 4), textcoords="offset points")
    axes.set_xlabel("times as fast as plain decoding")
    axes.set_ylabel("answers right in every item, %")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.15, y=0.15)
    figure.savefig(out / "quality.png", dpi=140)
    plt.close(figure)
    return ["speedup.png", "quality.png"]
