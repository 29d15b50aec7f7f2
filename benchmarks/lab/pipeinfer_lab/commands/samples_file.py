"""The file of `pipeinfer sample`: a prompt a line, each of which says how its answers were drawn.

Going on behind a file needs the same prompts, model and draws; a line that a crash has cut off is
drawn again. Knows no ranks, tokens or scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.errors import UsageError

_START = b'{"made": '
_NAMES = {"model": "the model"}


@dataclass(frozen=True, slots=True)
class Begun:
    """What is there already. kept: bytes of its whole lines."""

    path: Path
    records: Sequence[Mapping[str, Any]]
    kept: int

    @property
    def seed(self) -> int | None:
        """Of its draws."""
        return self.records[0]["made"].get("seed") if self.records else None

    def check(self, made: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]) -> None:
        """made: how answers would be drawn now. prompts: the fields that say what is asked. Raises
        UsageError where the file has another, with what to do."""
        for number, record in enumerate(self.records, 1):
            where = f"--out {self.path}, line {number}"
            for name, value in made.items():
                if (was := record["made"].get(name)) != value:
                    raise UsageError(f"{where}: {_NAMES.get(name, name)} was {was}, and is {value} "
                                     "now: use the same to go on, or give another --out")
            if number <= len(prompts) and any(
                    record.get(name) != value for name, value in prompts[number - 1].items()):
                raise UsageError(f"{where}: prompt {number} is another one now: use the same "
                                 "prompts to go on, or give another --out")


def begun(path: Path) -> Begun:
    """What is at `path`. Raises UsageError for a file that is not of `pipeinfer sample`, or
    cannot be read."""
    try:
        raw = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UsageError(f"--out {path}: cannot be read: {error.strerror or error}") from error
    *lines, rest = raw.split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("made"), dict):
            raise _foreign(path, number)
        records.append(record)
    if not (rest.startswith(_START) or _START.startswith(rest)):
        raise _foreign(path, len(lines) + 1)
    return Begun(path, records, len(raw) - len(rest))


def line_of(made: Mapping[str, Any], prompt: Mapping[str, Any],
            samples: Sequence[Mapping[str, Any]]) -> str:
    """A line of the file."""
    return json.dumps({"made": made, **prompt, "samples": samples}) + "\n"


def _foreign(path: Path, number: int) -> UsageError:
    return UsageError(f"--out {path}, line {number}: does not say how its answers were drawn, so "
                      "it is not of this version of pipeinfer sample: give another --out")
