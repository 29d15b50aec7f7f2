"""The longest silence of a stream while the job moves: the next one beside it, or after it.

    python -m benchmarks.resilience.overlap --runs 3

For each run and way `pipeinfer up -np 3` serves SmolLM2 slowly (`--pace-ms`); one client streams,
and the server is reloaded with other options, or moved to 4 ranks. Silences count from the command
on. Streams of a kind must have the same tokens, whichever way. Needs the `smollm2` model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import requests

from tests.rig import launch
from tests.rig.served import Served

PIPEINFER = [sys.executable, "-m", "pipeinfer"]
_TOKENS = 200
_BEGUN = 1.5  #: seconds of a stream before the command


class Stream(threading.Thread):
    """A completion, and when its tokens came."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.tokens: list[int] = []
        self._url = url
        self.start()

    def run(self) -> None:
        """Read to the end."""
        asked = {"prompt": "Once upon a time", "max_tokens": _TOKENS, "ignore_eos": True, "seed": 3,
                 "temperature": 0.8, "stream": True, "pipeinfer": {"detail": True}}
        with requests.post(f"{self._url}/v1/completions", json=asked, stream=True,
                           timeout=300) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    new = json.loads(line[6:]).get("pipeinfer", {}).get("tokens", [])
                    self.tokens += new
                    self.times += [time.monotonic()] * bool(new)


def one(kind: str, overlap: str, model: str) -> tuple[float, list[int]]:
    """The longest silence in seconds, and the tokens."""
    with tempfile.TemporaryDirectory() as state:
        words = ["serve", "-m", model, "-c", "2048", "-t", "1", "--port", str(launch.free_port())]
        process = launch.start([*PIPEINFER, "up", "-np", "3", "--overlap", overlap, "--", *words,
                                "--pace-ms", "90"], timeout=300, PIPEINFER_STATE=state)
        served = Served(process)
        try:
            served.wait_until_ready()
            time.sleep(_BEGUN)  # the supervisor hears of it a moment later
            stream, began = Stream(served.url), time.monotonic() + _BEGUN
            time.sleep(_BEGUN)
            order = ["rescale", "-np", "4"] if kind == "rescale" else [
                "reload", "--", *words, "--pace-ms", "1"]
            done = subprocess.run([*PIPEINFER, *order], capture_output=True, text=True, timeout=200,
                                  env=launch.environment(PIPEINFER_STATE=state), check=True)
            assert "1 open requests went on" in done.stdout, done.stdout
            stream.join(300)
            assert len(stream.tokens) == _TOKENS
            return max(b - a for a, b in itertools.pairwise(stream.times) if b > began), \
                stream.tokens
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("-m", dest="model", default="smollm2")
    given = parser.parse_args()
    right = True
    for kind in ("reload", "rescale"):
        seen: list[list[int]] = []
        for overlap in ("auto", "never"):
            found = [one(kind, overlap, given.model) for _ in range(given.runs)]
            seen += [tokens for _, tokens in found]
            silences = [silence for silence, _ in found]
            print(f"{kind}, overlap {overlap}: median {statistics.median(silences):.2f} s, most "
                  f"{max(silences):.2f} s", flush=True)
        right = right and all(tokens == seen[0] for tokens in seen)
    print("the same tokens" if right else "OTHER TOKENS")
    return int(not right)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(launch.ROOT))
    sys.exit(main())
