"""Which llama.cpp library is taken, and what is refused before anything is loaded or called."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import types
from pathlib import Path

import pytest
from msgspec import structs

from pipeinfer.errors import BackendError
from pipeinfer.llama import binding, library, loader, platform_check, short_runs
from pipeinfer.llama.loader import NATIVE, PREBUILT, VULKAN, find_library

LIBRARY = find_library()


def pretend(monkeypatch, tmp_path, **installed):
    """Packages with these versions, by module; None: installed, but without a library."""
    for package in (NATIVE, PREBUILT, VULKAN):
        if installed.get(package.module):
            (tmp_path / package.module).mkdir(parents=True)
            path = (tmp_path / package.module / package.file.replace("*", "1.so")).resolve()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    versions = {p.name: installed.get(p.module) for p in (NATIVE, PREBUILT, VULKAN)}
    monkeypatch.setattr(loader, "find_spec", lambda name: types.SimpleNamespace(
        submodule_search_locations=[str(tmp_path / name)]) if name in installed else None)
    monkeypatch.setattr(loader, "version", versions.__getitem__)
    monkeypatch.setattr(loader, "why_not_here", lambda: "")
    monkeypatch.delenv("PIPEINFER_LLAMA", raising=False)
    monkeypatch.delenv("PIPEINFER_LLAMA_LIBRARY", raising=False)


def test_a_compiled_library_wins(monkeypatch, tmp_path):
    pretend(monkeypatch, tmp_path, llama_cpp="0.3.36", xllamacpp="2026.10.11549")
    assert find_library().name == "llama-cpp-python 0.3.36"
    monkeypatch.setenv("PIPEINFER_LLAMA", "prebuilt")
    found = find_library()
    assert (found.name, found.layouts, found.compiled) == (
        "xllamacpp 2026.10.11549", ("moe cache",), False)


def test_vulkan_is_taken_when_asked_for(monkeypatch, tmp_path):
    pretend(monkeypatch, tmp_path, xllamacpp="2026.10.11549", cyllama="0.7.0")
    assert find_library().name == "xllamacpp 2026.10.11549"
    monkeypatch.setenv("PIPEINFER_LLAMA", "vulkan")
    found = find_library()
    assert (found.name, found.layouts) == ("cyllama-vulkan 0.7.0", ("moe cache",))
    assert found.path == tmp_path / "cyllama_vulkan.libs" / "libllama-1.so"
    pretend(monkeypatch, tmp_path / "other", xllamacpp="2026.10.11549")
    monkeypatch.setenv("PIPEINFER_LLAMA", "vulkan")
    with pytest.raises(BackendError, match=r"pip install cyllama-vulkan==0\.7\.0"):
        find_library()


def test_a_package_that_was_built_without_its_library_is_none(monkeypatch, tmp_path):
    pretend(monkeypatch, tmp_path, llama_cpp=None, xllamacpp="2026.10.11549")
    assert not find_library().compiled
    monkeypatch.setenv("PIPEINFER_LLAMA", "native")
    with pytest.raises(BackendError, match=r"no compiled llama\.cpp is installed.*--native"):
        find_library()


@pytest.mark.parametrize(("installed", "says"), [
    ({}, r"pip install xllamacpp==.*--native"),
    ({"llama_cpp": "0.3.37"}, r"llama-cpp-python 0\.3\.37 .* pip install llama-cpp-python==0\.3"),
    ({"xllamacpp": "2027.1.1"}, r"xllamacpp 2027\.1\.1 .* pip install xllamacpp==2026"),
])
def test_without_a_library_that_is_known_one_line_says_what_to_do(
        monkeypatch, tmp_path, installed, says):
    pretend(monkeypatch, tmp_path, **installed)
    with pytest.raises(BackendError, match=says) as caught:
        find_library()
    assert "\n" not in str(caught.value)
    assert library.llama_version() == f"{library.NO_LIBRARY}{caught.value}"


def test_a_choice_that_there_is_not(monkeypatch):
    monkeypatch.setenv("PIPEINFER_LLAMA", "cuda")
    with pytest.raises(BackendError, match="PIPEINFER_LLAMA=cuda"):
        find_library()


def test_a_library_named_by_its_path(monkeypatch, tmp_path):
    pretend(monkeypatch, tmp_path, llama_cpp="0.3.36", xllamacpp="2026.10.11549")
    path = tmp_path / "build" / "libllama.so"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setenv("PIPEINFER_LLAMA_LIBRARY", str(path))
    found = find_library()
    assert (found.path, found.layouts, found.compiled) == (path, ("plain", "moe cache"), True)
    assert found.name == f"{path} as llama-cpp-python 0.3.36"
    beside = path.with_name("libggml.so.0")
    beside.touch()
    os.utime(beside, ns=(1, path.stat().st_mtime_ns + 1))
    assert find_library().stamp != found.stamp
    path.with_name("libggml.so").symlink_to("nowhere")
    assert find_library().path == path
    for wrong in (tmp_path / "none.so", tmp_path, Path("libllama.so")):
        monkeypatch.setenv("PIPEINFER_LLAMA_LIBRARY", str(wrong))
        with pytest.raises(BackendError, match="not the absolute path of a file"):
            find_library()


@pytest.mark.slow
def test_a_named_library_is_checked_and_part_of_the_identity():
    """Whichever this is: each known layout of structs is tried."""
    program = "from pipeinfer.llama.library import llama_identity; print(llama_identity())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env=os.environ | {"PIPEINFER_LLAMA_LIBRARY": str(LIBRARY.path)})
    assert done.stdout.startswith(f"{LIBRARY.path} as llama-cpp-python {NATIVE.newest}, built ")
    assert " = 1" in done.stdout


def test_the_pins_are_those_of_the_package_and_of_constraints():
    root = Path(__file__).resolve().parents[2]
    if not (root / "constraints.txt").exists():
        pytest.skip("no checkout")
    pins = (root / "constraints.txt").read_text().replace("_", "-").splitlines()
    project = (root / "pyproject.toml").read_text()
    for package in (NATIVE, PREBUILT, VULKAN):
        assert f"{package.name}=={package.newest}" in pins
        assert f"{package.name}=={package.newest}" in project


# --- processors and platforms -----------------------------------------------------------------


@pytest.fixture
def on_x86(monkeypatch):
    monkeypatch.setattr(platform_check.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform_check, "_LIBRARIES", {})


@pytest.mark.parametrize(("features", "missing"), [
    ("avx avx2 fma f16c bmi2 sse4_2", ""), ("avx f16c", "avx2, fma, bmi2"), ("", "")])
def test_the_processors_features_are_checked(monkeypatch, on_x86, features, missing):
    """Nothing is refused where Linux does not tell."""
    monkeypatch.setenv(platform_check.FEATURES_VARIABLE, features)
    reason = platform_check.why_not_here()
    assert ("--native" in reason) == bool(missing)
    assert missing in reason


@pytest.mark.parametrize(("variables", "machine", "says"), [
    ({"SOABI": "cpython-313-x86_64-linux-musl"}, "x86_64", "musl"),
    ({"SOABI": "cpython-313t-x86_64-linux-gnu", "Py_GIL_DISABLED": 1}, "x86_64", "free-threaded"),
    ({"SOABI": "cpython-313-riscv64-linux-gnu"}, "riscv64", "riscv64"),
])
def test_platforms_without_a_wheel(monkeypatch, variables, machine, says):
    monkeypatch.setattr(platform_check.sysconfig, "get_config_var", variables.get)
    monkeypatch.setattr(platform_check.platform, "machine", lambda: machine)
    assert says in platform_check.why_not_here()
    assert "--native" in platform_check.why_not_here()


def test_a_system_library_that_is_missing(monkeypatch, on_x86):
    monkeypatch.delenv(platform_check.FEATURES_VARIABLE, raising=False)
    monkeypatch.setattr(platform_check, "cpu_flags", frozenset)
    monkeypatch.setattr(platform_check, "_LIBRARIES", {"libnone.so.9": "libnone9"})
    assert "apt install libnone9" in platform_check.why_not_here()


def test_the_features_of_an_arm_processor(tmp_path, monkeypatch):
    monkeypatch.delenv(platform_check.FEATURES_VARIABLE, raising=False)
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\n\n")
    assert platform_check.cpu_flags(tmp_path / "cpuinfo") == {"fp", "asimd", "asimddp"}
    assert platform_check.cpu_flags(tmp_path / "none") == frozenset()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors need no features")
def test_the_launch_scripts_ask_without_any_package():
    done = subprocess.run(
        [sys.executable, "-I", "-S", platform_check.__file__], capture_output=True, text=True,
        check=False, env=os.environ | {platform_check.FEATURES_VARIABLE: "sse2"})
    assert done.returncode == 1
    assert "--native" in done.stdout
    assert done.stdout.count("\n") == 1


# --- the binding ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plug_in_that_cannot_be_loaded_is_named():
    program = "from pipeinfer.llama.library import llama_version; from pipeinfer.llama import " \
              "binding; binding.loaded()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=False, env=os.environ | {"GGML_BACKEND_PATH": "/nowhere.so"})
    assert done.returncode
    assert "GGML_BACKEND_PATH=/nowhere.so: ggml cannot load this plug-in" in done.stderr


def test_a_library_with_another_layout_is_refused():
    """As if the other library's structs were expected of this one."""
    (own,) = LIBRARY.layouts
    wrong = {"plain": "moe cache", "moe cache": "plain"}[own]
    with pytest.raises(BackendError, match="lays out llama_context_params differently") as caught:
        binding.bind(structs.replace(LIBRARY, layouts=(wrong,)))
    assert "\n" not in str(caught.value)
    assert set(binding.bind(LIBRARY)) >= {"llama_decode", "llama_context_params"}


