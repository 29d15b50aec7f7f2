"""Shows how far the stages are while they load: one live line in a terminal, else plain lines.

Without a terminal, as under systemd, nohup or Slurm, nothing is printed for a start of a few
seconds; then one line per phase, and one every ten seconds in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from pipeinfer import host
from pipeinfer.cli.terminal import progress_stream
from pipeinfer.cluster.assembly import StageState
from pipeinfer.config import RequestConfig

_QUIET = 3.0  #: seconds in which a log gets no line
_PERIOD = 10.0  #: seconds between two lines of a log
_COLUMNS = 80  #: where the terminal does not say its width
_LONGEST = 3600.0  #: seconds left beyond which the rate so far tells nothing
_BYTES = 1 << 20  #: a larger total counts bytes, a smaller one steps

States = Mapping[int, StageState]


def progress_hook(config: RequestConfig) -> Callable[[States], None] | None:
    """Return a function that shows the loading progress of all stages; None for rank 0's `--json`
    and for other ranks."""
    if config.json or host.launched_rank() > 0:
        return None
    out, live = progress_stream()
    return LoadingLines(out, live=live).show


class LoadingLines:
    """The lines of one start.

    out: where they go. live: whether it is a terminal, in which a line can be replaced.
    """

    def __init__(self, out: TextIO, *, live: bool, clock: Callable[[], float] = time.monotonic
                 ) -> None:
        self._out, self._live, self._clock = out, live, clock
        self._begin()

    def _begin(self) -> None:
        self._began = self._shown = self._clock()
        self._done = False
        self._phases: tuple[str, ...] = ()
        self._seconds: dict[str, dict[int, float]] = {}
        self._before: dict[int, str] = {}
        self._last = self._began

    def show(self, states: States) -> None:
        """Show the states if that is due. Called at each message of a stage, at a start and after
        a loss."""
        if self._done:
            self._begin()
        now, phases = self._clock(), tuple(state.phase for _, state in sorted(states.items()))
        self._seconds.setdefault("planning", {0: now - self._began})
        for node, phase in self._before.items():
            spent = self._seconds.setdefault(phase, {})
            spent[node] = spent.get(node, 0.0) + now - self._last
        self._last = now
        self._before = {node: state.phase for node, state in states.items() if not state.ready}
        done = self._done = all(state.ready for state in states.values())
        if self._live:
            line = "" if done else self._line(states, now)[:_columns(self._out) - 1]
            self._write(f"\r\x1b[K{line}")
        if now - self._began < _QUIET:
            return
        if done:
            self._write(f"pipeinfer: ready after {now - self._began:.0f} s: {self._sum()}\n")
        elif not self._live and (phases != self._phases or now - self._shown >= _PERIOD):
            self._write(f"pipeinfer: {self._line(states, now)}\n")
            self._phases, self._shown = phases, now

    def _line(self, states: States, now: float) -> str:
        spares = any(state.spare for state in states.values())
        parts = [f"{state.spare or node} {progress_text(state, now)}"
                 for node, state in sorted(states.items())]
        return ("spare ranks: " if spares else "stages: ") + " | ".join(parts)

    def _sum(self) -> str:
        """Say for each phase how long the slowest stage was in it."""
        longest = {phase: max(spent.values()) for phase, spent in self._seconds.items()}
        return ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in longest.items()
                         if seconds >= 1) or "nothing took a second"

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _columns(out: TextIO) -> int:
    """Return the width of the terminal; a longer line could not be replaced."""
    try:
        return os.get_terminal_size(out.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS


def progress_text(state: StageState, now: float | None = None) -> str:
    """Return the phase of a stage, with MB, MB/s and seconds left where it counts bytes.

    now: by `time.monotonic`; None: the present time.
    """
    if state.total < _BYTES:
        return f"{state.phase} {state.done / state.total:.0%}" if state.total > 1 else state.phase
    took, left = (time.monotonic() if now is None else now) - state.since, state.total - state.done
    rate = state.done / took if took > 0 else 0.0
    text = f"{state.phase} {state.done / 1e6:,.0f} of {state.total / 1e6:,.0f} MB"
    if rate < 1e3 or took < 1 or left / rate > _LONGEST:
        return text
    return f"{text} ({rate / 1e6:,.0f} MB/s, {left / rate:.0f} s left)"
