"""Rank program: the same request many times in one job.

    steady.py OUT.json ROUNDS TOKENS CONFIG

CONFIG is a JSON object of a job's options. Rank 0 writes tokens per second of every round after the
first, and the texts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pipeinfer.cluster.generate import run_request
from pipeinfer.cluster.launch import join
from pipeinfer.core.types import SamplingParams
from pipeinfer.strategies.registry import job_config


def main() -> None:
    out, rounds, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    config = job_config(ctx=tokens + 64, **json.loads(sys.argv[4]))
    joined = join(config)
    if joined.place.rank:
        joined.serve()
    else:
        with joined.lead() as session:
            prompt = session.tokenizer.encode("def fibonacci(n):\n")
            speeds, texts = [], set()
            for turn in range(rounds + 1):
                got = run_request(session, prompt, SamplingParams(), tokens, ignore_eos=True)
                texts.add(tuple(got.tokens))
                if turn:
                    speeds.append((tokens - 1) / (got.times[-1] - got.times[0]))
            out.write_text(json.dumps({"speeds": speeds, "texts": [list(t) for t in texts]}))


if __name__ == "__main__":
    main()
