"""Who runs against whom, in turn, and what the runs say.

A contestant's reference is the fastest of the others in its group, by the median: where it
guesses, the fastest of all, otherwise the fastest that does not guess. Ratios are of one round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from benchmarks.peers.runs import Measured, Task, bench, ik_bench, pipeinfer, speculative

_WHOLE = ", workers of all threads"
_DRAFTS = (2, 4, 8)  #: tokens that llama.cpp's speculation drafts at a time; its own default is 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One program with its options. group: those it is compared with; ours: pipeinfer;
    guesses: whether it speculates; processes: ranks, or workers beside llama.cpp's own process."""

    group: str
    name: str
    ours: bool
    guesses: bool
    measure: Callable[[Task, Sequence[str], int], Measured]
    options: tuple[str, ...]
    processes: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """What the runs of an entry say: tokens per second, and ratios to `reference` (pipeinfer's
    only); each as (median, least, most), None without runs."""

    group: str
    name: str
    runs: int
    speed: tuple[float, float, float] | None
    reference: str = ""
    ratio: tuple[float, float, float] | None = None


def entries(draft: Path | None, workers: Sequence[int] = (1, 2), ik: Path | None = None
            ) -> Iterator[Entry]:
    """One process, then so many workers. draft: of the vocabulary, if there is one. ik: folder of
    ik_llama.cpp's programs."""
    kind, ours, theirs = (
        ("draft", ["-md", str(draft)], _drafted(draft) | _looked_up()) if draft else
        ("prompt-lookup", ["--proposer", "prompt-lookup"], _looked_up()))
    group, plain = "one process", ["--speculation", "off"]
    yield from (_theirs(group, flash) for flash in "01")
    yield from (_ik(group, flash, ik) for flash in "01" if ik)
    yield _ours(group, "plain", plain)
    yield _ours(group, "plain, --exact off", [*plain, "--exact", "off"])
    for name, options in theirs.items():
        yield Entry(group, f"llama-speculative-simple, {name}", False, True, speculative, options)
    yield _ours(group, kind, ours, guesses=True)
    yield _ours(group, f"{kind}, --policy speculative", [*ours, "--policy", "speculative"],
                guesses=True)
    yield _ours(group, f"{kind}, --exact off", [*ours, "--exact", "off"], guesses=True)
    for servers in workers:
        ranks = servers + 1
        group = f"{ranks} ranks, or {servers} ggml-rpc-server"
        name, options = list(theirs.items())[1]
        for whole in (False, True) if servers > 1 else (False,):  # a single one has all
            yield from (_theirs(group, flash, servers, whole=whole) for flash in "01")
            yield Entry(group, f"llama-speculative-simple, {name}{whole * _WHOLE}", False, True,
                        partial(speculative, whole=True) if whole else speculative,
                        (*options, "-devd", "none") if draft else options, servers)
        yield _ours(group, "plain", plain, ranks)
        yield _ours(group, "plain, --head-stage", [*plain, "--head-stage"], ranks)
        yield _ours(group, kind, ours, ranks, guesses=True)


def wide_entries(draft: Path | None) -> Iterator[Entry]:
    """Two members of a wide stage with a core each, beside one process with two threads and two
    stages of a pipeline. draft: as in `entries`."""
    group, plain = "two cores", ["--speculation", "off"]
    ours = ["-md", str(draft)] if draft else ["--proposer", "prompt-lookup"]
    yield from (_theirs(group, flash) for flash in "01")
    yield _ours(group, "one rank, plain", plain)
    for kind, options in (("plain", plain), ("guesses", ours)):
        guesses = kind == "guesses"
        yield _ours(group, f"one rank of two slices, {kind}", [*options, "--slices", "2"],
                    guesses=guesses)
        yield _ours(group, f"1x2, rank 0 a member, {kind}", [*options, "--grid", "1x2",
                                                             "--head-stage"], 2, guesses=guesses)
        yield _ours(group, f"1x2, {kind}", [*options, "--grid", "1x2"], 3, guesses=guesses)
        yield _ours(group, f"two stages, rank 0 one of them, {kind}", [*options, "--head-stage"],
                    2, guesses=guesses)
        yield _ours(group, f"two stages, {kind}", options, 3, guesses=guesses)


