"""The head's own source for a machine with another version."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import zipfile

import pytest
from msgspec import structs

from pipeinfer.errors import ProtocolError
from pipeinfer.supervise.join import source
from pipeinfer.supervise.join.agent import JoinRefused
from tests.kit.launch import ROOT
from tests.supervise.join.world import HEAD, OFFER, anyone

pytestmark = pytest.mark.anyio


@pytest.fixture
def checkout(tmp_path):
    """A small one, with what must not leave the machine."""
    root = tmp_path / "head"
    for name, text in {"launch/join": "echo joins \"$@\"; echo $PIPEINFER_PYTHON$PYTHONPATH",
                       "pipeinfer/host.py": "x = 1", "pipeinfer/a/b.gguf": "w" * 200_000,
                       "pipeinfer/_c.abi3.so": "made", "setup.cfg": "[metadata]",
                       ".git/config": "secret", ".venv/bin/python": "", "notes.txt": "own"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def own_source(monkeypatch, checkout):
    """The head has that checkout."""
    monkeypatch.setattr(source.archive, "__defaults__", (checkout,))
    return checkout


def test_an_archive_holds_the_source_and_nothing_else(checkout):
    with zipfile.ZipFile(io.BytesIO(source.archive(checkout))) as packed:
        assert sorted(packed.namelist()) == [
            "launch/join", "pipeinfer/a/b.gguf", "pipeinfer/host.py", "setup.cfg"]


def test_this_checkout_can_be_given(tmp_path):
    launcher = source.unpack(source.archive(), tmp_path)
    assert launcher.read_bytes() == (ROOT / "launch" / "join").read_bytes()
    assert (tmp_path / "constraints.txt").exists()
    code = "from pipeinfer import host; print(host.package_digest())"
    found = [subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True,
                            env=os.environ | {"PYTHONPATH": str(folder)}, text=True, check=True)
             for folder in (ROOT, tmp_path)]
    assert found[0].stdout == found[1].stdout  # so the head lets it in


def test_a_newer_source_takes_the_place_of_the_one_before_and_keeps_its_environment(
        checkout, tmp_path):
    folder = tmp_path / "member"
    source.unpack(source.archive(checkout), folder)
    (folder / ".venv").mkdir()
    (checkout / "pipeinfer" / "host.py").unlink()
    source.unpack(source.archive(checkout), folder)
    assert not (folder / "pipeinfer" / "host.py").exists()
    assert (folder / ".venv").exists()


def test_no_archive_reaches_beyond_its_folder(tmp_path):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:
        for name in ("../out", "/out", "launch/../../out"):
            packed.writestr(name, "x")
    source.unpack(made.getvalue(), tmp_path / "in")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ProtocolError, match="no archive"):
        source.unpack(b"PK", tmp_path / "in")


async def test_a_machine_with_another_version_gets_the_heads_source(world, own_source):
    agent = world.agent(offer=structs.replace(OFFER, digest="other"))
    with pytest.raises(JoinRefused, match="join --same-version` takes the head's") as found:
        await agent.run()
    assert found.value.version
    assert await agent.source("other") == ("d", source.archive(own_source))
    await world.until(lambda: not world.server._open)
    await world.joined()  # with the head's version


async def test_the_same_source_is_not_taken_again(world, own_source):
    """Else a machine whose launcher differs would install without end."""
    with pytest.raises(JoinRefused, match="what differs is not pipeinfer's own"):
        await world.agent().source(OFFER.digest)


async def test_a_head_without_source_names_the_package(world, own_source):
    (own_source / "launch" / "join").unlink()
    with pytest.raises(JoinRefused, match="pip install pipeinfer==1"):
        await world.agent().source("other")


async def test_strangers_and_members_get_no_source(world, own_source):
    reader, writer = await asyncio.open_connection(HEAD, world.port, ssl=anyone())
    writer.write(b'{"is":"sourcewanted"}\n')
    assert b"PK" not in await reader.read()
    writer.close()
    agent, task = await world.joined()
    agent._writer.write(b'{"is":"sourcewanted"}\n')
    await world.until(lambda: not world.server.present)  # the connection ends
    await world.leaves(agent, task)


def test_the_command_goes_on_with_the_heads_launcher(checkout, tmp_path):
    """In a process of its own, since it replaces itself."""
    (tmp_path / "archive").write_bytes(source.archive(checkout))
    code = ("import sys, pathlib; from pipeinfer.supervise.join import commands\n"
            f"commands._join_with(pathlib.Path({str(tmp_path / 'archive')!r}).read_bytes(), "
            f"pathlib.Path({str(tmp_path / 'member')!r}))")
    done = subprocess.run(
        [sys.executable, "-c", code, "join", "10.0.0.1", "--token-file", "T", "--same-version",
         "--token-file=T", "--threads", "3"], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines() == ["joins 10.0.0.1 --same-version --threads 3",
                                        sys.executable]
