"""What `pipeinfer measure` finds out about a real job, as a record to share.

A record names no host, address or path. The same prompts, with and without speculation, by one
user and by four; the hash of the texts tells whether they are equal. Knows no command line.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from pipeinfer import host
from pipeinfer.cli.drawing import check_drawing
from pipeinfer.cluster import generate
from pipeinfer.cluster.session import Session
from pipeinfer.config import JobConfig
from pipeinfer.core.types import Request, SamplingParams
from pipeinfer.errors import ClusterError, UsageError
from pipeinfer.host import Place
from pipeinfer.llama.library import llama_identity
from pipeinfer.scheduler.events import Emit, Finish, Refuse

FORMAT = 1
PROMPTS = (64, 512)  #: tokens of a short and of a long prompt
USERS = (1, 4)
_TOKENS, _LEAST, _WARM = 64, 8, 4  #: of an answer, at most and at least; of one that is not counted
_SECONDS = 180.0  #: nothing begins that would end later
_SILENCE = 300.0
PLAIN, SPECULATION = "plain", "with speculation"


class Host(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine, without its name. memory: GiB; ranks: of the job that run there."""

    processor: str
    cores: int
    memory: float
    ranks: tuple[int, ...]


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """Measured between neighbouring ranks: one way in microseconds, and 10^6 bytes per second."""

    latency: float
    rate: float


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """A file's name without its folder, bytes, and hash of its header."""

    name: str
    bytes: int
    hash: str


class Run(Struct, frozen=True, forbid_unknown_fields=True):
    """Answers by one policy to prompts of one length.

    users: at a time. prompt, tokens: of each. prompt_rate, rate: tokens per second of all users, up
    to the last first token, and after it. texts: hash of the tokens.
    """

    policy: str
    users: int
    prompt: int
    tokens: int
    prompt_rate: float
    rate: float
    texts: str


class Baseline(Struct, frozen=True, forbid_unknown_fields=True):
    """llama-bench on the same hosts, with one worker of its RPC on each; none on a single host.

    program: with its commit. prompt_rates: tokens per second of prompts of PROMPTS tokens. rate: of
    generation behind an empty text.
    """

    program: str
    workers: int
    prompt_rates: tuple[float, ...]
    rate: float


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """All that is shared.

    proposer: what drafts. equal: whether both policies had the same tokens everywhere. baseline:
    llama.cpp on the same hosts. missing: what the time did not suffice for. note: what its maker
    says of it.
    """

    format: int
    date: str
    pipeinfer: str
    library: str
    system: str
    model: Model
    proposer: str
    layers: tuple[int, ...]
    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    runs: tuple[Run, ...]
    equal: bool
    baseline: Baseline | None = None
    missing: tuple[str, ...] = ()
    note: str = ""


def surroundings(place: Place) -> tuple[tuple[Host, ...], tuple[Link, ...]]:
    """Return the job's hosts and links; all ranks have to call it, and ranks above 0 get nothing.

    Raises RankLost and TransportTimeout.
    """
    from pipeinfer.transport import mpi_job

    own: dict[str, Any] = {"host": host.host_name(), "rank": place.rank, "links": [],
                           "processor": host.processor_name(), "cores": os.cpu_count() or 1,
                           "memory": round(host.physical_memory() / 2**30, 1)}
    found = [own]
    if place.comm is not None:
        own["links"] = [structs.asdict(one) for one in mpi_job.measure_links(place.comm)]
        texts = mpi_job.gather_json(place.comm, msgspec.json.encode(own).decode())
        found = [msgspec.json.decode(text) for text in texts or ()]
    hosts = []
    for name in dict.fromkeys(one["host"] for one in found):
        here = [one for one in found if one["host"] == name]
        hosts.append(Host(here[0]["processor"], here[0]["cores"], here[0]["memory"],
                          tuple(one["rank"] for one in here)))
    return tuple(hosts), tuple(Link(round(1e6 * link["latency"], 1),
                                    round(link["bandwidth"] / 1e6, 1))
                               for one in found for link in one["links"])


