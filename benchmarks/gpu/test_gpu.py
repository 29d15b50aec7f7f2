"""The check of a GPU, rehearsed on devices that any machine has, and what must hold of its file."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import MOST_BYTES, PACKED, ROOT, build_folder, tracked_bytes
from benchmarks.gpu.check import Check
from benchmarks.gpu.devices import _LAVAPIPE, Device
from benchmarks.gpu.steps import Report, Runner, Step, StepError, child

HERE = Path(__file__).resolve().parent
BUILDS = Path(os.environ.get("PIPEINFER_GPU_BUILDS")
              or Path.home() / ".cache" / "pipeinfer-gpu-builds")
#: of .gpu, rounded up: sources of llama.cpp, Open MPI and wheels, as compressed as they are
PACKED_BYTES = 10 << 20
NEEDS_LAVAPIPE = pytest.mark.skipif(
    not Path(_LAVAPIPE).exists(),
    reason="Mesa's software driver for Vulkan is not installed (Debian: mesa-vulkan-drivers)")
SLOW_STEPS = """
import sys, time
from pathlib import Path
from benchmarks.gpu.steps import Report, Runner, Step
report = Report(Path(sys.argv[1]), device="none")
steps = [Step(f"step {i}", "one lane", 5, lambda left: time.sleep(0.02) or [0] * 2000)
         for i in range(500)]
Runner(report, time.monotonic() + 60).run(steps)
"""


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "gpu.json", ["/secret/"], device="none")


def steps_of(report):
    return json.loads((report._path).read_text())["steps"]


def run(report, *steps, seconds=30.0, **more):
    Runner(report, time.monotonic() + seconds).run(steps, **more)
    return steps_of(report)


def test_what_is_brought_along_fits():
    """64 MiB can be brought to the machine, with room for what is changed meanwhile."""
    packed = sum(path.stat().st_size for path in PACKED.rglob("*") if path.is_file())
    assert tracked_bytes() + max(packed, PACKED_BYTES) < MOST_BYTES


def test_a_step_that_fails_costs_only_those_that_need_it(report):
    def fails(_left):
        raise StepError("it broke in /secret/folder", {"half": 1})

    found = run(report, Step("a", "x", 5, fails), Step("b", "x", 5, lambda _: 2, needs=("a",)),
                Step("c", "y", 5, lambda _: 3, after=("a",)))
    assert (found["a"]["state"], found["a"]["error"]) == ("failed", "it broke in folder")
    assert found["a"]["result"] == {"half": 1}
    assert (found["b"]["state"], found["b"]["error"]) == ("skipped", "without a")
    assert (found["c"]["state"], found["c"]["result"]) == ("done", 3)
    assert json.loads(report._path.read_text())["complete"]


def test_only_some_steps_and_those_left_out(report):
    steps = [Step(name, "x", 5, lambda _: 1, needs=("a",) if name == "c" else ()) for name in "abc"]
    found = run(report, *steps, only=("c",), left_out={"b"})
    assert {name: one["state"] for name, one in found.items()} == {"b": "left out", "c": "done"}


def test_the_deadline_ends_what_runs_and_skips_the_rest(report, tmp_path):
    log = tmp_path / "log"

    def sleeps(left):
        return child([sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(60)"],
                     left, log)

    found = run(report, Step("long", "x", 50, sleeps), Step("later", "x", 5, lambda _: 1),
                seconds=2.0)
    assert "not done after" in found["long"]["error"]
    assert found["long"]["result"] == [{}]
    assert (found["later"]["state"], found["later"]["error"]) == ("skipped", "no time left")


def test_a_child_ends_with_the_check(tmp_path):
    """Also when the check is killed: the kernel sees to it."""
    program = ("from pathlib import Path; from benchmarks.gpu.steps import child; import sys\n"
               "child([sys.executable, '-c', 'import os, sys, time; "
               "open(sys.argv[1], \"w\").write(str(os.getpid())); time.sleep(60)', sys.argv[1]], "
               "60, Path(sys.argv[2]))")
    noted = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", program, str(noted), str(tmp_path / "log")],
                              cwd=ROOT)
    while not (noted.exists() and noted.read_text()):
        time.sleep(0.02)
    own = Path(f"/proc/{noted.read_text()}")
    assert own.exists()
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while own.exists() and "State:\tZ" not in (own / "status").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_check_leaves_a_valid_file(tmp_path, seed):
    path = tmp_path / "gpu.json"
    process = subprocess.Popen([sys.executable, "-c", SLOW_STEPS, str(path)], cwd=ROOT,
                               stdout=subprocess.DEVNULL)
    while not path.exists():
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0.2, 1.5))
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = json.loads(path.read_text())
    assert not found["complete"]
    assert {one["state"] for one in found["steps"].values()} <= {"done", "running"}


def rehearse(tmp_path, device, *more, seconds=480):
    """The check's own script on this device."""
    out = tmp_path / "out"
    done = subprocess.run(
        ["bash", str(HERE / "run.sh"), "--work", str(tmp_path / "work"), "--device", device,
         "--limit", str(seconds), *more],
        env=os.environ | {"OUT": str(out), "PYTHON": sys.executable,
                          "PIPEINFER_GPU_BUILDS": str(BUILDS)},
        capture_output=True, text=True, check=False, timeout=seconds + 60)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads((out / "gpu.json").read_text())
    assert found["complete"]
    return found["steps"]


