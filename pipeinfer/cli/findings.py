"""What a check of `pipeinfer doctor` found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. level: ok, warn or fail."""

    level: str
    what: str
    detail: str
    remedy: str = ""
