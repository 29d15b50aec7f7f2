"""`pipeinfer doctor`: checks whether this cluster works, and suggests remedies.

    pipeinfer doctor                       this host
    pipeinfer doctor --hostfile H          whether its hosts answer, before any mpirun
    mpirun -np 8 --hostfile H pipeinfer doctor

It checks the launch, the ranks and hosts, versions, CPU features, links between neighbours, and
whether llama.cpp computes here (in a subprocess, since a broken build
crashes). It changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import click
from msgspec import structs

from pipeinfer import host
from pipeinfer.backends.exact_width import MOST_CELLS, MOST_ROWS, exact_width
from pipeinfer.backends.factory import EXACT_LIMIT, llama_options
from pipeinfer.backends.llamacpp import huge_pages
from pipeinfer.backends.llamacpp.eval_callback import compiled_filter
from pipeinfer.cli.doctor_hosts import Finding
from pipeinfer.cluster import launch
from pipeinfer.cluster.handshake import hello
from pipeinfer.cluster.shutdown import part
from pipeinfer.config import JobConfig
from pipeinfer.errors import BackendError, PipeinferError, UsageError
from pipeinfer.llama import short_runs
from pipeinfer.models import locate
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import model_paths
from pipeinfer.models.media import Pictures

_PROBE_SECONDS = 60
_ALIKE = 0.05  #: of the largest logit, as far as a GPU's may be from the processor's
_AS_HERE = "as on the processor"


@click.command()
@click.option("--hostfile", default="", help="Check this hostfile's hosts by ssh instead.")
@click.option("--ranks", default=0, help="With --hostfile: number of ranks to place.")
@click.option("--exact", is_flag=True,
              help="Also search, in all layers of the model, how many rows of a run keep the bits "
                   "of single rows, and compare that with what a start measures: minutes for a "
                   "large model.")
@click.option("-m", "--model", default="", help="With --exact or --mmproj: the model.")
@click.option("-mm", "--mmproj", default="",
              help="Also measure how long this projector takes for a picture; auto: the one next "
                   "to the model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(hostfile: str, ranks: int, exact: bool, model: str, mmproj: str, as_json: bool
                   ) -> None:
    """Check this host, or every rank of an mpirun, and say what to do about each finding."""
    findings: list[Finding] | None
    if model and not (exact or mmproj):
        raise UsageError("-m needs --exact or --mmproj; whether a model fits, `pipeinfer plan` and "
                         "a start say")
    if hostfile:
        from pipeinfer.cli.doctor_hosts import check_hosts

        findings = check_hosts(hostfile, ranks)
    else:
        findings = examine(JobConfig())
    if findings is None:
        return
    if exact:
        findings += check_exact(JobConfig.of(model=model))
    if mmproj:
        findings.append(check_projector(JobConfig.of(
            model=model, mmproj="" if mmproj == "auto" else mmproj)))
    if as_json:
        click.echo(json.dumps({"findings": [dataclasses.asdict(f) for f in findings]}))
    else:
        for finding in findings:
            mark = {"ok": "  ok ", "warn": "warn ", "fail": "FAIL "}[finding.level]
            click.echo(f"{mark}{finding.what}: {finding.detail}")
            if finding.remedy:
                click.echo(f"       -> {finding.remedy}")
    if any(f.level == "fail" for f in findings):
        raise SystemExit(1)


def examine(config: JobConfig) -> list[Finding] | None:
    """Return every finding on rank 0, None on other ranks."""
    place = launch.find_place(config.cluster)
    own = hello(config, place)
    mine = {"rank": own.rank, "version": own.version, "backend": own.backend,
            "kernels": own.kernels, "unused": _unused(), "filter": compiled_filter() is not None,
            "numa": host.numa_nodes(), "short_runs": short_runs.used(),
            "huge_pages": huge_pages.setting(),
            **structs.asdict(host.facts(place.cores, place.local_rank, place.local_size)),
            "probe": probe_in_subprocess(), "links": []}
    if place.comm is None:
        everyone = [mine]
        library = "not used (one process)"
    else:
        from pipeinfer.transport import mpi_job

        mine["links"] = [structs.asdict(link) for link in mpi_job.measure_links(place.comm)]
        texts = mpi_job.gather_json(place.comm, json.dumps(mine))
        part(place)
        if texts is None:
            return None
        everyone = [json.loads(text) for text in texts]
        library = mpi_job.library_version()
    checks: list[Callable[[], list[Finding]]] = [
        lambda: _check_launch(everyone, library), lambda: _check_alike(everyone),
        lambda: _check_library(everyone), lambda: _check_features(everyone),
        lambda: _check_llama(everyone), lambda: _check_links(everyone),
    ]
    return [finding for check in checks for finding in check()]


def _check_launch(everyone: list[dict[str, Any]], library: str) -> list[Finding]:
    hosts: dict[str, list[dict[str, Any]]] = {}
    for rank in everyone:
        hosts.setdefault(rank["host"], []).append(rank)
    found = [Finding("ok", "launch", f"{len(everyone)} ranks on {len(hosts)} hosts, MPI {library}")]
    for name, ranks in hosts.items():
        memory = ranks[0]["memory_available"] / 2**30
        numbers = ", ".join(str(r["rank"]) for r in ranks)
        found.append(Finding("ok", f"host {name}", f"ranks {numbers}, {ranks[0]['cores']} cores "
                             f"each, {memory:.1f} GiB free, {ranks[0]['machine']}"))
        machine = ranks[0]["cores_host"]
        if len(ranks[0]["numa"]) > 1:
            found.append(_check_sockets(name, ranks[0]["numa"], len(ranks)))
        if len(ranks) > machine:
            found.append(Finding(
                "warn", f"host {name}", f"{len(ranks)} ranks share {machine} cores",
                "this is fine for a trial; for speed start one stage per host"))
    if len(everyone) == 1 and host.launched_size() == 1:
        found.append(Finding("ok", "launch", "one process; start with mpirun -np N to use more"))
    return found


def _check_sockets(name: str, nodes: list[list[Any]], ranks: int) -> Finding:
    """What a host with several NUMA nodes has, and whether each has a rank."""
    have = "; ".join(f"node {number}: {cores} cores, {memory / 2**30:.0f} GiB"
                     for number, cores, memory, _ in nodes)
    far = max((one for *_, distances in nodes for one in distances), default=0)
    detail = f"{len(nodes)} NUMA nodes ({have}; distance {far / 10:.1f} of the own memory's)"
    if ranks >= len(nodes):
        return Finding("ok", f"host {name}", f"{detail}; each rank stays on one")
    return Finding("warn", f"host {name}", f"{detail}, {ranks} rank{'s' * (ranks > 1)}",
                   "a rank that uses all of them waits for far memory: start this host alone by "
                   f"`pipeinfer up`, or give it slots={len(nodes)} and try --grid auto")


def _check_alike(everyone: list[dict[str, Any]]) -> list[Finding]:
    found = []
    for key, what in (("version", "pipeinfer"), ("backend", "llama.cpp"), ("python", "Python")):
        values = sorted({rank[key] for rank in everyone})
        if len(values) == 1:
            found.append(Finding("ok", what, f"{values[0]} on every rank"))
        else:
            who = "; ".join(f"rank {r['rank']} {r['host']} {r[key]}" for r in everyone)
            level = "warn" if key == "python" else "fail"
            found.append(Finding(level, what, who, "install the same version on every host"))
    return found


def _unused() -> list[str]:
    """Return the features of this CPU that llama.cpp was not compiled for."""
    from pipeinfer.llama import binding

    try:
        return list(binding.unused_features())
    except BackendError:
        return []


def _check_library(everyone: list[dict[str, Any]]) -> list[Finding]:
    """Report what each build of llama.cpp was compiled for, and what compiling it here would
    add."""
    builds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rank in everyone:
        builds.setdefault((rank["kernels"], " ".join(rank["unused"])), []).append(rank)
    found = []
    for (kernels, unused), ranks in builds.items():
        if not kernels:
            continue  # loading has failed, or ggml chooses its kernels at run time
        numbers = ", ".join(str(rank["rank"]) for rank in ranks)
        detail = f"compiled for {kernels.removesuffix(' short-runs')} (ranks {numbers})"
        found.append(Finding(
            "ok", "llama.cpp's kernels", detail + (f"; not for {unused}" if unused else ""),
            "`./launch/demo --native` compiles it for all that this processor has; whether that "
            "is faster depends on the model's type (docs/install.md)" if unused else ""))
    without = [str(rank["rank"]) for rank in everyone if not rank["filter"]]
    if without:
        found.append(Finding(
            "ok", "layer filter", f"not compiled (ranks {', '.join(without)}): Python answers "
            "llama.cpp for every node of a graph, 1 to 2 us each",
            "install a C compiler, then pipeinfer again"))
    found += _short_runs(everyone)
    small = [str(rank["rank"]) for rank in everyone if rank["huge_pages"] == "never"]
    if small:
        found.append(Finding(
            "ok", "huge pages", f"switched off (ranks {', '.join(small)}): weights are read in "
            "pages of 4 KiB, which takes longer",
            f"as root: echo madvise > {huge_pages.GIVEN}"))
    if len({kernels for kernels, _ in builds}) > 1:
        found.append(Finding(
            "warn", "llama.cpp's kernels", "differ between ranks: results can differ in near-ties",
            "use the prebuilt library on every host, or compile one for what all processors have"))
    return found


def _short_runs(everyone: list[dict[str, Any]]) -> list[Finding]:
    """Report which types of weights `short_runs` multiplies, and on which ranks."""
    kinds: dict[str, list[str]] = {}
    for rank in everyone:
        kinds.setdefault(" ".join(rank["short_runs"]), []).append(str(rank["rank"]))
    return [Finding(
        "ok", "short runs", f"{f'{types} by own kernels' if types else 'left to llama.cpp'} "
        f"(ranks {', '.join(ranks)})",
        "" if types else "with AVX2 or 64-bit ARM: install a C compiler, then pipeinfer again")
        for types, ranks in kinds.items()]


def _check_features(everyone: list[dict[str, Any]]) -> list[Finding]:
    sets = {tuple(rank["features"]) for rank in everyone}
    if len(sets) == 1:
        return [Finding("ok", "processors", f"alike: {' '.join(sets.pop()) or 'baseline'}")]
    common = set.intersection(*map(set, sets))
    detail = "; ".join(f"{r['host']}: {' '.join(r['features'])}" for r in everyone)
    return [Finding(
        "warn", "processors", f"differ: {detail}",
        "a llama.cpp compiled on the newest host can crash on the oldest: use the prebuilt one, "
        "compile it on every host, or once with CMAKE_ARGS='-DGGML_NATIVE=OFF' "
        f"(common features: {' '.join(sorted(common)) or 'none'})")]


def _check_llama(everyone: list[dict[str, Any]]) -> list[Finding]:
    found = []
    for rank in everyone:
        probe, who = rank["probe"], f"llama.cpp on rank {rank['rank']}"
        if probe.get("ok"):
            found.append(Finding("ok", who, f"computes (two-row Q8_0 decode bit-equal to single "
                                 f"rows: {'yes' if probe['equal'] else 'no'})"))
            found += _devices(rank)
        else:
            found.append(Finding("fail", who, probe["error"], probe["remedy"]))
    return found


def _devices(rank: dict[str, Any]) -> list[Finding]:
    """What llama.cpp can offload to on a rank's host, and what a decode there gave."""
    probe, found = rank["probe"], []
    for one in probe["devices"]:
        found.append(Finding("ok", f"GPU of rank {rank['rank']}", (
            f"{one['name']}: {one['description']}, {one['free'] / 2**30:.1f} of "
            f"{one['total'] / 2**30:.1f} GiB free")))
    if probe["devices"]:
        right = probe["offloaded"] == _AS_HERE
        found.append(Finding(
            "ok" if right else "fail", f"GPU of rank {rank['rank']}",
            f"a decode with all layers there: {probe['offloaded']}",
            "" if right else "use the processor (-ngl 0), or another build of llama.cpp"))
    return found


