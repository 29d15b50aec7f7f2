"""Padded runs on devices: every policy, over one rank and three, writes what a plain loop of the
same number of rows a decode writes on that device."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import jobs
from benchmarks.gpu.devices import Device
from benchmarks.gpu.jobs import ALL, DRAFT
from benchmarks.gpu.steps import child, json_lines
from benchmarks.gpu.test_gpu import NEEDS_LAVAPIPE, build_of, prepared
from pipeinfer.core.sampling import noise_key
from tests.kit.sample import full

ROWS = 4  #: of each decode
COUNT = 132  #: tokens of an answer
BLOCK = 256  #: cells in which a device's cache grows
TEXT = Path(jobs.ROOT / "pipeinfer" / "text_table.py").read_text()
#: the last three begin alike, and with them answers cross a block of the cache
PROMPTS = ("def main(", TEXT[:600], TEXT[:600] + "# ", TEXT[:600] + "class ")
POLICIES = (
    {"policy": "iterative"}, {"policy": "speculative", "branches": 3, "p_min": 0.0},
    {"policy": "pipeinfer", "p_min": 0.0, "path_min": 0.001}, {"policy": "published", "p_min": 0.0})
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8, "key": noise_key(5)}


def device_of(kind):
    build = build_of(kind)
    if not (build / "bin").exists():
        pytest.skip(f"no llama.cpp for the {kind} device has been built here: --full builds it")
    return Device(kind, build / "bin")


def plain_tokens(device, tmp_path, model, cases):
    return jobs.plain(device, tmp_path, tmp_path / "log", 1800, (ALL, None, ROWS), cases,
                      model=str(model))["tokens"]


def config_of(model):
    return {"model": str(model), "gpu_layers": ALL, "pad": ROWS, "ctx": 512, "threads": 1,
            "draft_model": "none", "proposer": ["prompt-lookup"], "policy": "pipeinfer"}


def compare(device, tmp_path, model, ranks, prompts, policies, samplings, count):
    """Every answer against the plain loop's; returns the job's figures by answer."""
    cases = [{"prompt": prompt, "params": params, "count": count}
             for prompt in prompts for params in samplings]
    found = jobs.program(
        device, ranks, [sys.executable, str(jobs.MATRIX)], {"config": config_of(model), "cases": [
            {**case, "limits": limits} for case in cases for limits in policies]},
        tmp_path, tmp_path / "log", 1800)
    assert found["exact_width"] == ROWS
    wanted = plain_tokens(device, tmp_path, model, cases)
    for i, result in enumerate(found["results"]):
        assert result["tokens"] == wanted[i // len(policies)], (
            cases[i // len(policies)], policies[i % len(policies)])
    return found["results"]


PARTS = """
import json, sys
from pathlib import Path
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.context import LlamaOptions
from pipeinfer.cluster.placement import measure_here
from pipeinfer.config import JobConfig
from pipeinfer.host import Place
from pipeinfer.models.locate import open_model
from pipeinfer.nodes import NodeSettings
path = Path(sys.argv[1])
any_threads = {}
for layers in (0, 5, 99):
    backend = LlamaCppBackend.load(
        path, layers=(0, 12), n_layers_total=12, first=True, last=True, n_ctx=256, n_seq_max=2,
        n_batch=8, n_threads=2, options=LlamaOptions(n_gpu_layers=layers))
    any_threads[layers] = backend.any_threads
    backend.close()
found = measure_here(JobConfig.of(gpu_layers=99), Place(0, 1, None, 1, 0, 1),
                     NodeSettings(), path, open_model(path).fingerprint)
print(json.dumps({"any_threads": any_threads, "free": found.gpu_free, "error": found.error,
                  "overhead": found.figures["overhead"]}))
