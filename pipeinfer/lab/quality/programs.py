"""Runs programs that a model wrote, with their tests, in a process with limits.

The limits are against accidents: time, memory, the size of files and of what it starts. A program
can still read files and use the network as this user can, so nothing is run unless it is asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile

SECONDS = 10.0  #: longest time for a program and its tests
_PASSED = 77  #: exit status of a program that came to its end
_RUN = f"""
import os, resource, sys
for what, amount in ((resource.RLIMIT_AS, 1 << 30), (resource.RLIMIT_CORE, 0),
                     (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_CPU, {SECONDS:.0f} + 1)):
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (amount, amount) if hard < 0 else (min(amount, hard),) * 2)
exec(compile(sys.stdin.read(), "answer", "exec"), {{"__name__": "__main__"}})
os._exit({_PASSED})
"""
_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)


def code_of(text: str) -> str:
    """Return the first code block of an answer, of those marked as Python if any is; or all of it.
    """
    blocks = _BLOCK.findall(text)
    marked = [code for mark, code in blocks if mark.strip().lower().startswith("py")]
    return next(iter([*marked, *(code for _, code in blocks)]), text)


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Return whether a Python program comes to its end without an error in time.

    It has an empty environment, no input and a folder of its own that is removed afterwards; its
    output is discarded. One that exits before its end has not passed.
    """
    with tempfile.TemporaryDirectory(prefix="pipeinfer-program-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUN], cwd=folder, env={}, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode == _PASSED
