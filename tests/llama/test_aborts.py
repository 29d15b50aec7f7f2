"""llama.cpp ends the process where a device fails: one line says why."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pipeinfer.models.locate import EMBEDDED

PROGRAM = """
import sys
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.llama import binding
backend = LlamaCppBackend.load(sys.argv[1], layers=(0, 2), n_layers_total=2, first=True, last=True,
                               n_ctx=256, n_seq_max=2, n_batch=8, n_threads=1)
binding.llama_memory_seq_cp(backend._memory, 99999, 0, 0, 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="signals of Linux")
def test_a_failed_assertion_is_one_line():
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(EMBEDDED / "draft.gguf")],
                          capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGABRT
    (line,) = done.stderr.splitlines()
    assert line.startswith("pipeinfer: error: llama.cpp ends this process: ")
    assert "GGML_ASSERT" in line
