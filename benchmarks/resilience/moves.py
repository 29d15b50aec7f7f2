"""The job is moved and reloaded under streaming clients: do their streams go on, and how soon?

    python -m benchmarks.resilience.moves --runs 5

Four clients of the official openai library stream from `pipeinfer up -np 3`. At a random moment one
of these happens: a stage is killed and `pipeinfer rescale` brings its rank back; `rescale` to
another number of ranks; `reload` with other options; the same with another model file in the same
place, which lets open requests end first. Every stream's tokens are compared with those of an
undisturbed run. Times are each client's longest silence from then on. Needs the `test` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.resilience.door import CLIENTS, all_of, during
from tests.rig import launch
from tests.rig.served import Served

PIPEINFER = [sys.executable, "-m", "pipeinfer"]
KINDS = ("lost", "ranks", "options", "file")
_MODEL = launch.ROOT / "pipeinfer" / "models" / "embedded" / "target.gguf"


class Up:
    """`pipeinfer up` with a copy of a model."""

    def __init__(self, folder: Path, pace_ms: float, model: Path, overlap: str) -> None:
        self.state, self.model = folder / "state", folder / "model.gguf"
        shutil.copy(model, self.model)
        self.words = ["serve", "-m", str(self.model), "--alias", "embedded", "--port",
                      str(launch.free_port()), "-c", "2048", "-t", "1", "--pace-ms", str(pace_ms)]
        self.process = launch.start([*PIPEINFER, "up", "-np", "3", "--stay", "--overlap", overlap,
                                     "--", *self.words], timeout=36000,
                                    PIPEINFER_STATE=str(self.state))
        self.served = Served(self.process)
        self.ranks = 3

    def call(self, *words: str) -> str:
        """A command; what it has printed."""
        done = subprocess.run([*PIPEINFER, *words], capture_output=True, text=True, timeout=300,
                              env=launch.environment(PIPEINFER_STATE=str(self.state)), check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def do(self, kind: str) -> str:
        """One of KINDS."""
        match kind:
            case "lost":
                job = json.loads(self.call("status", "--json"))
                for process in psutil.Process(job["pid"]).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if process.environ().get("OMPI_COMM_WORLD_RANK") == "1":
                            process.kill()
                self.served.until(lambda: self.served.health()[1].get("lost"), "a recovery", 60)
                return self.call("rescale")
            case "ranks":
                self.ranks = 7 - self.ranks  # 4 and 3 by turns
                return self.call("rescale", "-np", str(self.ranks))
            case "options":
                more = random.choice([["--speculation", "off"], ["--queue", "8"], ["-md", "none"]])
                return self.call("reload", "--", *self.words, *more)
        beside = self.model.with_suffix(".new")
        shutil.copy(_MODEL, beside)
        beside.replace(self.model)
        return self.call("reload", "--wait", "120")

    def end(self) -> None:
        """Leave nothing behind."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def one(up: Up, kind: str, wanted: list[list[int]], rng: random.Random) -> dict[str, Any]:
    """Do it during four streams; what came of them."""
    said: list[str] = []
    found = during(up.served.url, wanted, rng, 0.6, lambda: said.append(up.do(kind)))
    return {"kind": kind, **found, "said": said[0]}


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--do", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pace-ms", type=float, default=10.0)
    parser.add_argument("--overlap", default="auto", choices=("auto", "always", "never"))
    parser.add_argument("-m", dest="model", type=Path, default=_MODEL, help="a GGUF file")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, rows = random.Random(given.seed), []
    random.seed(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        up = Up(Path(folder), given.pace_ms, given.model, given.overlap)
        try:
            up.served.wait_until_ready()
            undisturbed = all_of(up.served.url, given.tokens)
            for stream in undisturbed:
                stream.join(120)
            wanted = [stream.tokens for stream in undisturbed]
            assert all(len(tokens) == given.tokens for tokens in wanted)
            for _ in range(given.runs):
                for kind in given.do:
                    row = one(up, kind, wanted, rng)
                    rows.append(row)
                    print(f"{kind}, overlap {given.overlap}: {sum(row['same'])} of {CLIENTS} "
                          "streams the same, silent for "
                          f"{', '.join(f'{s:.1f}' for s in row['silences'])} s; {row['said']}"
                          + "".join(f"; {error}" for error in row["errors"]), flush=True)
                    up.served.until(lambda: up.served.health()[0] == 200, "a server", timeout=120)
        finally:
            up.end()
    for kind in given.do:
        own = [row for row in rows if row["kind"] == kind]
        times = [s for row in own for s in row["silences"]]
        print(f"{kind}: {len(own)} times, {sum(sum(row['same']) for row in own)} of "
              f"{CLIENTS * len(own)} streams with the same tokens; longest silence median "
              f"{statistics.median(times):.1f} s, most {max(times):.1f} s")
    return int(not all(all(row["same"]) for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(launch.ROOT))
    sys.exit(main())
