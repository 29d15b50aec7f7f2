"""What llama.cpp's kernels get through here: bytes of weights per second, core and row.

    python -m benchmarks.kernels.kernels [--threads 1,2] [--mixes Q3_K_M,Q4_K_M] [--work DIR]
        [--repacked] [--json FILE]

A random model of 0.9 B weights (four layers of 4,096, a tiny vocabulary) is quantised to each mix
and decoded in runs of 1 to 8 rows through stock llama.cpp, the least of many repetitions.
`PIPEINFER_LLAMA_LIBRARY` names another build: docs/emulation.md uses one for AVX2 and one for AVX,
both without repacked weights. bytes per cycle divides by the clock that a chain of dependent
multiplications shows.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
import threading
import time
from pathlib import Path

import click
import numpy as np

from pipeinfer.llama import binding
from pipeinfer.llama.library import ensure_llama
from pipeinfer.models.gguf import ModelFile
from tests.kit.random_model import RandomSpec, write_random_model

ROWS = (1, 2, 3, 4, 5, 6, 8)
FTYPES = {"Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q4_K_M": 15,
          "Q5_K_M": 17, "Q6_K": 18}
SPEC = RandomSpec(n_layer=4, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336, qtype="F16")


def quantise(source: Path, target: Path, mix: str) -> None:
    """Write `source` (F16) in `mix`."""
    params = binding.llama_model_quantize_default_params()
    params.ftype, params.nthread = FTYPES[mix], 2
    status = binding.llama_model_quantize(str(source).encode(), str(target).encode(),
                                            ctypes.byref(params))
    if status:
        raise SystemExit(f"llama.cpp could not quantise to {mix}")


def decode_seconds(path: Path, threads: int, rounds: int, *, repacked: bool) -> dict[int, float]:
    """Least time of a decode by its number of rows. Weights stay as in the file, or are repacked
    for the processor, as jobs have them."""
    model_params = binding.llama_model_default_params()
    model_params.use_extra_bufts = repacked
    model_params.n_gpu_layers = 0
    model_params.use_mmap = False  # large pages: a mapped file's small ones cost page walks
    model = binding.llama_model_load_from_file(str(path).encode(), model_params)
    params = binding.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, 64, 64
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = binding.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = binding.llama_init_from_model(model, params)
    memory = binding.llama_get_memory(context)
    batch = binding.llama_batch_init(max(ROWS), 0, 1)
    best = dict.fromkeys(ROWS, float("inf"))
    for turn in range(rounds):
        for rows in ROWS:  # in turn, so that a busy moment does not meet one width alone
            batch.n_tokens = rows
            for i in range(rows):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = 5 + i, i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, True
            start = time.perf_counter()
            if binding.llama_decode(context, batch):
                raise SystemExit("llama_decode failed")
            binding.llama_synchronize(context)
            if turn:
                best[rows] = min(best[rows], time.perf_counter() - start)
            binding.llama_memory_clear(memory, True)
    binding.llama_batch_free(batch)
    binding.llama_free(context)
    binding.llama_model_free(model)
    return best


def fit(seconds: dict[int, float], upto: int = 6) -> tuple[float, float]:
    """(time of one row, time of each further row): least squares over runs of 1 to `upto` rows."""
    rows = np.array([r for r in seconds if r <= upto], float)
    slope, at_zero = np.polyfit(rows, [seconds[int(r)] for r in rows], 1)
    return seconds[1], min(slope, (slope * upto + at_zero - seconds[1]) / (upto - 1))


def read_bandwidth(threads: int, megabytes: int = 1024, rounds: int = 6) -> float:
    """Bytes/s that `threads` threads read (float32 dot products of memory far beyond a cache)."""
    count = megabytes * 2**20 // 8 // threads
    data = [(np.ones(count, np.float32), np.ones(count, np.float32)) for _ in range(threads)]
    best = 0.0
    for _ in range(rounds):
        workers = [threading.Thread(target=np.dot, args=pair) for pair in data]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, threads * count * 8 / (time.perf_counter() - start))
    return best


def clock_hz() -> float:
    """The clock under load, by a chain of multiplications of which each takes three cycles."""
    source = """
        #include <stdint.h>
        uint64_t chain(uint64_t n) {
            uint64_t x = 1;
            for (uint64_t i = 0; i < n; i += 8)
                __asm__ volatile("imul %0,%0;imul %0,%0;imul %0,%0;imul %0,%0;"
                                 "imul %0,%0;imul %0,%0;imul %0,%0;imul %0,%0;" : "+r"(x));
            return x;
        }"""
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "chain.c"), Path(folder, "chain.so")
        code.write_text(source)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, code], check=True)
        chain = ctypes.CDLL(str(library)).chain
        chain.argtypes, chain.restype = [ctypes.c_uint64], ctypes.c_uint64
        best = 0.0
        for _ in range(100):
            start = time.perf_counter()
            chain(8_000_000)
            best = max(best, 3 * 8e6 / (time.perf_counter() - start))
    return best


@click.command()
@click.option("--threads", default="1,2", show_default=True)
@click.option("--mixes", default=",".join(FTYPES), show_default=True)
@click.option("--rounds", default=8, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), help="Keep the models here (6 GB).")
@click.option("--repacked", is_flag=True, help="Weights repacked, where llama.cpp can.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(threads: str, mixes: str, rounds: int, work: Path | None, repacked: bool,
         output: Path | None) -> None:
    """Print rates by mix and threads."""
    ensure_llama()
    clock = clock_hz()
    print(binding.llama_print_system_info().decode())
    print(f"clock {clock / 1e9:.2f} GHz")
    counts = [int(part) for part in threads.split(",")]
    bandwidth = {count: read_bandwidth(count) for count in counts}
    for count, value in bandwidth.items():
        print(f"{count} threads read {value / 1e9:.1f} GB/s")
    results = []
    with tempfile.TemporaryDirectory(prefix="kernels-") as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for mix in mixes.split(","):
            path = folder / f"{mix}.gguf"
            if not path.exists():
                plain = folder / "f16.gguf"
                if not plain.exists():
                    write_random_model(plain, SPEC)
                quantise(plain, path, mix)
            model = ModelFile(path)
            size = sum(t.nbytes for t in model.tensors.values() if t.name.startswith("blk."))
            for count in counts:
                best = decode_seconds(path, count, rounds, repacked=repacked)
                one, more = fit(best)
                cycles = clock * count
                results.append({
                    "mix": mix, "bytes": size, "threads": count, "seconds": best,
                    "first": size / one / cycles, "further": size / more / cycles,
                    "share_of_bandwidth": size / one / bandwidth[count], "row_cost": more / one,
                })
                print(f"{mix:7} {size / 1e6:4.0f} MB {count} threads: "
                      + " ".join(f"{1e3 * t:.0f}" for t in best.values())
                      + f" ms | {size / one / bandwidth[count]:.0%} of bandwidth | per cycle, core:"
                      f" first {size / one / cycles:.2f}, further {size / more / cycles:.2f}"
                      f" | row cost {more / one:.2f}", flush=True)
    if output is not None:
        output.write_text(json.dumps({"clock": clock, "bandwidth": bandwidth,
                                      "system": binding.llama_print_system_info().decode(),
                                      "results": results}, indent=1))


if __name__ == "__main__":
    main()
