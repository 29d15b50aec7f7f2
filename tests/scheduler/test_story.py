"""What an error of the scheduler tells about the lanes before it."""

from __future__ import annotations

import pytest

from pipeinfer.cli import terminal
from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.messages import Decode
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Choice, Request
from pipeinfer.errors import InvariantError, ProtocolError
from pipeinfer.scheduler.events import Drafted, Enqueue, RunDone
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from tests.kit.simulated import Pipeline

LIMITS = Limits(n_ctx=400, policy=Policy.PIPEINFER, credit=4, partitions=8, exact_width=4)


def test_an_unknown_run_is_reported_with_what_its_lane_did():
    scheduler = Scheduler(LIMITS)
    said = scheduler.handle(Enqueue(Request(7, (3, 1, 4), 30)))
    run = next(one for one in said if isinstance(one, Decode))
    said = scheduler.handle(RunDone(run.run_id, (Choice(5),)))
    job = next(one for one in said if isinstance(one, StartDraft) and one.max_tokens)
    scheduler.handle(Drafted(job.job_id, (Proposal(-1, 9, 0.9),)))
    with pytest.raises(ProtocolError, match="came back twice") as caught:
        scheduler.handle(RunDone(run.run_id, (Choice(5),)))
    story = "\n".join(caught.value.story)
    lane = run.lanes[0]
    for text in ("opened", f"run {run.run_id} after -1 issued [(0, 3), (1, 1), (2, 4)]",
                 f"run {run.run_id} returned [5]", f"job {job.job_id} started at ",
                 f"job {job.job_id} proposed [9]"):
        assert f"lane {lane}: {text}" in story
    assert "issued [(4, 9)], speculative" in story


def test_of_each_lane_the_last_64_events_are_kept():
    pipeline = Pipeline(LIMITS, n_vocab=7, seed=1)
    for number in (1, 2):
        pipeline.submit(Request(number, (3, 1, 4), 60))
    pipeline.drain()
    lines = pipeline.scheduler.story.lines()
    by_lane = {line.split(":")[0] for line in lines}
    counts = {lane: sum(line.startswith(f"{lane}:") for line in lines) for lane in by_lane}
    assert len(counts) == 2
    assert set(counts.values()) == {64}
    assert lines[-1].endswith("closed")


def test_a_contradiction_in_the_state_is_printed_with_its_story(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "end_job", lambda code: None)
    scheduler = Scheduler(LIMITS, validate=True)
    scheduler.handle(Enqueue(Request(7, (3, 1, 4), 30)))
    scheduler.state.guess_rows = 5
    with pytest.raises(InvariantError) as caught:
        scheduler.handle(Enqueue(Request(8, (3, 1, 4), 30)))
    with pytest.raises(SystemExit):
        terminal.fail(caught.value)
    *before, last = capsys.readouterr().err.splitlines()
    assert before[0] == "### the last events of each lane"
    assert any("issued [(0, 3), (1, 1), (2, 4)]" in line for line in before)
    assert last.startswith("pipeinfer: error: the scheduler's state contradicts itself")
