"""Runs the steps of a check under one deadline and keeps their outcomes in one JSON file.

The file is replaced as a whole whenever a step begins or ends, so it is valid at any moment, also
after the check was killed. Steps of one lane run one after the other; lanes run at the same time. A
step's processes end with it, with its deadline, and with this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_KEPT = 1500  #: characters of an error that the file keeps


class StepError(Exception):
    """A step failed; partial: what it found before."""

    def __init__(self, text: str, partial: Any = None) -> None:
        super().__init__(text)
        self.partial = partial


class Report:
    """The JSON file: facts of the check, and for each step its state, seconds and result. hidden:
    what errors do not show, such as folders of the machine."""

    def __init__(self, path: Path, hidden: Sequence[str] = (), **head: Any) -> None:
        self._path, self._lock, self._start = path, threading.Lock(), time.monotonic()
        self._hidden = hidden
        self.data: dict[str, Any] = {**head, "complete": False, "seconds": 0.0, "steps": {}}
        self._write()

    def step(self, name: str, state: str, **more: Any) -> None:
        """Set the state of a step and add to what is known of it."""
        for text in self._hidden if "error" in more else ():
            more["error"] = more["error"].replace(text, "")
        with self._lock:
            known = self.data["steps"].setdefault(name, {"at": round(self.seconds, 1)})
            known |= {"state": state, **more}
            self._write()

    def state(self, name: str) -> str:
        """The state of a step, empty before it is known."""
        with self._lock:
            return str(self.data["steps"].get(name, {}).get("state", ""))

    def close(self) -> None:
        """Every step has an outcome."""
        with self._lock:
            self.data["complete"] = True
            self._write()

    @property
    def seconds(self) -> float:
        """Since the check began."""
        return time.monotonic() - self._start

    def _write(self) -> None:
        self.data["seconds"] = round(self.seconds, 1)
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix=".gpu-",
                                         delete=False) as file:
            json.dump(self.data, file, indent=1)
        os.replace(file.name, self._path)


@dataclass(frozen=True, slots=True)
class Step:
    """One step. seconds: the most it may take; work: gets the seconds that it has and gives what
    the file keeps; needs: steps that have to be done before, or it is skipped; after: steps that
    have to have ended before, whatever their outcome."""

    name: str
    lane: str
    seconds: float
    work: Callable[[float], Any]
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(slots=True)
class Runner:
    """Runs steps; see `run`. deadline: time.monotonic() at which all has to have ended."""

    report: Report
    deadline: float

    def run(self, steps: Sequence[Step], only: Sequence[str] = (),
            left_out: Collection[str] = ()) -> None:
        """Run these steps, or those of them that `only` names, and close the report. left_out:
        names of steps that are not taken."""
        ended = {step.name: threading.Event() for step in steps}
        lanes: dict[str, list[Step]] = {}
        for step in steps:
            if step.name in left_out:
                self.report.step(step.name, "left out")
            if step.name in left_out or (only and step.name not in only):
                ended[step.name].set()
            else:
                lanes.setdefault(step.lane, []).append(step)

        def lane(own: Sequence[Step]) -> None:
            for step in own:
                try:
                    waited = next((name for name in (*step.needs, *step.after)
                                   if not ended[name].wait(max(0.0, self._left))), "")
                    self._one(step, waited, () if only else step.needs)
                finally:
                    ended[step.name].set()

        with ThreadPoolExecutor(max(1, len(lanes))) as pool:
            for done in [pool.submit(lane, own) for own in lanes.values()]:
                done.result()
        self.report.close()

    @property
    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _one(self, step: Step, waited: str, needs: Sequence[str]) -> None:
        """Run a step, unless there is a reason not to. waited: a step that did not end in time."""
        lacking = [name for name in needs if self.report.state(name) != "done"]
        why = f"no time: waited for {waited}" if waited else \
            f"without {', '.join(lacking)}" if lacking else \
            "no time left" if self._left < 1.0 else ""
        if why:
            self.report.step(step.name, "skipped", error=why)
            return
        self.report.step(step.name, "running")
        started, state = time.monotonic(), "failed"
        more: dict[str, Any] = {}
        try:
            more["result"], state = step.work(min(step.seconds, self._left)), "done"
        except Exception as error:
            kind = "" if isinstance(error, StepError) else f"{type(error).__name__}: "
            more["error"] = f"{kind}{error}"[-_KEPT:]
            if isinstance(error, StepError) and error.partial is not None:
                more["result"] = error.partial
        self.report.step(step.name, state, seconds=round(time.monotonic() - started, 1), **more)
        print(f"[{self.report.seconds:6.1f} s] {step.name}: {state} {more.get('error', '')[-300:]}",
              flush=True)


def child(command: Sequence[str], seconds: float, log: Path,
          env: Mapping[str, str] | None = None) -> str:
    """What a command printed; its standard error goes to `log`. Raises StepError, with the lines
    of JSON that it had printed as the partial result, when it fails or takes longer."""
    with log.open("ab") as errors:
        process = subprocess.Popen(
            list(command), stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL,
            text=True, env=None if env is None else dict(env), start_new_session=True,
            preexec_fn=die_with_parent)
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            kill_group(process)
            out, _ = process.communicate()
            raise StepError(f"{_short(command)}: not done after {seconds:.0f} s",
                            json_lines(out) or None) from None
        finally:
            kill_group(process)
    if process.returncode:
        raise StepError(f"{_short(command)}: exit status {process.returncode}: {_tail(log)}",
                        json_lines(out) or None)
    return out


def json_lines(text: str) -> list[Any]:
    """The objects that a program printed, a line each; other lines are passed over."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def die_with_parent() -> None:
    """For preexec_fn: the kernel kills this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a group, and the group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _short(command: Sequence[str]) -> str:
    text = " ".join(command)
    return text if len(text) < 160 else f"{text[:100]} ... {text[-50:]}"


def _tail(path: Path) -> str:
    return path.read_bytes()[-1200:].decode("utf-8", "replace")
