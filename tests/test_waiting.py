"""How long threads wait for one another before they sleep."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeinfer import waiting

POLICY, LOOKS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"


@pytest.mark.parametrize(("each_ns", "expected"), [
    (25.0, 600), (50.0, 300), (4.0, 3750), (1e-3, 100_000), (1e6, 100), (None, 1_000), (0.0, 1_000),
])
def test_the_bound_is_a_time_whatever_a_look_takes(each_ns, expected):
    assert waiting.looks(each_ns) == expected


def test_a_look_is_measured_where_the_c_part_is():
    length = waiting.look_ns()
    if length is None:
        pytest.skip("the C part was not compiled")
    assert 0.1 < length < 1_000


@pytest.mark.parametrize(("given", "policy", "looks"), [
    ({}, "active", "600"),
    ({LOOKS: "7"}, "active", "7"),
    ({POLICY: "passive"}, "passive", None),
    # what the process that started this one has measured, maybe on another host
    ({POLICY: "active", LOOKS: "99", "PIPEINFER_SPINCOUNT": "99"}, "active", "600"),
    ({POLICY: "active", LOOKS: "7", "PIPEINFER_SPINCOUNT": "99"}, "active", "7"),
])
def test_what_the_environment_says_is_kept(monkeypatch, given, policy, looks):
    monkeypatch.setattr(waiting, "look_ns", lambda: 25.0)
    environment = dict(given)
    waiting.bound_waiting(environment)
    assert environment.get(POLICY) == policy
    assert environment.get(LOOKS) == looks


def test_it_is_set_with_the_package():
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("OMP_", "GOMP_", "KMP_", "PIPEINFER_SPIN"))}
    said = subprocess.run(
        [sys.executable, "-c", f"import os, pipeinfer; print(os.environ['{POLICY}'], "
         f"os.environ['{LOOKS}'])"],
        env=env, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert said[0] == "active"
    assert 100 <= int(said[1]) <= 100_000
