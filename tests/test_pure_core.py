"""The pure part imports nothing that has to do with the outside world; no pickle anywhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "pipeinfer"
PURE = ("core", "protocol", "tree", "sequences", "sampling", "scheduler", "events", "policy",
        "errors", "partition", "lanes", "admission", "prefixes", "reserve", "calibration",
        "controller", "probing", "watch", "replan", "pace", "flight", "speculation", "threads",
        "decomposers/base", "decomposers/reading", "decomposers/pasta", "decomposers/pdos",
        "decomposers/apar", "decomposers/skeleton", "probes", "replicas",
        "strategies/base", "strategies/draft_model", "strategies/prompt_lookup",
        "strategies/several", "strategies/rows", "strategies/lookahead", "strategies/bita")
FORBIDDEN = {"mpi4py", "torch", "time", "threading", "socket", "asyncio", "subprocess",
             "llama_cpp", "multiprocessing", "random", "click", "psutil"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("name", PURE)
def test_the_pure_core_stays_pure(name):
    assert not set(imports(PACKAGE / f"{name}.py")) & FORBIDDEN


def test_only_the_mpi_transport_imports_mpi():
    users = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py")
             if "mpi4py" in set(imports(p))}
    assert users == {"transport/mpi.py"}


def test_there_is_no_pickle():
    for path in PACKAGE.rglob("*.py"):
        assert not set(imports(path)) & {"pickle", "marshal", "shelve", "dill"}, path


def test_importing_the_scheduler_loads_no_heavy_module():
    code = ("import sys, pipeinfer.scheduler; "
            "print([m for m in ('mpi4py', 'torch', 'llama_cpp', 'gguf') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