def test_what_is_no_library_is_refused(tmp_path):
    path = tmp_path / "libllama.so"
    path.write_bytes(b"nothing")
    with pytest.raises(BackendError, match=r"cannot be loaded: .*libllama\.so"):
        binding.bind(structs.replace(LIBRARY, path=path))


def test_a_function_that_the_library_lacks():
    if LIBRARY.compiled:
        assert callable(binding.llama_model_quantize)
    else:
        with pytest.raises(BackendError, match=r"has no llama_model_quantize: .*--native"):
            _ = binding.llama_model_quantize
    with pytest.raises(AttributeError):
        _ = binding.llama_nothing


def test_everything_comes_from_one_library():
    """Two copies of ggml in one process would have two lists of buffers and types."""
    library.ensure_llama()
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()
             if "llama" in line.rpartition("/")[2]}
    assert files == {str(LIBRARY.path.resolve())}


def test_remembered_figures_are_named_by_library_and_kernels():
    identity = library.llama_identity()
    assert identity.startswith(f"{LIBRARY.name}; ")
    assert " = 1" in identity
    assert not {*binding.kernels()} & {*binding.unused_features()}
    own = ("short-runs",) if short_runs.used() else ()
    assert library.llama_kernels() == " ".join((*binding.kernels(), *own))
