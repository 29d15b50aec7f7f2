"""What guesses bring for a model whose layers keep a state, in virtual time.

    python -m benchmarks.paper.states [--raw FILE]

Three stages of 50 ms each. A run that was not accepted as a whole is repeated in part, since no
part of a state can be taken back. For comparison runs of one row alone, which repeat nothing, and a
model without a state.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import raw_files
from pipeinfer.core.policy import Policy
from pipeinfer.lab.emulation.synthetic import SyntheticPair
from pipeinfer.lab.emulation.virtual import Scenario, VirtualStage, Wire, simulate
from pipeinfer.scheduler.controller import Controller, cutoff
from pipeinfer.scheduler.settings import Limits

STAGES, SECONDS, DRAFT = 3, 0.05, 0.005
WIDTH = 16
#: whether layers keep a state, and the widest run
KINDS = {"one row": (True, 1), "state": (True, WIDTH), "without": (False, WIDTH)}


def speed(acceptance: float, policy: Policy, row: float, *, states: bool, width: int = WIDTH
          ) -> float:
    """Tokens per second. row: the time of a further row of a run, in runs of one row."""
    curve = tuple((rows, 1 + row * (rows - 1)) for rows in (2, 3, 4, 8, 16))

    def seconds(rows: int) -> float:
        return SECONDS * (1 + row * (rows - 1))

    credit = STAGES + 1
    limits = Limits(
        n_ctx=512, policy=policy, exact_width=width, credit=credit,
        partitions=8 if states else 16, path_min=cutoff(credit), states=states)
    controller = Controller(limits, (), curve) if policy is Policy.PIPEINFER else None
    return simulate(Scenario(
        (VirtualStage(seconds, layers=8),) * STAGES, (Wire(1e-4, 1e8),) * (STAGES + 1),
        lambda _: DRAFT, limits, SyntheticPair(acceptance), 4 * 1024, 64, 256,
        direct_cancel=True), controller).tokens_per_second


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`emulated-states`: times plain decoding."""
    return [[str(one["row"]), f"{one['acceptance']:.0%}".replace("%", " %"),
             *(f"{one[kind] / one['plain']:.2f}" for kind in KINDS)] for one in raw]


def main() -> None:
    """Print a line for each cost of a row and acceptance."""
    parser = argparse.ArgumentParser(description="guesses for models whose layers keep a state")
    parser.add_argument("--raw", type=Path, help="keep every speed as JSON")
    given, found = parser.parse_args(), []
    for row in (0.9, 0.3, 0.1):
        for acceptance in (0.5, 0.7, 0.9):
            plain = speed(acceptance, Policy.ITERATIVE, row, states=False)
            speeds = {kind: speed(acceptance, Policy.PIPEINFER, row, states=states, width=width)
                      for kind, (states, width) in KINDS.items()}
            found.append({"row": row, "acceptance": acceptance, "plain": plain, **speeds})
            one, state, without = (speeds[kind] / plain for kind in KINDS)
            print(f"{row}, {acceptance}: {one:.2f} with a state and one row a run, "
                  f"{state:.2f} with a state, {without:.2f} without a state")
    if given.raw:
        raw_files.write(given.raw, found)


if __name__ == "__main__":
    main()
