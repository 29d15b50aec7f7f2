"""A switch of namespaces that delays and loses frames, where the kernel has no netem.

    python bad_wires.py --delay SECONDS --loss SHARE NAMESPACE [NAMESPACE ...]

Every namespace gets a card eth0 (a TAP device) whose frames this process carries to the others:
each waits for the delay, and some are lost, drawn with a fixed seed. The cards are gone with the
process. Prints a line once they are there, and ends when
its standard input does. Knows nothing about nodes, rates and models.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import time
from pathlib import Path

_TUNSETIFF, _TAP, _NO_HEADER, _CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
_FRAME, _MOST_WAITING = 2048, 20_000  #: bytes of a frame; frames on their way, as a queue has


def card(space: Path) -> int:
    """A descriptor of a new card eth0 of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(space, os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _NO_HEADER))
        if libc.setns(home, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot leave the namespace")
    finally:
        os.close(home)
        os.close(there)
    return tap


def carry(cards: list[int], delay: float, loss: float) -> None:
    """Carry frames until standard input ends."""
    poll, rng = select.poll(), random.Random(1)
    poll.register(0, select.POLLIN)
    for number in cards:
        poll.register(number, select.POLLIN)
    place: dict[bytes, int] = {}  # the card behind which an address was seen
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(waiting)
            try:
                os.write(target, frame)
            except OSError:  # the card is down, or full
                continue
        rest = 1000.0 * (waiting[0][0] - now) if waiting else None
        for number, _ in poll.poll(rest):
            if number == 0:
                return  # whoever started this is gone
            try:
                frame = os.read(number, _FRAME)
            except OSError:
                continue
            place[frame[6:12]] = number
            known = place.get(frame[:6])
            for target in [known] if known is not None else cards:
                if target != number and rng.random() >= loss and len(waiting) < _MOST_WAITING:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + delay, count, target, frame))


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("spaces", nargs="+", type=Path)
    given = parser.parse_args()
    cards = [card(space) for space in given.spaces]
    print("ready", flush=True)
    carry(cards, given.delay, given.loss)


if __name__ == "__main__":
    main()
