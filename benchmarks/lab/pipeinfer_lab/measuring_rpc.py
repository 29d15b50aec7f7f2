"""llama.cpp's own programs on the hosts of a job, for `pipeinfer measure`: its RPC over several
hosts, one process on one host.

All ranks take part before the job loads its model. Each host runs one worker with all its cores,
which listens only on the address by which it reaches rank 0. Knows no command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from pipeinfer import host
from pipeinfer.cli.measuring import PROMPTS, Baseline, Host
from pipeinfer.errors import ClusterError, UsageError
from pipeinfer.host import Place
from pipeinfer.supervise.join.offers import own_addresses

BENCH = "llama-bench"
_WORKERS = ("ggml-rpc-server", "rpc-server")  #: today's name, and the one before it
_TOKENS = 32
_MEET, _START, _RUN = 30.0, 30.0, 400.0  #: seconds; the last for loading over the network, too
_VARIABLES = ("OMP_", "GOMP_", "KMP_")  #: those of the job's launcher


class HeadAddress(Struct, frozen=True):
    """Rank 0: where it can be reached, and the ranks that start a worker, one on each host."""

    addresses: tuple[str, ...]
    port: int
    ranks: tuple[int, ...]


class Worker(Struct, frozen=True):
    """A rank: its worker's address and port, "" for none; or why there is none."""

    end: str = ""
    failure: str = ""


def find(folder: Path) -> None:
    """Raise UsageError unless rank 0 has llama-bench in `folder`."""
    if not (folder / BENCH).is_file():
        raise UsageError(f"--programs {folder}: there is no {BENCH}; build llama.cpp with "
                         "-DGGML_RPC=ON, and have its programs there on every host")


def measure(place: Place, folder: Path, model: Path, hosts: Sequence[Host]) -> Baseline | None:
    """Measure, on all ranks; only rank 0 gets something.

    hosts: of `measuring.surroundings`, which ranks above 0 do not need.
    Raises ClusterError with what a program wrote, RankLost, TransportTimeout.
    """
    if place.comm is None or (place.rank == 0 and len(hosts) == 1):
        found = _bench(folder, model, ())
        _release(place)
        return found
    if place.rank == 0:
        return _lead(place, folder, model, hosts)
    _follow(place, folder)
    return None


def _lead(place: Place, folder: Path, model: Path, hosts: Sequence[Host]) -> Baseline:
    from pipeinfer.transport import mpi_job

    ranks = tuple(one.ranks[0] for one in hosts)
    with contextlib.ExitStack() as stack:
        stack.callback(_release, place)
        listener = stack.enter_context(socket.create_server(("", 0), backlog=len(ranks)))
        text = msgspec.json.encode(
            HeadAddress(tuple(own_addresses()), listener.getsockname()[1], ranks)).decode()
        for rank in range(1, place.size):
            mpi_job.send_json(place.comm, rank, text)
        own = _started(stack, folder, lambda: "127.0.0.1")
        texts = mpi_job.gather_json(place.comm, msgspec.json.encode(own).decode(),
                                        2 * _MEET + _START)
        workers = [msgspec.json.decode(one, type=Worker) for one in texts or ()]
        for rank, one in enumerate(workers):
            if one.failure:
                raise ClusterError(f"rank {rank}: {one.failure}")
        return _bench(folder, model, [one.end for one in workers if one.end])


def _follow(place: Place, folder: Path) -> None:
    from pipeinfer.transport import mpi_job

    text = mpi_job.receive_json(place.comm, 0, _RUN + _START)
    if not text:  # one host
        return
    head = msgspec.json.decode(text, type=HeadAddress)
    with contextlib.ExitStack() as stack:
        found = Worker()
        if place.rank in head.ranks:
            found = _started(stack, folder, lambda: _towards(head))
        mpi_job.send_json(place.comm, 0, msgspec.json.encode(found).decode())
        mpi_job.receive_json(place.comm, 0, _RUN + _START + 3 * _MEET)


