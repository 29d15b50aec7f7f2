"""Pictures of traces that `--trace` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeinfer.cli.drawing import pyplot
from pipeinfer.cli.summary import FATES
from pipeinfer.errors import UsageError


def read_trace(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the runs of a trace that --trace wrote, and the names of its tracks. Raises
    UsageError."""
    names: dict[int, str] = {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        events = [e for e in data["traceEvents"] if e.get("ph") == "X"]
        good = all(
            isinstance(e["ts"], int | float) and isinstance(e["dur"], int | float)
            and isinstance(e["tid"], int) and isinstance(e["cat"], str)
            and isinstance(e["args"]["run"], int) and abs(e["ts"]) < 1e18 and abs(e["dur"]) < 1e18
            and isinstance(e["args"].get("waited_ms", 0.0), int | float)
            for e in events)
        names = {e["tid"]: str(e["args"]["name"]).partition(" (")[0]
                 for e in data["traceEvents"] if e.get("ph") == "M"}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise UsageError(f"{path} is not a trace written by --trace")
    if not events:
        raise UsageError(f"{path} contains no runs")
    return events, names


def draw_timeline(trace_file: Path, picture: Path, *, start_ms: float, span_ms: float) -> None:
    """Draw stages against time, with runs coloured by fate, and paler where they waited for
    other members of a wide stage.

    start_ms: of the first run shown. span_ms: width of the picture. Raises UsageError.
    """
    events, names = read_trace(trace_file)
    plt = pyplot()
    from matplotlib.patches import Patch

    first = min(e["ts"] for e in events) / 1e3 + start_ms
    shown = [e for e in events if first <= e["ts"] / 1e3 <= first + span_ms]
    nodes = sorted({e["tid"] for e in events})
    figure, axis = plt.subplots(figsize=(14, 1.4 + 0.7 * len(nodes)), layout="constrained")
    for event in shown:
        left, width = event["ts"] / 1e3 - first, max(event["dur"] / 1e3, span_ms / 4000)
        axis.barh(event["tid"], width, left=left, height=0.72, align="center",
                  color=FATES.get(event["cat"], ("", "#000"))[1], edgecolor="white",
                  linewidth=0.6)
        waited = min(event["args"].get("waited_ms", 0.0), width)
        if waited > 0:  # all waits of a run are shown at its end
            axis.barh(event["tid"], waited, left=left + width - waited, height=0.72, align="center",
                      color="white", alpha=0.6)
        if width > span_ms / 60:
            axis.text(left + width / 2, event["tid"], str(event["args"]["run"]), ha="center",
                      va="center", color="white", fontsize=8)
    axis.set_yticks(nodes, [names.get(n, f"stage {n}") for n in nodes])
    axis.invert_yaxis()
    axis.set_xlim(0, span_ms)
    axis.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    kinds = [FATES[k] for k in FATES if any(e["cat"] == k for e in shown)]
    axis.legend(handles=[Patch(color=colour, label=words) for words, colour in kinds],
                ncols=max(1, len(kinds)), loc="lower center", bbox_to_anchor=(0.5, 1.0),
                frameon=False)
    figure.savefig(picture, dpi=120)
    plt.close(figure)
