"""docs/getting-started.md: every command that can run in a namespace is run, in order."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.rig.namespaces import ROOT, Cluster

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PAGE = Path(ROOT) / "docs" / "getting-started.md"
EMBEDDED = Path(ROOT) / "pipeinfer" / "models" / "embedded"
#: what cannot run here, and why
EXEMPT = {
    "sudo ": "changes this machine",
    "ssh-keygen ": "the namespaces have keys",
    "ssh-copy-id ": "the namespaces have keys",
    "git clone ": "the hosts share this checkout",
    "cd ~/pipeinfer && ./launch/demo": "installing is tested elsewhere",
}
RUN = 8  #: commands that are left


def commands():
    """The page's commands without their comments."""
    blocks = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line.split("  #")[0].rstrip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def wanted():
    return [line for line in commands() if not line.startswith(tuple(EXEMPT))]


def test_each_exemption_is_of_a_command_on_the_page():
    for start in EXEMPT:
        assert any(line.startswith(start) for line in commands()), start
    assert len(wanted()) == RUN


@pytest.mark.full("the same launcher over hosts in tests/namespaces/test_namespaces.py")
def test_a_newcomer_gets_from_two_machines_to_a_chat(tmp_path):
    lab, models, cache = (tmp_path / name for name in ("work", "work/models", "cache"))
    for folder in (lab, models, cache):
        folder.mkdir(mode=0o700)
    (models / "big.gguf").write_bytes((EMBEDDED / "target.gguf").read_bytes())
    env = {"PIPEINFER_CACHE": str(cache),
           "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with Cluster(2, private=(models, cache)) as cluster:  # the second host has no model
        key = cluster.environment()["PIPEINFER_SSH_ARGS"]

        def typed(line):
            line = line.replace("old1", "node1").replace("old2", "node2")
            line = re.sub(r"^ssh ", f"ssh {key} ", line)
            line = line.replace("big.gguf", "models/big.gguf")
            return line.replace("launch/ssh", f"{ROOT}/launch/ssh")

        def shell(line, timeout=60):
            done = cluster.run(["sh", "-c", f"cd {lab} && {typed(line)}"], timeout=timeout, **env)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            return done.stdout + done.stderr

        said, server = {}, None
        try:
            for line in wanted():
                if line.startswith("launch/ssh"):
                    server = cluster.start(["sh", "-c", f"cd {lab} && exec {typed(line)}"],
                                           timeout=150, **env)
                    await_health(cluster, server)
                elif line.startswith("pipeinfer chat"):
                    said[line] = shell(f"echo Hello | {line}")
                else:
                    said[line] = shell(line)
        finally:
            cluster.kill_jobs()
            if server is not None:
                out, err = server.communicate(timeout=20)

    def answer(start):
        (text,) = [text for line, text in said.items() if line.startswith(start)]
        return text

    assert answer("ssh ").strip() == "node2"
    assert "node1" in answer("pipeinfer doctor")
    assert "node2" in answer("pipeinfer doctor")
    assert "12 layers" in answer("pipeinfer plan")
    reply = json.loads(answer("curl"))
    assert "choices" in reply, reply
    assert reply["choices"][0]["message"]["content"]
    assert answer("pipeinfer chat").strip()
    assert "with 2 stages" in err, out + err


def await_health(cluster, server):
    """Until the server is ready."""
    deadline = time.monotonic() + 90
    while True:
        done = cluster.run(["curl", "-sf", "http://127.0.0.1:8080/health"], timeout=20)
        if done.returncode == 0 and "ok" in done.stdout:
            return
        assert server.poll() is None, server.communicate()
        assert time.monotonic() < deadline, "the server is not ready"
        time.sleep(0.3)
