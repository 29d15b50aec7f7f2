"""The wheel, outside any checkout: built, installed plainly, and used as a user would.

Without network pip fails at once, and the test is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.kit import launch
from tests.kit.sample import fewer
from tests.kit.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.mpi]
GENERATE = ["generate", "-p", "import os\n", "-n", "12", "--temp", "0", "--json"]
#: the sample leaves the largest model out, of which nothing here makes use: to compress, unpack and
#: copy it takes 8 s
LEFT_OUT = ("__pycache__", *fewer(0, 1) * ("smollm2-draft.gguf",))
SOURCES = ("pipeinfer", "setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """Of a user who has this virtual environment first on PATH, and MPI's settings."""
    env = {k: v for k, v in launch.environment().items()
           if not k.startswith(("PYTHONPATH", "PIPEINFER_", "VIRTUAL_ENV", "MPI4PY_"))}
    own = str(Path(sys.executable).parent)
    path = [part for part in env["PATH"].split(os.pathsep) if part != own]
    return env | {"PATH": os.pathsep.join([str(folder / "bin"), *path]),
                  "PIPEINFER_CACHE": str(folder / "cache")} | extra


def run(folder: Path, *command: str, timeout: float = 280, **extra: str
        ) -> subprocess.CompletedProcess[str]:
    """In the virtual environment `folder`, somewhere that is no checkout."""
    return subprocess.run([str(folder / "bin" / command[0]), *command[1:]], cwd=folder,
                          env=environment(folder, **extra), capture_output=True, text=True,
                          check=False, timeout=timeout, stdin=subprocess.DEVNULL)


def quick_compiler(folder: Path) -> dict[str, str]:
    """The sample's C parts are compiled with less optimisation: 16 s of a core become 10. With none
    at all the jobs lose more than that."""
    command = str(sysconfig.get_config_var("CC") or "") if fewer(0, 1) else ""
    if not command:
        return {}
    script = folder / "cc"
    script.write_text(f'#!/usr/bin/env bash\nexec {command} "${{@/#-O3/-O1}}"\n')
    script.chmod(0o700)
    return {"CC": str(script)}


