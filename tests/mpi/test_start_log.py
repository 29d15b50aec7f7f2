"""What a job says at its start."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from pipeinfer.cluster.notes import doubts_about
from pipeinfer.config import ModelConfig
from pipeinfer.core.policy import Policy
from tests.kit import launch

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
GENERATE = ["-m", "pipeinfer", "generate", "-p", "def", "-n", "4", "--temp", "0"]
FATAL = "ends the job when a rank dies"


def said(*options, **env):
    done = launch.run(3, [sys.executable, *GENERATE, *options], timeout=90, **env)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_plain_mpirun_is_told_that_a_death_ends_it_and_what_to_do():
    text = said(OMPI_MCA_mpi_ft_enable="0")
    assert FATAL in text
    assert 'eval "$(pipeinfer env)"' in text
    assert "policy pipeinfer: draft tokens come from prompt-lookup and draft.gguf" in text


def test_a_job_with_the_settings_says_nothing_of_the_kind_and_names_its_policy():
    text = said("--speculation", "off")
    assert FATAL not in text
    assert "policy iterative, token by token: --speculation off" in text


@pytest.mark.parametrize(("backend", "threads", "policy", "notes"), [
    ("torch", 2, Policy.PIPEINFER, ["one row", "-t 1"]), ("torch", 2, Policy.ITERATIVE, ["-t 1"]),
    ("torch", 1, Policy.PIPEINFER, ["one row"]), ("llamacpp", 2, Policy.ITERATIVE, []),
])
def test_a_narrow_width_is_said_and_what_may_widen_it(backend, threads, policy, notes):
    ready = {1: SimpleNamespace(backend=backend, threads=threads, gpu="")}
    found = doubts_about(ModelConfig(), SimpleNamespace(
        policy=policy, model=None), SimpleNamespace(
        terms=SimpleNamespace(exact=1), ready=ready))
    assert len(found) == len(notes)
    assert all(part in text for part, text in zip(notes, found, strict=True))
