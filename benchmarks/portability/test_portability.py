"""The comparison of processors: what it runs is there, and it counts what differs."""

from __future__ import annotations

from click.testing import CliRunner

from benchmarks.portability import __main__ as portability
from benchmarks.portability import builds
from tests.rig.launch import ROOT


def test_the_tests_that_it_runs_are_there():
    for names in portability.TESTS.values():
        for name in names:
            path, _, test = name.partition("::")
            assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text() or not test


def test_equal_tokens_are_counted_up_to_the_first_difference():
    assert portability.equal([[1, 2, 3]], [[1, 2, 3]]) == "all"
    assert portability.equal([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == "3 of 5"


def test_an_environment_names_its_library_and_leaves_numpys_new_kernels_alone(tmp_path):
    built = tmp_path / "sse" / "libllama.so"
    built.parent.mkdir()
    built.touch()
    found = portability.variables(portability.ENVIRONMENTS["sse"], tmp_path, None, 1)
    assert found["PIPEINFER_LLAMA_LIBRARY"] == str(built)
    assert found["ATEN_CPU_CAPABILITY"] == "default"
    assert "X86_V3" in found.get("NPY_DISABLE_CPU_FEATURES", "X86_V3")  # if this numpy has it
    assert {env.build for env in portability.ENVIRONMENTS.values()} == {"", *builds.FLAGS}


def test_an_environment_that_there_is_not(tmp_path):
    done = CliRunner().invoke(portability.main, ["--work", str(tmp_path), "--only", "mmx"])
    assert done.exit_code == 2
    assert "no environment mmx" in done.output