def _started(stack: contextlib.ExitStack, folder: Path, address: Callable[[], str]) -> Worker:
    """Start a worker that ends with `stack`, or say why there is none: rank 0 waits for a word of
    every rank."""
    try:
        return stack.enter_context(worker(folder, address(), os.cpu_count() or 1))
    except (ClusterError, OSError) as error:
        return Worker(failure=str(error))


def _release(place: Place) -> None:
    """Rank 0: let the other ranks go on."""
    if place.comm is None:
        return
    from pipeinfer.transport import mpi_job

    for rank in range(1, place.size):
        mpi_job.send_json(place.comm, rank, "")


def _towards(head: HeadAddress) -> str:
    """This host's address in the network that it shares with rank 0. Raises ClusterError."""
    end = time.monotonic() + _MEET
    for address in head.addresses:
        with contextlib.suppress(OSError), socket.create_connection(
                (address, head.port), timeout=max(0.1, min(3.0, end - time.monotonic()))) as link:
            return str(link.getsockname()[0])
    raise ClusterError(f"{host.host_name()} reaches none of {', '.join(head.addresses)}, which "
                       "are rank 0's: llama.cpp's RPC needs TCP between the hosts")


@contextlib.contextmanager
def worker(folder: Path, address: str, threads: int) -> Iterator[Worker]:
    """A worker of llama.cpp's RPC, until the block ends. threads: that it computes with. Raises
    ClusterError."""
    program = next((folder / name for name in _WORKERS if (folder / name).is_file()), None)
    if program is None:
        raise ClusterError(f"{host.host_name()} has no {_WORKERS[0]} in {folder}: put llama.cpp's "
                           "programs there on every host")
    with socket.create_server((address, 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(program), "-H", address, "-p", str(port), "-t", str(threads)]
    with tempfile.TemporaryFile("w+") as log:  # a pipe that nobody reads would stop it
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   env=_environment(), preexec_fn=_on_all_cores)
        try:
            _await(process, address, port)
            yield Worker(f"{address}:{port}")
        except TimeoutError:
            log.seek(0)
            raise ClusterError(f"`{' '.join(command)}` on {host.host_name()} does not listen: "
                               f"{log.read()[-400:]}") from None
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES)}


def _on_all_cores() -> None:
    """For a child: end with this rank, and use every core of the host."""
    host.end_with_parent()
    host.use_cores(os.cpu_count() or 1, frozenset())


def _await(process: subprocess.Popen[bytes], address: str, port: int) -> None:
    """Wait until a program listens. Raises TimeoutError, also where it has ended."""
    end = time.monotonic() + _START
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=1).close()
            return
        time.sleep(0.05)
    raise TimeoutError


def _bench(folder: Path, model: Path, ends: Sequence[str]) -> Baseline:
    """Run llama-bench over workers, or alone without `ends`. Raises ClusterError."""
    threads = 1 if ends else os.cpu_count() or 1
    command = [str(folder / BENCH), "-m", str(model), "-p", ",".join(map(str, PROMPTS)),
               "-n", str(_TOKENS), "-r", "1", "-t", str(threads), "-o", "json",
               *(("--rpc", ",".join(ends), "-ngl", "99") if ends else ())]
    said = ""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=_RUN, check=False, env=_environment(),
                              preexec_fn=_on_all_cores)
        said = done.stderr[-400:]
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        rates = {(row["n_prompt"], row["n_gen"]): round(float(row["avg_ts"]), 2) for row in rows}
        return Baseline(f"llama.cpp {rows[0]['build_commit']}", len(ends),
                      tuple(rates[length, 0] for length in PROMPTS), rates[0, _TOKENS])
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{BENCH} took over {_RUN:.0f} s") from None
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise ClusterError(f"`{' '.join(command)}` reports no speeds: {said}") from None
