"""Whether llama.cpp's own speculation leaves its text as it is.

    python -m benchmarks.peers.texts --programs FOLDER -m MODEL -md DRAFT [--eagle HEAD]

Each kind of speculation of llama-speculative-simple, greedy, beside the same program that never
guesses (n-grams so long that none is found again), over every prompt of this project. With
--workers the layers are on so many RPC workers on this machine. Prints for each kind how many
texts are equal as far as both go, and how many tokens were drafted and accepted.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import click

from benchmarks.methods.prompts import CHATS, PROMPTS
from benchmarks.peers.runs import Measured, Task, speculative
from pipeinfer.files import write_atomically

_NEVER = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1024")
KINDS: dict[str, tuple[str, ...]] = {
    "again, without guesses": _NEVER,
    "draft-simple": ("--spec-type", "draft-simple"),
    "draft-eagle3": ("--spec-type", "draft-eagle3"),
    "ngram-simple": ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3",
                     "--spec-ngram-simple-size-m", "8"),
    "ngram-mod": ("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "8",
                  "--spec-ngram-mod-n-min", "2", "--spec-ngram-mod-n-max", "8"),
    "ngram-cache": ("--spec-type", "ngram-cache"),
}


def texts() -> list[str]:
    """All prompts, questions in the template of SmolLM2."""
    return [*PROMPTS, *(f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n"
                        for asked in CHATS.values() for one in asked)]


def measure(task: Task, options: tuple[str, ...], workers: int) -> Measured | str:
    """One run, or why there is none. The program's last lines are lost now and then."""
    why = ""
    for _ in range(3):
        try:
            return speculative(task, options, workers)
        except click.ClickException as error:
            why = error.message[-200:]
    return why


def main() -> None:
    """Print a row for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-md", "--draft", type=Path)
    parser.add_argument("--eagle", type=Path, help="with its target's matrices")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    given = parser.parse_args()
    heads = {"draft-simple": given.draft, "draft-eagle3": given.eagle}
    chosen = texts()[:given.prompts]
    plain: dict[str, str] = {}
    for kind, options in {"": _NEVER, **{name: KINDS[name] for name in given.kinds}}.items():
        head = heads.get(kind)
        if kind in heads and head is None:
            continue
        equal, drafted, accepted, speeds, failed = 0, 0, 0, [], []
        for text in chosen:
            with tempfile.TemporaryDirectory() as folder:
                prompt = Path(folder) / "prompt.txt"
                write_atomically(prompt, text)
                task = Task(given.programs, given.model, prompt, 512, given.tokens, given.threads,
                            120.0)
                found = measure(task, (*options, *(("-md", str(head)) if head else ())),
                                given.workers)
            if isinstance(found, str):
                failed.append(found)
                continue
            plain.setdefault(text, found.raw["text"])
            mine, its = found.raw["text"].rstrip(), plain[text].rstrip()
            equal += mine.startswith(its) or its.startswith(mine)
            drafted += found.raw.get("drafted", 0)
            accepted += found.raw.get("accept", 0)
            speeds.append(found.tokens_per_second)
        middle = sorted(speeds)[len(speeds) // 2] if speeds else 0.0
        print(f"| {kind or 'without guesses'} | {equal} of {len(chosen)} | {accepted} of {drafted} "
              f"| {middle:.1f} | {len(failed)} failed {failed[:1]} |", flush=True)


if __name__ == "__main__":
    main()
