"""The training loop: rates, parts of a loss, budgets, interrupts."""

# ruff: noqa: E402  (skipped where a package is missing)
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pipeinfer_lab.training.minimise import Progress, Schedule, adamw, minimise


def weight():
    return torch.nn.Parameter(torch.tensor([3.0]))


def run(objective, schedule, **options):
    learnt = [weight()]
    lines = []
    losses = minimise(lambda step, spent: objective(learnt[0], step), schedule,
                      [adamw(learnt, 0.1)], [learnt], report=lines.append, **options)
    return losses, float(learnt[0].detach()), lines


def whole(parameter, step):
    del step
    yield parameter.square().sum(), 2


def halves(parameter, step):
    del step
    for _ in range(2):
        yield parameter.square().sum() / 2, 1


def test_the_rate_rises_and_falls_over_the_budget():
    line = Schedule(steps=10, warmup_steps=4)
    assert [line.rate_at(k / 10, k) for k in (0, 1, 5)] == [0.25, 0.45, 0.5]
    curve = Schedule(steps=10, cosine=True)
    assert [curve.rate_at(spent, 9) for spent in (0, 0.5, 1)] == pytest.approx([1, 0.505, 0.01])


def test_parts_of_a_loss_are_added_up():
    one, two = run(whole, Schedule(steps=5)), run(halves, Schedule(steps=5))
    assert one[0] == pytest.approx(two[0])
    assert one[1] == pytest.approx(two[1])
    assert one[0][0] == 9
    assert one[0][-1] < 9
    assert "step 5  100.0%" in one[2][-1]


def test_a_budget_in_minutes_counts_the_steps_alone():
    progress = Progress(seconds=59.0)
    spent = Schedule(minutes=1).spent(progress)
    assert spent == pytest.approx(59 / 60)
    progress.add(1.0, 5, 1.0)
    assert Schedule(minutes=1).spent(progress) == 1
    assert run(whole, Schedule(minutes=1), progress=progress)[0] == []


@pytest.mark.parametrize("interruptible", [True, False])
def test_an_interrupt_ends_only_runs_that_it_may_end(interruptible):
    saved, losses = [], []

    def objective(parameter, step):
        if step == 2:
            raise KeyboardInterrupt
        return whole(parameter, step)

    def go():
        return run(objective, Schedule(steps=5), losses=losses, save=lambda: saved.append(1),
                   interruptible=interruptible)

    if interruptible:
        assert "interrupted after step 2 of 5" in go()[2]
    else:
        with pytest.raises(KeyboardInterrupt):
            go()
    assert len(losses) == 2
    assert len(saved) == interruptible
