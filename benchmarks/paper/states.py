"""What guesses bring for a model whose layers keep a state, in virtual time.

    python -m benchmarks.paper.states

Three stages of 50 ms each. A run that was not accepted as a whole is repeated in part, since no
part of a state can be taken back. For comparison runs of one row alone, which repeat nothing, and a
model without a state.
"""

from __future__ import annotations

from pipeinfer.core.policy import Policy
from pipeinfer.lab.emulation.synthetic import SyntheticPair
from pipeinfer.lab.emulation.virtual import Scenario, VirtualStage, Wire, simulate
from pipeinfer.scheduler.controller import Controller, cutoff
from pipeinfer.scheduler.settings import Limits

STAGES, SECONDS, DRAFT = 3, 0.05, 0.005
WIDTH = 16


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


def main() -> None:
    """Print a line for each cost of a row and acceptance."""
    for row in (0.9, 0.3, 0.1):
        for acceptance in (0.5, 0.7, 0.9):
            plain = speed(acceptance, Policy.ITERATIVE, row, states=False)
            one, state, without = (
                speed(acceptance, Policy.PIPEINFER, row, states=states, width=width) / plain
                for states, width in ((True, 1), (True, WIDTH), (False, WIDTH)))
            print(f"{row}, {acceptance}: {one:.2f} with a state and one row a run, "
                  f"{state:.2f} with a state, {without:.2f} without a state")


if __name__ == "__main__":
    main()