"""


@pytest.mark.slow
def test_what_a_rank_with_layers_on_an_rpc_device_reports(tmp_path):
    """Its free memory, a layer's time without the launch; and that the number of threads changes
    bits where some layers stay on the processor, with keys and values in f16."""
    with device_of("rpc").open() as env:
        (found,) = json_lines(child([sys.executable, "-c", PARTS, str(jobs.TARGET)], 120,
                                    tmp_path / "log", jobs.job_environment(
                                        env, PIPEINFER_CACHE=str(tmp_path))))
    assert found["any_threads"] == {"0": True, "5": False, "99": True}
    assert found["free"] > 1e6
    assert not found["error"]
    assert found["overhead"] >= 0


def misses(results):
    return sum(one["guesses_tested"] - one["accepted_speculative"] for one in results)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [full(1), 3])
def test_policies_write_what_a_padded_plain_loop_writes_on_an_rpc_device(tmp_path, ranks):
    results = compare(device_of("rpc"), tmp_path, jobs.TARGET, ranks, PROMPTS[1:2], POLICIES[1:],
                      [GREEDY, SAMPLED], COUNT)
    assert misses(results) >= 20
    assert sum(one["accepted_speculative"] for one in results) > 100


@pytest.mark.full("padding in tests/backends/test_padded.py, jobs on the RPC device in this file")
@NEEDS_LAVAPIPE
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.timeout(4800)
def test_policies_write_what_a_padded_plain_loop_writes_on_a_vulkan_device(tmp_path, ranks):
    """Its kernels differ by width, by holes and by the cells of others."""
    prepared("vulkan")
    results = compare(device_of("vulkan"), tmp_path, DRAFT, ranks, PROMPTS, POLICIES,
                      [GREEDY, SAMPLED], COUNT)
    assert misses(results) >= 20


#: for sh: leaves the device to rank 2
_RANK_2 = '[ "$OMPI_COMM_WORLD_RANK" = 2 ] || unset GGML_BACKEND_PATH; exec "$@"'


@pytest.mark.full("all ranks with a device in this file, none in tests/cluster/test_gpu_memory.py")
def test_one_rank_with_a_device_among_ranks_without(tmp_path):
    """A desktop with a GPU and old servers: rank 0 drafts, ranks 1 and 3 compute on the processor,
    though -ngl is given. Every policy writes what a plain loop on the processor writes."""
    device = device_of("rpc")
    config = {**config_of(jobs.TARGET), "draft_model": str(DRAFT), "proposer": ["draft"],
              "cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on", "layers": "4,4,4"}
    cases = [{"prompt": PROMPTS[1], "params": params, "count": 60} for params in (GREEDY, SAMPLED)]
    found = jobs.program(
        device, 4, ["sh", "-c", _RANK_2, "sh", sys.executable, str(jobs.MATRIX)],
        {"config": config, "cases": [{**case, "limits": limits} for case in cases
                                     for limits in POLICIES]}, tmp_path, tmp_path / "log", 600)
    wanted = jobs.plain(device, tmp_path, tmp_path / "log", 600, (0, 1, ROWS), cases,
                        model=str(jobs.TARGET), cache="q8_0")["tokens"]
    for i, result in enumerate(found["results"]):
        assert result["tokens"] == wanted[i // len(POLICIES)], POLICIES[i % len(POLICIES)]
    assert misses(found["results"]) >= 20
    assert [one["host"] for one in found["reports"].values()] == 3 * [socket.gethostname()]


def check_requests_beside_each_other(device, tmp_path, model, ranks):
    """Two at the same time, and a third, which begins as they do, after one of them."""
    case = {"params": GREEDY, "count": COUNT, "limits": {}}
    (found,) = jobs.program(
        device, ranks, [sys.executable, str(jobs.MATRIX)],
        {"config": {**config_of(model), "parallel": 2, "speculation": "on"},
         "cases": [{**case, "prompt": PROMPTS[1], "beside": PROMPTS[2:]}]},
        tmp_path, tmp_path / "log", 1800)["results"]
    assert found["tokens"] == plain_tokens(device, tmp_path, model, [
        {**case, "prompt": prompt} for prompt in PROMPTS[1:]])
    assert found["reused"][2] == 128, "two chunks of the prompts in common"


@pytest.mark.slow
def test_requests_beside_each_other_on_an_rpc_device(tmp_path):
    check_requests_beside_each_other(device_of("rpc"), tmp_path, jobs.TARGET, 1)


@pytest.mark.full("lanes that are chains in tests/scheduler/test_lanes.py")
@NEEDS_LAVAPIPE
@pytest.mark.timeout(4800)
def test_requests_beside_each_other_on_a_vulkan_device(tmp_path):
    prepared("vulkan")
    check_requests_beside_each_other(device_of("vulkan"), tmp_path, DRAFT, 1)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [ALL, full(5)])
def test_slices_on_rpc_devices_have_the_processors_text(tmp_path, layers):
    """Their partial results lie in the device's memory, or some of them, and are summed here."""
    device = device_of("rpc")
    words = [sys.executable, "-m", "pipeinfer", "generate", "-m", str(jobs.TARGET), "-p",
             PROMPTS[1], "-n", "40", "--temp", "0", "--ignore-eos", "-c", "512", "-t", "1", "-md",
             "none", "--proposer", "prompt-lookup", "--set", "turns=off", "--grid", "1x2", "-ctk",
             "q8_0", "-ctv", "q8_0", "-fa", "on", "--json"]
    tokens = {}
    for count in (0, layers):
        with device.open(3) as env:
            tokens[count] = json_lines(child(
                jobs.command(3, [*words, "-ngl", str(count)]), 120, tmp_path / "log",
                jobs.job_environment(env, MPIEXEC_TIMEOUT="115")))[0]["tokens"]
    assert tokens[layers] == tokens[0]
