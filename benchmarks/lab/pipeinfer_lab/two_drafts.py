"""Emulated speculation whose trees are merged from two drafts, both on the head."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.emulation import scenarios
from pipeinfer.emulation.profiles import Profiles
from pipeinfer.emulation.scenarios import Built, Experiment, draft_bytes, draft_time
from pipeinfer.emulation.synthetic import SyntheticBackend, SyntheticPair
from pipeinfer.emulation.virtual import Result, Scenario
from pipeinfer.errors import UsageError
from pipeinfer.scheduler.controller import Controller
from pipeinfer.strategies.proposers.draft_model import DraftModel
from pipeinfer.strategies.proposers.prompt_lookup import PromptLookup
from pipeinfer_lab.traced import Traced


@dataclass(frozen=True, slots=True)
class TwoDrafts(Experiment):
    """As `Experiment`. second: profile of another pair with the same target, whose draft is asked
    after the first one."""

    second: str = ""


class _Second(DraftModel):
    """A draft that calls `begin` before each of its evaluations, which take another time."""

    def __init__(self, backend: SyntheticBackend, begin: Callable[[], None], paths: int) -> None:
        super().__init__(backend, paths=paths)
        self._begin = begin

    def steps(self, job: StartDraft) -> Generator[int, None, tuple[Proposal, ...]]:
        steps = super().steps(job)
        while True:
            try:
                rows = next(steps)
            except StopIteration as end:
                found: tuple[Proposal, ...] = end.value
                return found
            self._begin()
            yield rows


class _Simulation(Traced):
    """pair, seconds: the second draft, and the time of its decode by rows."""

    def __init__(self, scenario: Scenario, controller: Controller | None, pair: SyntheticPair,
                 seconds: Callable[[int], float]) -> None:
        self._pair, self._seconds, self._is_second = pair, seconds, False
        super().__init__(scenario, controller)

    def proposers(self, draft: DraftModel) -> list[DraftModel | PromptLookup]:
        info, limits = self.target.info, self.spec.limits
        paths = self.spec.draft_paths + limits.parallel - 1
        backend = SyntheticBackend(self._pair, info.n_ctx, paths + max(limits.branches, 1),
                                   draft=True)
        return [*super().proposers(draft), _Second(backend, self._begin, paths)]

    def _begin(self) -> None:
        self._is_second = True

    def draft_seconds(self, rows: int) -> float:
        seconds = self._seconds(rows) if self._is_second else super().draft_seconds(rows)
        self._is_second = False
        return seconds


def run(profiles: Profiles, experiment: TwoDrafts) -> tuple[Built, Result, Traced]:
    """Emulate an experiment in virtual time. Raises UsageError and PlanError."""
    built = scenarios.build(profiles, experiment)
    first, second = profiles.pair(experiment.pair), profiles.pair(experiment.second)
    if second.target != first.target:
        raise UsageError(f"{experiment.second} drafts for {second.target}, not for {first.target}")
    draft, head = profiles.model(second.draft), scenarios.ground_of(profiles, experiment).drafter
    simulation = _Simulation(
        built.scenario, scenarios.controller_of(built, experiment),
        SyntheticPair(second.acceptance, seed=experiment.prompt_seed, draft=1),
        draft_time(draft, head))
    memory = (built.memory[0] + draft_bytes(draft, experiment), *built.memory[1:])
    return replace(built, memory=memory), simulation.run(), simulation
