"""Rebalancing under ordinary traffic: does it help, and does it stay away from what harms?

    python -m benchmarks.serving.folding --model FILE.gguf

A server over several ranks of one host answers 8 clients, one stream and a prompt of 1,500 tokens;
then `POST /rebalance`, as often as it finds something; then the same load again. A second server
rebalances by itself (`--rebalance auto`) while processes that only compute take its cores for half
a minute and leave again. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving.campaigns import server
from benchmarks.serving.client import get
from benchmarks.serving.peers import ask, load, mixed_prompts
from pipeinfer.transport import http_client

_LONG = 1500
_NEIGHBOUR = "import itertools\nfor _ in itertools.count(): pass"


async def look(port: int, model: Path) -> dict[str, Any]:
    """Tokens/s of 8 clients and of one stream, and of reading a long prompt; the layers held."""
    eight = await load(port, 8, mixed_prompts(model, 16, 0, 3), 64)
    one = await load(port, 1, mixed_prompts(model, 2, 0, 4), 64)
    reading = await ask(port, mixed_prompts(model, 4, _LONG, 6)[3], 4)
    facts = json.loads((await get(port, "/props"))[1])["pipeinfer"]
    return {"eight": round(eight["tokens_per_second"], 1),
            "one": round(one["tokens_per_second"], 1), "prompt": round(_LONG / reading.times[0]),
            "layers": [stage["layers"][1] - stage["layers"][0] for stage in facts["stages"]],
            "changes": [change["why"] for change in facts["changes"]]}


async def asked(port: int) -> str:
    """What the server says to `POST /rebalance`."""
    answer = await http_client.ask_async(
        "POST", f"http://127.0.0.1:{port}/rebalance", {}, timeout=300.0)
    return answer.text


async def by_request(model: Path, ranks: int) -> dict[str, Any]:
    """Before and after asking for it until nothing better is found."""
    async with server(ranks, *_options(model), "--rebalance", "off") as running:
        await load(running.port, 4, mixed_prompts(model, 8, 0, 2), 64)
        found: dict[str, Any] = {"before": await look(running.port, model), "answers": []}
        for _ in range(3):
            said = json.loads(await asked(running.port))
            found["answers"].append(said)
            if not said.get("changed"):
                break
            await load(running.port, 4, mixed_prompts(model, 16, 0, 2), 64)  # it is verified
        found["after"] = await look(running.port, model)
    return found


async def by_itself(model: Path, ranks: int, seconds: float) -> dict[str, Any]:
    """Before, beside and after neighbours that take the cores."""
    async with server(ranks, *_options(model)) as running:
        await load(running.port, 4, mixed_prompts(model, 8, 0, 2), 64)
        found = {"before": await look(running.port, model)}
        neighbours = [subprocess.Popen([sys.executable, "-c", _NEIGHBOUR])
                      for _ in range(multiprocessing.cpu_count())]
        try:
            end = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < end:
                await load(running.port, 2, mixed_prompts(model, 4, 0, 5), 32)
                await asyncio.sleep(2.0)  # it looks between requests
            found["beside"] = await look(running.port, model)
        finally:
            for one in neighbours:
                one.kill()
                one.wait()
        for _ in range(6):
            await load(running.port, 2, mixed_prompts(model, 4, 0, 5), 32)
            await asyncio.sleep(4.0)
        found["after"] = await look(running.port, model)
    return found


def _options(model: Path) -> tuple[str, ...]:
    return ("-m", str(model), "--parallel", "8", "-c", "2048", "--cache-tokens", "8192",
            "--no-prefix-cache")


async def measure(model: Path, ranks: int, seconds: float) -> dict[str, Any]:
    """Both servers, one after the other."""
    return {"asked": await by_request(model, ranks),
            "alone": await by_itself(model, ranks, seconds)}


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0, help="that the neighbours stay")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(measure(given.model, given.ranks, given.seconds)), indent=1))


if __name__ == "__main__":
    main()
