"""Requests that schemathesis makes, against the HTTP process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeinfer.models.locate import EMBEDDED
from pipeinfer.server.frames import Refused
from tests.kit.sample import full
from tests.kit.server_peer import front

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def sent(url, folder, examples, *more):
    """Send so many requests an operation; return the report and its exit status. folder: for what
    failed, which schemathesis would send again."""
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "--config-file", HERE / "malformed.toml", "run",
         f"{url}/openapi.json", "-n", str(examples), "--seed", "1", "--no-color",
         "--generation-database", "none", *more],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])}, cwd=folder,
        capture_output=True, text=True, check=False, timeout=280)
    return done.stdout + done.stderr, done.returncode


@pytest.mark.parametrize("examples", [8, full(40)])
def test_no_malformed_request_brings_a_500_or_an_undescribed_answer(examples, tmp_path):
    with front(EMBEDDED / "target.gguf", queue=200) as server:
        report, status = sent(server.url, tmp_path, examples)
        text = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).json()
    assert status == 0, report
    assert "✅ Fuzzing" in report
    assert text["choices"][0]["finish_reason"] == "stop"


def test_what_is_wrong_would_be_noticed(tmp_path):
    with front(EMBEDDED / "target.gguf") as server:
        server.peer.answer = lambda frame: [Refused(frame.id, "no such kind", "a bug")]
        report, status = sent(
            server.url, tmp_path, 8, "--include-path", "/v1/completions", "--no-shrink")
    assert status == 1, report
    assert "Server error" in report
