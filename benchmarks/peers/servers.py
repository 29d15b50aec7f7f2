"""Servers and their speculation, beside each other: python -m benchmarks.peers.servers -m MODEL

llama-server without guesses and with each of its kinds, and `pipeinfer serve` without and with its
own, over one or more ranks. Every server is asked the same prompts, one after the other, greedy;
servers take turns, so that a machine that changes its speed hits all alike. Says for each its
tokens per second, of whole answers and behind the first token, and how many texts equal those of
the same
server without guesses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.programs import SERVER, find
from benchmarks.peers.texts import texts
from benchmarks.serving.campaigns import server
from benchmarks.serving.client import get
from pipeinfer.lab.chaos.whole import free_port
from pipeinfer.transport import http_client
from pipeinfer.transport.http_client import HttpFailure

KINDS: dict[str, tuple[str, ...]] = {
    "none": ("--spec-type", "none"),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-map-k": ("--spec-type", "ngram-map-k"),
    "ngram-map-k4v": ("--spec-type", "ngram-map-k4v"),
    "ngram-mod": ("--spec-type", "ngram-mod"),
    "ngram-cache": ("--spec-type", "ngram-cache"),
    "draft-simple": ("--spec-type", "draft-simple"),
    "draft-eagle3": ("--spec-type", "draft-eagle3"),
}
_SECONDS = 300.0


async def ask(port: int, prompt: str, tokens: int) -> tuple[str, int, float, float]:
    """One streamed greedy completion: its text, its tokens, seconds in all and to the first."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "cache_prompt": False, "ignore_eos": True}
    text, count, first, begin = [], 0, 0.0, time.perf_counter()
    async with http_client.stream_async(
            "POST", f"http://127.0.0.1:{port}/v1/completions", body, timeout=_SECONDS) as response:
        if not http_client.is_stream(response):
            await response.aread()
            raise HttpFailure(f"{response.status_code}: {response.text[:300]}")
        async with contextlib.aclosing(http_client.events_async(response)) as events:
            async for chunk in events:
                for choice in chunk.get("choices", []):
                    if piece := choice.get("text"):
                        first = first or time.perf_counter() - begin
                        text.append(piece)
                count = (chunk.get("usage") or {}).get("completion_tokens", count)
    return "".join(text), count, time.perf_counter() - begin, first


@contextlib.asynccontextmanager
async def llama(program: Path, options: tuple[str, ...]) -> AsyncIterator[int]:
    """Start llama-server and wait until it is ready; yields its port."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        str(program), "--port", str(port), "-np", "1", "--no-webui", *options,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _SECONDS
        while True:
            assert process.returncode is None, f"{program.name} {' '.join(options)} ended"
            assert time.monotonic() < deadline, f"{program.name} was not ready in time"
            with contextlib.suppress(HttpFailure):
                if (await get(port, "/health"))[0] == 200:
                    break
            await asyncio.sleep(0.1)
        yield port
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def contest(given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """By server, an entry for each of its answers."""
    program = find(given.programs, given.work, (SERVER,)) / SERVER
    heads = {"draft-simple": given.draft, "draft-eagle3": given.eagle}
    own: dict[str, tuple[int, tuple[str, ...]]] = {}
    guesses = ("-md", str(given.draft)) if given.draft else ()
    for ranks in given.ranks:
        where = f"pipeinfer, {ranks} rank{'s' * (ranks > 1)}"
        own[f"{where}, none"] = ranks, ("--speculation", "off")
        own[f"{where}, default"] = ranks, guesses
        if given.eagle:
            own[f"{where}, head"] = ranks, ("--eagle", str(given.eagle))
    found: dict[str, list[dict[str, Any]]] = {}
    every = texts()
    asked = every[::max(1, len(every) // given.prompts)][:given.prompts]

    async def measure(name: str, port: int) -> None:
        await ask(port, asked[0], 16)
        for prompt in asked:
            text, count, seconds, first = await ask(port, prompt, given.tokens)
            found.setdefault(name, []).append(
                {"text": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
                 "tokens": count, "seconds": round(seconds, 4), "first": round(first, 4)})

    for turn in range(given.rounds):
        for kind, options in KINDS.items():
            head = heads.get(kind)
            if (kind in heads and head is None) or (given.kinds and kind not in given.kinds):
                continue
            more = ("-m", str(given.model), "-c", "2048", "-t", str(given.threads),
                    *(("-md", str(head)) if head else ()))
            async with llama(program, (*options, *more)) as port:
                await measure(f"llama-server, {kind}", port)
            print(turn, kind, flush=True)
        for name, (ranks, options) in own.items():
            serve = ("-m", str(given.model), "-c", "2048", "--no-prefix-cache", *options)
            async with server(ranks, *serve, quiet=True) as running:
                await measure(name, running.port)
            print(turn, name, flush=True)
    return found


def rows_of(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """A row for each server: medians over its answers, and how many texts are those of the same
    server without guesses."""
    rows = []
    for name, answers in found.items():
        plain = found[f"{name.rpartition(', ')[0]}, none"]
        whole = statistics.median(one["tokens"] / one["seconds"] for one in answers)
        behind = statistics.median((one["tokens"] - 1) / (one["seconds"] - one["first"])
                                   for one in answers)
        first = statistics.median(one["first"] for one in answers)
        same = sum(a["text"] == b["text"] for a, b in zip(answers, plain, strict=True))
        rows.append([name, f"{whole:.1f}", f"{behind:.1f}", f"{1e3 * first:.0f}",
                     f"{same} of {len(answers)}"])
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-md", "--draft", type=Path)
    parser.add_argument("--eagle", type=Path, help="with its target's matrices")
    parser.add_argument("--programs", type=Path, help="folder with llama-server")
    parser.add_argument("--work", type=Path, default=Path(".work"),
                        help="where llama.cpp's programs are built if no folder is given")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1])
    parser.add_argument("--kinds", nargs="*", choices=KINDS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--json", type=Path, help="every answer, its text as a hash")
    given = parser.parse_args()
    found = asyncio.run(contest(given))
    for row in rows_of(found):
        print(f"| {' | '.join(row)} |")
    if given.json:
        given.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
