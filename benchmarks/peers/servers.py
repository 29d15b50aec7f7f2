"""Servers and their speculation, compared: python -m benchmarks.peers.servers -m MODEL

llama-server without guesses and with each of its kinds, and `pipeinfer serve` without and with its
own, over one or more ranks. Every server is asked the same prompts, one after the other, greedy;
servers take turns, so that a machine that changes its speed hits all alike. Says for each its
tokens per second, of whole answers and behind the first token, and how many texts equal those of
the same server without guesses.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.programs import SERVER, find
from benchmarks.peers.texts import texts
from benchmarks.serving.campaigns import server
from benchmarks.serving.peers import ask, llama_server

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


async def contest(given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """By server, an entry for each of its answers."""
    program = find(given.programs, given.work, (SERVER,)) / SERVER
    heads = {"draft-simple": given.draft, "draft-eagle3": given.eagle}
    own: dict[str, tuple[int, tuple[str, ...]]] = {}
    draft = ("-md", str(given.draft)) if given.draft else ()
    for ranks in given.ranks:
        where = f"pipeinfer, {ranks} rank{'s' * (ranks > 1)}"
        own[f"{where}, none"] = ranks, ("--speculation", "off")
        own[f"{where}, default"] = ranks, draft
        if given.eagle:
            own[f"{where}, head"] = ranks, ("--eagle", str(given.eagle))
    kinds = ("none", *given.kinds) if given.kinds else tuple(KINDS)
    found: dict[str, list[dict[str, Any]]] = {}
    every = texts()
    asked = every[::max(1, len(every) // given.prompts)][:given.prompts]

    async def measure(name: str, port: int) -> None:
        await ask(port, asked[0], 16)
        for prompt in asked:
            answer = await ask(port, prompt, given.tokens)
            found.setdefault(name, []).append(
                {"text": hashlib.blake2b(answer.text.encode(), digest_size=8).hexdigest(),
                 "tokens": answer.tokens, "seconds": round(answer.seconds, 4),
                 "first": round(answer.times[0], 4)})

    for turn in range(given.rounds):
        for kind, options in KINDS.items():
            head = heads.get(kind)
            if kind not in kinds or (kind in heads and head is None):
                continue
            guesses = ("-md", str(head)) if head else ()
            async with llama_server(program, given.model, 1, 2048, given.threads,
                                    (*options, *guesses)) as port:
                await measure(f"llama-server, {kind}", port)
            print(turn, kind, flush=True)
        for name, (ranks, options) in own.items():
            serve = ("-m", str(given.model), "-c", "2048", "--set", "prefix_cache=false", *options)
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
    parser.add_argument("--kinds", nargs="*", choices=KINDS,
                        help="measured besides none [default: all]")
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
