"""Sources of the standard library, split as for the embedded models.

The split is by a hash of a file's relative path, so that it is the same on every machine: the
embedded pair has not read the held-out files.

Does not know: tokens, models.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

#: Directories that are not the library itself: installed packages, caches, test material that is
#: broken Python on purpose, and tests.
_SKIP_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__", "bad", "lib2to3_data",
                        "test", "tests", "idle_test"})
#: Generated tables: megabytes of numbers that would teach nothing but numbers.
_SKIP_FILES = re.compile(
    r"^(encodings/(cp|iso|mac|koi|hp|kz|ptcp|tis|aliases).*|pydoc_data/topics\.py"
    r"|_sysconfigdata.*|html/entities\.py|.*(cjk|unicode_ident|badsyntax|bad_coding|big5|gb).*)$"
)
#: One file in this many is held out.
HELD_OUT_ONE_IN = 20


def is_held_out(name: str) -> bool:
    """True when the file of this relative path (forward slashes) belongs to the held-out split."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def library(*, held_out: bool, root: Path | None = None) -> Iterator[str]:
    """Readable, mostly ASCII ``.py`` files of one split, in path order, with tabs and trailing
    blanks tidied.

    root: of the library [default: the running interpreter's].
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        name = relative.as_posix()
        if is_held_out(name) != held_out or _SKIP_DIRS.intersection(relative.parts) \
                or _SKIP_FILES.match(name):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if len(text) >= 200 and _is_prose_or_code(text):
            yield "\n".join(line.rstrip() for line in text.expandtabs(8).splitlines()) + "\n"


def _is_prose_or_code(text: str) -> bool:
    """False for tables: too many digits or non-ASCII characters, or very long lines."""
    digits = sum(character.isdigit() for character in text)
    odd = sum(not character.isascii() for character in text)
    longest = max(map(len, text.splitlines()), default=0)
    return digits < 0.12 * len(text) and odd < 0.02 * len(text) and longest < 500
