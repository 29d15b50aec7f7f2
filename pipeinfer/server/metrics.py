"""The metrics for Prometheus: counters of requests and tokens, latencies, the engine's gauges."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from pipeinfer.server.choice import Generation

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_OUTCOMES = ("stop", "length", "disconnected", "timeout", "shutdown", "error", "refused")
_GAUGES = {
    "waiting": "Requests waiting for a lane.",
    "lanes": "Requests being decoded.",
    "runs": "Runs in flight.",
    "cells_used": "Tokens in the cache.",
    "cells": "Tokens that the cache can hold.",
    "free_ids": "Unused sequence ids.",
    "kept_prefixes": "Prompts of finished requests kept in the cache.",
    "stored_pieces": "Pieces of prompts on the disks of all stages (--kv-disk).",
    "stored_read": "Of these, pieces read instead of computed since the job began.",
    "stored_missed": "Reads for which a stage lacked a piece.",
    "stored_written": "Files of pieces that stages wrote.",
    "stored_dropped": "Pieces that stages had no time or room to write.",
    "stored_written_bytes": "Bytes of these files.",
    "stored_held_bytes": "Bytes in the folders of --kv-disk.",
    "credit": "Maximum number of useful runs in flight.",
    "draft_max": "Maximum draft tokens per micro-batch.",
    "acceptance": "Estimated share of draft tokens that are accepted.",
}

_STAGES = {
    "stage_seconds": "Recent seconds of a stage for a run of one row, without its slowest runs.",
    "stage_slowdown": "stage_seconds relative to the stage's best time, or to the plan: above 1 "
                      "the stage has slowed down, or is slower than it was measured.",
}
_MEMBERS = {
    "member_seconds": "Recent seconds that a member of a wide stage computes in a run of one row.",
    "member_waiting_seconds": "Recent seconds that a member waits for the others in such a run.",
}


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # half of the lines, which no reader needs
        self._registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self._registry, "namespace": "pipeinfer"}
        self._requests = Counter("requests", "Choices by outcome.", ["outcome"], **make)
        for outcome in _OUTCOMES:
            self._requests.labels(outcome)
        self._answers = Counter("http_responses", "HTTP answers by status.", ["status"], **make)
        self._prompt = Counter("prompt_tokens", "Prompt tokens.", **make)
        self._reused = Counter("prompt_tokens_reused", "Prompt tokens taken from the cache.",
                               **make)
        self._restored = Counter("prompt_tokens_restored", "Of these, tokens from disks.", **make)
        self._output = Counter("generated_tokens", "Generated tokens.", **make)
        self._drafted = Counter("drafted_tokens", "Tokens that were drafted.", **make)
        self._accepted = Counter("accepted_tokens", "Drafted tokens that were right.", **make)
        self._pictures = [Counter(f"pictures_{name}", text, **make) for name, text in (
            ("computed", "Pictures and sounds whose rows were computed."),
            ("cached", "Those whose rows were cached."),
            ("seconds", "Seconds that the projector computed."))]
        self._shown: Sequence[float] = (0, 0, 0.0)
        self._first = Histogram("time_to_first_token_seconds", "Seconds from request to first "
                                                               "token.",
                                buckets=_FIRST, **make)
        self._between = Histogram("inter_token_seconds", "Seconds between tokens of one answer.",
                                  buckets=_BETWEEN, **make)
        self._gauges = {name: Gauge(name, text, **make) for name, text in _GAUGES.items()}
        self._stages = {name: Gauge(name, text, ["stage", "rank", "host"], **make)
                        for name, text in (_STAGES | _MEMBERS).items()}
        self._sums = Gauge("sum_seconds", "What adding up one row over the members of a stage took "
                                          "at the start.", ["stage", "rank", "host"], **make)
        self._restarts = Counter("restarts", "How often a new job took over from one that failed.",
                                 **make)
        self._recoveries = Gauge("recoveries", "How often the job recovered from "
                                               "lost ranks.", **make)
        self._lost = Gauge("ranks_lost", "Ranks that the job has lost.", **make)
        self._journal = Gauge("journal_bytes", "Size of the file of --journal.", **make)
        self._unwritten = Gauge("journal_failing", "1 while the file of --journal cannot be "
                                                   "written.", **make)
        self._arranged: list[Any] = []
        self._ready = Gauge("ready", "1 while a job answers requests.", **make)
        self._open = Gauge("open_choices", "Choices that clients are waiting for.", **make)

    def render(self, open_choices: int, ready: bool = True) -> bytes:
        """Return the text that Prometheus reads."""
        self._open.set(open_choices)
        self._ready.set(ready)
        return generate_latest(self._registry)

    def answered(self, status: int) -> None:
        """Count an HTTP answer by its status."""
        self._answers.labels(str(status)).inc()

    def pictures(self, *shown: float) -> None:
        """Count pictures. shown: computed and cached ones, and seconds, since the projector's
        start."""
        for counter, now, before in zip(self._pictures, shown, self._shown, strict=True):
            counter.inc(max(now - before, 0))
        self._shown = shown

    def restarted(self) -> None:
        """Count that another job took over."""
        self._restarts.inc()

    def journal(self, size: int, failing: bool) -> None:
        """Set the journal's size in bytes, and whether it cannot be written."""
        self._journal.set(size)
        self._unwritten.set(failing)

    def refused(self) -> None:
        """Count a request that was refused before it reached the engine."""
        self._requests.labels("refused").inc()

    def token(self, generation: Generation, before: float | None) -> None:
        """Count a token. before: the time of the token before it, None for the first."""
        self._output.inc()
        counts = generation.counts
        now = time.monotonic()
        if before is None:
            self._first.observe(now - counts.submitted)
        else:
            self._between.observe(now - before)

    def ended(self, generation: Generation, reason: str) -> None:
        """Count the end of a choice. reason: from the engine."""
        outcome = {"context": "length"}.get(reason, reason)
        self._requests.labels(outcome if outcome in _OUTCOMES else "error").inc()
        stats = generation.stats
        reused = int(stats.get("reused", 0))
        self._prompt.inc(generation.counts.prompt)
        self._reused.inc(reused)
        self._restored.inc(int(stats.get("restored", 0)))
        self._drafted.inc(int(stats.get("drafted", 0)))
        self._accepted.inc(int(stats.get("accepted_speculative", 0)))

    def status(self, status: dict[str, Any], facts: dict[str, Any]) -> None:
        """Set the gauges from the engine's report. facts: with the stages."""
        self._changed(facts)
        for name, gauge in self._stages.items():
            shown = [one for one in facts.get("stages", ())
                     if (one.get("of_slices") if name in _MEMBERS else not one.get("member"))]
            values = list(status.get(name, ()))
            if name in _MEMBERS and values:  # of all nodes, plain stages included
                values = [values[one["node"] - 1] for one in shown]
            for stage, value in zip(shown, values, strict=False):
                gauge.labels(stage.get("stage", stage["node"]), stage["rank"],
                             stage["host"]).set(value)
        for name, gauge in self._gauges.items():
            value = status.get(name)
            if isinstance(value, list):
                value = len(value)
            if isinstance(value, int | float):
                gauge.set(value)

    def _changed(self, facts: dict[str, Any]) -> None:
        """Remove the gauges of stages that are not there any more."""
        stages = [(stage["node"], stage["rank"]) for stage in facts.get("stages", ())]
        if stages != self._arranged:
            self._arranged = stages
            for gauge in (*self._stages.values(), self._sums):
                gauge.clear()
            for stage in facts.get("stages", ()):
                if stage.get("sum_seconds"):
                    self._sums.labels(stage["stage"], stage["rank"], stage["host"]).set(
                        stage["sum_seconds"])
        changes = facts.get("changes", ())
        self._recoveries.set(sum(bool(change["lost"]) for change in changes))
        self._lost.set(len(facts.get("lost", ())))
