"""Arrangements for several users: what `pipeinfer plan --clients` compares."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pipeinfer.cli.plan import plan_command
from pipeinfer.emulation.profiles import load_profiles
from pipeinfer.emulation.wide import WideExperiment
from pipeinfer.errors import PlanError
from pipeinfer.forecast import for_clients
from tests.kit.launch import ROOT

PROFILES = load_profiles(None)


def compare(clients, **more):
    return for_clients.compare(PROFILES, WideExperiment(
        "c", "dolphin-tinyllama", **{"nodes": 8} | more), clients)


def test_one_user_gains_from_wide_stages_and_many_on_a_slow_link_from_copies():
    fast, slow = compare(16), compare(16, link="gigabit")
    assert fast.users == slow.users == (1, 16)
    assert fast.best(0).name == slow.best(0).name == "grid 1x8"
    assert fast.best(1).name == "grid 2x4"
    assert slow.best(1).name == "a copy on each of 8 hosts"
    alone, copies = fast.rows[:2]
    assert copies.speeds[0] == alone.speeds[0]  # one user has one copy
    assert copies.speeds[1] == pytest.approx(8 * compare(2).rows[0].speeds[1])


def test_a_model_that_no_host_holds_has_neither_one_host_nor_copies():
    profiles = load_profiles(ROOT / "benchmarks" / "paper" / "today.toml")
    found = for_clients.compare(profiles, WideExperiment("minis", "qwen3-30b"), 4)
    assert [row.name for row in found.rows] == ["pipeline 2x1", "grid 1x2"]
    with pytest.raises(PlanError, match="3 hosts of desktops do not hold the model"):
        for_clients.compare(profiles, WideExperiment("desktops", "glm-air"), 4)


def test_the_command():
    words = ["--clients", "8", "--cluster", "c", "--hosts", "4", "--pair", "dolphin-tinyllama"]
    done = CliRunner().invoke(plan_command, words)
    assert done.exit_code == 0, done.output
    assert "for both alike, as `serve --parallel 8` plans: grid" in done.output
    found = json.loads(CliRunner().invoke(plan_command, [*words, "--json"]).output)
    assert found["users"] == [1, 8]
