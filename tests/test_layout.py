"""What pyproject.toml's import contracts do not say: a light scheduler, ceilings."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pipeinfer

PACKAGE = Path(__file__).resolve().parents[1] / "pipeinfer"
ROOT = PACKAGE.parent
CEILINGS = ROOT / "tests" / "ceilings.toml"
#: groups of rooms that have a ceiling; all others of the product are its entries
GROUPS = {"core": ("scheduler", "strategies", "runtime", "core", "cluster", "planning"),
          "models": ("models", "backends", "llama", "transport"),
          "emulation": ("emulation",)}
#: tables of what is added to the ceilings: capabilities, and what moved in from other places
MORE = ("added", "moved")
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 600, 50


@pytest.mark.parametrize("module", ["scheduler.scheduler", "core.codec",
                                    "planning.partition", "planning.replan",
                                    "strategies.decomposers.pasta", "strategies.proposers.bita"])
def test_importing_what_decides_loads_no_heavy_module(module):
    heavy = ("mpi4py", "torch", "pipeinfer.llama.binding", "gguf")
    code = (f"import sys, pipeinfer.{module}; "
            f"print([m for m in {heavy} if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@functools.cache
def code(path):
    """The file's tree, and whether each line is code: no blank, docstring or full-line comment."""
    text, docstrings = path.read_text(), set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) \
                and isinstance(first.value.value, str):
            docstrings |= set(range(first.lineno, first.end_lineno + 1))
    return tree, [bool(line.strip()) and not line.strip().startswith("#")
                  and number not in docstrings for number, line in enumerate(text.splitlines(), 1)]


@functools.cache
def product():
    return sorted(PACKAGE.rglob("*.py"))


def test_no_group_of_rooms_exceeds_its_ceiling():
    ceilings = tomllib.loads(CEILINGS.read_text())
    for more in [one for table in MORE for one in ceilings.pop(table).values()]:
        for name, lines in more.items():
            ceilings[name] = ceilings.get(name, 0) + lines
    found = dict.fromkeys(("entries", *GROUPS), 0) | {"files": len(product())}
    for path in product():
        room = path.relative_to(PACKAGE).parts[0]
        group = next((name for name, rooms in GROUPS.items() if room in rooms), "entries")
        found[group] += sum(code(path)[1])
    assert found.keys() == ceilings.keys()
    assert {name: (count, ceilings[name]) for name, count in found.items()
            if count > ceilings[name]} == {}


def test_a_ceiling_only_falls():
    if not (ROOT / ".git").exists():
        pytest.skip("no history here")
    git = ["git", "-C", str(ROOT)]
    name = str(CEILINGS.relative_to(ROOT))
    log = subprocess.run([*git, "log", "--reverse", "--first-parent", "--format=%H %s", "--", name],
                         capture_output=True, text=True, check=True).stdout.splitlines()
    before, rises = {}, []  # a number by its name, "models" or "prompts models"
    for commit, _, subject in (line.partition(" ") for line in log):
        text = subprocess.run([*git, "show", f"{commit}:{name}"], capture_output=True, text=True,
                              check=False).stdout
        now = tomllib.loads(text)
        now |= {f"{one} {name}": lines for table in MORE for one, more in now.pop(table, {}).items()
                for name, lines in more.items()}
        if any(now[key] > value for key, value in before.items() if key in now):
            rises.append(f"{commit[:8]} {subject}")
        before = now
    assert rises == []


def test_files_and_functions_stay_short():
    long = []
    for path in product():
        tree, lines = code(path)
        if sum(lines) > MOST_LINES_OF_A_FILE:
            long.append(f"{path}: {sum(lines)} lines")
        long += [f"{path}: {node.name}" for node in ast.walk(tree)
                 if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                 and sum(lines[node.lineno - 1:node.end_lineno]) > MOST_LINES_OF_A_FUNCTION]
    assert long == []


def modules():
    """Every module of the package: name, and names of those that it imports, for types as well."""
    paths = {".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)
                      ).removesuffix(".__init__"): path for path in PACKAGE.rglob("*.py")}
    for name, path in paths.items():
        found = set()
        for node in ast.walk(code(path)[0]):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {full if (full := f"{node.module}.{alias.name}") in paths else node.module
                          for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        yield name, found & paths.keys() - {name}


def test_no_module_imports_one_that_imports_it():
    """Directly or by way of others: types have a home below those that use them."""
    left = dict(modules())
    while leaves := {name for name, imported in left.items() if not imported & left.keys()}:
        for name in leaves:
            del left[name]
    used = {one for imported in left.values() for one in imported}
    assert sorted(name for name in left if name in used) == []


def test_the_kit_is_below_benchmarks_and_the_lab():
    """Tests may import both; benchmarks import the kit alone of tests, and the kit none of them."""
    found = []
    for folder, forbidden in (("benchmarks", r"tests(?!\.kit\b)"),
                              ("benchmarks/lab", "tests|benchmarks"),
                              ("tests/kit", r"tests(?!\.kit\b)|benchmarks|pipeinfer_lab")):
        statement = re.compile(rf"^ *(?:from|import) (?:{forbidden})\b.*", re.M)
        for path in (ROOT / folder).rglob("*.py"):
            found += [f"{path.relative_to(ROOT)}: {one}"
                      for one in statement.findall(path.read_text())]
    assert found == []


def test_the_lab_has_the_version_of_the_product():
    own = tomllib.loads((ROOT / "benchmarks/lab/pyproject.toml").read_text())["project"]
    version = pipeinfer.__version__
    assert own["version"] == version
    assert [one for one in own["dependencies"] if one.startswith("pipeinfer")] == [
        f"pipeinfer=={version}"]
