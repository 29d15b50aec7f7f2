"""Reads a TOML file that a user wrote: what cannot be read is one line, whatever is in it.

Knows no keys.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from pipeinfer.errors import UsageError

MOST_BYTES = 4 << 20


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """The tables of the file. what: such as "config file", for messages. Raises UsageError."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {what} {path}: {getattr(error, 'strerror', error)}") from (
            error)
    if len(raw) > MOST_BYTES:
        raise UsageError(f"{what} {path} has more than {MOST_BYTES} bytes")
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is not valid TOML: it is not UTF-8 text") from error
    except RecursionError as error:
        raise UsageError(f"{what} {path} is not valid TOML: it is nested too deep") from error
    except ValueError as error:  # tomllib's own, and numbers with thousands of digits
        reason = " ".join(str(error).split())
        raise UsageError(f"{what} {path} is not valid TOML: {reason}") from error


def check_writable(path: Path) -> None:
    """Raise UsageError when `path` could not be written later."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: its folder is missing or not writable")


def write_atomically(path: Path, text: str) -> None:
    """Write all of a file or nothing. Raises UsageError."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent or ".", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