def length_entries(length: int, ik: Path | None = None) -> Iterator[Entry]:
    """One process with so many tokens in the cache, by kind of cache. ik: as in `entries`."""
    group, plain = f"after {length} tokens", ["--speculation", "off"]
    for flash, values in (("0", "f16"), ("1", "f16"), ("1", "q8_0")):
        yield Entry(group, f"llama-bench -fa {flash} -ctv {values}", False, False, bench,
                    ("-fa", flash, "-ctv", values))
    yield from (_ik(group, flash, ik) for flash in "01" if ik)
    yield _ours(group, "plain", plain)
    yield _ours(group, "plain, --exact off", [*plain, "--exact", "off"])


def contest(
    wanted: Sequence[Entry], tasks: Sequence[Task], rounds: int,
    say: Callable[[int, Entry, Measured | str], None],
) -> dict[Entry, list[Measured]]:
    """Run all in turn, so often; `say` hears of every run. One that fails is not run again.

    tasks: rounds take them in turn.
    """
    found: dict[Entry, list[Measured]] = {entry: [] for entry in wanted}
    failed: set[Entry] = set()
    for turn in range(rounds):
        for entry in [entry for entry in found if entry not in failed]:
            try:
                measured = entry.measure(tasks[turn % len(tasks)], entry.options, entry.processes)
            except click.ClickException as error:
                failed.add(entry)
                say(turn, entry, error.message)
                continue
            found[entry].append(measured)
            say(turn, entry, measured)
    return found


def lines(found: Mapping[Entry, Sequence[Measured]]) -> list[Line]:
    """A line per entry, in order."""
    speeds = {entry: [one.tokens_per_second for one in runs] for entry, runs in found.items()}
    made = []
    for entry, own in speeds.items():
        if not own:
            made.append(Line(entry.group, entry.name, 0, None))
            continue
        reference = _reference(entry, speeds) if entry.ours else None
        made.append(Line(
            entry.group, entry.name, len(own), spread(own), reference.name if reference else "",
            spread([a / b for a, b in zip(own, speeds[reference], strict=False)])
            if reference else None))
    return made


def table(found: Sequence[Line]) -> str:
    """The lines for people."""
    cells = [(line.name, shown(line.speed) or "failed",
              f"{shown(line.ratio)} of {line.reference}" if line.ratio else "") for line in found]
    names, speeds = (max(len(cell[i]) for cell in cells) for i in (0, 1))
    rows, group = [], ""
    for line, (name, speed, ratio) in zip(found, cells, strict=True):
        if line.group != group:
            group = line.group
            rows.append(f"{group:{names + 2}}  {'tokens/s':{speeds}}  "
                        "ratio to the others' best")
        rows.append(f"  {name:{names}}  {speed:{speeds}}  {ratio}".rstrip())
    return "\n".join(rows)


def shown(found: tuple[float, float, float] | None) -> str:
    """A spread for people."""
    return "{:.2f} ({:.2f} to {:.2f})".format(*found) if found else ""


def _reference(entry: Entry, speeds: Mapping[Entry, Sequence[float]]) -> Entry | None:
    peers = [other for other, own in speeds.items() if own and not other.ours
             and other.group == entry.group and other.guesses <= entry.guesses]
    return max(peers, key=lambda other: statistics.median(speeds[other]), default=None)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, least, most)."""
    return statistics.median(values), min(values), max(values)


def _ours(group: str, name: str, options: Sequence[str], ranks: int = 1, *,
          guesses: bool = False) -> Entry:
    return Entry(group, f"pipeinfer, {name}", True, guesses, pipeinfer, tuple(options), ranks)


def _theirs(group: str, flash: str, servers: int = 0, *, whole: bool = False) -> Entry:
    return Entry(group, f"llama-bench -fa {flash}{whole * _WHOLE}", False, False,
                 partial(bench, whole=True) if whole else bench, ("-fa", flash), servers)


def _ik(group: str, flash: str, programs: Path) -> Entry:
    return Entry(group, f"ik_llama.cpp, llama-bench -fa {flash} -rtr 1", False, False,
                 partial(ik_bench, programs=programs), ("-fa", flash))


def _drafted(draft: Path) -> dict[str, tuple[str, ...]]:
    base = ("-md", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max")
    found = {f"draft {count}": (*base, str(count)) for count in _DRAFTS}
    most = str(_DRAFTS[-1])
    return found | {f"draft {most}, p-min 0.5": (*base, most, "--spec-draft-p-min", "0.5")}


def _looked_up() -> dict[str, tuple[str, ...]]:
    """Its n-gram lookup; n-grams of 3, since its own default of 12 finds nothing in short texts."""
    return {f"ngram-simple {count}": (
        "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3",
        "--spec-ngram-simple-size-m", str(count)) for count in _DRAFTS}
