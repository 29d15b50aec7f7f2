"""A real chat model with a draft of its own: are tokens the plain ones, and what do guesses bring?

    python -m benchmarks.methods.real_pair --model SmolLM2.gguf --draft smollm2-draft.gguf

Ten questions in the model's chat template, twelve about a text that they hold, five openings of
prose and five of programs; greedy and at temperature 0.8. Every proposer (none, the draft, prompt
lookup, both; with --eagle also a prediction head) over 1 to 4 ranks, one thread each, against
tests/kit/plain_loop.py, which shares no code with the pipeline. A mismatch is teacher-forced as in
`lossless`. With --pace-ms all stages together take at least that long for a run, as on hosts of
their own; speeds are then those of such hosts. --grid 1xN: a wide stage. Guesses are not tuned or
stopped here, as other jobs do.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.methods.lossless import explain
from benchmarks.methods.matrix import answers_of
from benchmarks.methods.prompts import CHATS
from pipeinfer.core.grid import parse_widths
from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.planning.wide import shares_of
from tests.kit.plain_loop import PlainLoop
from tests.kit.sliced_loop import SlicedLoop

QUESTIONS = (
    "What is photosynthesis?", "Write a short poem about the sea.", "How do I boil an egg?",
    "Give me three tips for learning a language.", "Explain why the sky is blue.",
    "Write a letter to my landlord about a broken window.", "What is the capital of Italy?",
    "Write a Python function that returns the larger of two numbers.",
    "Summarize the story of Cinderella in three sentences.", "What should I pack for a weekend?",
)
PROSE = (
    "The old bridge over the river was built in", "When the rain stopped, the children",
    "Economists have long argued that", "In the middle of the desert there is a town",
    "The most important thing about cooking rice is",
)
CODE = (
    "def fibonacci(n):\n", "import os\nimport sys\n\ndef main():\n", "class Stack:\n    def ",
    "// Returns the sum of an array\nfunction sum(", "for i in range(10):\n    if i % 2 == 0:\n",
)
ABOUT = (*CHATS["about a text"], *CHATS["edits"])  #: answers that repeat their question
KINDS = (*("chat",) * len(QUESTIONS), *("prose",) * len(PROSE), *("code",) * len(CODE),
         *("about a text",) * len(ABOUT))
PROPOSERS: dict[str, tuple[str, ...]] = {
    "none": (), "draft": ("draft",), "prompt lookup": ("prompt-lookup",),
    "both": ("prompt-lookup", "draft"), "head": ("eagle3",),
    "lookup and head": ("prompt-lookup", "eagle3"),
    "all": ("prompt-lookup", "eagle3", "draft")}
SAMPLINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "key": noise_key(1)}}


def prompts(model: Path) -> list[list[int]]:
    """Token ids of every prompt."""
    tokenizer = open_tokenizer(model)
    chats, about = ([tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
                    for texts in (QUESTIONS, ABOUT))
    return [*chats, *(tokenizer.encode(text) for text in (*PROSE, *CODE)), *about]


def job(model: Path, ranks: int, name: str, cases: list[dict[str, Any]], given: argparse.Namespace
        ) -> list[dict[str, Any]]:
    """The answers of one job to all cases."""
    proposers = PROPOSERS[name]
    config = {
        "model": str(model), "ctx": 1024, "threads": 1, "threads_draft": 1,
        "policy": "pipeinfer" if proposers else "iterative", "grid": given.grid,
        "hook": [f"pace={given.pace_ms / max(1, ranks - 1)}"] if given.pace_ms else [],
        "draft_model": str(given.draft) if "draft" in proposers else "none"}
    if proposers:
        config["proposer"] = list(proposers)
    if "eagle3" in proposers:
        config["eagle"] = str(given.eagle)
    return list(answers_of(ranks, config, cases, timeout=3600, name=name)["results"])


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--eagle", type=Path, help="EAGLE-3 head of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=len(KINDS), help="every so-manyth of all")
    parser.add_argument("--samplings", nargs="+", default=list(SAMPLINGS), choices=SAMPLINGS)
    parser.add_argument("--proposers", nargs="+", default=list(PROPOSERS)[:4],
                        choices=PROPOSERS)
    parser.add_argument("--pace-ms", type=float, default=0.0,
                        help="time of all stages together for a run, at least")
    parser.add_argument("--grid", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    texts = prompts(given.model)
    chosen = range(0, len(KINDS), max(1, len(KINDS) // given.prompts))
    plain: PlainLoop = PlainLoop(given.model)
    if given.grid:
        widths = parse_widths(given.grid)
        assert len(widths) == 1, "one stage: give 1xN"
        plain = SlicedLoop(str(given.model), [ModelFile(given.model).n_layers],
                           [own or (1.0,) for own in shares_of("", widths)])
        given.ranks = [sum(widths) + 1]
    keys = [(i, name) for name in given.samplings for i in chosen]
    cases = [{"prompt": texts[i], "params": SAMPLINGS[name], "count": given.tokens, "limits": {}}
             for i, name in keys]
    wanted = [plain.generate(case["prompt"], given.tokens, SamplingParams(**case["params"]))
              for case in cases]
    rows, differ = [], 0
    for ranks in given.ranks:
        for name in given.proposers:
            found = job(given.model, ranks, name, cases, given)
            for key, case, answer, tokens in zip(keys, cases, found, wanted, strict=True):
                rows.append({"ranks": ranks, "proposer": name, "kind": KINDS[key[0]],
                             "sampling": key[1], **answer})
                if answer["tokens"] != tokens:
                    differ += 1
                    explain(plain, ranks, key, case, answer["tokens"], tokens)
            print(line(ranks, name, rows), flush=True)
    print(f"{len(rows)} answers, {differ} differ")
    if given.json:
        given.json.write_text(json.dumps(rows))


def line(ranks: int, name: str, rows: list[dict[str, Any]]) -> str:
    """Speeds and acceptance of a job, by kind of text and sampling."""
    parts = []
    for sampling in SAMPLINGS:
        for kind in dict.fromkeys(KINDS):
            own = [row for row in rows if (row["ranks"], row["proposer"], row["kind"],
                                           row["sampling"]) == (ranks, name, kind, sampling)]
            if not own:
                continue
            tested = sum(row.get("guesses_tested", 0) for row in own)
            right = sum(row.get("accepted_speculative", 0) for row in own)
            speed = statistics.median(row["tokens_per_second"] for row in own)
            parts.append(f"{sampling} {kind} {speed:.1f}/s"
                         + (f" ({right / tested:.2f})" if tested else ""))
    return f"{ranks} ranks, {name}: " + "; ".join(parts)


if __name__ == "__main__":
    main()
