"""What the import contracts of pyproject.toml do not say: no pickle, and a light scheduler."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "pipeinfer"


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_there_is_no_pickle():
    for path in PACKAGE.rglob("*.py"):
        assert not set(imports(path)) & {"pickle", "marshal", "shelve", "dill"}, path


@pytest.mark.parametrize("module", ["scheduler.scheduler", "scheduler.replicas", "core.codec",
                                    "planning.partition", "planning.replan",
                                    "strategies.decomposers.pasta", "strategies.proposers.bita"])
def test_importing_what_decides_loads_no_heavy_module(module):
    heavy = ("mpi4py", "torch", "pipeinfer.llama.binding", "gguf")
    code = (f"import sys, pipeinfer.{module}; "
            f"print([m for m in {heavy} if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
