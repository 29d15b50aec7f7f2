"""Rank program (2 ranks): a run with activations there and back, beside bare MPI.

Usage: hop.py OUT.json ROUNDS ROWS WIDTH. Both are ping-pongs of the same bytes in one job,
alternating in blocks; round trips are halved.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from pipeinfer.core.codec import encode
from pipeinfer.core.messages import Decode, Tag
from pipeinfer.core.types import make_rows
from pipeinfer.transport.base import Layout
from pipeinfer.transport.mpi import MpiPort
from pipeinfer.transport.mpi_job import world
from pipeinfer.transport.mpi_startup import introduce


def main() -> None:
    out, rounds, n_rows, width = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    comm = world()
    introduce(comm)
    raw = comm.Dup()
    rank = comm.Get_rank()
    port = MpiPort(comm, Layout((0, 1)))
    rows = make_rows([(i, i, (0,), True) for i in range(n_rows)])
    hidden = np.random.default_rng(0).random((n_rows, width), np.float32)
    message = Decode(1, 0, rows, (0,) * n_rows, hidden=hidden)
    size = len(encode(message))
    frame = bytearray(size)
    times: dict[str, list[float]] = {"pipeinfer": [], "bare": [], "bare_probe": []}

    def product() -> None:
        if rank == 0:
            port.send(1, Tag.TRANSACTION, message)
        received = None
        while received is None:
            received = port.take(Tag.TRANSACTION)
            if received is None:
                port.wait(1.0)
        got = received.message
        assert isinstance(got, Decode)
        if rank == 1:
            port.send(0, Tag.TRANSACTION, Decode(1, 0, got.rows, got.lanes, hidden=got.hidden))

    def bare() -> None:
        if rank == 0:
            raw.Send([frame, MPI.BYTE], 1)
            raw.Recv([frame, MPI.BYTE], 1)
        else:
            raw.Recv([frame, MPI.BYTE], 0)
            raw.Send([frame, MPI.BYTE], 0)

    def bare_probe() -> None:
        if rank == 0:
            raw.Send([frame, MPI.BYTE], 1)
        matched = raw.Mprobe(1 - rank)
        buffer = bytearray(size)
        matched.Recv([buffer, MPI.BYTE])
        if rank == 1:
            raw.Send([buffer, MPI.BYTE], 0)

    for block in range(rounds // 50 + 1):
        for name, ping in (("pipeinfer", product), ("bare", bare), ("bare_probe", bare_probe)):
            raw.Barrier()
            for _ in range(50):
                start = time.perf_counter()
                ping()
                if block:
                    times[name].append((time.perf_counter() - start) / 2)
    if rank == 0:
        out.write_text(json.dumps({
            "bytes": size, **{k: sorted(v)[len(v) // 2] for k, v in times.items()}}))
    port.close(1.0)


main()
