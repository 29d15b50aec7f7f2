"""Many more clients than a server takes, some of which do not read: who is served, who is sent
away, what memory does, and whether everything is as before afterwards.

    python -m benchmarks.serving.overload --clients 200 --np 4
"""

from __future__ import annotations

import argparse
import collections
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
import requests

from tests.rig.served import Served, serve

SECONDS = 120.0
PROMPTS = ("import os\n", "def f(x):\n", "class A:\n", "for i in range(10):\n")


@dataclass
class Tally:
    """Answers by status; texts of good ones by (prompt, count of tokens); seconds each took."""

    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    texts: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    refused_seconds: list[float] = field(default_factory=list)
    without_retry: int = 0
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def body(prompt: str, count: int, stream: bool = False) -> dict[str, Any]:
    """A greedy request for exactly `count` tokens."""
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": stream}


def ask(url: str, number: int, tally: Tally, count: int) -> None:
    """One client: one request, no second try."""
    prompt = PROMPTS[number % len(PROMPTS)]
    start = time.monotonic()
    try:
        response = requests.post(f"{url}/v1/completions", json=body(prompt, count),
                                 timeout=SECONDS)
    except requests.RequestException as error:
        with tally.lock:
            tally.errors.append(repr(error))
        return
    took = time.monotonic() - start
    with tally.lock:
        tally.statuses[response.status_code] += 1
        if response.status_code == 200:
            text = response.json()["choices"][0]["text"]
            tally.texts.setdefault((prompt, count), set()).add(text)
            tally.seconds.append(took)
        else:
            tally.refused_seconds.append(took)
            tally.without_retry += "Retry-After" not in response.headers


def storm(url: str, clients: int, count: int) -> Tally:
    """All clients at once."""
    tally = Tally()
    threads = [threading.Thread(target=ask, args=(url, i, tally, count)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return tally


def deaf_client(url: str, count: int) -> socket.socket:
    """A client that asks for a stream and never reads."""
    where = urlsplit(url)
    assert where.hostname is not None
    client = socket.create_connection((where.hostname, where.port or 80), SECONDS)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    data = json.dumps({**body(PROMPTS[0], count, stream=True), "logprobs": 5}).encode()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                   b"Content-Type: application/json\r\n"
                   b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return client


def memory(served: Served) -> dict[str, int]:
    """Resident bytes of every process of the job, by what it is."""
    found: dict[str, int] = {}
    root = psutil.Process(served.process.pid)
    for process in [root, *root.children(recursive=True)]:
        line = process.cmdline()
        kind = "http" if "pipeinfer.server" in line else "rank" if "serve" in line else "other"
        if kind != "other":
            found[f"{kind} {process.pid}"] = process.memory_info().rss
    return found


def settle(until: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Wait for the lanes to be empty."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if until():
            return True
        time.sleep(0.05)
    return False


def run(served: Served, clients: int, deaf: int, rounds: int, count: int) -> dict[str, Any]:
    """Storms with deaf clients among them; what came of it."""
    url = served.url

    def idle() -> bool:
        return not any(s["is_processing"] for s in requests.get(f"{url}/slots", timeout=10).json())

    alone = {p: requests.post(f"{url}/v1/completions", json=body(p, count), timeout=SECONDS)
             .json()["choices"][0]["text"] for p in PROMPTS}
    storms, sizes = [], []
    for _ in range(rounds):
        silent = [deaf_client(url, 400) for _ in range(deaf)]
        storms.append(storm(url, clients, count))
        for client in silent:
            client.close()
        settle(idle)
        sizes.append(memory(served))
    after = requests.post(f"{url}/v1/completions", json=body(PROMPTS[0], count), timeout=SECONDS)
    statuses: collections.Counter[int] = sum((t.statuses for t in storms), collections.Counter())
    served_s = [s for t in storms for s in t.seconds]
    refused_s = [s for t in storms for s in t.refused_seconds]
    wrong = sum(texts != {alone[prompt]} for t in storms for (prompt, _), texts in t.texts.items())
    growth = {name: sizes[-1][name] - sizes[0].get(name, 0) for name in sizes[-1]}
    return {
        "clients": clients, "deaf": deaf, "rounds": rounds,
        "statuses": dict(sorted(statuses.items())),
        "errors": [e for t in storms for e in t.errors],
        "without_retry_after": sum(t.without_retry for t in storms), "wrong_texts": wrong,
        "served_median_s": round(statistics.median(served_s), 3) if served_s else None,
        "served_most_s": round(max(served_s, default=0.0), 3),
        "refused_most_s": round(max(refused_s, default=0.0), 3),
        "growth_mib": {name: round(size / 2**20, 1) for name, size in growth.items()},
        "idle_afterwards": idle(),
        "good_afterwards": after.status_code == 200
        and after.json()["choices"][0]["text"] == alone[PROMPTS[0]],
    }


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--deaf", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--np", type=int, default=4)
    options = parser.parse_args()
    with serve(options.np, "-c", "1024", "--parallel", "8", "--queue", "32",
               seconds=3600) as served:
        served.wait_until_ready()
        found = run(served, options.clients, options.deaf, options.rounds, options.tokens)
    print(json.dumps({"np": options.np, **found}))
    return int(not found["good_afterwards"] or bool(found["errors"] or found["wrong_texts"]))


if __name__ == "__main__":
    sys.exit(main())