def pip(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This Python's pip at work in the virtual environment `folder`, which begins without one:
    making one takes 7 s."""
    return subprocess.run([sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"),
                           *arguments], cwd=folder, env=environment(folder), capture_output=True,
                          text=True, check=False, timeout=280, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean virtual environment with the wheel, from PyPI's packages alone."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        path = launch.ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
        else:
            shutil.copy(path, source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True,
                   timeout=280)
    needs = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]["requires"]
    done = pip(folder, "install", "--quiet", "--no-compile", "--retries", "0", "build", "pip",
               *needs)
    if done.returncode:
        pytest.skip(f"pip reaches no packages: {done.stderr.strip().splitlines()[-1]}")
    # nothing but what pyproject.toml asks for is here, and pip: two more environments, each with a
    # pip of its own, would show the same and take 25 s
    done = run(folder, "python", "-m", "build", "--no-isolation", "--outdir", "dist", str(source),
               **quick_compiler(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, = (folder / "dist").glob("*.whl")
    assert "-cp311-abi3-" in wheel.name  # one for every newer Python
    if shutil.which("cc"):  # optional parts are left out without a word when they do not compile
        with zipfile.ZipFile(wheel) as packed:
            parts = {Path(name).name.split(".")[0] for name in packed.namelist()
                     if name.endswith(".so")}
        assert parts == {"_layer_filter", "_short_runs"}
    # by the newest pip: that of Python 3.11 looks for files for twice as long, 17 s of a core
    done = run(folder, "python", "-m", "pip", "install", "--quiet", "--no-compile", "--constraint",
               str(launch.ROOT / "constraints.txt"), f"{wheel}[mpi]")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def tokens(done: subprocess.CompletedProcess[str]) -> list[int]:
    """What `generate --json` wrote."""
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[int] = json.loads(done.stdout)["tokens"]
    return found


def test_one_process_and_four_ranks_write_the_same_tokens(installed):
    alone = tokens(run(installed, "pipeinfer", *GENERATE))
    assert len(alone) == 12
    assert tokens(run(installed, "mpirun", "-np", "4", "pipeinfer", *GENERATE)) == alone


def test_no_compiler_was_needed(installed):
    said = run(installed, "pipeinfer", "doctor")
    assert said.returncode == 0, said.stdout
    assert "llama.cpp: xllamacpp" in said.stdout
    listed = json.loads(pip(installed, "list", "--format", "json").stdout)
    assert not {"llama-cpp-python", "llama_cpp_python"} & {one["name"] for one in listed}


@pytest.mark.full("its jobs in tests/supervise/test_demo.py; fetches 93 MB")
def test_the_demo_answers_and_races(installed):
    done = run(installed, "pipeinfer", "demo", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "def " in done.stdout
    assert "same text" in done.stdout
    assert (installed / "race.svg").read_text().startswith("<svg")


def test_the_server_has_its_page_and_a_model(installed, tmp_path):
    process = subprocess.Popen(
        [str(installed / "bin" / "pipeinfer"), "up", "-np", "2", "--", "--port", "0"],
        cwd=installed, text=True, env=environment(installed) | {"PIPEINFER_STATE": str(tmp_path)},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True)
    served = Served(process)
    try:
        served.wait_until_ready()
        status, page = served.get("/")
        assert status == 200
        assert "<html" in page
        status, answer = served.post("/v1/completions", {"prompt": "import os\n", "max_tokens": 4})
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        assert served.end() in (0, 130, 143)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        served.end()
        process.stderr.close()


def test_the_product_is_all_of_it(installed):
    """Without the lab every command of users works, and what is missing says how to get it."""
    listed = run(installed, "pipeinfer", "--help")
    assert listed.returncode == 0
    assert not [name for name in ("bench", "chaos", "train") if f"  {name} " in listed.stdout]
    for command in ("doctor", "models", "cache", "serve --help", "up --help", "chat --help",
                    "race --help", "demo --help", "measure --help",
                    "plan dolphin-70b --dry-run --cluster c",
                    "ablate --cluster c --size 4 -n 8"):
        done = run(installed, "pipeinfer", *command.split())
        assert done.returncode == 0, done.stdout + done.stderr
    for command in (("bench",), ("chaos", "--nonsense"), ("train", "--help"),
                    ("measure", "--programs", "."), (*GENERATE, "--hook", "fault=kill@1:decode=3")):
        done = run(installed, "pipeinfer", *command)
        assert done.returncode == 2, command
        line, = done.stderr.splitlines()
        assert "pip install ./benchmarks/lab" in line
        assert "Traceback" not in done.stderr


def test_the_lab_adds_its_commands(installed):
    done = pip(installed, "install", "--quiet", "--no-compile", "--no-deps", "--no-build-isolation",
               str(launch.ROOT / "benchmarks" / "lab"))
    assert done.returncode == 0, done.stderr
    try:
        assert "  chaos " in run(installed, "pipeinfer", "--help").stdout
        done = run(installed, "pipeinfer", "bench", "--nodes", "3", "--tokens", "8", "--policy",
                   "pipeinfer")
        assert done.returncode == 0, done.stderr
        assert "tokens/s" in done.stdout
        done = run(installed, "mpirun", "-np", "3", "pipeinfer", *GENERATE, "--hook",
                   "fault=kill@1:decode=3")
        assert "fault" in done.stderr
    finally:
        pip(installed, "uninstall", "--yes", "pipeinfer-lab")


def test_nothing_of_pytest_is_in_the_wheel(installed):
    package, = installed.glob("lib/python*/site-packages/pipeinfer")
    assert not [path for path in package.rglob("*.py") if "import pytest" in path.read_text()]
