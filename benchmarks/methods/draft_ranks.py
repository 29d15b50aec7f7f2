"""Where drafts run: on rank 0, on ranks of their own, two at once; over the same paced stages.

    python -m benchmarks.methods.draft_ranks -m smollm2 --small DRAFT.gguf --large LARGE.gguf

Variants take turns text by text, each in a job of its own; tokens must be those of plain decoding.
`--large` may be a copy of the target, as if that were much larger: `--pace-ms` says how slow stages
are. The ranks of a draft come in addition to the stages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from tests.rig import launch

TEXTS = ("Explain how a suspension bridge carries its load.",
         "Write a short story about a lighthouse keeper and a storm.",
         "List the steps to change a bicycle tyre.")
STAGES = 3


def variants(small: str, large: str) -> dict[str, tuple[int, list[str]]]:
    """Ranks and options of each."""
    return {
        "plain": (STAGES + 1, ["--policy", "iterative"]),
        "small, rank 0": (STAGES + 1, ["-md", small]),
        "small, a rank": (STAGES + 2, ["-md", small, "--draft-ranks", "1"]),
        "small, two ranks": (STAGES + 3, ["-md", small, "--draft-ranks", "2"]),
        "large, rank 0": (STAGES + 1, ["-md", large]),
        "large, a rank": (STAGES + 2, ["-md", large, "--draft-ranks", "1"]),
        "large, two ranks": (STAGES + 3, ["-md", large, "--draft-ranks", "2"]),
        "both, rank 0": (STAGES + 1, ["-mds", small, "-md", large]),
        "both at once": (STAGES + 2, ["-mds", small, "-md", large, "--draft-ranks", "1"]),
    }


def main(argv: list[str] | None = None) -> int:
    """Print a table; 1 if a token differs."""
    parser = argparse.ArgumentParser(description="drafts on ranks of their own")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--small", required=True)
    parser.add_argument("--large", required=True)
    parser.add_argument("--pace-ms", default="60")
    parser.add_argument("--pace-row-ms", default="2")
    parser.add_argument("-n", "--tokens", type=int, default=96)
    args = parser.parse_args(argv)
    base = [sys.executable, "-m", "pipeinfer", "generate", "-m", args.model, "--chat", "--json",
            "--temp", "0", "-n", str(args.tokens), "--pace-ms", args.pace_ms, "--pace-row-ms",
            args.pace_row_ms]
    wanted: dict[str, list[int]] = {}
    speeds: dict[str, list[float]] = {}
    right: dict[str, list[float]] = {}
    differ = 0
    for text in TEXTS:
        for name, (ranks, options) in variants(args.small, args.large).items():
            done = launch.run(ranks, [*base, "-p", text, *options])
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            answer = json.loads(done.stdout)
            differ += answer["tokens"] != wanted.setdefault(text, answer["tokens"])
            speeds.setdefault(name, []).append(answer["stats"]["tokens_per_second"])
            right.setdefault(name, []).append(answer["stats"]["acceptance"])
            print(f"{name}: {speeds[name][-1]:.2f} tokens/s", file=sys.stderr, flush=True)
    for name, found in speeds.items():
        print(f"{name:18} {statistics.fmean(found):6.2f} tokens/s ({min(found):.2f} to "
              f"{max(found):.2f})  {statistics.fmean(right[name]):4.0%} of guesses right")
    print(f"{differ} of {sum(map(len, speeds.values()))} answers differ from plain decoding's")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
