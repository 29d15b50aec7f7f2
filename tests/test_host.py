"""What a process finds out about its control groups, version 1 and 2."""

from __future__ import annotations

import os

import pytest

from pipeinfer import host


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A file system of control groups; `make(process's lines, {path: text})`."""

    def make(lines, files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "self").write_text(lines)

    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN_GROUPS", tmp_path / "self")
    return make


def test_no_limits(groups):
    groups("0::/\n", {"cpu.max": "max 100000", "memory.max": "max"})
    assert host.quota() == 1 << 20
    assert host._memory_left() == 1 << 62


def test_the_tightest_level_counts_in_version_2(groups):
    groups("0::/slurm/job7/step\n", {
        "slurm/cpu.max": "800000 100000", "slurm/job7/cpu.max": "150000 100000",
        "slurm/job7/step/cpu.max": "max 100000",
        "slurm/job7/memory.max": str(8 << 30), "slurm/job7/memory.current": str(6 << 30),
        "slurm/job7/memory.stat": f"anon 5\ninactive_file {3 << 30}\n",
        "slurm/job7/step/memory.max": "max", "slurm/job7/step/memory.current": "1",
        "slurm/job7/step/memory.stat": "anon 1\n",
    })
    assert host.quota() == 1.5
    assert host._memory_left() == 5 << 30  # three of the six used are old pages of files


def test_version_1_has_a_tree_per_controller(groups):
    groups("4:memory:/box\n3:cpu,cpuacct:/box/inner\n1:name=systemd:/other\n", {
        "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
        "cpu/box/cpu.cfs_quota_us": "200000", "cpu/box/cpu.cfs_period_us": "100000",
        "cpu/box/inner/cpu.cfs_quota_us": "4000", "cpu/box/inner/cpu.cfs_period_us": "10000",
        "cpu/other/cpu.cfs_quota_us": "1000", "cpu/other/cpu.cfs_period_us": "10000",
        "memory/box/memory.limit_in_bytes": "1000", "memory/box/memory.usage_in_bytes": "900",
        "memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
    })
    assert host.quota() == 0.4
    assert host._memory_left() == 400


@pytest.mark.parametrize(("text", "wanted"), [
    ("processor : 0\nflags\t\t: fpu sse2 avx2\n", False),
    ("flags : avx2 avx512_bf16\nflags : avx2\n", True),
    ("flags : amx_tile amx_bf16\n", True),
    ("Features\t: fp asimd bf16\n", True),
    ("Features\t: fp asimd\n", False),
    ("", False),
])
def test_bfloat16_is_for_processors_that_multiply_it(tmp_path, monkeypatch, text, wanted):
    monkeypatch.setattr(host, "_CPU_INFO", tmp_path / "cpuinfo")
    assert not host.multiplies_bfloat16()
    (tmp_path / "cpuinfo").write_text(text)
    assert host.multiplies_bfloat16() == wanted


@pytest.mark.parametrize(("size", "here", "fabric", "wanted"), [
    (3, 3, False, "^tcp,ofi"), (3, 3, True, "^tcp,ofi"),
    (3, 1, False, "^ofi"), (3, 1, True, None), (1, 1, False, None),
])
def test_transports_that_are_of_no_use_are_left_out(tmp_path, monkeypatch, size, here, fabric,
                                                    wanted):
    monkeypatch.setenv("OMPI_MCA_btl", "")  # what is there now comes back
    monkeypatch.delenv("OMPI_MCA_btl")
    monkeypatch.setattr(host, "_FABRICS", (tmp_path / "infiniband", tmp_path / "cxi"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(size))
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(here))
    if fabric:
        (tmp_path / "cxi").mkdir()
    host.choose_transports()
    assert os.environ.get("OMPI_MCA_btl") == wanted
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    host.choose_transports()
    assert os.environ["OMPI_MCA_btl"] == "self,tcp"
