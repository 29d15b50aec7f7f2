"""Input files and values of the user: TOML files, sizes, and output files. Every error is one
line."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeinfer.errors import UsageError

MOST_BYTES = 4 << 20
_UNITS = {"": 1, "b": 1, **{
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgt", 1) for kind, base in (("b", 1000), ("ib", 1024))
}}


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """Return the tables of a TOML file.

    what: the kind of file, such as "config file", for messages.
    Raises UsageError if it cannot be read, is too large or is not valid.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {what} {path}: {getattr(error, 'strerror', error)}") from (
            error)
    if len(raw) > MOST_BYTES:
        raise UsageError(f"{what} {path} has more than {MOST_BYTES} bytes")
    try:
        return tomllib.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is not valid TOML: it is not UTF-8 text") from error
    except RecursionError as error:
        raise UsageError(f"{what} {path} is not valid TOML: it is nested too deep") from error
    except ValueError as error:  # tomllib's own, and numbers with thousands of digits
        reason = " ".join(str(error).split())
        raise UsageError(f"{what} {path} is not valid TOML: {reason}") from error


def check_writable(path: Path) -> None:
    """Raise UsageError if `path` could not be written later."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: its folder is missing or not writable")


def write_atomically(path: Path, content: str | Iterable[bytes]) -> None:
    """Write a whole file or nothing; no temporary file stays behind. Raises UsageError."""
    partial = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent or ".", delete=False) as file:
            partial = Path(file.name)
            file.writelines([content.encode()] if isinstance(content, str) else content)
        partial.replace(path)
        partial = None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def parse_bytes(value: Any, where: str) -> int:
    """Return a number of bytes from an integer or a text such as "8 GiB" or "7.5GB".

    where: the setting, for messages. Raises UsageError.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63:
        return int(value)
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)",
                         str(value)[:60].strip().lower())
    size = 0
    if isinstance(value, str) and found and found[2] in _UNITS:
        size = int(float(found[1]) * _UNITS[found[2]])
    if size <= 0:
        raise UsageError(f"{where} is {repr(value)[:80]}; give bytes or a text such as \"8 GiB\"")
    return size
