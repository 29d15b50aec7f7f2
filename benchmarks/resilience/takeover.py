"""What the survivors of a rank are sent where only the head has the model file, and how long a
text pauses.

    python -m benchmarks.resilience.takeover

Four hosts in network namespaces (tests/rig/namespaces.py), links at 1 Gbit/s, disks of their
own; `generate --distribute` of an inflated target; the middle stage is killed. Once the neighbours
take its layers over, once a spare that received them ahead of time. Every text is compared with
the undisturbed one. Needs root. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from pipeinfer.lab.commands.inflate import inflate
from tests.rig.launch import ROOT
from tests.rig.namespaces import Cluster, why_not

EMBEDDED = ROOT / "pipeinfer" / "models" / "embedded" / "target.gguf"
VICTIM = 3  #: node 1 is the head, 2 to 4 hold stages, 5 is the spare


def kill_stage(cluster: Cluster, node: int) -> None:
    """SIGKILL to the rank on a node."""
    for pid in cluster.pids(node):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if b"generate" in words and b"PMIX_RANK=" in environment and b"ssh" not in words[0]:
                os.kill(pid, signal.SIGKILL)


def one(models: Path, cache: Path, command: list[str], spares: int, kill: bool, seconds: float
        ) -> dict[str, Any]:
    """A text, its longest silence after the kill, and what the head sent from then on."""
    with Cluster(4 + spares, private=[models, cache]) as cluster:
        more = ["--spares", str(spares)] if spares else []
        began = time.monotonic()
        process = cluster.start(cluster.launch([*command, *more]), timeout=seconds,
                                PIPEINFER_CACHE=str(cache))
        try:
            text, times, killed, sent = "", [], 0.0, 0
            assert process.stdout is not None
            first = 0.0
            while select.select([process.stdout], [], [], seconds)[0]:
                piece = os.read(process.stdout.fileno(), 4096).decode()
                if not piece:
                    break
                text += piece
                first = first or time.monotonic() - began
                times.append(time.monotonic())
                if kill and not killed and len(text) > 120:
                    killed, sent = time.monotonic(), cluster.sent_bytes(1)
                    kill_stage(cluster, VICTIM)
            after = [at for at in times if at >= killed]
            silence = max((b - a for a, b in zip([killed, *after], after, strict=False)),
                          default=0.0)
            _, err = process.communicate(timeout=20)
            found = {"text": text, "start_seconds": round(first, 1), "rc": process.returncode,
                     "said": [line for line in err.splitlines() if "went on" in line]}
            if kill:
                found |= {"pause_seconds": round(silence, 2),
                          "sent_mb": round((cluster.sent_bytes(1) - sent) / 1e6, 1)}
            return found
        finally:
            cluster.kill_jobs()


@click.command()
@click.option("--embd", default=1536, show_default=True, help="Size of the target's activations.")
@click.option("--tokens", default=120, show_default=True)
@click.option("--seconds", default=240.0, show_default=True, help="For each job.")
def main(embd: int, tokens: int, seconds: float) -> None:
    """Kill a stage of a cluster in which only the head has the model."""
    if reason := why_not():
        sys.exit(f"no cluster of namespaces here: {reason}")
    with tempfile.TemporaryDirectory() as directory:
        models, cache = Path(directory, "models"), Path(directory, "cache")
        models.mkdir()
        cache.mkdir(mode=0o700)
        target = models / "target.gguf"
        inflate(EMBEDDED, target, n_embd=embd, n_layer=12, n_head=embd // 64,
                n_head_kv=embd // 64, n_ff=3 * embd)
        command = ["generate", "-m", str(target), "--distribute", "-p", "def read(path):\n", "-n",
                   str(tokens), "--temp", "0", "--ignore-eos", "-c", "512", "-t", "1", "--split",
                   "equal", "--policy", "iterative"]
        plain = one(models, cache, command, 0, False, seconds)
        found: dict[str, Any] = {"model_mb": round(target.stat().st_size / 1e6, 1),
                                 "undisturbed": plain}
        for name, spares in (("neighbours", 0), ("spare", 1)):
            found[name] = one(models, cache, command, spares, True, seconds)
            found[name]["text_equal"] = found[name].pop("text") == plain["text"]
        plain.pop("text")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
