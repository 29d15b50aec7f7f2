"""A model on a network disk whose server is gone: a signal ends a command that waits for it."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys

import pytest

_FORCE = 1  #: umount2's MNT_FORCE


@pytest.fixture
def dead_disk(tmp_path):
    """A mounted file system that answers nothing: who looks for a file there can be killed and not
    interrupted, as on a network disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no /dev/fuse here")
    where = tmp_path / "disk"
    where.mkdir()
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"dead", os.fsencode(where), b"fuse", 0, options.encode()):
        os.close(device)
        pytest.skip(f"cannot mount here: {os.strerror(ctypes.get_errno())}")
    unique, = struct.unpack_from("<8xQ", os.read(device, 1 << 17))  # the kernel introduces itself
    hello = struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 1, 1, 4096, 1, 0, 0, *[0] * 8)
    os.write(device, struct.pack("<IiQ", 16 + len(hello), 0, unique) + hello)
    yield str(where)
    os.close(device)  # which ends what waits for it
    libc.umount2(os.fsencode(where), _FORCE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("option", ["-m", "-md"])
def test_one_signal_ends_a_command_that_waits_for_a_dead_disk(dead_disk, number, option):
    with subprocess.Popen(
            [sys.executable, "-m", "pipeinfer", "generate", option, f"{dead_disk}/some.gguf",
             "-p", "x", "-n", "4"], stderr=subprocess.PIPE, text=True,
            # who starts tests in the background lets them ignore Ctrl-C
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        try:
            line = next(line for line in process.stderr if "still waiting for the disk of" in line)
            assert dead_disk in line
            process.send_signal(number)
            assert process.wait(20) != 0
        finally:
            process.kill()