def _check_links(everyone: list[dict[str, Any]]) -> list[Finding]:
    found = []
    for rank in everyone:
        for link in rank["links"]:
            latency, bandwidth = link["latency"], link["bandwidth"]
            slow = latency > 5e-3 or bandwidth < 20e6
            found.append(Finding(
                "warn" if slow else "ok", f"link {link['source']}-{link['dest']}",
                f"{latency * 1e6:.0f} us, {bandwidth / 1e6:.0f} MB/s",
                "check the cable, the switch and --mca btl_tcp_if_include" if slow else ""))
    return found


def probe_in_subprocess() -> dict[str, Any]:
    """Decode with llama.cpp in a process that may crash; return the outcome."""
    env = {k: v for k, v in os.environ.items()
           if not k.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_"))}
    remedy = "install it again: remove .venv and call launch/demo, or launch/demo --native"
    try:
        done = subprocess.run([sys.executable, "-P", "-m", "pipeinfer.cli.doctor"], env=env,
                              check=False, capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"no answer in {_PROBE_SECONDS} s", "remedy": remedy}
    lines = done.stdout.splitlines()
    if lines:
        answer: dict[str, Any] = json.loads(lines[0])
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            answer["offloaded"] = f"ended with status {done.returncode} {last}".strip()
        elif len(lines) > 1:
            answer |= json.loads(lines[1])
        return answer
    if done.returncode == -signal.SIGILL:
        return {"ok": False, "error": "illegal instruction: built for a newer processor",
                "remedy": "build on this host, or with CMAKE_ARGS='-DGGML_NATIVE=OFF'"}
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return {"ok": False, "error": f"a decode of two rows crashed with {name}",
                "remedy": "build without AMX: CMAKE_ARGS='-DGGML_AMX_INT8=OFF -DGGML_AMX_TILE=OFF'"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"ok": False, "error": last, "remedy": remedy}
    return {"ok": False, "error": "no answer", "remedy": remedy}


def _probe() -> None:
    """In the subprocess: compare one row with two on the embedded draft, and with GPUs."""
    import numpy as np

    from pipeinfer.backends.llamacpp.backend import LlamaCppBackend, LlamaOptions
    from pipeinfer.core.types import ALL_SEQS, END, make_rows
    from pipeinfer.llama import binding
    from pipeinfer.llama.library import gpus

    path = locate.EMBEDDED / "draft.gguf"
    n = locate.open_model(path).n_layers
    rows = [(5, 0, (0,), True), (6, 1, (0,), True)]

    def load(offloaded: int) -> LlamaCppBackend:
        return LlamaCppBackend.load(
            path, layers=(0, n), n_layers_total=n, first=True, last=True, n_ctx=256, n_seq_max=1,
            n_batch=16, n_threads=1, options=LlamaOptions(n_gpu_layers=offloaded))

    backend = load(0)
    both = backend.decode(make_rows(rows))
    backend.seq_rm(ALL_SEQS, 0, END)
    single = [backend.decode(make_rows([row])) for row in rows]
    assert both is not None
    equal = all(s is not None and np.array_equal(s[0], b)
                for s, b in zip(single, both, strict=True))
    backend.close()
    devices = [structs.asdict(one) for one in gpus()]
    print(json.dumps({"ok": True, "equal": equal, "devices": devices, "offloaded": "",
                      "system": binding.llama_print_system_info().decode()}), flush=True)
    if devices:  # which may end the process
        there = load(-1)
        found = there.decode(make_rows(rows))
        assert found is not None
        away = float(np.abs(found - both).max() / np.abs(both).max())
        print(json.dumps({"offloaded": _AS_HERE if away < _ALIKE else
                          f"logits differ from the processor's by {away:.1%}"}))
        there.close()


def check_exact(config: JobConfig) -> list[Finding]:
    """Search R in the whole model, which takes minutes for a large one, and in its excerpt.

    A start trusts the excerpt, so one that allows more rows than the whole model is an error.
    """
    from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
    from pipeinfer.backends.llamacpp.excerpt import LoadedExcerpt

    try:
        path, _ = model_paths(config)
        model, threads = ModelFile(path), config.model.threads or len(os.sched_getaffinity(0))
        with closing(LlamaCppBackend.load(
                path, layers=(0, model.n_layers), n_layers_total=model.n_layers, first=True,
                last=True, n_ctx=MOST_CELLS, n_seq_max=3, n_batch=MOST_ROWS, n_threads=threads,
                options=llama_options(config.model))) as backend:
            begun = time.monotonic()
            whole = exact_width(backend, EXACT_LIMIT)
            took = time.monotonic() - begun
            text = f"R = {whole} over all {model.n_layers} layers ({took:.1f} s)"
            with LoadedExcerpt.opened(path, backend) as excerpt:
                if excerpt is None:
                    return [Finding("ok", "exact", f"{text}; a start of this architecture measures "
                                    "all layers, too")]
                begun = time.monotonic()
                found = excerpt.width(EXACT_LIMIT, None)
                text += f", {found} over the excerpt ({time.monotonic() - begun:.1f} s)"
    except PipeinferError as error:
        return [Finding("fail", "exact", str(error))]
    if found <= whole:
        return [Finding("ok", "exact", text)]
    return [Finding("fail", "exact", text, "report this model and processor; until then start with "
                    "--policy iterative, or --exact off for tokens up to near-ties")]


def check_projector(config: JobConfig) -> Finding:
    """Measure how long the projector takes for a picture of 640 x 480."""
    size = 640 * 480 * 3
    grey = b"BM" + struct.pack("<IHHI", size + 54, 0, 0, 54) + struct.pack(
        "<IiiHHIIiiII", 40, 640, 480, 1, 24, 0, size, 0, 0, 0, 0) + bytes([127]) * size
    try:
        options = locate.projector(config, model_paths(config)[0])
        if options is None:
            return Finding("fail", "projector", "there is none next to the model",
                           "name its file with --mmproj")
        with closing(Pictures(options)) as pictures:
            count = len(pictures.layout(grey))
            pictures.show(grey)
            return Finding("ok", "projector", f"a picture of 640 x 480 becomes {count} tokens in "
                           f"{pictures.seconds:.1f} s, in a process of about "
                           f"{options.memory / 1e9:.1f} GB")
    except PipeinferError as error:
        return Finding("fail", "projector", str(error))


if __name__ == "__main__":
    _probe()
