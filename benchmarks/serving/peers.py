"""`pipeinfer serve` beside llama.cpp's own server: same file, same cores, same clients.

    python -m benchmarks.serving.peers --model FILE.gguf [--programs FOLDER]

Without a folder of programs the peer is the server within xllamacpp, the prebuilt library.

Every round starts each server once, warms it up, and sends the same chats from 1, 4, 8 and 16
clients at a time, each its next one when its last has ended. Servers take turns within a round, so
that a machine that changes its speed hits all alike. Greedy, and every answer has its full length.
Prompts are mixed: short ones, and every fourth as long as `--long` tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.methods.prompts import PROMPTS
from benchmarks.peers.programs import SERVER, find
from benchmarks.serving.campaigns import server
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.transport.http_client import HttpFailure
from pipeinfer_lab import http_async
from pipeinfer_lab.chaos.client import get
from pipeinfer_lab.chaos.whole import free_port

_SILENCE = 300.0
_START_SECONDS = 120.0
_LEAST = 8  #: answers of a measurement
_WITHIN = """
import sys, time, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.ui, p.n_threads_http = sys.argv[1], False, 160
p.port, p.n_parallel, p.n_ctx, p.cpuparams.n_threads = map(int, sys.argv[2:])
server = xllamacpp.Server(p)
time.sleep(1e6)
"""


@dataclass
class Answered:
    """One answer: seconds from sending to each piece of text, and what the server counted."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


async def ask(port: int, prompt: list[int], tokens: int) -> Answered:
    """One streamed greedy completion of `tokens` tokens. Raises HttpFailure."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "cache_prompt": False}
    answer, begin = Answered(), time.perf_counter()
    async with http_async.stream(
            "POST", f"http://127.0.0.1:{port}/v1/completions", body, timeout=_SILENCE) as response:
        if not http_async.is_stream(response):
            await response.aread()
            raise HttpFailure(f"{response.status_code}: {response.text[:300]}")
        async with contextlib.aclosing(http_async.events(response)) as events:
            async for chunk in events:
                pieces = [choice.get("text") or "" for choice in chunk.get("choices", [])]
                if any(pieces):
                    answer.times.append(time.perf_counter() - begin)
                usage = chunk.get("usage") or {}
                answer.tokens = usage.get("completion_tokens", answer.tokens)
    answer.seconds = time.perf_counter() - begin
    return answer


async def load(port: int, clients: int, prompts: list[list[int]], tokens: int
               ) -> dict[str, float]:
    """What `clients` clients see; seconds are given in ms."""
    todo, answers = prompts[::-1], []

    async def client() -> None:
        while todo:
            answers.append(await ask(port, todo.pop(), tokens))

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - start
    short = [a for a in answers if a.tokens != tokens]
    assert not short, f"{len(short)} answers are shorter than asked for"
    firsts = sorted(a.times[0] for a in answers)
    gaps = sorted(b - a for answer in answers
                  for a, b in zip(answer.times, answer.times[1:], strict=False))
    return {"tokens_per_second": sum(a.tokens for a in answers) / seconds,
            "first_p50_ms": 1e3 * percentile(firsts, 0.5),
            "first_p95_ms": 1e3 * percentile(firsts, 0.95),
            "gap_p50_ms": 1e3 * percentile(gaps, 0.5), "gap_p95_ms": 1e3 * percentile(gaps, 0.95),
            "answer_p50_ms": 1e3 * percentile(sorted(a.seconds for a in answers), 0.5)}


def percentile(values: list[float], part: float) -> float:
    """The value below which `part` of the sorted values lie."""
    return values[min(len(values) - 1, int(part * len(values)))]


@contextlib.asynccontextmanager
async def llama_server(program: Path | None, model: Path, parallel: int, ctx: int, threads: int,
                       options: Sequence[str] = ()) -> AsyncIterator[int]:
    """Start llama-server, or that within xllamacpp; wait until it is ready; yields its port."""
    port = free_port()
    command = [str(program), "-m", str(model), "--port", str(port), "-np", str(parallel),
               "-c", str(ctx * parallel), "-t", str(threads), "--no-webui", *options]
    if program is None:
        command = [sys.executable, "-c", _WITHIN, str(model), str(port), str(parallel),
                   str(ctx * parallel), str(threads)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        stdin=asyncio.subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items()
             if not name.startswith(("OMP_", "GOMP_"))})
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            assert process.returncode is None, f"{' '.join(command)} ended"
            assert time.monotonic() < deadline, f"{' '.join(command)} was not ready in time"
            if (await get(f"http://127.0.0.1:{port}", "/health"))[0] == 200:
                break
            await asyncio.sleep(0.1)
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.kill()
                await process.wait()


def mixed_prompts(model: Path, count: int, long: int, seed: int) -> list[list[int]]:
    """Prompts without a common start; every fourth has `long` tokens, the others 20 to 60."""
    tokenizer, rng = open_tokenizer(model), random.Random(seed)
    words = [token for text in PROMPTS for token in tokenizer.encode(text)]
    prompts = []
    for k in range(count):
        length = long if long and k % 4 == 3 else rng.randint(20, 60)
        start = rng.randrange(len(words))
        prompts.append((words[start:] + words * (1 + length // len(words)))[:length])
    return prompts


async def contest(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds over all servers; figures by server and number of clients."""
    program = find(args.programs, Path(), (SERVER,)) / SERVER if args.programs else None
    most, ctx = max(args.clients), args.long + args.tokens + 192
    serve = ("-m", str(args.model), "--parallel", str(most), "-c", str(ctx),
             "--set", f"cache_tokens={ctx * most}", "--set", "prefix_cache=false", *args.options)
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}

    async def measure(name: str, port: int, turn: int) -> None:
        warm = mixed_prompts(args.model, 2, 0, 999)
        await load(port, 1, warm, args.tokens)
        for clients in args.clients:
            count = max(_LEAST, args.each * clients)
            prompts = mixed_prompts(args.model, count, args.long, 100 * turn + clients)
            found = await load(port, clients, prompts, args.tokens)
            figures.setdefault(name, {}).setdefault(str(clients), []).append(found)
            print(turn, name, clients, {k: round(v, 1) for k, v in found.items()}, flush=True)

    for turn in range(args.rounds):
        async with llama_server(program, args.model, most, ctx, args.threads,
                                shlex.split(args.peer_options)) as port:
            await measure("llama-server", port, turn)
        for ranks in args.ranks:
            async with server(ranks, *serve, quiet=True) as running:
                await measure(f"pipeinfer, {ranks} rank{'s' * (ranks > 1)}", running.port, turn)
    return figures


