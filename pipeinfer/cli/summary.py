"""What `pipeinfer generate` reports: the summary that ends it, and a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeinfer.scheduler.events import LaneStats

#: words and colour for what became of a run, as on the page (server/web: runs.js, app.css), which
#: has one for all that were cancelled
FATES = {
    "prompt": ("prompt", "#8a6bb8"), "non-speculative": ("plain", "#2b6cb0"),
    "accepted": ("accepted", "#0b8a67"), "partly accepted": ("partly accepted", "#7fa31b"),
    "rejected": ("rejected", "#cf5a1e"), "stopped": ("cancelled, cut short", "#8f3a10"),
    "skipped": ("cancelled, not computed", "#eab296"),
}


def summary(figures: Mapping[str, Any], stages: Mapping[int, Mapping[str, Any]],
            notes: list[str]) -> str:
    """Return the text that `generate` prints to standard error: speed, runs and stages."""
    ttft, itl = figures["time_to_first_token"], figures["inter_token_latency_mean"]
    after = figures["time_to_first_after_prompt"]
    lines = [
        f"{figures['n_output']} tokens at {figures['tokens_per_second']:.1f} tokens/s, first after "
        f"{_ms(ttft)} (next {_ms(after)} after the prompt's end), then every {_ms(itl)} (prompt "
        f"{figures['n_prompt']} tokens, ended by {figures['reason']}, seed {figures['seed']})",
    ]
    if figures.get("restored"):
        lines.append(f"prompt: {figures['restored']} of {figures['n_prompt']} tokens from the "
                     "disks")
    if figures.get("issued_speculative"):
        lines.append(
            f"speculation: {figures['accepted_speculative']} of {figures['n_output']} tokens were "
            f"in flight when accepted, acceptance {figures['acceptance']:.0%} "
            f"({figures['issued_speculative']} issued)"
        )
    lines.append(
        f"runs: {figures['runs']} issued, {figures['speculative_runs']} of them speculative, "
        f"{figures['cancelled_runs']} cancelled ({figures['skipped_runs']} cut short)"
    )
    if figures.get("flops") and figures["steps"]:
        per_step = figures["flops"] / figures["steps"]
        lines.append(f"arithmetic: {figures['rows'] / figures['steps']:.1f} rows and about "
                     f"{per_step / 1e9:.2f} GFLOP per step, {figures['steps']} steps")
    if figures.get("gave_up"):
        lines.append(f"threads: {figures['gave_up']} ended because they were too long, not by the "
                     "model")
    if slower_than_plain(figures["steps"], figures["visible"]) and \
            figures["visible"] < figures["n_output"]:
        lines.append(f"threads: {figures['steps']} steps for the {figures['visible']} tokens that "
                     "are shown; for such questions leave out --decomposer")
    for node, stage in sorted(stages.items()):
        if "busy_share" in stage:
            waited = f", waited {stage['waited_share']:.0%} for the other members" if stage.get(
                "waited") else ""
            lines.append(
                f"{name_of(node, stage)}: layers {stage['layers'][0]}-{stage['layers'][1] - 1} on "
                f"{stage['host']}, busy {stage['busy_share']:.0%}{waited}, sent "
                f"{stage['sent_bytes'] / 1e6:.2f} MB, memory {stage['rss'] / 2**20:.0f} MiB"
            )
    if figures.get("resident_bytes"):
        gib = figures["resident_bytes"] / 2**30
        lines.append(f"memory: {gib:.2f} GiB resident over all ranks, "
                     f"{figures['tokens_per_second_per_gib']:.1f} tokens/s per GiB")
    return "\n".join(lines + [f"note: {note}" for note in notes])


def slower_than_plain(steps: int, tokens: int) -> bool:
    """Return whether so many steps are a tenth more than plain decoding takes for so many tokens.
    """
    return steps > 1.1 * tokens


def flops_of(stats: LaneStats, row: tuple[float, float]) -> float:
    """Return the approximate number of arithmetic operations of a request's issued rows,
    cancelled or not, without its prompt's. row: see `row_flops`."""
    return stats.rows * row[0] + stats.attended * row[1]


def memory_figures(tokens_per_second: float, stages: Mapping[int, Mapping[str, Any]], own: int,
                   others: int = 0) -> dict[str, float]:
    """Return the memory of all ranks, including draft and head, and the speed relative to it; {}
    if a stage did not report.

    own: resident bytes of rank 0, which may have a stage, too.
    others: resident bytes of the draft ranks.
    """
    if not stages or not all("rss" in stage for stage in stages.values()):
        return {}
    ranks = {0: own}
    for node, stage in stages.items():
        rank = stage.get("rank", node)
        ranks[rank] = max(ranks.get(rank, 0), stage["rss"])
    total = sum(ranks.values()) + others
    return {"resident_bytes": total,
            "tokens_per_second_per_gib": tokens_per_second / (total / 2**30)}


def name_of(node: int, stage: Mapping[str, Any]) -> str:
    """Return a node's name: its stage, and its member if the stage is cut into slices."""
    number = stage.get("stage", node)
    if not stage.get("slices"):
        return f"stage {number}"
    return f"stage {number} member {stage['member']}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def chrome_trace(
    issues: list[tuple[int, float, bool, int]], cancels: list[tuple[float, tuple[int, ...]]],
    results: list[tuple[int, float]], reports: Mapping[int, Mapping[str, Any]],
    fates: Mapping[int, str],
) -> dict[str, Any]:
    """Return Chrome-trace JSON: one track per stage, one slice per run, marks for the head's
    actions.

    issues, cancels, results: see `RunTrace`. reports: of the stages, by node.
    fates: what became of each run's tokens, by run id. Times of different hosts are by their own
        clocks.
    """
    events: list[dict[str, Any]] = [_name(0, "head")]
    starts = [t for _, t, _, _ in issues] or [0.0]
    zero = min(starts)
    for run_id, at, _, rows in issues:
        events.append(_mark(f"issue {run_id}", at - zero, {"run": run_id, "rows": rows}))
    for at, ids in cancels:
        events.append(_mark(f"cancel {','.join(map(str, ids))}", at - zero, {"runs": list(ids)}))
    for run_id, at in results:
        events.append(_mark(f"result {run_id}", at - zero, {"run": run_id}))
    for node, report in sorted(reports.items()):
        stage = f"stage {report.get('stage', node)}"
        if report.get("n_sums") is not None:
            stage += f" member {report['member']}"
        events.append(_name(node, f"{stage} ({report.get('host', '')})"))
        for run_id, start, end, fate, rows, *waited in report.get("events", ()):
            kind = fates.get(run_id, "prompt") if fate == "computed" else fate
            args = {"run": run_id, "fate": kind, "rows": rows}
            if sum(waited):
                args["waited_ms"] = 1e3 * sum(waited)  # for the other members, in all sums
            events.append({
                "name": f"run {run_id}", "cat": kind, "ph": "X", "pid": 1, "tid": node,
                "ts": (start - zero) * 1e6, "dur": (end - start) * 1e6, "args": args,
            })
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(node: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 1, "tid": node, "args": {"name": name}}


def _mark(name: str, at: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "t", "pid": 1, "tid": 0, "ts": at * 1e6, "args": args}
