"""Rank program: many prompts under many settings of the scheduler in one launch.

Usage: matrix.py TASK.json OUT.json; the task has `config` (options), `cases` (each with
`limits` to replace, `params`, `prompt` as token ids, `count`; `observed`: what runs did is
wanted; `beside`: prompts of further requests at the same time). Rank 0 writes tokens and figures.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from pipeinfer.cluster.generate import run_request
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.session import Session
from pipeinfer.cluster.shutdown import end_job
from pipeinfer.core.policy import Ablation, Policy
from pipeinfer.core.types import Request, SamplingParams
from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.events import Emit, Finish
from tests.kit.configs import job_config


def at_once(session: Session, prompts: Sequence[str], params: SamplingParams, count: int
            ) -> dict[str, list[Any]]:
    """The tokens of requests that are all submitted before any of them ends, and the rows of the
    widest run of generated tokens."""
    found: dict[int, list[int]] = {}
    session.head.observe(True)
    for number, prompt in enumerate(prompts, 1 << 20):
        session.head.submit(Request(number, tuple(session.tokenizer.encode(prompt)), count, params,
                                    ignore_eos=True))
        found[number] = []
    left = set(found)
    until = time.monotonic() + 600
    while left:
        assert time.monotonic() < until, "requests have not ended"
        match session.head.next_news(0.1):
            case Emit(number, choice):
                found[number].append(choice.token)
            case Finish(number):
                left.remove(number)
    widest = max(one["rows"] for one in session.head.take_runs()
                 if one.get("kind") in ("token", "mixed"))
    return {"tokens": list(found.values()), "widest": widest}


def main() -> None:
    """See the module's docstring."""
    task = json.loads(Path(sys.argv[1]).read_text())
    # what is guessed is for the cases to say, whatever rows cost on this machine at this moment
    config = job_config(**{
        k: tuple(v) if isinstance(v, list) else v
        for k, v in ({"turns": "off", "adapt": False} | task["config"]).items()})
    results = []
    try:
        joined = join(config)
        if joined.place.rank:
            joined.serve()
            return
        with joined.lead() as session:
            base = session.limits
            if config.cluster.turns == "off":  # ranks stand for hosts, and so does rank 0's stage
                base = structs.replace(base, time_sharing=False)
            for case in task["cases"]:
                change = dict(case["limits"])
                adapt = change.pop("adapt", False)
                if "policy" in change:
                    change["policy"] = Policy(change["policy"])
                if "ablations" in change:
                    change["ablations"] = frozenset(map(Ablation, change["ablations"]))
                if "exact_width" in change:
                    change["exact_width"] = min(base.exact_width, change["exact_width"])
                session.head.drain(60)
                limits = structs.replace(base, **change)
                session.head.reconfigure(limits, Controller(limits, max_rows=64) if adapt else None)
                prompt = case["prompt"]
                params = {**case["params"]}
                params["logit_bias"] = tuple(map(tuple, params.get("logit_bias", ())))
                if beside := case.get("beside"):
                    results.append(at_once(session, [prompt, *beside], SamplingParams(**params),
                                           case["count"]))
                    continue
                if isinstance(prompt, str):
                    prompt = session.tokenizer.encode(prompt)
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
                    "group_max": base.group_max,
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
