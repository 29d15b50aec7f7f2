"""Whole jobs on a device: every policy's tokens against a plain loop on the same device."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.devices import Device
from benchmarks.gpu.steps import StepError, child
from benchmarks.methods.prompts import PROMPTS
from pipeinfer.core.sampling import noise_key
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.scheduler.settings import PUBLISHED
from tests.kit.launch import environment, mpirun_path

ROOT = Path(__file__).resolve().parents[2]
MATRIX = ROOT / "tests" / "kit" / "programs" / "matrix.py"
TARGET, DRAFT = EMBEDDED / "target.gguf", EMBEDDED / "draft.gguf"
ALL = 99  #: more layers than any of these models has
_PREFIXES = ("PMIX_PREFIX", "PRTE_PREFIX")  #: of an Open MPI that was unpacked elsewhere
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.8, "key": noise_key(5)})
POLICIES: tuple[dict[str, Any], ...] = (
    {"policy": "iterative"}, {"policy": "speculative", "branches": 3, "p_split": 0.1},
    {"policy": "pipeinfer", "p_min": 0.0, "alternatives": 3, "path_min": 0.001},
    {"policy": "pipeinfer", "adapt": True}, {"policy": "published", **PUBLISHED})
#: layers on the device, flash attention and rows a decode of a plain loop
Loop = tuple[int, int | None, int]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A job. config: its options; gpu_layers: of the plain loop that it is compared with; died: a
    rank is killed on purpose; flash: of the plain loop, None for what `auto` chooses."""

    name: str
    ranks: int
    config: Mapping[str, Any] = field(default_factory=dict)
    gpu_layers: int = ALL
    died: bool = False
    flash: int | None = None

    @property
    def loop(self) -> Loop:
        """Layers on the device and flash attention of the plain loop, and its rows a decode."""
        return self.gpu_layers, self.flash, int(self.config.get("pad", 0))


PADDED: dict[str, Any] = {"pad": 4}
ON_GPU: dict[str, Any] = {"gpu_layers": ALL, "gpu_layers_draft": ALL}
ARRANGEMENTS = (
    Arrangement("one rank", 1, ON_GPU | PADDED),
    Arrangement("one rank, single rows", 1, {**ON_GPU, "pad": 1}),
    Arrangement("one rank, exact off", 1, {**ON_GPU, "exact": "off"}),
    Arrangement("one rank, no flash attention", 1, {**ON_GPU, **PADDED, "flash_attn": "off"},
                flash=0),
    Arrangement("half of the layers", 1, {"gpu_layers": 6, **PADDED}, 6),
    Arrangement("three ranks", 3, ON_GPU | PADDED),
    Arrangement("three ranks, exact off", 3, {**ON_GPU, "exact": "off"}),
    Arrangement("three ranks, draft on the processor", 3, {"gpu_layers": ALL, **PADDED}),
    Arrangement("four ranks, a stage is killed", 4, {
        **ON_GPU, **PADDED, "hook": ["fault=kill@2:decode=40"], "timeout": 30}, died=True),
)


def run_all(device: Device, work: Path, log: Path, seconds: float) -> dict[str, Any]:
    """Run every arrangement, some at once, and compare. Raises StepError, with what was found, if
    a job fails."""
    sizes = device.sizes
    cases = [{"prompt": prompt, "params": params, "count": sizes.tokens}
             for prompt in PROMPTS[:sizes.prompts] for params in SAMPLINGS]
    lock = threading.Lock()
    # a software driver takes several times as long for padded rows: see test_padded.py
    arrangements = ARRANGEMENTS if device.kind != "vulkan" else [
        replace(one, config={**one.config, "pad": 1}) for one in ARRANGEMENTS
        if one.name in ("one rank", "three ranks")]
    loops = {kind: plain(device, work, log, seconds / 2, kind, cases)["tokens"]
             for kind in sorted({one.loop for one in arrangements}, key=str)}
    found: dict[str, Any] = {}

    def one(arrangement: Arrangement) -> None:
        try:
            answer = job(device, work, log, seconds / 2, arrangement, cases)
            result = compare(device, work, log, seconds / 2, arrangement, cases, answer,
                             loops[arrangement.loop])
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[-600:]}
        with lock:
            found[arrangement.name] = result

    with ThreadPoolExecutor(sizes.jobs_at_once) as pool:
        list(pool.map(one, arrangements))
    if failed := [name for name, result in found.items() if "error" in result]:
        raise StepError(f"failed: {', '.join(failed)}", found)
    return found


