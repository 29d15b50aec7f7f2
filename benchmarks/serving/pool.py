"""`serve --remember-answers`: what guesses from earlier answers bring, by kind of request.

    python -m benchmarks.serving.pool smollm2 --ranks 4
    python -m benchmarks.serving.pool smollm2 --ranks 4 --pace-ms 20    # stages take so long

The chats of each kind of `prompts.FORMS` and, as requests that have nothing in common, those of
`prompts.CHATS`, one after the other, greedy, by a server with the option and by one without. Every
text has to be the same by both.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass

from benchmarks.methods.prompts import CHATS, FORMS
from benchmarks.serving.campaigns import server
from benchmarks.serving.client import complete

_TOKENS = 96
KINDS = FORMS | {"questions and others": tuple(p for kind in CHATS.values() for p in kind)}


@dataclass
class Asked:
    """What one kind of requests got. seconds: without prompts."""

    texts: list[str]
    tokens: int = 0
    guessed: int = 0
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """Share of the tokens that were guessed, and tokens per second."""
        return f"{self.guessed / self.tokens:.2f} | {self.tokens / self.seconds:.1f}"


async def ask(ranks: int, options: list[str], chats: tuple[str, ...]) -> Asked:
    """These chats, by a server of their own."""
    found = Asked([])
    async with server(ranks, *options) as served:
        for chat in ("Hello", *chats):  # the first warms the server up
            answer = await complete(served.port, {
                "messages": [{"role": "user", "content": chat}], "max_tokens": _TOKENS,
                "temperature": 0}, path="/v1/chat/completions")
            if not answer.ended:
                raise SystemExit(f"no answer to {chat!r}: {answer.error}")
            if chat != "Hello":
                found.texts.append(answer.text)
                found.tokens += answer.usage["completion_tokens"]
                found.guessed += answer.timings["accepted_n"]
                found.seconds += answer.timings["predicted_ms"] / 1000
    return found


async def measure(model: str, ranks: int, options: list[str]) -> None:
    """Print the table."""
    base = ["-m", model, *options]
    print("| requests | tokens | guessed | tokens/s | guessed with the option | tokens/s |")
    print("| --- " * 6 + "|", flush=True)
    for kind, chats in KINDS.items():
        apart = await ask(ranks, base, chats)
        pooled = await ask(ranks, [*base, "--remember-answers"], chats)
        if apart.texts != pooled.texts:
            raise SystemExit(f"{kind}: the texts differ")
        print(f"| {kind} ({len(chats)}) | {apart.tokens} | {apart.line} | {pooled.line} |",
              flush=True)


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pace-ms", default="0")
    given = parser.parse_args()
    asyncio.run(measure(given.model, given.ranks, ["--pace-ms", given.pace_ms]))


if __name__ == "__main__":
    main()
