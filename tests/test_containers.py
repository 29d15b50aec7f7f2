"""The files of launch/container: they fit together, and the image's entry does what it says.

Docker is not needed; docs/containers.md says what was run with the image's files.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "launch" / "container"
HOSTS = [line.split()[0] for line in (FOLDER / "hosts").read_text().splitlines()]


def read(name):
    return [one for one in yaml.safe_load_all((FOLDER / name).read_text()) if one]


def test_each_host_of_the_file_is_a_container_that_starts_before_the_head():
    services = read("compose.yaml")[0]["services"]
    assert [*services] == ["key", *HOSTS[1:], HOSTS[0]]
    for name in HOSTS:
        assert services[name]["hostname"] == name
        assert "cluster" in services[name]["networks"]
    head = services["head"]
    assert head["command"][:2] == ["head", "serve"]
    waits = {name: how["condition"] for name, how in head["depends_on"].items()}
    assert waits == {"key": "service_completed_successfully"} | dict.fromkeys(
        HOSTS[1:], "service_healthy")
    assert all(port.startswith("127.0.0.1:") for port in head["ports"])


def test_each_pod_is_a_host_of_the_list():
    found = {(one["kind"], one["metadata"]["name"]): one
             for one in read("kubernetes/statefulset.yaml")}
    pods = found["StatefulSet", "pipeinfer"]["spec"]
    lines = found["ConfigMap", "pipeinfer-hosts"]["data"]["hosts"].splitlines()
    assert lines == [f"pipeinfer-{i} slots=1" for i in range(pods["replicas"])]
    assert ("Service", pods["serviceName"]) in found
    pod = pods["template"]["spec"]
    assert pod["dnsConfig"]["searches"] == [f"{pods['serviceName']}.default.svc.cluster.local"]
    (container,) = pod["containers"]
    (where,) = (one["value"] for one in container["env"] if one["name"] == "PIPEINFER_HOSTS")
    assert where.rpartition("/")[0] in {one["mountPath"] for one in container["volumeMounts"]}


def test_what_the_image_copies_is_there_and_not_ignored():
    text = (FOLDER / "Dockerfile").read_text()
    kept = re.findall(r"^!(.+)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.M)
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M)
              for word in line.split()[:-1] if not word.startswith("--") and word != "."]
    assert len(copied) == 4
    for name in [*copied, *kept]:
        assert (ROOT / name).exists(), name
    for name in copied:
        assert any(fnmatch.fnmatch(name, f"{one}*") for one in kept), name


def entry(folder, *words, **env):
    """Run the entry with the programs of `folder` first on PATH."""
    return subprocess.run([str(FOLDER / "entry"), *words], capture_output=True, text=True,
                          check=False, timeout=30, stdin=subprocess.DEVNULL,
                          env={"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder),
                               "PIPEINFER_KEY": str(folder / "id"), **env})


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen")
def test_the_head_waits_for_hosts_and_starts_without_those_that_do_not_answer(tmp_path):
    """`ssh` and `pipeinfer` are stand-ins that write down how they were called."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / "hosts").write_text("# mine\nhere slots=1\none slots=1\ntwo.example slots=1\n")
    program(tmp_path / "hostname", "echo here")
    program(tmp_path / "ssh", 'echo "$1" >>"$HOME/asked"; [ "$1" = one ]')
    program(tmp_path / "pipeinfer", 'echo "$@"')
    for _ in range(2):
        assert entry(tmp_path, "key").returncode == 0
    done = entry(tmp_path, "head", "serve", "-m", "x", PIPEINFER_WAIT="2",
                 PIPEINFER_HOSTS=str(tmp_path / "hosts"))
    assert done.stdout == f"up --hosts {tmp_path}/hosts -- serve -m x\n"
    assert done.stderr == "entry: two.example does not answer: starting without it\n"
    asked = (tmp_path / "asked").read_text().split()
    assert asked[0] == "one"
    assert set(asked[1:]) == {"two.example"}
    public = (tmp_path / ".ssh" / "authorized_keys").read_text()
    assert public.split()[:2] == (tmp_path / "id.pub").read_text().split()[:2]
    assert (tmp_path / ".ssh" / "known_hosts").read_text() == f"* {public}"
    assert (tmp_path / ".ssh" / "id").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_other_words_are_a_command_and_only_the_first_pod_is_the_head(tmp_path):
    assert entry(tmp_path, "echo", "a", "b").stdout == "a b\n"
    program(tmp_path / "entry", 'echo "$@"')
    for name, words in (("pipeinfer-0", "head serve"), ("pipeinfer-10", "host")):
        program(tmp_path / "hostname", f"echo {name}")
        assert entry(tmp_path, "pod", "serve").stdout == f"{words}\n"
