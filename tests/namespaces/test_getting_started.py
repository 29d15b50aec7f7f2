"""docs/getting-started.md: every command that can run in a namespace is run, in order."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.kit.namespaces import ROOT, Cluster

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PAGE = Path(ROOT) / "docs" / "getting-started.md"
EMBEDDED = Path(ROOT) / "pipeinfer" / "models" / "embedded"
#: what cannot run here: it changes this machine; the machines share this checkout
EXEMPT = ("sudo ", "git clone ")
RUN = 3  #: commands that are left


def commands():
    """The page's commands without their comments."""
    blocks = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line.split("  #")[0].rstrip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def wanted():
    return [line for line in commands() if not line.startswith(EXEMPT)]


def test_each_exemption_is_of_a_command_on_the_page():
    for start in EXEMPT:
        assert any(line.startswith(start) for line in commands()), start
    assert len(wanted()) == RUN


@pytest.mark.full("the same commands in tests/namespaces/test_join.py")
def test_a_newcomer_gets_from_two_machines_to_a_chat(tmp_path):
    lab, cache = tmp_path / "work", tmp_path / "cache"
    for folder in (lab, cache):
        folder.mkdir(mode=0o700)
    (lab / "big.gguf").write_bytes((EMBEDDED / "target.gguf").read_bytes())
    env = {"PIPEINFER_CACHE": str(cache),
           "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    up, join, chat = wanted()
    # the second machine has no model, and its token comes without a terminal
    with Cluster(2, private=(lab, cache), sshd=False, host_name="debian") as cluster:
        def start(node, line, **more):
            line = line.replace("~/pipeinfer", str(ROOT))
            line = line.replace("192.168.1.11", cluster.address(1))
            return cluster.start(
                ["sh", "-c", f"cd {lab} && {line} 2>>{lab}/said"], timeout=150, node=node,
                PIPEINFER_STATE=str(tmp_path / f"state{node}"), **env, **more)

        def until(text):
            deadline = time.monotonic() + 90
            while text not in (lab / "said").read_text():
                assert time.monotonic() < deadline, (lab / "said").read_text()
                time.sleep(0.1)

        (lab / "said").touch()
        start(1, up)
        until("on each other machine: launch/join ")
        token = start(1, "pipeinfer tokens --new").stdout.read().split()[-1]
        start(2, join, PIPEINFER_JOIN_TOKEN=token)
        until("is moved to 2 ranks: ready again")  # so small a model is faster on one
        said = start(1, f"echo Hello | {chat}").stdout.read()
    assert said.strip()
