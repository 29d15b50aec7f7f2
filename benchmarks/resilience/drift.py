"""A host that becomes slow while a server runs, and what planning anew is worth.

    python -m benchmarks.resilience.drift

Four hosts in network namespaces (tests/rig/namespaces.py) serve the embedded target from
equal shares; then one host's processor quota falls to a quarter. Speeds before, with the slow host,
after `pipeinfer rebalance` (or, with --auto, after the server has noticed by itself). Every answer
is compared with the first. Needs root. Prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import click

from tests.rig.namespaces import Cluster, why_not

PORT, SECONDS = 8123, 60.0
CLIENT = """
import json, sys, time, urllib.request
def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[2]}" + path, data,
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=50) as answer:
        return answer.read().decode()
what = json.loads(sys.argv[1])
if what["path"] == "ask":
    start = time.monotonic()
    got = json.loads(call("/v1/completions", what["body"]))
    print(json.dumps({"seconds": time.monotonic() - start, "text": got["choices"][0]["text"]}))
else:
    print(call(what["path"], what.get("body")))
"""


class Served:
    """A server on node 1, asked from there."""

    def __init__(self, cluster: Cluster, tokens: int) -> None:
        self.cluster = cluster
        self.body = {"prompt": "def read(path):\n", "max_tokens": tokens, "temperature": 0,
                     "ignore_eos": True}
        self.texts: set[str] = set()

    def call(self, path: str, body: object = None) -> str:
        """What the server answers; raises AssertionError when it does not."""
        done = self.cluster.run([sys.executable, "-c", CLIENT,
                                 json.dumps({"path": path, "body": body}), str(PORT)],
                                timeout=SECONDS)
        if done.returncode:
            raise AssertionError(done.stderr[-500:])
        return done.stdout

    def await_ready(self) -> None:
        """Until requests are taken."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self.call("/health")
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def speed(self, rounds: int) -> float:
        """Tokens per second, the median of some answers."""
        speeds = []
        for _ in range(rounds):
            found = json.loads(self.call("ask", self.body))
            self.texts.add(found["text"])
            speeds.append(self.body["max_tokens"] / found["seconds"])
        return statistics.median(speeds)

    def slowdown(self) -> dict[str, float]:
        """`pipeinfer_stage_slowdown` by stage."""
        lines = [line for line in self.call("/metrics").splitlines()
                 if line.startswith("pipeinfer_stage_slowdown{")]
        return {line.split('stage="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}

    def layers(self) -> list[list[int]]:
        """Of each stage."""
        return [stage["layers"] for stage in json.loads(
            self.call("/props"))["pipeinfer"]["stages"]]


@click.command()
@click.option("--cpu", default=0.3, show_default=True, help="Cores of a host.")
@click.option("--slow", default=3, show_default=True, help="The host that becomes slow.")
@click.option("--share", default=0.25, show_default=True, help="What is left of its quota.")
@click.option("--tokens", default=80, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--model", default="", help="Another target than the embedded one.")
@click.option("--auto", is_flag=True, help="Wait for the server to notice.")
def main(cpu: float, slow: int, share: float, tokens: int, rounds: int, model: str, auto: bool
         ) -> None:
    """Slow one host down and redistribute the layers."""
    if reason := why_not():
        sys.exit(f"no cluster of namespaces here: {reason}")
    with Cluster(4, cpu=cpu) as cluster:
        process = cluster.start(cluster.launch(
            ["serve", "--port", str(PORT), "-c", "512", "-t", "1", "--split", "equal",
             "--speculation", "off", "--rebalance", "auto" if auto else "off",
             *(["-m", str(Path(model).resolve())] if model else [])]), timeout=600.0)
        try:
            served = Served(cluster, tokens)
            served.await_ready()
            found = {"before": served.speed(rounds), "layers_before": served.layers()}
            cluster.set_quota(slow, cpu * share)
            found |= {"slow": served.speed(rounds), "slowdown": served.slowdown()}
            if auto:
                deadline = time.monotonic() + SECONDS
                while served.layers() == found["layers_before"] and time.monotonic() < deadline:
                    time.sleep(2.0)
            else:
                found["said"] = json.loads(served.call("/rebalance", {}))["message"]
            found |= {"after": served.speed(rounds), "layers_after": served.layers(),
                      "texts_equal": len(served.texts) == 1}
        finally:
            cluster.kill_jobs()
            process.communicate(timeout=20)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
