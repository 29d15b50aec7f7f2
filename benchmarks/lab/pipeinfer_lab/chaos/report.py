"""What came of the runs of `pipeinfer chaos`: one line each, a table, one sentence."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Outcome:
    """What came of one run. Times in seconds.

    number: of the run, from 0
    fault: as the user named it
    moment: when it was to happen
    what: the fault in words
    hit: ranks, in the order in which they were hit
    at: from the start of the requests (of the job for moment load) to the fault
    happened: whether the fault took place
    lost: requests without a complete answer, and why
    different: requests with other tokens than undisturbed
    next_any: from the (last) signal until the first stream flowed again
    next_all: the same per live stream
    ready: from the start of the job until it was ready
    recoveries: as the server counts them; -1 where it does not say
    exit_code: of the server; None while it runs
    left: processes and files that stayed behind
    trouble: why the run could not be completed
    seconds: of the whole run
    """

    number: int
    fault: str
    moment: str
    what: str = ""
    hit: list[int] = field(default_factory=list)
    at: float = 0.0
    happened: bool = False
    lost: dict[int, str] = field(default_factory=dict)
    different: list[int] = field(default_factory=list)
    next_any: float | None = None
    next_all: list[float] = field(default_factory=list)
    ready: float = 0.0
    recoveries: int = -1
    exit_code: int | None = None
    left: list[str] = field(default_factory=list)
    trouble: str = ""
    seconds: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether every request got all of its own tokens."""
        return not (self.lost or self.different or self.trouble)

    @property
    def clean(self) -> bool:
        """Whether in addition nothing stayed behind, and the fault took place at all."""
        return self.kept and self.happened and not self.left

    def line(self) -> str:
        """The outcome in one line for people, with a further line per damaged request."""
        parts = [f"run {self.number + 1}: {self.what or f'{self.fault} in {self.moment}'}:"]
        parts.append(f"{'ok' if self.clean else 'kept' if self.kept else 'FAILED'},")
        if not self.happened:
            parts.append("the fault did not take place,")
        if self.next_any is not None:
            worst = max(self.next_all, default=self.next_any)
            parts.append(f"next token after {self.next_any:.2f} s, every stream after "
                         f"{worst:.2f} s,")
        if self.ready:
            parts.append(f"ready after {self.ready:.1f} s,")
        parts.append(f"exit {self.exit_code}, {self.seconds:.1f} s in all")
        text = " ".join(parts)
        for index, why in self.lost.items():
            text += f"\n  request {index} was lost: {why}"
        if self.different:
            text += f"\n  other tokens than undisturbed: requests {self.different}"
        for thing in self.left:
            text += f"\n  left behind: {thing}"
        return text + (f"\n  {self.trouble}" if self.trouble else "")

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data, with `kept` and `clean`."""
        return {**asdict(self), "kept": self.kept, "clean": self.clean}


def resumed(times: Sequence[float], death: float) -> float | None:
    """Seconds from `death` until a stream flowed again: the end of its longest silence since.

    A token that was already under way may arrive right after the death; it is the silence behind
    it that counts. times: of the stream's tokens, ascending, on the clock of `death`. None for a
    stream that had ended.
    """
    after = [t for t in times if t > death]
    if not after:
        return None
    gaps = [(t - before, t) for before, t in zip([death, *after], after, strict=False)]
    return max(gaps)[1] - death


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 95th percentile (the smallest time that so many do not exceed), worst and number of
    some times."""
    if not values:
        return None
    p95 = sorted(values)[math.ceil(0.95 * len(values)) - 1]
    return {"median": round(statistics.median(values), 3), "p95": round(p95, 3),
            "worst": round(max(values), 3), "count": len(values)}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures over all runs, and for each fault and moment."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(f"{outcome.fault}, {outcome.moment}", []).append(outcome)
    return {
        "runs": len(outcomes), "kept": sum(o.kept for o in outcomes),
        "clean": sum(o.clean for o in outcomes), "happened": sum(o.happened for o in outcomes),
        "lost_requests": sum(len(o.lost) for o in outcomes),
        "different_requests": sum(len(o.different) for o in outcomes),
        "left_behind": sum(bool(o.left) for o in outcomes),
        "exit_codes": dict(Counter(str(o.exit_code) for o in outcomes)),
        **_times(outcomes),
        "groups": {name: {"runs": len(some), "kept": sum(o.kept for o in some), **_times(some)}
                   for name, some in sorted(groups.items())},
    }


def _times(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {"next_token": spread([o.next_any for o in outcomes if o.next_any is not None]),
            "every_stream": spread([t for o in outcomes for t in o.next_all]),
            "ready": spread([o.ready for o in outcomes if o.ready])}


def table(found: dict[str, Any]) -> str:
    """The summary as text with a last sentence that says it all."""
    lines = [f"{'fault, moment':28}{'runs':>5}{'kept':>6}  {'next token (s)':22}"
             f"{'every stream (s)':22}{'ready (s)'}",
             f"{'':41}{'median, p95, worst':22}{'median, p95, worst':22}{'median, p95, worst'}"]
    for name, group in found["groups"].items():
        lines.append(f"{name:28}{group['runs']:5}{group['kept']:6}  "
                     f"{_three(group['next_token']):22}{_three(group['every_stream']):22}"
                     f"{_three(group['ready'])}")
    text = f"{found['kept']} of {found['runs']} runs kept every token"
    if found["next_token"]:
        times = found["next_token"]
        text += (f"; next token after a fault: median {times['median']:.1f} s, worst "
                 f"{times['worst']:.1f} s")
    if found["happened"] < found["runs"]:
        text += f"; in {found['runs'] - found['happened']} the fault did not take place"
    if found["left_behind"]:
        text += f"; {found['left_behind']} left something behind"
    codes = [code for code in found["exit_codes"] if code != "0"]
    if codes:
        counts = found["exit_codes"]
        text += f"; exit codes {', '.join(f'{code} ({counts[code]}x)' for code in codes)}"
    return "\n".join([*lines, f"{text}."])


def _three(times: dict[str, float] | None) -> str:
    return ("-" if times is None else
            f"{times['median']:.2f}, {times['p95']:.2f}, {times['worst']:.2f}")