def table(figures: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Medians of the rounds as Markdown, and each server's share of llama-server's tokens/s."""
    lines = ["| server | clients | tokens/s | of llama-server | first token p50, p95 "
             "| gap p50, p95 | answer p50 |", "| --- " * 7 + "|"]
    base = figures["llama-server"]
    for name, by_clients in figures.items():
        for clients, rounds in by_clients.items():
            middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            ratios = [one["tokens_per_second"] / peer["tokens_per_second"]
                      for one, peer in zip(rounds, base[clients], strict=True)]
            lines.append(
                f"| {name} | {clients} | {middle['tokens_per_second']:.0f} | "
                f"{statistics.median(ratios):.2f} | {middle['first_p50_ms']:.0f}, "
                f"{middle['first_p95_ms']:.0f} ms | {middle['gap_p50_ms']:.1f}, "
                f"{middle['gap_p95_ms']:.1f} ms | {middle['answer_p50_ms']:.0f} ms |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--programs", type=Path, help="folder with llama-server")
    parser.add_argument("--peer-options", default="",
                        help="of llama-server, such as '--spec-type ngram-mod'")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--long", type=int, default=300, help="0: no long prompts")
    parser.add_argument("--each", type=int, default=2, help="answers per client")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[],
                        help="further options of `pipeinfer serve`; the last argument")
    args = parser.parse_args()
    if args.peer_options and not args.programs:
        parser.error("--peer-options needs --programs")
    figures = asyncio.run(contest(args))
    print(table(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
