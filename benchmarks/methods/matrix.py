"""Cases that real ranks answer in one job: `tests/kit/programs/matrix.py`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kit.launch import python


def answers_of(ranks: int, config: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], *,
               timeout: float) -> dict[str, Any]:
    """What the program says of a job with this config; a failure ends this process. timeout: in
    seconds."""
    with tempfile.TemporaryDirectory() as folder:
        task, out = Path(folder) / "task.json", Path(folder) / "out.json"
        task.write_text(json.dumps({"config": config, "cases": cases}))
        done = python(ranks, "matrix", str(task), str(out), timeout=timeout)
        if done.returncode:
            sys.exit(f"{ranks} ranks: failed\n{done.stderr[-3000:]}")
        return dict(json.loads(out.read_text()))
