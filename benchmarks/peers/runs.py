"""One run of one program: its command, its deadline, and the speed that it reports.

Speeds are those of generation, without loading and prompt. llama-bench feeds random tokens and
samples nothing, so it is given the prompt's length as depth and no more.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from pipeinfer.errors import ClusterError
from pipeinfer_lab.measuring_rpc import worker
from tests.kit.launch import run

_DECODED = re.compile(r"decoded +(\d+) tokens in +([\d.]+) seconds")
_COUNT = re.compile(r"\bn_(drafted|accept) += (\d+)")


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run gave; raw: whatever else the program said that later questions may need."""

    tokens_per_second: float
    command: list[str]
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """What every program is asked to do with one model.

    programs: the folder of llama.cpp's own; n_prompt, tokens: tokens of the prompt and to generate;
    threads: in all; deadline: seconds that one run may take; ctx: cells, 0 for the model's own
    """

    programs: Path
    model: Path
    prompt: Path
    n_prompt: int
    tokens: int
    threads: int
    deadline: float
    ctx: int = 0


def bench(task: Task, options: Sequence[str] = (), servers: int = 0, *, whole: bool = False
          ) -> Measured:
    """llama-bench, on `servers` workers if there are any. whole: see `workers`. Raises
    ClickException."""
    command = [str(task.programs / "llama-bench"), "-m", str(task.model), "-p", "0",
               "-n", str(task.tokens), "-d", str(task.n_prompt), "-r", "1",
               "-t", _own_threads(task, servers), "-o", "json", *options]
    with workers(task, servers, whole=whole) as remote:
        return parse_bench(_output(command + remote, task)[0], command + remote)


def ik_bench(task: Task, options: Sequence[str] = (), servers: int = 0, *, programs: Path
             ) -> Measured:
    """ik_llama.cpp's llama-bench in the folder `programs`, with weights repacked as they are loaded
    (`-rtr 1`). Raises ClickException."""
    del servers
    command = [str(programs / "llama-bench"), "-m", str(task.model), "-p", "0", "-n", "0",
               "-gp", f"{task.n_prompt},{task.tokens}", "-r", "1", "-t", str(task.threads),
               "-o", "json", "-rtr", "1", *options]
    return parse_bench(_output(command, task)[0], command)


def speculative(task: Task, options: Sequence[str] = (), servers: int = 0, *, whole: bool = False
                ) -> Measured:
    """llama-speculative-simple, likewise. Raises ClickException."""
    command = [str(task.programs / "llama-speculative-simple"), "-m", str(task.model),
               "-f", str(task.prompt), "-n", str(task.tokens),
               "-t", _own_threads(task, servers),
               "-c", str(task.ctx or task.n_prompt + task.tokens + 128), "--temp", "0",
               "--ignore-eos", *options]
    with workers(task, servers, whole=whole) as remote:
        out, err = _output(command + remote, task)
        return parse_speculative(out, err, command + remote)


def pipeinfer(task: Task, options: Sequence[str] = (), ranks: int = 1) -> Measured:
    """`pipeinfer generate`. Raises ClickException."""
    command = [sys.executable, "-m", "pipeinfer", "generate", "-m", str(task.model),
               "-f", str(task.prompt), "-n", str(task.tokens), "--temp", "0", "--ignore-eos",
               "--json", *(("-c", str(task.ctx)) if task.ctx else ()), *options]
    return parse_pipeinfer(_output(command, task, ranks)[0], command)


def parse_bench(text: str, command: list[str]) -> Measured:
    """From what `llama-bench -o json` printed. Raises ClickException."""
    try:
        (row,) = json.loads(text)
        return Measured(float(row["avg_ts"]), command, row)
    except (ValueError, KeyError, TypeError):
        raise _unreadable(command, text) from None


def parse_speculative(out: str, err: str, command: list[str]) -> Measured:
    """From what llama-speculative-simple printed and logged. Raises ClickException."""
    found = _DECODED.search(err)
    if found is None or not float(found[2]):
        raise _unreadable(command, err)
    counts = {name: int(count) for name, count in _COUNT.findall(err)}
    return Measured(int(found[1]) / float(found[2]), command, {"text": out, **counts})


def parse_pipeinfer(text: str, command: list[str]) -> Measured:
    """From what `pipeinfer generate --json` printed. Raises ClickException."""
    try:
        answer = json.loads(text)
        return Measured(float(answer["stats"]["tokens_per_second"]), command, answer)
    except (ValueError, KeyError, TypeError):
        raise _unreadable(command, text) from None


def _own_threads(task: Task, servers: int) -> str:
    """With workers, llama.cpp's own process looks up embeddings, and runs the draft: idle threads
    of a larger team would spin against the workers."""
    return "1" if servers else str(task.threads)


@contextmanager
def workers(task: Task, count: int, *, whole: bool = False) -> Iterator[list[str]]:
    """So many ggml-rpc-servers; yields the options that name them.

    They share the threads, or, with `whole`, each has all of them, as they take turns. They end
    with the block. Raises ClickException where one does not start.
    """
    if not count:
        yield []
        return
    with ExitStack() as stack:
        threads = task.threads if whole else max(1, task.threads // count)
        try:
            ends = [stack.enter_context(worker(task.programs, "127.0.0.1", threads)).end
                    for _ in range(count)]
        except ClusterError as error:
            raise click.ClickException(str(error)) from None
        yield ["--rpc", ",".join(ends), "-ngl", "99"]


def _output(command: list[str], task: Task, ranks: int = 1) -> tuple[str, str]:
    # launch/mpi.env gives every library one thread; llama.cpp's own programs keep theirs.
    own = {"PIPEINFER_TURNS": "auto"} if command[0] == sys.executable else {
        "OMP_NUM_THREADS": str(task.threads)}
    try:
        done = run(ranks, command, timeout=task.deadline, **own)
    except AssertionError:
        raise click.ClickException(
            f"`{' '.join(command)}` took over {task.deadline:.0f} s: raise --deadline, or lower "
            "--tokens") from None
    if done.returncode:
        raise click.ClickException(
            f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout, done.stderr


def _unreadable(command: Sequence[str], text: str) -> click.ClickException:
    return click.ClickException(
        f"`{' '.join(command)}` reported no speed; another version? It said: {text[-800:]}")