def measure(session: Session, base: JobConfig, hosts: tuple[Host, ...], links: tuple[Link, ...],
            told: Callable[[str], None] = lambda _: None) -> Record:
    """Ask a running job, and return the record. told: called with what is asked next."""
    path = session.loaded.job.target
    proposer = session.draft_name or ", ".join(base.speculation.proposer) or "prompt lookup"
    configs = {PLAIN: base.replace(policy="iterative"), SPECULATION: base}
    end, tokens, runs, missing = time.monotonic() + _SECONDS, _TOKENS, list[Run](), list[str]()
    for users, length in itertools.product(USERS, PROMPTS):
        prompts = _prompts(session, length, users)
        for policy, config in configs.items():
            what = f"{policy}, {users} user{'s' * (users > 1)}, prompt of {length} tokens"
            if time.monotonic() + foreseen(runs, users, length, tokens) > end:
                missing.append(what)
                continue
            told(what)
            session.use(config)
            if not runs:  # what is slow only once is not counted; a slow job answers less
                begin = time.monotonic()
                _ask(session, prompts, _WARM)
                each = (time.monotonic() - begin) / _WARM
                tokens = max(_LEAST, min(_TOKENS, int(_SECONDS / 32 / each)))
            runs.append(_run(policy, length, tokens, _ask(session, prompts, tokens)))
            session.head.drain(config.cluster.timeout)
    return Record(
        FORMAT, time.strftime("%Y-%m-%d"), host.package_version(), llama_identity(),
        f"{platform.system()} {platform.machine()}", Model(
            path.name, path.stat().st_size, session.loaded.job.model.fingerprint[:16]),
        proposer, tuple(one.stop - one.start for one in session.assembly.held), hosts, links,
        tuple(runs), equal(runs), missing=tuple(missing))


def foreseen(runs: Sequence[Run], users: int, length: int, tokens: int) -> float:
    """Return the seconds of a further run at the lowest rates so far; 0 without any run.

    users, length, tokens: as of `Run`.
    """
    if not runs:
        return 0.0
    prompt_rate = max(1e-3, min(one.prompt_rate for one in runs))
    rate = max(1e-3, min(one.rate for one in runs))
    return users * (length / prompt_rate + tokens / rate)


def equal(runs: Sequence[Run]) -> bool:
    """Whether texts depend on users and prompts alone."""
    texts: dict[tuple[int, int], set[str]] = {}
    for run in runs:
        texts.setdefault((run.users, run.prompt), set()).add(run.texts)
    return all(len(found) == 1 for found in texts.values())


def _prompts(session: Session, length: int, users: int) -> list[list[int]]:
    """Program text, which every installation of a version has; other parts for each user."""
    words = session.tokenizer.encode(inspect.getsource(generate))
    if len(words) < length:
        raise UsageError(f"the vocabulary makes only {len(words)} tokens of the text to measure by")
    step = (len(words) - length) // max(USERS)
    return [words[step * user : step * user + length] for user in range(users)]


class _Answer(Struct):
    """times: seconds from asking to each token."""

    tokens: list[int] = []
    times: list[float] = []


def _ask(session: Session, prompts: Sequence[Sequence[int]], tokens: int) -> list[_Answer]:
    """Put all prompts at once and wait for all answers. Raises ClusterError if nothing comes."""
    head, begin = session.head, time.monotonic()
    answers: dict[int, _Answer] = {}
    for number, prompt in enumerate(prompts):
        answers[number] = _Answer()
        head.submit(Request(number, tuple(prompt), tokens, SamplingParams(), frozenset(), True))
    open_ones, heard = set(answers), begin
    while open_ones:
        news = head.next_news(0.1)
        now = time.monotonic()
        match news:
            case Emit(request_id, choice):
                answers[request_id].tokens.append(choice.token)
                answers[request_id].times.append(now - begin)
            case Finish(request_id):
                open_ones.discard(request_id)
            case Refuse(_, error):
                raise error
            case _ if now - heard > _SILENCE:
                raise ClusterError(f"no token for {_SILENCE:.0f} s: see `pipeinfer doctor`")
        heard = now if news is not None else heard
    return list(answers.values())


