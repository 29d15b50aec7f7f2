"""While modules are imported the cycle collector rests, and only then."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from pipeinfer.loading import uncollected
from tests.kit.launch import ROOT


def test_it_collects_afterwards_as_before():
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize("imports", [
    "import pipeinfer.__main__", "from pipeinfer.server.__main__ import serving; serving()"])
def test_what_a_process_has_imported_is_not_looked_through_again(imports):
    program = f"import gc; {imports}; assert gc.isenabled() and gc.get_freeze_count() > 10_000"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=ROOT)
