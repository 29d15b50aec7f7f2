"""What the files of a work folder were made of, so that a run does not go on with another's.

Does not know: what is trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeinfer.errors import ModelError
from pipeinfer.files import write_atomically
from pipeinfer.models.locate import open_model

NOTE = "made-of.json"


def claim(work: Path, files: Sequence[str], model: Path, **more: str | int) -> None:
    """Make a work folder, or check that the files in it were made of the same.

    files: names of those from which a run goes on
    model: whose answers or weights they hold
    more: what they depend on besides
    Raises ModelError for files of another model, data or option, or without a note.
    """
    work.mkdir(parents=True, exist_ok=True)
    note = work / NOTE
    wanted = {"model": open_model(model).fingerprint, **more}
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{note}: cannot be read ({error}): remove {work}") from None
    kept = [name for name in files if (work / name).exists()]
    other = [name for name, value in wanted.items() if found.get(name) != value]
    if kept and other:
        raise ModelError(f"{work} holds {kept[0]} of another {' and '.join(other)}: give another "
                         "--work, or remove that folder")
    write_atomically(note, json.dumps(wanted))
