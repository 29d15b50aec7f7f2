"""Rank program: many prompts under many settings of the scheduler in one launch.

Usage: matrix.py TASK.json OUT.json; the task has `config` (options), `cases` (each with
`limits` to replace, `params`, `prompt` as token ids, `count`; `observed`: what runs did is
wanted). Rank 0 writes tokens and figures.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from msgspec import structs

from pipeinfer.cluster.generate import run_request
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.shutdown import end_job
from pipeinfer.core.policy import Ablation, Policy
from pipeinfer.core.types import SamplingParams
from pipeinfer.scheduler.controller import Controller
from pipeinfer.strategies import registry


def main() -> None:
    """See the module's docstring."""
    task = json.loads(Path(sys.argv[1]).read_text())
    config = registry.job_config(**{k: tuple(v) if isinstance(v, list) else v
                                    for k, v in ({"turns": "off"} | task["config"]).items()})
    results = []
    try:
        joined = join(config)
        if joined.place.rank:
            joined.serve()
            return
        with joined.lead() as session:
            base = session.limits
            for case in task["cases"]:
                change = dict(case["limits"])
                adapt = change.pop("adapt", False)
                if "policy" in change:
                    change["policy"] = Policy(change["policy"])
                if "ablations" in change:
                    change["ablations"] = frozenset(map(Ablation, change["ablations"]))
                session.head.drain(60)
                limits = structs.replace(base, **change)
                session.head.reconfigure(limits, Controller(limits, max_rows=64) if adapt else None)
                prompt = case["prompt"]
                if isinstance(prompt, str):
                    prompt = session.tokenizer.encode(prompt)
                params = {**case["params"]}
                params["logit_bias"] = tuple(map(tuple, params.get("logit_bias", ())))
                observed = bool(case.get("observed"))
                session.head.observe(observed)
                session.head.take_runs()
                started = time.monotonic()
                out = run_request(session, prompt, SamplingParams(**params), case["count"],
                                  ignore_eos=case.get("ignore_eos", True))
                seconds = time.monotonic() - started
                results.append({"tokens": out.tokens, "prompt": list(prompt), **out.stats()})
                if observed:
                    session.head.drain(60)
                    results[-1] |= {"seen": session.head.take_runs(),
                                    "stage_seconds": seconds * session.n_stages}
        Path(sys.argv[2]).write_text(
            json.dumps(
                {
                    "results": results,
                    "exact_width": base.exact_width,
                    "reports": {
                        k: {**v, "events": v.get("events")} for k, v in session.reports.items()
                    },
                    "head_busy": session.head.stats.busy,
                    "died": session.head.trace.died if session.head.trace else {},
                }
            )
        )
    except Exception:
        import traceback

        traceback.print_exc()
        end_job(1)


main()
