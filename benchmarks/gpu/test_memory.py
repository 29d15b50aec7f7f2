"""Jobs on devices whose memory is too small: they are refused before they load, and survivors of a
loss as well."""

from __future__ import annotations

import socket
import sys

import pytest

from benchmarks.gpu import devices, jobs
from benchmarks.gpu.steps import StepError, child, json_lines
from benchmarks.gpu.test_padded import device_of
from tests.kit.sample import full

MIB = 1 << 20
SMALL = 46 * MIB  #: for six layers of the model with their cache and scratch, not for all twelve
WORDS = ("generate", "-m", str(jobs.TARGET), "-p", "def main(", "-n", "12", "--temp", "0", "-c",
         "512", "-t", "1", "-md", "none", "--json")


def outcome(tmp_path, ranks, memory, *more):
    """Tokens of a job, on devices with so many bytes, or the error with which it ends."""
    with device_of("rpc").open(ranks, memory) as env:
        try:
            printed = child(jobs.command(ranks, [sys.executable, "-m", "pipeinfer", *WORDS, *more]),
                            120, tmp_path / "log", jobs.job_environment(
                                env, MPIEXEC_TIMEOUT="115", PIPEINFER_CACHE=str(tmp_path)))
        except StepError as error:
            return str(error)
    return json_lines(printed)[0]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "more", "who"), [
    (1, (), "rank 0 on"), (3, ("--set", "split=equal", "-c", "4096"), "rank 2 on"),
    full(3, ("-c", "4096"), "rank 1 on"), full(3, ("--layers", "2,10"), "rank 2 on")])
def test_what_does_not_fit_a_device_is_refused_before_it_loads(tmp_path, ranks, more, who):
    error = outcome(tmp_path, ranks, SMALL, "-ngl", "99", *more)
    assert "exit status 4" in error
    assert f"{who} " in error
    assert "its GPUs (127.0.0.1:" in error
    assert "but has 46 MiB: it lacks" in error
    assert "use a lower -ngl" in error
    assert list(tmp_path.glob("**/*.gguf")) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, full(3)])
def test_some_layers_fit(tmp_path, ranks):
    assert isinstance(outcome(tmp_path, ranks, SMALL, "-ngl", "5"), list)
    error = outcome(tmp_path, ranks, 33 * MIB, "-ngl", "5")
    assert "its GPUs (127.0.0.1:" in error
    assert "layers there need" in error
    assert "but 33 MiB are free: use a lower -ngl" in error


@pytest.mark.slow
def test_the_survivors_of_a_loss_are_refused_what_their_device_cannot_hold(tmp_path):
    error = outcome(tmp_path, 3, SMALL, "-ngl", "99", "--set", "split=equal", "--hook",
                    "fault=kill@2:decode=4")
    assert "exit status 6" in error
    assert "its GPUs (127.0.0.1:" in error
    assert "cannot hold the model" in error
    assert "they have 46 MiB together" in error
    assert "use a lower -ngl" in error


@pytest.mark.slow
def test_a_server_whose_port_another_program_has_taken_gets_another_port(monkeypatch):
    """The rank of that port would speak to that program, and die."""
    device, choices = device_of("rpc"), []
    choose = devices._free_ports
    with socket.socket() as other:

        def taken_at_first(count):
            choices.append(choose(count))
            if len(choices) == 1:
                other.bind(("127.0.0.1", choices[0] + 1))
                other.listen()
            return choices[-1]

        monkeypatch.setattr(devices, "_free_ports", taken_at_first)
        with device.open(2) as env:
            assert len(choices) == 2
            assert env["PIPEINFER_RPC_PORT"] == str(choices[1])


@pytest.mark.slow
def test_what_is_measured_on_a_device_is_not_taken_for_another_ones(tmp_path):
    """The name of an RPC device is its address."""
    counts = []
    for _ in range(2):
        assert isinstance(outcome(tmp_path, 1, 0, "-ngl", "99", "--set", "pad=2"), list)
        counts.append(len(list(tmp_path.glob("**/padding-*"))))
    assert counts[1] > counts[0] > 0
