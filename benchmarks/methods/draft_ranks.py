"""Where drafts run: on rank 0, on ranks of their own, two at once; over the same paced stages.

    python -m benchmarks.methods.draft_ranks -m smollm2 --small DRAFT.gguf --large LARGE.gguf

Variants take turns text by text, each in a job of its own; tokens must be those of plain decoding.
`--large` may be a copy of the target, as if that were much larger: `--pace-ms` says how slow stages
are. The ranks of a draft come in addition to the stages. `--raw` keeps the figures of each answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.records import raw_files
from tests.kit import launch

TEXTS = ("Explain how a suspension bridge carries its load.",
         "Write a short story about a lighthouse keeper and a storm.",
         "List the steps to change a bicycle tyre.")
STAGES = 3


LOOKUP, SMALL, LARGE = 'proposer = "prompt-lookup"', 'draft = "{small}"', 'draft = "{large}"'
AHEAD = 'proposer = "draft-lookahead"\ndraft = "{large}"'
#: by name: options, and settings of the ranks behind the stages
VARIANTS: dict[str, tuple[list[str], list[str]]] = {
    "none": (["--policy", "iterative"], []),
    "small, on rank 0": (["-md", "{small}"], []),
    "small, a rank": (["-md", "{small}"], ['role = "draft"']),
    "large, on rank 0": (["-md", "{large}"], []),
    "large, a rank": (["-md", "{large}"], ['role = "draft"']),
    "small on rank 0, large on a rank": (["-md", "{small}"], [LARGE]),
    "small and large, a rank each": ([], [SMALL, LARGE]),
    "lookup, small and large, a rank each": ([], [LOOKUP, SMALL, LARGE]),
    "lookup and small, a rank each": ([], [LOOKUP, SMALL]),
    "large by lookahead, a rank": ([], [AHEAD]),
    "large by its text's n-grams, a rank": (["--lookahead-window", "0"], [AHEAD]),
}


def rows_of(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[list[str]]:
    """A row for each variant: tokens per second, and the part of guesses that were right."""
    rows = []
    for name, answers in found.items():
        speeds = [one["tokens_per_second"] for one in answers]
        right = statistics.fmean(one["acceptance"] for one in answers)
        rows.append([name, f"{statistics.fmean(speeds):.2f}", f"{min(speeds):.2f} to "
                     f"{max(speeds):.2f}", "" if name == "none" else f"{right:.0%}".replace(
                         "%", " %")])
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print a table; 1 if a token differs."""
    parser = argparse.ArgumentParser(description="drafts on ranks of their own")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--small", required=True)
    parser.add_argument("--large", required=True)
    parser.add_argument("--pace-ms", default="60")
    parser.add_argument("--pace-row-ms", default="2")
    parser.add_argument("-n", "--tokens", type=int, default=96)
    parser.add_argument("--raw", type=Path)
    args = parser.parse_args(argv)
    base = [sys.executable, "-m", "pipeinfer", "generate", "-m", args.model, "--chat", "--json",
            "--temp", "0", "-n", str(args.tokens), "--hook",
            f"pace={args.pace_ms}+{args.pace_row_ms}"]
    wanted: dict[str, list[int]] = {}
    found: dict[str, list[dict[str, float]]] = {}
    differ, paths = 0, {"small": args.small, "large": args.large}
    with tempfile.TemporaryDirectory() as folder:
        for text in TEXTS:
            for name, (options, ranks) in VARIANTS.items():
                nodes = Path(folder) / "nodes.toml"
                nodes.write_text("".join(
                    f"[rank.{STAGES + 1 + k}]\n{one.format(**paths)}\n"
                    for k, one in enumerate(ranks)), encoding="utf-8")
                done = launch.run(STAGES + 1 + len(ranks), [
                    *base, "-p", text, "--nodes", str(nodes),
                    *(one.format(**paths) for one in options)])
                if done.returncode:
                    raise SystemExit(f"{name}: {done.stderr[-2000:]}")
                answer = json.loads(done.stdout)
                differ += answer["tokens"] != wanted.setdefault(text, answer["tokens"])
                found.setdefault(name, []).append({
                    key: answer["stats"][key] for key in ("tokens_per_second", "acceptance")})
                print(f"{name}: {found[name][-1]['tokens_per_second']:.2f} tokens/s",
                      file=sys.stderr, flush=True)
                if args.raw:
                    raw_files.write(args.raw, found)
    for row in rows_of(found):
        print(" | ".join(row))
    print(f"{differ} of {sum(map(len, found.values()))} answers differ from plain decoding's")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
