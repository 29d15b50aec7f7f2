"""Which tests run: the sample shows every behaviour, `--full` runs everything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kit.launch import ROOT
from tests.kit.sample import FULL, matrix

TESTS = """
import pytest
@pytest.mark.full("what test_short shows")
def test_long(): pass
def test_short(): pass
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.full)])
def test_cells(n): pass
"""
UNEXPLAINED = """
@pytest.mark.full
def test_hidden(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(("text", "args", "wanted", "says"), [
    (TESTS, ["test_it.py"], {"short", "cells[1]"}, "sample: 2 tests are left out"),
    (TESTS + UNEXPLAINED, ["test_it.py", "--full"],
     {"long", "short", "cells[1]", "cells[2]", "hidden"}, "full run"),
    (TESTS + UNEXPLAINED, ["test_it.py::test_long", "test_it.py::test_cells"],
     {"long", "cells[1]", "cells[2]"}, "sample: 0"),
    (TESTS + UNEXPLAINED, ["test_it.py"], set(), "say what shows the same there"),
])
def test_what_is_selected(tmp_path, text, args, wanted, says):
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.kit.fixtures", "-v",
         "--basetemp", tmp_path / "inner", *args],  # nothing of other runs is cleaned up
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert (done.returncode == 0) == bool(wanted), done.stdout + done.stderr
    passed = [line.split()[0] for line in done.stdout.splitlines() if " PASSED" in line]
    assert {name.partition("::test_")[2] for name in passed} == wanted
    assert says in done.stdout + done.stderr
    assert ("deselected" in done.stdout) == ("2 tests" in says)


def test_a_matrix_shows_each_value_of_each_axis():
    cells = matrix("abc", [1, 2], "xyzw")
    assert len(cells) == 24
    shown = {cell.values for cell in cells if FULL not in cell.marks}
    assert shown == {("a", 1, "x"), ("b", 2, "y"), ("c", 1, "z"), ("a", 2, "w")}
