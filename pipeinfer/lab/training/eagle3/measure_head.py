"""What a head is worth: its chains in llama.cpp against greedy answers that it has not seen.

    python -m pipeinfer.lab.training.eagle3.measure_head HEAD TARGET [--draft DRAFT]

Independent of torch and of training.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.lab.training.eagle3.llama_head import LlamaEagle, LlamaTarget
from pipeinfer.models.eagle_head import complete
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_tokenizer

STEPS = 4  #: of a chain
#: questions and beginnings that are none of `draft.prompts`
PROMPTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "What should I do when my neighbour plays loud music at night?",
        "Explain the difference between weather and climate.",
        "Plan a weekend in a city with two children.",
        "Why do we have leap years?",
        "How can I keep tomatoes fresh for longer?",
        "Write an apology to a colleague whose meeting I forgot.",
        "Which is heavier, a litre of oil or a litre of water, and why?",
        "Give me tips for a long flight.",
    ),
    "prose": (
        "The ferry left the harbour at six, and nobody on deck",
        "In 1783 two brothers from Annonay filled a paper bag with smoke and",
        "My grandmother kept a tin box under her bed. In it",
        "Copper was among the first metals that people used, because",
        "The committee met on Tuesday to discuss",
        "Most birds that spend the winter in the north",
        "When the lights went out in the theatre,",
        "A good map leaves out more than it shows.",
    ),
    "code": (
        "Write a Python function that finds all pairs of numbers in a list with a given sum.",
        "Write a Python class for a bank account with deposit and withdraw methods.",
        "How do I rename all files of a folder in Python?",
        "Write a JavaScript function that groups an array of objects by a key.",
        "Write a SQL query that returns the three best customers of each month.",
        "Write a Python decorator that caches results.",
        "Write a C program that copies a file.",
        "Write a shell script that backs up a folder every day.",
    ),
}


@dataclass(slots=True)
class ChainCount:
    """Chains of one kind of text. reached: of step d + 1, how often the d steps before it were
    right; right: how often it was as well."""

    reached: list[int] = field(default_factory=lambda: [0] * STEPS)
    right: list[int] = field(default_factory=lambda: [0] * STEPS)

    def add(self, proposed: Sequence[int], wanted: Sequence[int]) -> None:
        """Count one chain."""
        for step, (token, truth) in enumerate(zip(proposed, wanted, strict=True)):
            self.reached[step] += 1
            if token != truth:
                return
            self.right[step] += 1

    def summary(self) -> dict[str, object]:
        """Return the shares by step, and the accepted tokens of a chain of three."""
        chains = max(1, self.reached[0])
        return {"chains": self.reached[0],
                "right": [round(hit / max(1, of), 3)
                          for hit, of in zip(self.right, self.reached, strict=True)],
                "accepted_of_3": round(sum(self.right[:3]) / chains, 3)}


def answer(target: LlamaTarget, prompt: list[int], count: int, ends: frozenset[int]
           ) -> tuple[list[int], FloatArray]:
    """Return the prompt with its greedy answer, and the tapped rows of all tokens but the last."""
    target.cut(0)
    tokens, rows = list(prompt), []
    new = prompt
    while len(tokens) < len(prompt) + count:
        logits, found = target.step(new, len(tokens) - len(new))
        rows.append(found)
        new = [int(logits.argmax())]
        tokens += new
        if new[0] in ends:
            break
    return tokens, np.concatenate(rows)


def head_chains(head: LlamaEagle, tokens: list[int], start: int, rows: FloatArray,
                count: ChainCount) -> None:
    """Count the chains at every position of an answer that begins at `start`."""
    head.cut(0)
    hidden = head.encode(rows)
    head.read(tokens[1:start], hidden[: start - 1], 0)
    for at in range(start - 1, len(tokens) - STEPS - 1):
        proposed = head.chain(tokens[at + 1], hidden[at], at, STEPS)
        count.add(proposed, tokens[at + 2 : at + 2 + STEPS])


def draft_chains(draft: LlamaTarget, tokens: list[int], start: int, count: ChainCount) -> None:
    """The same with a draft model."""
    draft.cut(0)
    draft.step(tokens[:start], 0)
    for at in range(start, len(tokens) - STEPS):
        token, proposed = tokens[at], []
        for step in range(STEPS):
            token = int(draft.step([token], at + step)[0].argmax())
            proposed.append(token)
        count.add(proposed, tokens[at + 1 : at + 1 + STEPS])
        draft.cut(at + 1)


def milliseconds(call: Callable[[], object], times: int = 60) -> float:
    """Return the median time of a call."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(taken), 2)


@click.command()
@click.argument("head", type=click.Path(path_type=Path, exists=True))
@click.argument("target", type=click.Path(path_type=Path, exists=True))
@click.option("--draft", type=click.Path(path_type=Path, exists=True))
@click.option("--tokens", type=int, default=128, show_default=True, help="Of each answer.")
@click.option("--prompts", type=int, default=8, show_default=True, help="Of each kind.")
@click.option("--threads", type=int, default=2, show_default=True)
def main(head: Path, target: Path, draft: Path | None, tokens: int, prompts: int, threads: int
         ) -> None:
    """Compare HEAD's chains with TARGET's greedy answers."""
    found = ModelFile(head).arch_get("target_layers")
    assert isinstance(found, list)
    taps = tuple(tap for tap in found if isinstance(tap, int))
    tokenizer = open_tokenizer(target)
    whole = LlamaTarget(target, taps, threads=threads)
    small = LlamaTarget(draft, (), threads=threads) if draft is not None else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.gguf"
        complete(head, target, path)
        eagle = LlamaEagle(path, threads=threads)
        for kind, texts in PROMPTS.items():
            count, drafted = ChainCount(), ChainCount()
            for text in texts[:prompts]:
                prompt = list(tokenizer.encode(text) if kind == "prose" else
                              tokenizer.encode_chat([{"role": "user", "content": text}]))
                all_tokens, rows = answer(whole, prompt, tokens, frozenset(tokenizer.eog_ids))
                head_chains(eagle, all_tokens, len(prompt), rows, count)
                if small is not None:
                    draft_chains(small, all_tokens, len(prompt), drafted)
            click.echo(f"{kind}: head {count.summary()}")
            if small is not None:
                click.echo(f"{kind}: draft {drafted.summary()}")
        at = len(all_tokens) - 2

        def head_chain() -> None:
            eagle.chain(all_tokens[-1], eagle.encode(rows[-1:], at)[0], at, 3)
            eagle.cut(at)

        eagle.cut(0)
        eagle.read(all_tokens[1:-1], eagle.encode(rows)[:at], 0)
        click.echo(f"ms of a chain of 3, with one row encoded: head {milliseconds(head_chain)}")
        if small is not None:
            small.cut(0)
            small.step(all_tokens, 0)

            def draft_chain() -> None:
                for step in range(3):
                    small.step(all_tokens[-1:], len(all_tokens) + step)
                small.cut(len(all_tokens))

            click.echo(f"ms of a chain of 3: draft {milliseconds(draft_chain)}")

        def target_token() -> None:
            whole.cut(len(all_tokens) - 1)
            whole.step(all_tokens[-1:], len(all_tokens) - 1)

        click.echo(f"ms of a token: target {milliseconds(target_token)}")


if __name__ == "__main__":
    main()
