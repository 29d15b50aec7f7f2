"""Several clients on an emulated cluster: throughput and latency against their number.

    python -m benchmarks.serving.cluster                              # virtual time
    mpirun -np 8 python -m benchmarks.serving.cluster --wall          # the real runtime, 8 nodes

Speculation auto, on and off; tokens are compared with plain decoding. Prints one line a
measurement, and keeps all with --json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from msgspec import structs

from pipeinfer import host
from pipeinfer.core.policy import Policy
from pipeinfer.lab.emulation.load import LoadResult, emulate_load, simulate_load
from pipeinfer.lab.emulation.profiles import load_profiles
from pipeinfer.lab.emulation.scenarios import EXACT, Experiment, build
from pipeinfer.lab.emulation.virtual import Scenario, prompt_of
from pipeinfer.scheduler.controller import Controller, Timing, groups

MODES = ("auto", "on", "off")
MOST = 16  #: requests at a time


def scenario_of(args: argparse.Namespace, mode: str) -> tuple[Scenario, Controller]:
    """The scenario of a setting of --speculation, and what tunes it."""
    built = build(load_profiles(), Experiment(
        args.cluster, args.pair, nodes=args.nodes, tokens=args.tokens, prompt=args.prompt,
        limits=(("chunk", args.chunk),)))
    n_stages = len(built.scenario.stages)
    limits = structs.replace(built.scenario.limits, parallel=MOST, alone=mode == "on", share=groups(
        Timing(1.0, n_stages, built.curve, 0.0, 0.0), EXACT, MOST))
    if mode == "off":
        limits = structs.replace(limits, policy=Policy.ITERATIVE)
    return dataclasses.replace(built.scenario, limits=limits), Controller(
        limits, built.pinned, built.curve)


def figures_of(scenario: Scenario, result: LoadResult) -> dict[str, float]:
    """What is kept of a measurement, after its tokens were compared."""
    for request_id, tokens in result.outputs.items():
        wanted = scenario.pair.plain(prompt_of(scenario, request_id), scenario.tokens)
        assert tokens == wanted, request_id
    return {"tokens_per_second": result.tokens_per_second, "gap_median": result.gap_median,
            "gap_mean": statistics.fmean(result.gaps),
            "gap_worst": result.gap_worst, "first_mean": sum(result.first) / len(result.first)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="c")
    parser.add_argument("--pair", default="dolphin-tinyllama")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--wall", action="store_true", help="the real runtime, under mpirun")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for clients in args.clients:
        for mode in args.modes:
            scenario, controller = scenario_of(args, mode)
            run = emulate_load if args.wall else simulate_load
            result = run(scenario, clients, args.rounds, controller=controller)
            if result is None:
                continue
            figures = figures_of(scenario, result)
            found.setdefault(mode, {})[str(clients)] = figures
            print(clients, mode, {k: round(v, 3) for k, v in figures.items()}, flush=True)
    if args.json and host.launched_rank() == 0:
        args.json.write_text(json.dumps(
            {"cluster": args.cluster, "pair": args.pair, "nodes": args.nodes, "wall": args.wall,
             "chunk": args.chunk, "tokens": args.tokens, "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
