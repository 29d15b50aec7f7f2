"""From the command to the end of a few tokens: seconds, and seconds of processors.

    python -m benchmarks.kernels.starting [--ranks 1,3] [--rounds 5]

The embedded pair, whose figures are remembered after the first round, which does not count: what is
left is starting processes, loading Python's modules and MPI. For another version run this file with
PYTHONPATH at its checkout.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import click

from benchmarks.peers.contest import shown, spread
from tests.rig.launch import run

_COMMAND = ["generate", "-p", "hello", "-n", "4", "--temp", "0"]


@click.command(help=__doc__)
@click.option("--ranks", default="1,3", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
def main(ranks: str, rounds: int) -> None:
    """See above."""
    with tempfile.TemporaryDirectory() as folder:
        for count in map(int, ranks.split(",")):
            wall, busy = zip(*_timed(partial(_start, count, folder), rounds), strict=True)
            click.echo(f"{count} rank{'s' * (count > 1)}: {shown(spread(wall))} s, processors "
                       f"{shown(spread(busy))} s")


def _start(ranks: int, cache: str) -> None:
    done = run(ranks, [sys.executable, "-m", "pipeinfer", *_COMMAND], timeout=120,
               PIPEINFER_CACHE=cache)
    if done.returncode:
        raise click.ClickException(done.stderr[-1500:])


def _timed(action: Callable[[], None], rounds: int) -> Iterator[tuple[float, float]]:
    action()
    for _ in range(rounds):
        before, began = os.times(), time.monotonic()
        action()
        after = os.times()
        yield (time.monotonic() - began, after.children_user + after.children_system
               - before.children_user - before.children_system)


if __name__ == "__main__":
    main()
