"""What guesses bring for a model whose layers keep a state, in virtual time.

    python -m benchmarks.paper.states

Three stages of 50 ms each; every run has one row, since no part of a state can be taken back, and
a run on a copy of a state may take longer. For comparison a model without a state, whose further
rows cost 0.9 of a run.
"""

from __future__ import annotations

from pipeinfer.core.policy import Policy
from pipeinfer.lab.emulation.synthetic import SyntheticPair
from pipeinfer.lab.emulation.virtual import Scenario, VirtualStage, Wire, simulate
from pipeinfer.scheduler.controller import Controller, cutoff
from pipeinfer.scheduler.settings import Limits

STAGES, SECONDS, DRAFT, ROW = 3, 0.05, 0.005, 0.9


def speed(acceptance: float, policy: Policy, *, states: bool, longer: float = 1.0) -> float:
    """Tokens per second. longer: the time of a run relative to one without a copy."""
    curve = tuple((rows, 1 + ROW * (rows - 1)) for rows in (2, 3, 4, 8, 16))

    def seconds(rows: int) -> float:
        return SECONDS * longer * (1 + ROW * (rows - 1))

    credit = STAGES + 1
    limits = Limits(
        n_ctx=512, policy=policy, exact_width=1 if states else 16, credit=credit,
        partitions=8 if states else 16, draft_max=1, path_min=cutoff(credit), states=states)
    controller = Controller(limits, (), curve) if policy is Policy.PIPEINFER else None
    return simulate(Scenario(
        (VirtualStage(seconds, layers=8),) * STAGES, (Wire(1e-4, 1e8),) * (STAGES + 1),
        lambda _: DRAFT, limits, SyntheticPair(acceptance), 4 * 1024, 64, 256,
        direct_cancel=True), controller).tokens_per_second


def main() -> None:
    """Print a line for each acceptance."""
    for acceptance in (0.5, 0.7, 0.9):
        plain = speed(acceptance, Policy.ITERATIVE, states=False)
        found = [speed(acceptance, Policy.PIPEINFER, states=states, longer=longer) / plain
                 for states, longer in ((True, 1.0), (True, 1.2), (False, 1.0))]
        print(f"{acceptance}: {found[0]:.2f} with a state, {found[1]:.2f} if copies make runs "
              f"1.2 times as long, {found[2]:.2f} without a state")


if __name__ == "__main__":
    main()
