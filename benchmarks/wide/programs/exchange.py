"""Rank program: members of one stage exchange parts of sums, beside bare MPI.

Usage: exchange.py OUT.json WIDTH ROUNDS WAYS BYTES [BYTES ...]. The first WIDTH ranks are the
members; a further one is the head and sleeps. WAYS: of messages, memory, messages:f16,
messages:bf16, bare (Sendrecv or Allgather and a sum in the same order), joined with commas. Blocks
of the ways alternate; a way's time is the median over all members' medians. `control`: seconds of
32 KB one way between the first two members, half a round trip.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from pipeinfer import host
from pipeinfer.backends.shared_team import Region, SharedTeam
from pipeinfer.backends.team import Team, TeamShape
from pipeinfer.runtime.port_team import PortTeam
from pipeinfer.transport.base import Layout
from pipeinfer.transport.mpi import MpiPort
from pipeinfer.transport.mpi_job import world
from pipeinfer.transport.mpi_startup import introduce

BLOCK = 20


def watch(_index: int) -> None:
    """Members wait as long as it takes."""


def main() -> None:
    out, width, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ways, sizes = sys.argv[4].split(","), list(map(int, sys.argv[5:]))
    comm = world()
    introduce(comm)
    rank = comm.Get_rank()
    here = comm.Split_type(MPI.COMM_TYPE_SHARED, rank)
    if rank < width:  # members have cores of their own where there are enough, as in a job
        host.widen_affinity(here.Get_rank(), min(width, here.Get_size()))
    raw = comm.Split(0 if rank < width else 1, rank)
    port = MpiPort(comm, Layout((width, *range(width))))
    if rank < width:
        measure(out, raw, port, (width, rounds, ways, sizes))
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(0.05)
    port.close(1.0)


def measure(out: Path, raw: MPI.Comm, port: MpiPort, what: tuple[int, int, list[str], list[int]]
            ) -> None:
    """All ways at all sizes."""
    width, rounds, ways, sizes = what
    me, nodes = raw.Get_rank(), range(1, width + 1)
    holders = tuple((i,) for i in range(width))
    teams: dict[str, Team] = {}
    for way in ways:
        kind = way.partition(":")[2] or "f32"
        shape = TeamShape(holders, me, kind, max(sizes) // 4)
        if way.startswith("messages"):
            teams[way] = PortTeam(shape, port, nodes, watch)
        elif way == "memory":
            region = Region.create(shape) if me == 0 else None
            name = raw.bcast(region.name if region else None)
            teams[way] = SharedTeam(shape, region or Region.open(name, shape), watch)
    found: dict[str, dict[int, float]] = {way: {} for way in ways}
    for size in sizes:
        times: dict[str, list[float]] = {way: [] for way in ways}
        part = np.ones(size // 4, np.float32)
        parts = np.empty((width, part.size), np.float32)
        for block in range(rounds // BLOCK + 1):
            for way in ways:
                raw.Barrier()
                team = teams.get(way)
                if team is not None:
                    team.begin(block, cancelled=False)
                    team.arm(None)
                    adder = team.part(me)
                for turn in range(BLOCK):
                    part[:] = 1.0
                    start = time.perf_counter()
                    if team is not None:
                        assert adder.add(part, turn)
                    else:
                        bare(raw, part, parts)
                    if block:
                        times[way].append(time.perf_counter() - start)
        for way in ways:
            middle = raw.allgather(statistics.median(times[way]))
            found[way][size] = statistics.median(middle)
    control = pingpong(raw, 32 << 10)
    if me == 0:
        out.write_text(json.dumps({"seconds": found, "control": control}))
    for team in teams.values():
        team.close()


def bare(raw: MPI.Comm, part: np.ndarray, parts: np.ndarray) -> None:
    """The same sum with blocking MPI calls and nothing else."""
    if len(parts) == 2:
        raw.Sendrecv(part, 1 - raw.Get_rank(), 0, parts[1], 1 - raw.Get_rank(), 0)
        first, second = (part, parts[1]) if raw.Get_rank() == 0 else (parts[1], part)
        np.add(first, second, out=part)
    else:
        raw.Allgather(part, parts)
        np.copyto(part, parts[0])
        for other in parts[1:]:
            part += other


def pingpong(raw: MPI.Comm, size: int) -> float:
    """Seconds of one way, the median."""
    frame, times = bytearray(size), []
    if raw.Get_rank() > 1:
        return 0.0
    for _ in range(60):
        start = time.perf_counter()
        if raw.Get_rank() == 0:
            raw.Send([frame, MPI.BYTE], 1)
            raw.Recv([frame, MPI.BYTE], 1)
        else:
            raw.Recv([frame, MPI.BYTE], 0)
            raw.Send([frame, MPI.BYTE], 0)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2


main()
