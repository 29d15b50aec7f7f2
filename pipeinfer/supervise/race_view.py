"""A race of policies over the same stages: its results as text, and pictures of the runs.

Plain data; this module uses no session.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from msgspec import Struct

from pipeinfer.cli.summary import FATES
from pipeinfer.core.policy import Policy
from pipeinfer.text_table import aligned

#: who races, in order: the policy and its name here
RACERS = {Policy.ITERATIVE: "one token at a time", Policy.SPECULATIVE: "synchronous",
          Policy.PIPEINFER: "pipeinfer"}
_WIDTH = max(map(len, RACERS.values()))
#: what became of a run, as a character; cancelled runs have one
MARKS = {"prompt": "p", "non-speculative": "=", "accepted": "+", "partly accepted": "~",
         "rejected": "x", "stopped": "-", "skipped": "-"}
_SHOWN_US = 2e6  #: the most that pictures show of an answer, in microseconds
_COLUMNS = 48  #: of a stage's line in the terminal
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\s]+")
_UNDATED = "#cfcfcf"


class Finished(Struct, frozen=True):
    """An answer of the race.

    policy: by which it came. speed: tokens per second after the first one.
    seconds: from the request to the last token. runs: ids of its runs, first and last.
    """

    policy: Policy
    tokens: tuple[int, ...]
    text: str
    speed: float
    seconds: float
    runs: tuple[int, int]


def result_fields(one: Finished, first: Finished) -> dict[str, Any]:
    """Return the figures of an answer, compared with the first racer's, as an event has them."""
    return {"policy": one.policy.value, "tokens": len(one.tokens), "tokens_per_second": one.speed,
            "seconds": one.seconds, "ratio": one.speed / first.speed if first.speed else 0.0,
            "same": one.text == first.text and one.tokens == first.tokens}


def result_line(one: Finished, first: Finished) -> str:
    """Return the line of an answer, compared with the first racer's."""
    found = result_fields(one, first)
    said = f"{excerpt(one.text, 40)}..." if one is first else \
        f"{found['ratio']:.1f} times, {'same text' if found['same'] else 'ANOTHER TEXT'}"
    figures = f"{one.speed:5.1f} tokens/s  {one.seconds:4.1f} s"
    return f"{RACERS[one.policy]:<{_WIDTH}}  {figures}  {said}"


def excerpt(text: str, length: int, *, end: bool = False) -> str:
    """Return the beginning, or the end, of a text as one line without control characters."""
    line = _CONTROLS.sub(" ", text).strip()
    return line[-length:] if end else line[:length].rstrip()