def _run(policy: str, length: int, tokens: int, answers: Sequence[_Answer]) -> Run:
    users, first = len(answers), max(one.times[0] for one in answers)
    later = [time for one in answers for time in one.times if time > first]
    rate = len(later) / max(max(later, default=0.0) - first, 1e-9)
    text = msgspec.json.encode([one.tokens for one in answers])
    return Run(policy, users, length, tokens, round(users * length / first, 2), round(rate, 2),
               hashlib.blake2b(text, digest_size=8).hexdigest())


# --- to show ----------------------------------------------------------------------------------


def paragraph(record: Record) -> str:
    """A few sentences to paste."""
    kinds: dict[tuple[str, int], int] = {}
    for one in record.hosts:
        kinds[one.processor, one.cores] = kinds.get((one.processor, one.cores), 0) + 1
    hosts = ", ".join(f"{count} x {name} ({cores} cores)"
                      for (name, cores), count in kinds.items())
    worst = max(record.links, key=lambda link: link.latency, default=None)
    where = "" if worst is None else \
        f"; slowest link {worst.latency:.0f} us, {worst.rate:.0f} MB/s"
    lines = [f"{record.model.name} ({record.model.bytes / 2**30:.1f} GiB) over "
             f"{len(record.layers)} stages ({', '.join(map(str, record.layers))} layers) on {hosts}"
             f"{where}; pipeinfer {record.pipeinfer}, {record.date}."]
    for (users, prompt), pair in _pairs(record).items():
        lines.append(f"{users} user{'s' * (users > 1)}, prompt of {prompt}: " + ", ".join(
            f"{policy} {run.rate:.1f} tokens/s (prompt {run.prompt_rate:.0f})"
            for policy, run in pair.items()) + ".")
    lines.append(f"Drafts by {record.proposer}; the texts are "
                 f"{'equal' if record.equal else 'NOT EQUAL: please report this'}.")
    if record.baseline is not None:
        rates = zip(record.baseline.prompt_rates, PROMPTS, strict=True)
        prompts = ", ".join(f"{rate:.0f} of {length} tokens" for rate, length in rates)
        lines.append(f"{words(record.baseline)}, beside it: {record.baseline.rate:.1f} tokens/s "
                     f"(prompt {prompts}).")
    return "\n".join([*lines, *(f"Not measured in time: {what}." for what in record.missing)])


def words(baseline: Baseline) -> str:
    """What ran beside pipeinfer."""
    return f"{baseline.program}, " + (f"RPC over {baseline.workers} hosts" if baseline.workers
                                    else "one process")


def _pairs(record: Record) -> Mapping[tuple[int, int], dict[str, Run]]:
    found: dict[tuple[int, int], dict[str, Run]] = {}
    for run in record.runs:
        found.setdefault((run.users, run.prompt), {})[run.policy] = run
    return found


def draw(path: Path, records: Mapping[str, Record]) -> None:
    """Draw records beside one another: bars of tokens per second. Raises UsageError without
    matplotlib."""
    check_drawing()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 1.5 * len(records)), layout="constrained")
    axes = figure.subplots(len(records), 1, squeeze=False)[:, 0]
    for ax, (name, record) in zip(axes, records.items(), strict=True):
        labels, rates, colours = [], [], []
        for (users, prompt), pair in _pairs(record).items():
            for policy, run in pair.items():
                labels.append(f"{users} x {prompt}, {policy}")
                rates.append(run.rate)
                colours.append("tab:blue" if policy == PLAIN else "tab:orange")
        if record.baseline is not None:
            labels.append(words(record.baseline))
            rates.append(record.baseline.rate)
            colours.append("tab:gray")
        bars = ax.barh(labels[::-1], rates[::-1], color=colours[::-1])
        ax.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
        ax.set_title(f"{name}: {record.model.name}, {len(record.hosts)} hosts, "
                     f"{len(record.layers)} stages", fontsize=9, loc="left")
        ax.tick_params(labelsize=7)
    axes[-1].set_xlabel("tokens per second of all users (users x tokens of the prompt)", fontsize=8)
    figure.savefig(path, dpi=150)
