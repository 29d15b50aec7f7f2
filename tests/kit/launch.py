"""Launch real MPI jobs from tests and benchmarks.

The parent never imports MPI. Clocks are nested: the product's own deadlines are the shortest,
then mpirun's, then this parent's, which kills the whole process group.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipeinfer.transport.settings import mpi_settings

ROOT = Path(__file__).resolve().parents[2]
PIPEINFER = [sys.executable, "-m", "pipeinfer"]
#: a program that runs its arguments as `pipeinfer run` runs mpirun
SUPERVISED = """
import os, sys
from pipeinfer.cli import inherited
from pipeinfer.supervise.run import supervised
inherited.settle()
sys.exit(supervised(lambda _: sys.argv[1:], dict(os.environ)))
"""
_OUTER = ("OMPI_", "PMIX_", "PMI_", "PRTE_")


def free_port() -> int:
    """A TCP port of this host that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mpirun_path() -> str | None:
    """The launcher: named, beside this Python, or on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return os.environ.get("PIPEINFER_MPIRUN") or (str(beside) if beside.exists() else None) or \
        shutil.which("mpirun")


def environment(**extra: str) -> dict[str, str]:
    """A clean environment with the settings for MPI and nothing of an outer MPI job. Ranks stand
    for hosts: unless told otherwise they do not take turns."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_OUTER)}
    env |= mpi_settings()
    env["PIPEINFER_DEFAULT_MODEL"] = "embedded"  # whatever else is installed
    env.setdefault("PIPEINFER_TURNS", "off")
    env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks" / "lab")))
    env["PYTHONFAULTHANDLER"] = "1"
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env | extra


def run(np: int, command: list[str], *, timeout: float = 120.0, mpi_args: tuple[str, ...] = (),
        stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `command` on `np` ranks (without mpirun for 1); kills everything at the deadline."""
    prefix: list[str] = []
    if np > 1:
        launcher = mpirun_path()
        assert launcher is not None, "no mpirun found"
        prefix = [launcher, "-np", str(np), *mpi_args]
    process = start(prefix + command, timeout=timeout, stdin=stdin is not None, **env)
    try:
        out, err = process.communicate(stdin, timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError("the job did not end within "
                             f"{timeout} s\n{out[-2000:]}\n{err[-4000:]}") from None
    except BaseException:  # an interrupt reaches only the parent: the job has its own group
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def answered(np: int, *words: Any, **options: Any) -> Any:
    """The JSON that `pipeinfer generate WORDS` writes on `np` ranks; options: as `run` takes them.
    Raises AssertionError with the log where it fails."""
    done = run(np, [*PIPEINFER, "generate", "--json", *map(str, words)], **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def refused(np: int, *words: Any, code: int, says: str, lines: int = 0, **options: Any) -> None:
    """Check that `pipeinfer WORDS` on `np` ranks ends with this exit code and a reason that holds
    these words. lines: of standard error in all, if it is given; options: as `run` takes them."""
    done = run(np, [*PIPEINFER, *map(str, words)], timeout=60, **options)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert lines in (0, len(done.stderr.splitlines())), done.stderr


def start(command: list[str], *, timeout: float, stdin: bool = False, **env: str
          ) -> subprocess.Popen[str]:
    """Start in a process group of its own."""
    env = {"MPIEXEC_TIMEOUT": str(max(1, int(timeout) - 5)), **env}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, env=environment(**env),
        start_new_session=True, preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    """A test run that was itself started in the background ignores SIGINT, one under nohup SIGHUP,
    and bash cannot trap what was ignored when it started."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def python(np: int, program: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a file of `programs` on `np` ranks; options: as `run` takes them."""
    path = Path(__file__).parent / "programs" / f"{program}.py"
    return run(np, [sys.executable, str(path), *args], **options)