def plain(device: Device, work: Path, log: Path, seconds: float, kind: Loop,
          cases: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """What the plain loop on this device writes; see benchmarks/gpu/plain.py."""
    task = {"model": str(TARGET), "gpu_layers": kind[0], "flash": kind[1], "pad": kind[2],
            "cases": list(cases), **more}
    return program(device, 1, [sys.executable, "-m", "benchmarks.gpu.plain"], task, work, log,
                    seconds)


def job(device: Device, work: Path, log: Path, seconds: float, arrangement: Arrangement,
        cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the ranks of an arrangement answer to every case under every policy."""
    config = {"model": str(TARGET), "draft_model": str(DRAFT), "ctx": 512, "threads": 1,
              "threads_draft": 1, "branches": 3, "policy": "pipeinfer", **arrangement.config}
    if device.kind == "rpc" and arrangement.ranks == 1:
        config["gpu_layers_draft"] = 0  # two threads cannot share a process's one connection
    policies = POLICIES[3:4] if arrangement.died else POLICIES
    task = {"config": config,
            "cases": [{**case, "limits": limits} for case in cases for limits in policies]}
    return program(device, arrangement.ranks, [sys.executable, str(MATRIX)], task, work, log,
                    seconds)


def compare(device: Device, work: Path, log: Path, seconds: float, arrangement: Arrangement,
            cases: Sequence[Mapping[str, Any]], answer: Mapping[str, Any],
            wanted: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many answers differ from the plain loop's, and how near a tie each difference is."""
    policies = POLICIES[3:4] if arrangement.died else POLICIES
    results = answer["results"]
    differ = [
        {"case": i // len(policies), "policy": policies[i % len(policies)]["policy"],
         "tokens": result["tokens"]}
        for i, result in enumerate(results) if result["tokens"] != wanted[i // len(policies)]]
    explained = plain(device, work, log, seconds, arrangement.loop, cases,
                      tokens=list(wanted), against=differ)["differ"] if differ else []
    return {"answers": len(results), "differ": len(differ),
            "near_ties": sum(one["near_tie"] for one in explained), "explained": explained[:12],
            "R": answer["exact_width"],
            "accepted": sum(one["accepted_speculative"] for one in results),
            "cancelled": sum(one["cancelled_runs"] for one in results)}


def command(ranks: int, words: Sequence[str]) -> list[str]:
    """The words as a job of so many ranks, without mpirun for one. Raises StepError."""
    if ranks == 1:
        return list(words)
    launcher = mpirun_path()
    if launcher is None:
        raise StepError("no mpirun was found")
    return [launcher, "--oversubscribe", "-np", str(ranks), *words]


def job_environment(own: Mapping[str, str], **more: str) -> dict[str, str]:
    """The settings for MPI and those of a device."""
    kept = {name: os.environ[name] for name in _PREFIXES if name in os.environ}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    device = {name: value for name, value in own.items()
              if name.startswith(("PIPEINFER_", "GGML_", "VK_", "LP_"))}
    return environment(**kept, **device, PYTHONPATH=paths) | more


def program(device: Device, ranks: int, words: Sequence[str], task: Mapping[str, Any],
            work: Path, log: Path, seconds: float) -> dict[str, Any]:
    """What a rank program writes for a task, on ranks that each have the device. Raises
    StepError."""
    folder = Path(tempfile.mkdtemp(dir=work))
    task_path, out = folder / "task.json", folder / "out.json"
    task_path.write_text(json.dumps(task))
    with device.open(ranks) as own:
        child(command(ranks, [*words, str(task_path), str(out)]), seconds, log,
              job_environment(own, MPIEXEC_TIMEOUT=str(max(5, int(seconds) - 5))))
    return dict(json.loads(out.read_text()))
