"""`pipeinfer serve` under load: every request against a plain loop.

    python -m benchmarks.serving

Real servers on this machine, over HTTP. Prints figures and, with `--json FILE`, keeps them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.methods.prompts import PROMPTS
from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.strategies.proposers.base import common_prefix
from pipeinfer_lab.chaos.client import Answer, complete, get
from pipeinfer_lab.chaos.whole import free_port
from tests.kit.launch import environment, mpirun_path
from tests.kit.plain_loop import PlainLoop

EMBEDDED = Path(__file__).parents[2] / "pipeinfer" / "models" / "embedded"


class Server:
    """A running server: its port, and the processes that belong to it."""

    def __init__(self, port: int, process: asyncio.subprocess.Process) -> None:
        self.port, self.process = port, process
        self.url = f"http://127.0.0.1:{port}"

    def memory(self) -> dict[str, int]:
        """Resident bytes by process, named by what it runs."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if "pipeinfer" in line and "mpirun" not in line:
                    kind = "http" if "pipeinfer.server" in line else "rank"
                    found[f"{kind} {process.pid}"] = process.memory_info().rss
        return found

    async def slots(self) -> list[dict[str, Any]]:
        """What `/slots` says."""
        found: list[dict[str, Any]] = (await get(self.url, "/slots"))[1]
        return found

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = (await get(self.url, "/metrics"))[1]
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                   if line.split("{")[0].split(" ")[0] == name)


@contextlib.asynccontextmanager
async def server(ranks: int, *options: str, quiet: bool = True) -> AsyncIterator[Server]:
    """Start `pipeinfer serve` on so many ranks and wait until it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "pipeinfer", "serve", "--port", str(port), *options]
    if ranks > 1:
        launcher = mpirun_path()
        assert launcher is not None, "no mpirun found"
        command = [launcher, "-np", str(ranks), *command]
    log = tempfile.TemporaryFile() if quiet else None  # a pipe that nobody reads would fill
    process = await asyncio.create_subprocess_exec(
        *command, env=environment(), start_new_session=True,
        stdout=asyncio.subprocess.DEVNULL, stderr=log)
    try:
        running = Server(port, process)
        for _ in range(1200):
            if (await get(running.url, "/health"))[0] == 200:
                break
            assert process.returncode is None, f"the server did not start:\n{_end_of(log)}"
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("the server was not ready after two minutes")
        yield running
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGUSR1 if ranks > 1 else signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), 45)
            except TimeoutError:
                process.kill()
        if log is not None:
            log.close()


def _end_of(log: IO[bytes] | None) -> str:
    if log is None:
        return "(see above)"
    log.seek(0)
    return log.read().decode(errors="replace")[-2000:]


# --- lossless ---------------------------------------------------------------------------------


def some_requests(count: int, seed: int, tokenizer: Tokenizer, longest: int = 48
                  ) -> list[dict[str, Any]]:
    """Requests with random prompts (many start alike), lengths and sampling."""
    rng = random.Random(seed)
    texts = [tokenizer.encode(text) for text in PROMPTS]
    shared = [token for text in texts[:6] for token in text][:200]
    requests = []
    for _ in range(count):
        own = rng.choice(texts)
        prompt = shared[: rng.choice([0, 0, 64, 130, 200])] + own[: rng.randint(1, len(own))]
        request: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, longest),
                                   "ignore_eos": True, "temperature": 0}
        if rng.random() < 0.6:
            request |= {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
                        "seed": rng.randrange(1 << 20)}
        if rng.random() < 0.2:
            request |= {"repeat_penalty": 1.2, "repeat_last_n": 64}
        requests.append(request)
    return requests


def plain_tokens(loop: PlainLoop, request: dict[str, Any]) -> list[int]:
    """What the request gives alone, by a loop that shares no code with the pipeline."""
    params = SamplingParams(
        temperature=request["temperature"], top_k=request.get("top_k", 0),
        top_p=request.get("top_p", 1.0), min_p=request.get("min_p", 0.0),
        repeat_penalty=request.get("repeat_penalty", 1.0),
        repeat_last_n=request.get("repeat_last_n", 64),
        key=noise_key(request.get("seed", 0)))
    return loop.generate(request["prompt"], request["max_tokens"], params)


async def under_load(url: str, requests: list[dict[str, Any]], at_once: int, seed: int,
                     leavers: float = 0.2) -> list[tuple[int | None, Answer]]:
    """Send all, `at_once` at a time with random pauses; some hang up. (left after, answer) each."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(at_once)
    plans = [(rng.randint(1, 20) if rng.random() < leavers else None, rng.random() * 0.05)
             for _ in requests]

    async def one(request: dict[str, Any], leave: int | None, pause: float
                  ) -> tuple[int | None, Answer]:
        async with gate:
            await asyncio.sleep(pause)
            body = {**request, "stream_options": {"include_usage": True}}
            return leave, await complete(url, body, leave_after=leave)

    return list(await asyncio.gather(*(
        one(request, *plan) for request, plan in zip(requests, plans, strict=True))))


def compare(requests: list[dict[str, Any]], answers: list[tuple[int | None, Answer]],
            wanted: list[list[int]]) -> list[str]:
    """What is wrong with the answers: nothing, if all is well."""
    wrong = []
    for k, (request, (left, answer), tokens) in enumerate(
            zip(requests, answers, wanted, strict=True)):
        if left is None or left >= request["max_tokens"]:
            if answer.tokens != tokens or (left is None and answer.trouble):
                wrong.append(f"request {k}: {answer.status} {answer.trouble} {answer.reason} "
                             f"{len(answer.tokens)} of {len(tokens)} tokens, differs at "
                             f"{common_prefix(answer.tokens, tokens)}")
            elif left is None and answer.usage.get("completion_tokens") != len(tokens):
                wrong.append(f"request {k}: usage {answer.usage}")
        elif answer.tokens != tokens[: len(answer.tokens)]:
            wrong.append(f"request {k}, which left: differs at "
                         f"{common_prefix(answer.tokens, tokens)}")
    return wrong


async def lossless(args: argparse.Namespace) -> dict[str, Any]:
    """At least 200 requests, 16 at a time, against the plain loop; memory along the way."""
    target = EMBEDDED / "target.gguf"
    tokenizer = open_tokenizer(target)
    requests = some_requests(args.requests, args.seed, tokenizer)
    loop = PlainLoop(target, n_ctx=1024)
    wanted = [plain_tokens(loop, request) for request in requests]
    loop.close()
    memory = []
    wrong: list[str] = []
    async with server(args.ranks, *args.options) as running:
        for turn in range(args.turns):
            answers = await under_load(running.url, requests, args.at_once, args.seed + turn)
            wrong += compare(requests, answers, wanted)
            memory.append(sum(running.memory().values()))
        await asyncio.sleep(1.0)
        busy = sum(slot["is_processing"] for slot in await running.slots())
    figures = {"requests": args.turns * len(requests), "left": sum(
        left is not None for left, _ in answers) * args.turns, "wrong": len(wrong),
        "tokens": args.turns * sum(map(len, wanted)), "lanes_at_the_end": busy,
        "memory_mib": [round(b / 2**20, 1) for b in memory]}
    for line in wrong[:10]:
        print(line)
    return figures


# --- throughput -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--requests", type=int, default=220)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to keep the figures in")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[],
                        help="further options of `pipeinfer serve`; the last argument")
    args = parser.parse_args()
    figures = asyncio.run(lossless(args))
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"ranks": args.ranks, "options": args.options,
                                         "figures": figures}, indent=1) + "\n")