class RaceLines:
    """A line for each racer in a terminal, redrawn while the answers come.

    out: the terminal.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._drawn = out, False
        self._texts = dict.fromkeys(RACERS, "")

    def add(self, policy: Policy, piece: str) -> None:
        """Show a further piece of an answer."""
        self._texts[policy] += piece
        room = self._columns() - _WIDTH - 3
        lines = [f"\r\x1b[K{name:<{_WIDTH}}  {excerpt(self._texts[one], room, end=True)}\n"
                 for one, name in RACERS.items()]
        self._write(self._back() + "".join(lines))
        self._drawn = True

    def clear(self) -> None:
        """Remove the lines."""
        self._write(f"{self._back()}\r\x1b[J" if self._drawn else "")
        self._drawn = False

    def _back(self) -> str:
        return f"\x1b[{len(RACERS)}A" if self._drawn else ""

    def _columns(self) -> int:
        try:
            return max(os.get_terminal_size(self._out.fileno()).columns, _WIDTH + 10)
        except OSError:
            return 80

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


# --- pictures ---------------------------------------------------------------------------------


class Lane(Struct, frozen=True):
    """What the stages computed in a part of an answer.

    stages: of each stage the runs in it as (start, end, fate); times in microseconds from the
    beginning of the part.
    """

    policy: Policy
    stages: tuple[tuple[tuple[float, float, str], ...], ...]


def lanes_of(trace: Mapping[str, Any], race: Sequence[Finished]) -> tuple[float, list[Lane]]:
    """Return the length of the part that is shown, in microseconds, and a lane for each racer.

    trace: of all answers, as `chrome_trace` returns it. The part is the middle of each answer
    without its prompt, of the same length for all.
    """
    runs = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    nodes = sorted({e["tid"] for e in runs})
    own = [[e for e in runs if one.runs[0] <= e["args"]["run"] <= one.runs[1]
            and e["cat"] != "prompt"] for one in race]
    ends = [(min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events))
            if events else (0.0, 0.0) for events in own]
    span = min([_SHOWN_US, *(stop - start for start, stop in ends)])
    lanes = []
    for one, events, (start, stop) in zip(race, own, ends, strict=True):
        zero = (start + stop - span) / 2
        lanes.append(Lane(one.policy, tuple(tuple(
            (max(e["ts"] - zero, 0.0), min(e["ts"] + e["dur"] - zero, span), e["cat"])
            for e in events
            if e["tid"] == node and e["ts"] < zero + span and e["ts"] + e["dur"] > zero)
            for node in nodes)))
    return span, lanes


def _used(lanes: Sequence[Lane]) -> list[str]:
    """The fates that occur, in the order of the legend."""
    found = {fate for lane in lanes for runs in lane.stages for _, _, fate in runs}
    return [fate for fate in FATES if fate in found]


def as_text(span: float, lanes: Sequence[Lane]) -> str:
    """Return the picture as characters, a line for each stage."""
    rows = []
    for lane in lanes:
        for number, runs in enumerate(lane.stages, 1):
            cells = ["."] * _COLUMNS
            for start, end, fate in runs:
                first = int(start / span * _COLUMNS)
                for column in range(first, max(first + 1, int(end / span * _COLUMNS))):
                    cells[min(column, _COLUMNS - 1)] = MARKS.get(fate, "?")
            rows.append([RACERS[lane.policy] if number == 1 else "", f"stage {number}",
                         "".join(cells)])
    words = {MARKS[fate]: "cancelled" if MARKS[fate] == "-" else FATES[fate][0]
             for fate in _used(lanes)}
    signs = [f"{mark} {word}" for mark, word in words.items()]
    return "\n".join([*aligned(rows), "   ".join([f"{span / 1e6:.1f} s:", *signs, ". idle"])])


def _fields(line: str) -> str:
    return ", ".join(part.strip() for part in line.split("  ") if part)


def as_svg(title: str, span: float, lanes: Sequence[Lane], lines: Sequence[str]) -> str:
    """Return the picture as SVG. lines: the results, one for each lane."""
    left, wide, row, y = 70, 860, 22, 34
    parts = [f'<text x="12" y="20" font-weight="bold">{html.escape(title)}</text>']
    for lane, line in zip(lanes, lines, strict=True):
        y += 26
        parts.append(f'<text x="12" y="{y - 8}">{html.escape(_fields(line))}</text>')
        for number, runs in enumerate(lane.stages, 1):
            parts.append(f'<rect x="{left}" y="{y}" width="{wide}" height="{row - 4}" '
                         'fill="#f1f1f1"/>'
                         f'<text x="12" y="{y + 13}" fill="#555">stage {number}</text>')
            for start, end, fate in runs:
                x = left + start / span * wide
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max((end - start) / span * wide, 1):.1f}" '
                    f'height="{row - 4}" fill="{FATES.get(fate, ("", _UNDATED))[1]}" '
                    'stroke="white" stroke-width="0.6"/>')
            y += row
    x, y = 12, y + 24
    for fate in _used(lanes):
        word, colour = FATES[fate]
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
                     f'<text x="{x + 17}" y="{y}">{word}</text>')
        x += 45 + 7 * len(word)
    parts.append(f'<text x="{left + wide}" y="{y}" text-anchor="end">{span / 1e6:.1f} s</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 14}" height="{y + 16}" '
            'font-family="sans-serif" font-size="13">\n<rect width="100%" height="100%" '
            'fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n")
