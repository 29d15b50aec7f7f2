"""`pipeinfer chaos`: options, progress, the table and the exit code."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.terminal import show_over
from pipeinfer.core.grid import Grid, parse_widths
from pipeinfer.errors import UsageError
from pipeinfer_lab.chaos import client
from pipeinfer_lab.chaos.campaign import CampaignFile
from pipeinfer_lab.chaos.client import Answer
from pipeinfer_lab.chaos.job import Trouble
from pipeinfer_lab.chaos.report import Outcome, summary, table
from pipeinfer_lab.chaos.soak import FAULTS as SOAK_FAULTS
from pipeinfer_lab.chaos.soak import MOVES, soak
from pipeinfer_lab.chaos.trial import (
    BETWEEN,
    FAULTS,
    KV,
    MOMENTS,
    SIGNALS,
    Setup,
    Undisturbed,
    bodies,
    remove_leftovers,
    trial,
    undisturbed,
)
from pipeinfer_lab.chaos.victims import VICTIMS, Victims
from pipeinfer_lab.chaos.whole import DISKS, WHOLE, can_mount, check


@click.command("chaos")
@click.option("--ranks", default=5, show_default=True, type=click.IntRange(2, 1024),
              help="Ranks of the job, including the head and spares.")
@click.option("--spares", default=0, show_default=True, type=click.IntRange(0),
              help="Ranks that stay idle until they replace one that dies.")
@click.option("--fault", "faults", multiple=True, type=click.Choice([*FAULTS, *MOVES, "all"]),
              default=("kill",), show_default=True,
              help="Fault to cause; several alternate, one per run (repeatable). With --minutes "
                   f"also {' and '.join(MOVES)}: the job moves, or is loaded with other options.")
@click.option("--moment", "moments", multiple=True, type=click.Choice([*MOMENTS, "random"]),
              default=("random",), show_default=True,
              help="When the fault happens, where there is a choice; recovery: a second stage "
                   "fails soon after the first.")
@click.option("--grid", default="", help="Members of each stage, as for serve: faults can hit one "
              "member, and cut-link the link between two of a stage.")
@click.option("--victim", default="any", show_default=True, type=click.Choice(VICTIMS),
              help="With --grid: which ranks fail: any, leaders of stages, other members, or all "
                   "members of a stage at once.")
@click.option("--runs", default=10, show_default=True, type=click.IntRange(1))
@click.option("--requests", default=4, show_default=True, type=click.IntRange(1, 64),
              help="Number of concurrent requests.")
@click.option("--tokens", default=80, show_default=True, type=click.IntRange(4),
              help="Maximum number of tokens of a request.")
@click.option("--mixed", is_flag=True,
              help="Requests ask for JSON, grammars, several answers, log-probabilities, stop "
                   "texts, penalties and tools in turn; at least 7 --requests have all.")
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@click.option("-m", "--model", default="", help="Target model [default: the embedded one].")
@click.option("-md", "--model-draft", "draft", default="", help="Draft model.")
@click.option("-c", "--ctx-size", "ctx", default=1024, show_default=True)
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(1.0),
              help="Time limit for the requests of a run, in seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--keep-logs", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="Directory for the servers' logs.")
@click.option("--client", type=click.Choice(("own", "openai")), default="own", show_default=True,
              help="Who asks: pipeinfer's own client, or the official openai library with its "
                   "default time-outs (pip install openai).")
@click.option("--resume", type=click.Path(dir_okay=False, path_type=Path), default=None,
              help="Append what comes of each run to this file, and leave out the runs that are in "
                   "it already: a campaign in several sittings.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=None,
              help="Instead of --runs: one server under `pipeinfer up` for so long, with "
                   "--requests clients that never rest.")
@click.option("--every", default=60.0, show_default=True, type=click.FloatRange(0.1),
              help="With --minutes: seconds between two faults.")
@click.argument("serve_arguments", nargs=-1, type=click.UNPROCESSED)
def chaos_command(serve_arguments: tuple[str, ...], **given: Any) -> None:
    """Kill, stop and disturb real jobs on this machine, and see whether a token is lost.

    Each run starts `mpirun pipeinfer serve`, sends requests, lets one thing go wrong and compares
    every answer with an undisturbed run. Options of `serve` may follow after --.

    \b
    pipeinfer chaos --runs 20
    pipeinfer chaos --fault stop --moment decode --spares 1 --ranks 6 -- --hook pace=5
    pipeinfer chaos --grid 2x2 --fault kill --fault cut-link --victim leader
    pipeinfer chaos --minutes 120 --fault all --client openai
    """
    ranks, spares, requests, tokens, seed = (
        given[name] for name in ("ranks", "spares", "requests", "tokens", "seed"))
    if ranks - spares < 2:
        raise UsageError(f"{ranks} ranks with {spares} spares leave no rank for a stage: raise "
                         "--ranks")
    minutes = given["minutes"]
    _check_kinds(given["faults"], minutes, given["resume"])
    victims = _victims(given["grid"], given["victim"], given["faults"], ranks - spares - 1)
    arguments = ["--port", "0", "-c", str(given["ctx"]), "-t", "1", "--set", "split=equal",
                 "--parallel", str(max(4, requests)), "--any-model-name",
                 *_flag("--grid", given["grid"])]
    arguments += [*_flag("-m", given["model"]), *_flag("-md", given["draft"])]
    asker = _client(given["client"])
    told = {"ranks": ranks, "spares": spares, "requests": requests, "tokens": tokens, "seed": seed,
            "mixed": given["mixed"]}
    file = None if given["resume"] is None else CampaignFile(given["resume"], {
        **told, "faults": list(given["faults"]), "moments": list(given["moments"]),
        "victim": given["victim"], "client": given["client"],
        "serve": [*arguments, *serve_arguments]})
    folder = Path(tempfile.mkdtemp(prefix="pipeinfer-chaos-")) / "cache"
    folder.mkdir()
    setup = Setup(ranks, spares, (*arguments, *serve_arguments),
                  bodies(requests, tokens, seed, mixed=given["mixed"]), folder,
                  given["keep_logs"], given["seconds"], victims, asker,
                  kv=minutes is None and bool({*KV, "all"} & {*given["faults"]}))
    signal.signal(signal.SIGTERM, _end)  # or the job under trial would stay
    try:
        planned = plan(given["faults"], given["moments"], given["runs"], seed,
                       two=ranks - spares > 2) if minutes is None else []
        outcomes = asyncio.run(
            _campaign(setup, planned, seed, file, quiet=given["as_json"]) if minutes is None else
            _soak(setup, given["faults"], minutes, given["every"], seed, quiet=given["as_json"]))
    finally:
        remove_leftovers(folder)
    found = summary(outcomes)
    if given["as_json"]:
        click.echo(json.dumps({**told, **found,
                               "outcomes": [outcome.to_json() for outcome in outcomes]}))
    else:
        click.echo(f"\n{table(found)}")
    if found["clean"] < found["runs"]:
        raise SystemExit(1)


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def _flag(name: str, value: str) -> list[str]:
    return [name, value] if value else []


def _victims(text: str, who: str, faults: tuple[str, ...], ranks: int) -> Victims:
    """Who is to be hit. ranks: that hold layers. Raises UsageError for what does not fit."""
    grid = Grid(parse_widths(text)) if text else None
    if grid is not None and grid.n_nodes != ranks:
        raise UsageError(f"--grid {text} has {grid.n_nodes} members, but {ranks} ranks are neither "
                         "the head nor a spare: change --ranks")
    if who != "any" and grid is None:
        raise UsageError(f"--victim {who} needs --grid")
    check(faults)
    victims = Victims(grid, who)
    if BETWEEN in faults and ranks < 2:
        raise UsageError(f"--fault {BETWEEN} needs two ranks besides the head: raise --ranks")
    return victims


def plan(faults: tuple[str, ...], moments: tuple[str, ...], runs: int, seed: int, *,
         two: bool = False) -> list[Outcome]:
    """Which fault comes in which run, and when; empty outcomes to be filled. two: whether there are
    two ranks beside the head."""
    rng = random.Random(f"plan {seed}")
    kinds = faults
    if "all" in faults:
        kinds = tuple(one for one in FAULTS if (two or one != BETWEEN)
                      and (one not in DISKS or can_mount()))
    planned = []
    for number in range(runs):
        fault = kinds[number % len(kinds)]
        moment = moments[number // len(kinds) % len(moments)]
        planned.append(Outcome(number, fault, _moment(fault, moment, rng)))
    return planned


def _moment(fault: str, moment: str, rng: random.Random) -> str:
    """A moment that the fault can have; the asked one where it can."""
    possible: tuple[str, ...]
    if fault in SIGNALS:
        possible = MOMENTS
    elif fault in ("error", "memory", "clock", *WHOLE, *DISKS):
        possible = ("prefill", "decode")
    else:
        return "load" if fault in ("disk-full", "corrupt-cache") else "always"
    return moment if moment in possible else rng.choice(possible)


async def _campaign(setup: Setup, planned: list[Outcome], seed: int, file: CampaignFile | None,
                    *, quiet: bool) -> list[Outcome]:
    done = {} if file is None else file.outcomes
    if all(outcome.number in done for outcome in planned):
        return [done[outcome.number] for outcome in planned]
    wanted = await _wanted(setup, quiet)
    if file is not None and not file.begin(wanted.tokens):
        raise Trouble("an undisturbed run gives other tokens than the campaign's file has: another "
                      "model, version or machine; name another file with --resume")
    for outcome in planned:
        if outcome.number in done:
            continue
        _progress(f"run {outcome.number + 1} of {len(planned)}: {outcome.fault}, "
                  f"{outcome.moment}", quiet)
        await trial(setup, wanted, outcome, random.Random(f"run {seed} {outcome.number}"))
        if file is not None:
            file.add(outcome)
        if not quiet:
            _progress("", quiet)
            click.echo(outcome.line())
    _progress("", quiet)
    return [done.get(outcome.number, outcome) for outcome in planned]


async def _wanted(setup: Setup, quiet: bool) -> Undisturbed:
    """What the requests get when nothing goes wrong. Raises Trouble if that is not always equal."""
    _progress("two undisturbed runs first", quiet)  # the first one fills the cache
    first, again = await undisturbed(setup), await undisturbed(setup)
    if again.tokens != first.tokens:
        raise Trouble("two undisturbed runs gave different tokens: nothing can be compared")
    return again


async def _soak(setup: Setup, faults: tuple[str, ...], minutes: float, every: float, seed: int, *,
                quiet: bool) -> list[Outcome]:
    wanted = await _wanted(setup, quiet)
    _progress(f"one server for {minutes:g} minutes", quiet)
    outcomes = await soak(setup, wanted, SOAK_FAULTS if "all" in faults else faults, minutes, every,
                          random.Random(f"soak {seed}"))
    _progress("", quiet)
    if not quiet:
        click.echo("\n".join(outcome.line() for outcome in outcomes))
    return outcomes


def _check_kinds(faults: tuple[str, ...], minutes: float | None, resume: Path | None) -> None:
    """Raise UsageError for faults that the kind of campaign does not have."""
    kinds = FAULTS if minutes is None else SOAK_FAULTS
    for fault in faults:
        if fault not in (*kinds, "all"):
            raise UsageError(f"--fault {fault} needs --minutes" if minutes is None else
                             f"--minutes has no --fault {fault}: choose of {', '.join(kinds)}")
    if minutes is not None and resume is not None:
        raise UsageError("--resume is for campaigns of --runs: leave out --minutes")


def _client(name: str) -> Callable[..., Awaitable[Answer]]:
    if name == "own":
        return client.complete
    if importlib.util.find_spec("openai") is None:
        raise UsageError("--client openai needs the openai library: pip install openai")
    return client.by_openai


def _progress(text: str, quiet: bool) -> None:
    """A line on a terminal that the next one overwrites."""
    if not quiet:
        show_over(text)
