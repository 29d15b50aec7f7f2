"""Rank program: do large sends move while their sender computes? Usage: overlap.py OUT.json MB.

Ranks 0 and 1: rank 0 sends a run with that many megabytes of activations and then computes for
300 ms without entering MPI; rank 1 notes when it arrives (both clocks are this host's). Then all
four ranks: head and three stages of 30 ms each, asleep outside MPI because three do not fit two
cores, with such activations, 30 runs, several in flight. Rank 0 writes the arrival times, the
throughput, and every stage's runs for a picture.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipeinfer.backends.base import Capabilities, ShardInfo
from pipeinfer.core.control import PortName, Progress, Report
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Decode, LaneOpen, RunFinished, Shutdown, Tag
from pipeinfer.core.types import FloatArray, Rows, SamplingParams, make_rows
from pipeinfer.lab.faults.paced import PacedBackend
from pipeinfer.runtime.stage import Stage
from pipeinfer.transport.base import Layout
from pipeinfer.transport.mpi import MpiPort
from pipeinfer.transport.mpi_job import world
from pipeinfer.transport.mpi_startup import introduce

STAGE_SECONDS = 0.030
RUNS, CREDIT, N_ROWS = 30, 5, 16


class Width:
    """A backend that only has the right sizes."""

    capabilities = Capabilities(True, False, False, True)

    def __init__(self, node: int, width: int) -> None:
        self.info = ShardInfo("none", (node - 1, node), 3, node == 1, node == 3, width, 8, 4096, 2,
                              64, 0, 0)

    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray:
        del should_stop
        if self.info.last:
            return np.zeros((len(rows), 8), np.float32)
        return np.zeros((len(rows), self.info.n_embd), np.float32) if hidden is None else \
            hidden.copy()

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None: ...
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None: ...
    def seq_keep(self, seq_id: int) -> None: ...
    def close(self) -> None: ...


def burn(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def main() -> None:
    out, width = Path(sys.argv[1]), int(float(sys.argv[2]) * 2**20) // (4 * N_ROWS)
    comm = world()
    introduce(comm)
    rank = comm.Get_rank()
    port = MpiPort(comm, Layout(tuple(range(comm.Get_size()))))
    rows = make_rows([(i, i, (0,), True) for i in range(N_ROWS)])
    lanes = (0,) * N_ROWS
    arrivals = []
    for _ in range(8):
        comm.Barrier()
        if rank == 0:
            port.send(1, Tag.TRANSACTION, Decode(
                0, -1, rows, lanes, hidden=np.ones((N_ROWS, width), np.float32)))
            sent = time.time()
            burn(0.3)
            answer = await_message(port, Tag.RESULT)
            assert isinstance(answer, Progress)
            arrivals.append(answer.done / 1e9 - sent)
        elif rank == 1:
            await_message(port, Tag.TRANSACTION)
            port.send(0, Tag.RESULT, Progress(PortName(1), "arrived", time.time_ns(), 0))
    comm.Barrier()
    if rank:
        backend = PacedBackend(Width(rank, width), lambda _rows: STAGE_SECONDS)
        Stage(port, Grid.plain(3), backend, trace=True).serve()
        port.close(5.0)
        return
    port.send(1, Tag.TRANSACTION, LaneOpen(0, SamplingParams()))
    start, done, sent_runs = time.time(), [], 0
    while len(done) < RUNS:
        while sent_runs < RUNS and sent_runs - len(done) < CREDIT:
            port.send(1, Tag.TRANSACTION, Decode(sent_runs, -1, rows, lanes))
            sent_runs += 1
        answer = await_message(port, Tag.RESULT)
        assert isinstance(answer, RunFinished)
        done.append(time.time() - start)
    port.send(1, Tag.TRANSACTION, Shutdown())
    reports = {}
    while len(reports) < 3:
        notice = await_message(port, Tag.RESULT)
        assert isinstance(notice, Report)
        reports[notice.port.stage] = notice.figures()
    steady = np.diff(done[5:])
    out.write_text(json.dumps({
        "bytes": N_ROWS * width * 4, "arrivals": arrivals, "run_seconds": float(np.median(steady)),
        "stage_seconds": STAGE_SECONDS, "reports": reports}))
    port.close(5.0)


def await_message(port: MpiPort, tag: Tag) -> object:
    deadline = time.monotonic() + 30
    while (envelope := port.take(tag)) is None:
        port.wait(0.1)
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came on {tag.name}")
    return envelope.message


main()
