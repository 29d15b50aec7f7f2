"""What a process inherits may be odd: closed streams, an encoding without most letters, no home.

`settle` mends that before anything reads or writes, here and for the processes that it starts.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import pwd
import stat
import sys
import tempfile
from pathlib import Path

from pipeinfer import host

_STREAMS = ("stdin", "stdout", "stderr")


def settle() -> None:
    """Open standard streams that are closed, let them take every letter, and find a home."""
    lost = sys.stdout is None
    for number, name in enumerate(_STREAMS):
        if not _is_open(number):  # it has the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8",
                                    errors="backslashreplace", closefd=False))
        with contextlib.suppress(OSError):
            os.set_blocking(number, True)  # a program before may have left it otherwise
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _takes_all(stream):
            stream.reconfigure(errors="backslashreplace")
    if lost and host.launched_rank() == 0:
        sys.stderr.write("pipeinfer: note: standard output is closed, so what is written there is "
                         "lost\n")
    if not _is_home(os.environ.get("HOME", "")):
        os.environ["HOME"] = str(_home())


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _takes_all(stream: io.TextIOWrapper) -> bool:
    """Whether a stream encodes every text, also bytes of names that are no UTF-8."""
    utf8 = codecs.lookup(stream.encoding).name == "utf-8"
    return stream.errors == "backslashreplace" or (utf8 and stream.errors == "surrogateescape")


def _is_home(path: str) -> bool:
    """Whether this can be a home: a folder, and not the root folder, which containers name for
    users without an entry, unless they may write there."""
    return os.path.isabs(path) and os.path.isdir(path) and (
        path.strip("/") != "" or os.access(path, os.W_OK))


def _home() -> Path:
    """Return the user's home, or a private folder in that for temporary files."""
    with contextlib.suppress(KeyError):
        if _is_home(found := pwd.getpwuid(os.getuid()).pw_dir):
            return Path(found)
    path = Path(tempfile.gettempdir()) / f"pipeinfer-home-{os.getuid()}"
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() \
                and not facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return path
    return Path(tempfile.mkdtemp(prefix="pipeinfer-home-"))
