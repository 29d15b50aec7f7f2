"""Raw results as files: JSON in one line, compressed where the name ends in .gz."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).with_name("raw")


def write(path: Path, found: Any) -> None:
    """Keep what a benchmark found."""
    data = json.dumps(found).encode() + b"\n"
    # the time is left out, so that the same numbers give the same file
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def add(path: Path, found: Any) -> None:
    """Keep it behind what is in the file, which is a list: a table of several commands."""
    write(path, [*(read(path) if path.exists() else ()), found])


def text(path: Path) -> str:
    """The text of a file, which may be compressed (.gz)."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def read(path: Path) -> Any:
    """What a benchmark found."""
    return json.loads(text(path))
