"""pipeinfer beside llama.cpp's own programs: the same files, in turn, in one run.

    python -m benchmarks.peers [--files 05b-Q8_0,smollm2-Q4_1] [--rounds 5] [--json FILE]
    python -m benchmarks.peers --lengths 0,1024,4096,8192 [--files 05b-Q8_0]
    python -m benchmarks.peers --wide [--files 05b-Q8_0]          members of a stage, on two cores

Programs and models are made on first use, below --work, and kept. The first takes half an hour of
two cores and 5 GB. --only takes the entries whose "group: name" contains one of some words.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.methods.heldout import prompts
from benchmarks.peers import models, programs
from benchmarks.peers.contest import (
    Entry,
    contest,
    entries,
    length_entries,
    lines,
    table,
    wide_entries,
)
from benchmarks.peers.runs import Measured, Task
from pipeinfer import __version__
from pipeinfer.files import check_writable, write_atomically
from pipeinfer.llama.library import llama_identity
from pipeinfer.models.locate import open_tokenizer

WORK = Path.home() / ".cache" / "pipeinfer-peers"
_LEAST_PROMPT = 8  #: stands for a context of 0 tokens: pipeinfer needs a prompt
_SPARE_CELLS = 256  #: beside prompt and new tokens, for guesses


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    programs: Path | None
    ik: Path | None
    work: Path
    files: str
    only: str
    rounds: int
    tokens: int
    prompt_tokens: int
    prompts: int
    lengths: str
    wide: bool
    workers: str
    deadline: float
    output: Path | None


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option("--programs", type=click.Path(path_type=Path),
              help="Folder with llama.cpp's own programs [default: built below --work].")
@click.option("--ik", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Folder with ik_llama.cpp's llama-bench: one process is compared with it, too.")
@click.option("--work", type=click.Path(path_type=Path), default=WORK, show_default=True)
@click.option("--files", default=",".join(models.NAMES), show_default=True)
@click.option("--only", default="", help="Entries with one of these words, such as: plain,bench.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=128, show_default=True,
              help="Tokens to generate.")
@click.option("--prompt-tokens", type=click.IntRange(_LEAST_PROMPT), default=96, show_default=True)
@click.option("--prompts", type=click.IntRange(1), default=1, show_default=True,
              help="Prompts that the rounds take in turn.")
@click.option("--lengths", default="", help="Measure speed after so many tokens instead.")
@click.option("--wide", is_flag=True, help="Grids of two members instead.")
@click.option("--workers", default="1,2", show_default=True,
              help="Workers of ggml-rpc-server beside a rank more.")
@click.option("--deadline", default=1800.0, show_default=True, help="Seconds for one run.")
@click.option("--json", "output", type=click.Path(path_type=Path),
              help="Write everything that was reported here, after every run.")
def main(**given: Any) -> None:
    """See above."""
    options = Options(**given)
    names = options.files.split(",")
    if unknown := set(names) - set(models.NAMES):
        raise click.UsageError(f"no file {', '.join(sorted(unknown))}: choose of "
                               f"{', '.join(models.NAMES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or what was started would go on
    if options.output:
        check_writable(options.output)
    options.work.mkdir(parents=True, exist_ok=True)
    folder = programs.find(options.programs, options.work)
    report = {"machine": _machine(folder), "options": dataclasses.asdict(options), "runs": [],
              "tables": []}
    for name in names:
        path = models.make(name, options.work)
        for label, wanted, tasks in _contests(options, name, path, folder):
            found = lines(contest(wanted, tasks, options.rounds,
                                  _listener(name, report, options.output)))
            title = (f"{name} ({path.stat().st_size / 1e9:.2f} GB), {label}, {options.tokens} "
                     f"tokens, {_threads()} threads, median of {options.rounds} (range)")
            click.echo(f"\n{title}\n{table(found)}\n")
            report["tables"].append({"title": title, "lines": list(map(dataclasses.asdict, found))})
            _keep(report, options.output)


def _contests(options: Options, name: str, path: Path, folder: Path) -> list[
        tuple[str, list[Entry], list[Task]]]:
    """Title, entries and tasks of each comparison of this file."""
    found = []
    for length in map(int, options.lengths.split(",")) if options.lengths else (None,):
        count = options.prompt_tokens if length is None else max(length, _LEAST_PROMPT)
        draft = models.draft_of(name)
        wanted = list(length_entries(length, options.ik) if length is not None else
                      wide_entries(draft) if options.wide else
                      entries(draft, tuple(map(int, options.workers.split(","))), options.ik))
        if options.only:
            wanted = [one for one in wanted
                      if any(word in f"{one.group}: {one.name}" for word in
                             options.only.split(","))]
            if not wanted:
                raise click.UsageError(
                    f"--only {options.only} leaves nothing: use words that a run prints")
        tasks = _tasks(options, path, folder, count,
                       0 if length is None else count + options.tokens + _SPARE_CELLS)
        found.append((f"a prompt of {count}", wanted, tasks))
    return found


def _tasks(options: Options, path: Path, folder: Path, length: int, ctx: int) -> list[Task]:
    """One per prompt: the beginnings of library files that the embedded pair has not seen."""
    tokenizer = open_tokenizer(path)
    made = []
    for i, tokens in enumerate(prompts(tokenizer, options.prompts, length)):
        # A blank at the end would be joined with what follows, and is not read alike by all.
        text = tokenizer.decode(tokens[tokenizer.adds_bos :]).rstrip()
        prompt = options.work / "prompts" / f"{path.stem}-{length}-{i}.txt"
        prompt.parent.mkdir(exist_ok=True)
        prompt.write_text(text, encoding="utf-8")
        made.append(Task(folder, path, prompt, len(tokenizer.encode(text)), options.tokens,
                         _threads(), options.deadline, ctx))
    tokenizer.close()
    if len(made) < options.prompts:
        raise click.UsageError(f"only {len(made)} held-out texts have {length} tokens: lower "
                               "--prompts or the length")
    return made


def _listener(name: str, report: dict[str, Any], output: Path | None) -> Any:
    """Tells of each run on standard error and keeps it in the report."""
    def say(turn: int, entry: Entry, measured: Measured | str) -> None:
        failed = isinstance(measured, str)
        said = measured if failed else f"{measured.tokens_per_second:.2f} tokens/s"
        click.echo(f"{name}, round {turn + 1}, {entry.group}: {entry.name}: {said}", err=True)
        report["runs"].append({
            "file": name, "round": turn, "group": entry.group, "entry": entry.name,
            "load": os.getloadavg()[0],
            **({"failed": measured} if failed else dataclasses.asdict(measured))})
        _keep(report, output)

    return say


def _keep(report: dict[str, Any], output: Path | None) -> None:
    if output:
        write_atomically(output, json.dumps(report, default=str, indent=1))


def _machine(folder: Path) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    version = subprocess.run([str(folder / "llama-bench"), "--version"], capture_output=True,
                             text=True, check=False, timeout=60)
    return {
        "processor": next((line.partition(":")[2].strip() for line in cpuinfo
                           if line.startswith("model name")), platform.machine()),
        "threads": _threads(), "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(), "python": platform.python_version(),
        "pipeinfer": __version__, "pipeinfer_library": llama_identity(),
        "llama.cpp": (version.stdout + version.stderr).strip(), "build_flags": programs.FLAGS,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _threads() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
