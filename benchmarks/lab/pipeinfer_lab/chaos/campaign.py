"""The file of a campaign, from which it goes on. Knows no fault."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeinfer.errors import UsageError
from pipeinfer_lab.chaos.report import Outcome


class CampaignFile:
    """One JSON object a line: what the campaign is, then what came of each run.

    settings: what must be the same for runs to belong together. Held against other processes until
    it is closed. Raises UsageError for a file of another campaign, or of none.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self.outcomes: dict[int, Outcome] = {}
        self._tokens: list[list[int]] | None = None
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_size:
                self._read()
        except BlockingIOError:
            self.close()
            raise UsageError(f"another process writes {path}: wait for it, or name another file"
                             ) from None
        except UsageError:
            self.close()
            raise

    def _read(self) -> None:
        raw = self._path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        try:
            head, *rest = [json.loads(line) for line in whole.splitlines()]
            known, self._tokens = head["campaign"], head["tokens"]
            made = [outcome_of(one) for one in rest]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{self._path} is no file of `pipeinfer chaos --resume`: name another "
                             "one") from None
        other = [name for name in self._settings if known.get(name) != self._settings[name]]
        if other:
            raise UsageError(f"{self._path} is of a campaign with other options "
                             f"({', '.join(other)}): give those, or name another file")
        if len(whole) < len(raw):  # whoever wrote it was killed within a line
            os.truncate(self._path, len(whole))
        self.outcomes = {outcome.number: outcome for outcome in made}

    def begin(self, tokens: Sequence[Sequence[int]]) -> bool:
        """Whether these tokens of an undisturbed run are those of the file; a new file gets
        them."""
        wanted = [list(one) for one in tokens]
        if self._tokens is None:
            self._tokens = wanted
            self._add({"campaign": self._settings, "tokens": wanted})
        return self._tokens == wanted

    def add(self, outcome: Outcome) -> None:
        """Keep what came of a run."""
        self.outcomes[outcome.number] = outcome
        self._add(outcome.to_json())

    def _add(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Let others have it."""
        self._file.close()


def outcome_of(found: dict[str, Any]) -> Outcome:
    """What `Outcome.to_json` has written."""
    given = {field.name: found[field.name] for field in fields(Outcome)}
    given["lost"] = {int(index): why for index, why in given["lost"].items()}
    return Outcome(**given)
