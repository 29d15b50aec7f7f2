"""The comparison of processors: its environments."""

from __future__ import annotations

from click.testing import CliRunner

from benchmarks import portability


def test_an_environment_names_its_library_and_leaves_numpys_new_kernels_alone(tmp_path):
    built = tmp_path / "sse" / "libllama.so"
    built.parent.mkdir()
    built.touch()
    found = portability.variables("sse", tmp_path, None)
    assert found["PIPEINFER_LLAMA_LIBRARY"] == str(built)
    assert found["ATEN_CPU_CAPABILITY"] == "default"
    assert "X86_V3" in found.get("NPY_DISABLE_CPU_FEATURES", "X86_V3")  # if this numpy has it
    assert {env.build for env in portability.ENVIRONMENTS.values()} == {"", *portability.BUILDS}


def test_an_environment_that_there_is_not(tmp_path):
    done = CliRunner().invoke(portability.main, ["--work", str(tmp_path), "--only", "mmx"])
    assert done.exit_code == 2
    assert "no environment mmx" in done.output
