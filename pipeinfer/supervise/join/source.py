"""The head's own source, for a machine with another version: `pipeinfer join --same-version`."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

from pipeinfer.errors import ProtocolError

ROOT = Path(__file__).parents[3]
LAUNCHER = "launch/join"
MOST = 1 << 30  #: bytes of an archive
SECONDS = 600.0  #: to send one
_FILES = ("setup.cfg", "setup.py", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
_FOLDERS = ("pipeinfer", "launch")
_MADE = {".so", ".pyc", ".pyd"}  #: made for this machine


def archive(root: Path = ROOT) -> bytes | None:
    """Return a checkout as a ZIP archive, without what git or a user has beside its source. None:
    this is an installed package, which has no source to install from."""
    if not (root / LAUNCHER).is_file():
        return None
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:  # mostly weights, which do not get smaller
        for path in [*(root / name for name in _FILES),
                     *(one for name in _FOLDERS for one in sorted((root / name).rglob("*")))]:
            if path.is_file() and path.suffix not in _MADE:
                packed.write(path, path.relative_to(root))
    return made.getvalue()


def unpack(data: bytes, folder: Path) -> Path:
    """Put a checkout in place of the one in `folder`, and return its launcher. Its environment
    stays: the launcher installs again if what it needs has changed. Raises ProtocolError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            packed.extractall(folder)  # leaves out `..` and leading slashes
    except (zipfile.BadZipFile, ValueError) as error:
        raise ProtocolError(f"the head sent no archive: {error}") from error
    return folder / LAUNCHER