def build_of(device):
    return build_folder(BUILDS, PACKED / "llama.tar.xz", device)


def prepared(device):
    """Make what the check needs, and the library: it takes ten minutes of a core, once."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", "pack"], cwd=ROOT, check=True,
                   capture_output=True, timeout=900)
    if device == "rpc":
        subprocess.run(["bash", str(HERE / "build.sh"), str(PACKED / "llama.tar.xz"),
                        str(build_of(device)), device], check=True, capture_output=True,
                       timeout=3000)


@pytest.mark.full("test_rows_on_an_rpc_device_where_its_library_is_built; steps in this file")
@pytest.mark.timeout(4800)
def test_the_rehearsal_on_an_rpc_device(tmp_path):
    """Foreign memory, the processor's arithmetic: every step is done, and every bit is equal."""
    prepared("rpc")
    steps = rehearse(tmp_path, "rpc")
    assert {name: one["state"] for name, one in steps.items() if one["state"] != "done"} == {}
    for one in steps["bits"]["result"]:
        if "equal" in one:
            assert one["equal"] == one["of"], one
    for name, one in steps["jobs"]["result"].items():
        assert "exact off" in name or one["differ"] == 0, name
    assert not steps["tests"]["result"].get("failed")


@pytest.mark.full("the same; this needs a software driver for Vulkan, and minutes")
@NEEDS_LAVAPIPE
@pytest.mark.timeout(1200)
def test_the_rehearsal_on_a_vulkan_device(tmp_path):
    """Kernels that differ by width and by holes: padded rows have equal bits all the same."""
    prepared("vulkan")
    steps = rehearse(tmp_path, "vulkan")
    assert {one["state"] for one in steps.values()} == {"done", "left out"}
    padded = [one for one in steps["bits"]["result"] if one["what"] == "padded"]
    assert len(padded) == 8
    for one in padded:
        for question in ("neighbours", "chain", "after a miss"):
            assert one[question]["equal"] == one[question]["of"], one
    assert all(one["differ"] == 0 for one in steps["jobs"]["result"].values())


@pytest.mark.slow
def test_rows_on_an_rpc_device_where_its_library_is_built(tmp_path):
    """In the sample only there: to build it takes ten minutes of a core."""
    if not (PACKED / "llama.tar.xz").exists() or not (build_of("rpc") / "bin").exists():
        pytest.skip("no llama.cpp with RPC has been built here: --full builds it")
    steps = rehearse(tmp_path, "rpc", "--only", "library,devices,bits", seconds=240)
    kinds = [one.get("kind") for one in steps["devices"]["result"]]
    assert "GPU" in kinds
    assert all(one["equal"] == one["of"] for one in steps["bits"]["result"] if "equal" in one)


def test_a_program_that_fails_does_not_end_the_comparison(tmp_path, monkeypatch):
    """On a GPU that is there for minutes the others' figures are worth having."""
    def fails(_seconds):
        raise OSError("no speed was reported")

    check = Check(Device("vulkan", tmp_path), Report(tmp_path / "gpu.json", []), tmp_path, tmp_path,
                  tmp_path, tmp_path)
    monkeypatch.setattr(Check, "_contestants", lambda *_: {
        "first": lambda _: [("first", 1.0, "")], "second": fails,
        "third": lambda _: [("third", 3.0, "")]})
    with pytest.raises(StepError, match="second: OSError: no speed") as caught:
        check.speed(60)
    assert caught.value.partial["speeds"] == {"first": [1.0], "third": [3.0]}
