"""The load that a server holds: tiny answers per second, streams at once, memory of a stream.

    python -m benchmarks.serving.held
    python -m benchmarks.serving.held --rounds 3 --streams 200 1000 --programs FOLDER

`pipeinfer serve` beside llama.cpp's own server on the same machine with the same file, which is the
embedded target, so small that the server's own work counts. Servers take turns. Tiny answers: one
token to a prompt of two, from so many clients at a time over connections that stay; and the
processor time of one, which other programs change little. Streams at once: all are opened, 16 are
decoded at a time and the others wait; they count when every one has all of its tokens. Memory of a
waiting stream: that of the server's processes (PSS) with half and with all of them open, the
difference for each.

Without --programs llama.cpp's server is the one that xllamacpp has within it (the same code and
HTTP server, started from Python): the library that pipeinfer computes with.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.rig import launch

MODEL = launch.ROOT / "pipeinfer" / "models" / "embedded" / "target.gguf"
PARALLEL, CTX = 16, 512
_START, _WAIT = 120.0, 300.0
_WITHIN = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_parallel, params.n_ctx, params.n_threads_http = map(int, sys.argv[3:6])
params.cpuparams.n_threads, params.ui = int(sys.argv[6]), False
server = xllamacpp.Server(params)
time.sleep(1e6)
"""


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[psutil.Process]:
    """A server that is ready; killed at the end."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True,
                               env=os.environ | {"PIPEINFER_DEFAULT_MODEL": "embedded"})
    try:
        deadline = time.monotonic() + _START
        while True:
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)[:200]} does not get ready")
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(15)


def servers(given: argparse.Namespace) -> dict[str, Callable[[int], list[str]]]:
    """Command lines by name, each for a port."""
    def ours(port: int) -> list[str]:
        return [sys.executable, "-m", "pipeinfer", "serve", "-m", str(MODEL), "--port", str(port),
                "-np", str(PARALLEL), "-c", str(CTX), "-t", str(given.threads), "--queue",
                "100000", "--client-timeout", "600"]

    def theirs(port: int) -> list[str]:
        shape = [str(PARALLEL), str(PARALLEL * CTX), str(max(given.streams) + 16),
                 str(given.threads)]
        if given.programs is None:
            return [sys.executable, "-c", _WITHIN, str(MODEL), str(port), *shape]
        return [str(given.programs / "llama-server"), "-m", str(MODEL), "--port", str(port), "-np",
                shape[0], "-c", shape[1], "--threads-http", shape[2], "-t", shape[3]]

    return {"pipeinfer serve": ours, "llama.cpp's server": theirs}


# --- clients -----------------------------------------------------------------------------------


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
            b"\r\nContent-Length: %d\r\n\r\n" % len(data)) + data


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The body of one answer. Raises RuntimeError unless its status is 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(head.decode("latin-1"))
    if b"transfer-encoding: chunked" not in head:
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        return await reader.readexactly(length)
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


async def tiny(port: int, clients: int, seconds: float) -> float:
    """Answers of one token per second, of so many clients at a time."""
    request = _request({"prompt": [5, 6], "max_tokens": 1, "temperature": 0, "ignore_eos": True,
                        "cache_prompt": False})
    count, end = 0, time.monotonic() + seconds

    async def one() -> None:
        nonlocal count
        while time.monotonic() < end:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while time.monotonic() < end:  # some servers end a connection after 100 requests
                    writer.write(request)
                    await _answer(reader)
                    count += 1
            writer.close()

    begin = time.monotonic()
    await asyncio.gather(*(one() for _ in range(clients)))
    return count / (time.monotonic() - begin)


def memory(process: psutil.Process) -> int:
    """Bytes of a server's processes, what they share counted once."""
    found = 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found += one.memory_full_info().pss
    return found


def busy(process: psutil.Process) -> float:
    """Seconds of processor time that a server's processes have had."""
    found = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found += sum(one.cpu_times()[:2])
    return found


async def streams(port: int, count: int, tokens: int, process: psutil.Process
                  ) -> tuple[float, float]:
    """Seconds until so many streams that were opened together all had their tokens, and bytes of
    one that waits."""
    request = _request({"prompt": [5, 6], "max_tokens": tokens, "temperature": 0, "stream": True,
                        "ignore_eos": True, "cache_prompt": False})

    async def begin() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        pair = await asyncio.open_connection("127.0.0.1", port)
        pair[1].write(request)
        return pair

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await _answer(reader)
        if b"[DONE]" not in body or body.count(b"data: {") < 2:
            raise RuntimeError(body[-500:].decode("utf-8", "replace"))
        writer.close()

    start = time.monotonic()
    async with asyncio.timeout(_WAIT):
        pairs = [await begin() for _ in range(count // 2)]
        await asyncio.sleep(1.0)
        half = await asyncio.to_thread(memory, process)
        pairs += [await begin() for _ in range(count - count // 2)]
        await asyncio.sleep(1.0)
        whole = await asyncio.to_thread(memory, process)
        await asyncio.gather(*(end(*pair) for pair in pairs))
    return time.monotonic() - start, (whole - half) / (count - count // 2)


# --- rounds ------------------------------------------------------------------------------------


def measure(name: str, command: list[str], port: int, given: argparse.Namespace
            ) -> dict[str, float]:
    """One round of one server."""
    found: dict[str, float] = {}
    with running(command, port) as process:
        asyncio.run(tiny(port, 4, 1.0))  # warm
        found["memory at rest, MiB"] = memory(process) / 2**20
        for clients in given.clients:
            before = busy(process)
            rate = asyncio.run(tiny(port, clients, given.seconds))
            found[f"tiny answers/s, {clients} clients"] = rate
            found[f"processor ms of one, {clients} clients"] = (
                1e3 * (busy(process) - before) / max(1.0, rate * given.seconds))
        for count in given.streams:
            try:
                seconds, each = asyncio.run(streams(port, count, given.tokens, process))
            except (RuntimeError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                print(f"{name}, {count} streams: {type(error).__name__} {error}"[:400],
                      file=sys.stderr)
                continue
            found[f"{count} streams, seconds until all are whole"] = seconds
            found[f"{count} streams, KiB for one that waits"] = each / 1024
    return found


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of tiny answers")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--streams", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--tokens", type=int, default=16, help="of a stream")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--programs", type=Path, help="folder with llama-server")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.rounds):
        for name, command in servers(given).items():
            port = launch.free_port()
            rounds.setdefault(name, []).append(measure(name, command(port), port, given))
            print(name, {k: round(v, 1) for k, v in rounds[name][-1].items()}, flush=True)
    rows = list(dict.fromkeys(key for some in rounds.values() for one in some for key in one))
    print(f"\n| median of {given.rounds} | {' | '.join(rounds)} |\n|---|{'---|' * len(rounds)}")
    for row in rows:
        values = [[one[row] for one in some if row in one] for some in rounds.values()]
        print(f"| {row} | " + " | ".join(
            f"{statistics.median(v):.1f}" if v else "-" for v in values) + " |")
    if given.json:
        given.json.write_text(json.dumps(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
