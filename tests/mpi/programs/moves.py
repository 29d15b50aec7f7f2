"""Rank program: one request twice, first undisturbed, then while slices move between ranks.

Usage: moves.py TASK.json OUT.json; the task has `config` (options), `prompt`, `count`, and `moves`:
after how many tokens who holds what, as (rank, first layer, last layer + 1, slices) each, stage by
stage. Rank 0 writes the tokens of both and the arrangements that there were.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pipeinfer.cluster.generate import Generated, run_request
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.shutdown import end_job
from pipeinfer.core.types import SamplingParams
from pipeinfer.planning.replan import Holding
from tests.kit.configs import job_config


def holdings(session, stages):
    cuts = {layer: one.cut for one in session.plan.held for layer in range(one.start, one.stop)}
    return tuple(Holding(rank, start, stop, member, cuts[start], tuple(slices))
                 for team in stages for member, (rank, start, stop, slices) in enumerate(team))


def main() -> None:
    """See the module's docstring."""
    task = json.loads(Path(sys.argv[1]).read_text())
    try:
        joined = join(job_config(**task["config"]))
        if joined.place.rank:
            joined.serve()
            return
        with joined.lead() as session:
            prompt = session.tokenizer.encode(task["prompt"])
            params = SamplingParams(temperature=0.8, key=7)
            plain = run_request(session, prompt, params, task["count"], ignore_eos=True)
            moves, out = list(task["moves"]), Generated()

            def move() -> bool:
                if moves and len(out.tokens) >= moves[0][0]:
                    session.assembly.move(holdings(session, moves.pop(0)[1]), "a test")
                    session.resume()
                return False

            run_request(session, prompt, params, task["count"], ignore_eos=True, interrupted=move,
                        into=out)
            bits = session.bits
        Path(sys.argv[2]).write_text(json.dumps({
            "plain": plain.tokens, "moved": out.tokens, "bits": bits, "left": len(moves),
            "changes": [change.why for change in session.assembly.changes]}))
    except Exception:
        import traceback

        traceback.print_exc()
        end_job(1)


main()
