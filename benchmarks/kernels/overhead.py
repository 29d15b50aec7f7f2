"""What pipeinfer costs beside the bare thing, side by side in one run.

    python -m benchmarks.kernels.overhead --big MODEL.gguf

1. one hop of 4 rows x 4096 floats against bare mpi4py (shared memory, then TCP on loopback);
2. `-np 1 --policy iterative` against a plain llama-cpp-python loop on the same file, alternating;
3. the head's time per accepted token, the draft's compute not included.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import click

from tests.rig.launch import ROOT, run
from tests.rig.plain_loop import PlainLoop

TCP = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self")
PROMPT = "def fibonacci(n):\n"


def hop() -> None:
    """Part 1."""
    for label, args in (("shared memory", ()), ("TCP", TCP)):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "hop.json"
            program = ROOT / "benchmarks" / "kernels" / "programs" / "hop.py"
            done = run(2, [sys.executable, str(program), str(out), "1000", "4", "4096"],
                       mpi_args=args)
            if done.returncode:
                sys.exit(done.stderr[-2000:])
            got = json.loads(out.read_text())
        ours, bare, probe = (1e6 * got[k] for k in ("pipeinfer", "bare", "bare_probe"))
        print(f"hop of {got['bytes']} bytes over {label}: {ours:.0f} us, bare send/receive "
              f"{bare:.0f} us (x{ours / bare:.2f}), bare matched probe {probe:.0f} us "
              f"(x{ours / probe:.2f})", flush=True)


def loop(model: Path, tokens: int, rounds: int, threads: int) -> None:
    """Part 2: alternate, so that drift of the machine hits both."""
    from pipeinfer.cluster.generate import run_request
    from pipeinfer.cluster.launch import join
    from pipeinfer.config import JobConfig
    from pipeinfer.core.types import SamplingParams

    plain = PlainLoop(model, n_ctx=512, n_threads=threads)
    config = JobConfig.of(model=str(model), ctx=256, policy="iterative", threads=threads)
    ratios, ours, theirs = [], [], []
    with join(config).lead() as session:
        prompt = session.tokenizer.encode(PROMPT)
        for turn in range(rounds + 1):
            out = run_request(session, prompt, SamplingParams(), tokens, ignore_eos=True)
            mine = (out.times[-1] - out.times[0]) / (tokens - 1)
            list(plain.logits_after(prompt, []))
            start = time.perf_counter()
            reference = []
            logits = plain.decode([out.tokens[0]], len(prompt))
            for i in range(1, tokens):
                token = int(logits.argmax())
                reference.append(token)
                if i < tokens - 1:
                    logits = plain.decode([token], len(prompt) + i)
            other = (time.perf_counter() - start) / (tokens - 1)
            if reference != out.tokens[1:]:
                print("note: tokens differ", reference, out.tokens[1:])
            if turn:
                ours.append(mine)
                theirs.append(other)
                ratios.append(mine / other)
    plain.close()
    print(f"{model.name}, {threads} threads: -np 1 iterative {1e3 * statistics.median(ours):.2f} "
          f"ms per token, plain loop {1e3 * statistics.median(theirs):.2f} ms, ratio median "
          f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


def head() -> None:
    """Part 3."""
    for np in (2, 4):
        done = run(np, [sys.executable, "-m", "pipeinfer", "generate", "-p", PROMPT, "-n", "400",
                        "--temp", "0.8", "--seed", "1", "--ignore-eos", "--json"])
        stats = json.loads(done.stdout)["stats"]
        print(f"{np} ranks: head {1e3 * stats['head_seconds_per_token']:.3f} ms per accepted "
              f"token, {stats['runs'] / stats['n_output']:.2f} runs per token", flush=True)


@click.command()
@click.option("--big", type=click.Path(path_type=Path, exists=True), help="A model of about 1 B.")
@click.option("--tokens", default=32)
@click.option("--rounds", default=5)
@click.option("--threads", default=2)
def main(big: Path | None, tokens: int, rounds: int, threads: int) -> None:
    """Run all parts."""
    hop()
    head()
    if big is not None:
        loop(big, tokens, rounds, threads)


if __name__ == "__main__":
    main()
