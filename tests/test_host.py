"""What a process finds out about its control groups, version 1 and 2."""

from __future__ import annotations

import os
import tempfile

import pytest

from pipeinfer import host
from pipeinfer.cluster.launch import _other_size


@pytest.mark.parametrize(("sizes", "cores", "wanted"), [
    (("48K", "2048K", "491520K"), 2, 64 << 20),  # a virtual machine that sees its host's
    (("48K", "2048K", "49152K"), 2, 48 << 20),
    (("48K", "512K", "256M"), 64, 256 << 20),
    ((), 8, 32 << 20),
])
def test_no_more_cache_than_the_cores_have(tmp_path, monkeypatch, sizes, cores, wanted):
    for index, size in enumerate(sizes):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(host, "_CACHES", tmp_path)
    monkeypatch.setattr(host, "_allowed", lambda: cores)
    assert host.last_level_cache.__wrapped__() == wanted


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
def test_transports_that_are_of_no_use_are_left_out(tmp_path, monkeypatch, launcher, size, here,
                                                    fabric, wanted):
    monkeypatch.setenv("OMPI_MCA_btl", "")  # what is there now comes back
    monkeypatch.delenv("OMPI_MCA_btl")
    monkeypatch.setattr(host, "_FABRICS", (tmp_path / "infiniband", tmp_path / "cxi"))
    launcher({"OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_RANK": "0",
              "OMPI_COMM_WORLD_LOCAL_SIZE": str(here)})
    if fabric:
        (tmp_path / "cxi").mkdir()
    host.choose_transports()
    assert os.environ.get("OMPI_MCA_btl") == wanted
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    host.choose_transports()
    assert os.environ["OMPI_MCA_btl"] == "self,tcp"


@pytest.mark.parametrize(("ranks", "free", "elsewhere"), [
    (4, 0, True), (4, 16 << 20, True), (4, 64 << 20, True), (8, 64 << 20, True),
    (2, 16 << 20, True), (2, 32 << 20, True), (2, 64 << 20, False), (3, 64 << 20, False),
    (4, 80 << 20, False), (4, 24 << 30, False), (1, 0, False)])
def test_ranks_share_files_where_shared_memory_is_small(monkeypatch, tmp_path, launcher, ranks,
                                                        free, elsewhere):
    monkeypatch.setenv("OMPI_MCA_btl", "self,sm")
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", "")  # what is there now comes back
    monkeypatch.delenv("OMPI_MCA_btl_sm_backing_directory")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launcher({"OMPI_COMM_WORLD_SIZE": str(ranks), "OMPI_COMM_WORLD_RANK": "0",
              "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)})
    monkeypatch.setattr(host, "_free_bytes", lambda _: free)
    host.choose_transports()
    found = os.environ.get("OMPI_MCA_btl_sm_backing_directory")
    assert found == (str(tmp_path) if elsewhere else None)


SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}


@pytest.fixture
def launcher(monkeypatch):
    """Sets what a launcher would, and nothing of the one that started this process."""

    def make(variables):
        for name in list(os.environ):
            if name.startswith(("OMPI_COMM_", "PMI_", "PMIX_", "SLURM_", "MPI_LOCAL")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.mark.parametrize(("variables", "size", "rank"), [
    ({}, 1, 0),
    (MPIRUN, 3, 2),
    (MPIRUN | SLURM, 3, 2),  # mpirun within a step
    ({"PMI_SIZE": "4", "PMI_RANK": "1"}, 4, 1),
    ({"PMI_SIZE": "4"}, 1, 0),  # without a rank it is none
    ({"PMI_SIZE": "4"} | SLURM, 2, 0),  # not one's size with the other's rank
    ({"PMI_SIZE": "2", "PMI_RANK": "5"}, 1, 0),
    ({"PMI_SIZE": "x", "PMI_RANK": "0"}, 1, 0),
    (SLURM, 2, 0),
    (SLURM | {"SLURM_PROCID": "1"}, 2, 1),
    (SLURM | {"SLURM_PTY_PORT": "40000"}, 1, 0),  # the shell of srun --pty
    (SLURM | {"SLURM_PTY_PORT": "40000", "PMIX_NAMESPACE": "slurm.pmix.1.0"}, 2, 0),
    (SLURM | {"SLURM_STEP_ID": "4294967290"}, 1, 0),  # salloc's shell
    (SLURM | {"SLURM_STEPID": "4294967290", "SLURM_LOCALID": "0"}, 1, 0),
    (SLURM | {"SLURM_PTY_PORT": "40000", "SLURM_STEP_TASKS_PER_NODE": "2(x1)"}, 1, 0),
])
def test_who_is_a_rank_of_what(launcher, variables, size, rank):
    launcher(variables)
    assert (host.launched_size(), host.launched_rank()) == (size, rank)
    if size == 1:
        assert host.local_place() == (0, 1)


@pytest.mark.parametrize(("variables", "wanted"), [
    ({}, False), ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, True),
    ({"PMI_SIZE": "1", "PMI_RANK": "0"}, True), (SLURM, True),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, False),  # every shell of a job with one task
])
def test_the_only_rank_of_a_launcher_is_launched_too(launcher, variables, wanted):
    launcher(variables)
    assert host.launched() == wanted


@pytest.mark.parametrize(("variables", "says"), [
    (SLURM | {"SLURM_STEP_ID": "0"}, ("Slurm step 1.0: SLURM_STEP_NUM_TASKS=2", "sees 1",
                                      "env -u SLURM_STEP_NUM_TASKS -u SLURM_PROCID pipeinfer",
                                      "srun --mpi=pmix")),
    ({"PMI_SIZE": "4", "PMI_RANK": "0"}, ("PMI_SIZE=4, PMI_RANK=0", "env -u PMI_SIZE -u PMI_RANK",
                                          "MPI4PY_LIBMPI")),
    (MPIRUN | {"OMPI_COMM_WORLD_RANK": "0"}, ("started 3 ranks", "different MPIs")),
])
def test_variables_of_no_job_are_named(launcher, variables, says):
    launcher(variables)
    text = _other_size(host.launch(), 1)
    assert not [part for part in says if part not in text], text


@pytest.mark.parametrize(("device", "gpus", "rank", "chosen"), [
    ("per-rank", 2, 0, "0"), ("per-rank", 2, 3, "1"), ("per-rank", 1, 1, None),
    ("per-rank", 0, 1, None), ("gpu:1", 2, 0, "1"), ("gpu", 2, 1, None), ("", 2, 1, None),
    ("cpu", 2, 1, None)])
def test_ranks_of_a_host_get_its_gpus_in_turn(tmp_path, monkeypatch, device, gpus, rank, chosen):
    for number in range(gpus):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "7")  # chosen by the user
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    host.choose_gpu(device, host.Place(rank, 4, None, 1, rank, 4), tmp_path)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == chosen
    assert os.environ.get("GGML_VK_VISIBLE_DEVICES") == chosen
    assert os.environ["HIP_VISIBLE_DEVICES"] == "7"
    for name in ("CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"):
        os.environ.pop(name, None)


def test_pages_that_a_process_has_mapped_are_not_free(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\nMapped:  2000 kB\nHuge: 0\n")
    assert host.free_memory(path) == 3000 * 1024
    path.write_text("MemTotal: 9000 kB\n")
    assert host.free_memory(path) == 0
