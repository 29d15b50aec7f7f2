"""One run: a real job, concurrent requests, one fault at a random moment, a verdict.

The tokens that every request has to get come from an undisturbed run of the same program with the
same options. All randomness comes from the campaign's seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipeinfer_lab.chaos import client, whole
from pipeinfer_lab.chaos.client import Answer
from pipeinfer_lab.chaos.job import ServerJob, Trouble, poll
from pipeinfer_lab.chaos.report import Outcome, resumed
from pipeinfer_lab.chaos.victims import ANYONE, Victims
from pipeinfer_lab.chaos.whole import CONNECTIONS_LOST, DISKS, NOBODY_LEFT, WHOLE
from pipeinfer_lab.faults.faults import flip_byte

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
BETWEEN = "cut-link"  #: between two ranks that both hear the head
#: by --hook fault= of a rank
KV = ("kv-corrupt", "kv-full", "kv-slow")  #: of prompts on disks
INSIDE = ("error", "memory", "clock", "slow", "slow-link", "lose-cancel", "disk-full", BETWEEN, *KV)
FAULTS = (*SIGNALS, *INSIDE, "corrupt-cache", "storm", *WHOLE, *DISKS)
MOMENTS = ("load", "prefill", "decode", "recovery")
FIRST_SECONDS, DRAIN_SECONDS, GONE_SECONDS = 600.0, 20.0, 5.0
STORM_CLIENTS = 200
_QUEUE_FULL = 429
_STORES = {"PIPEINFER_KV_DISK": "auto"}  #: below a run's own cache
_CUT_SECONDS = "16"  #: --timeout where a link is cut: nothing else tells of it
_SECOND_BLOW = 0.3  #: seconds after the first in which the second of moment recovery comes
_SNIPPETS = ("def fibonacci(n):\n", "class Stack:\n    def __init__(self):\n", "import os\n",
             "for i in range(10):\n    print(i)\n", "def read_config(path):\n", "x = [1, 2, 3]\n")


_PERSON: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"},
                   "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 4,
                            "maxItems": 12}}}
#: what requests ask besides text, in turn
_MIXED: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema",
                         "json_schema": {"name": "person", "schema": _PERSON}}},
    {"grammar": 'root ::= ("yes, " | "no, " | "perhaps ")' " [a-z ]{40,60} [.]"},
    {"n": 2, "ignore_eos": True}, {"logprobs": 3, "ignore_eos": True},
    {"stop": ["return", "\n\n\n"]}, {"presence_penalty": 0.6, "ignore_eos": True},
    {"tools": [{"type": "function", "function": {"name": "store", "parameters": _PERSON}}],
     "tool_choice": "required"})


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs of a campaign share. cache: a directory of its own. logs: where logs go.
    victims: who is hit. complete: the client, `client.complete` or another one like it. kv: whether
    the undisturbed runs keep prompts on disks."""

    ranks: int
    spares: int
    arguments: tuple[str, ...]
    bodies: tuple[dict[str, Any], ...]
    cache: Path
    logs: Path | None = None
    answer_seconds: float = 60.0
    victims: Victims = ANYONE
    complete: Callable[..., Awaitable[Answer]] = client.complete
    kv: bool = False

    def start(self, cache: Path, fault: str = "", *, seconds: float = 0.0,
              environ: Mapping[str, str] | None = None) -> ServerJob:
        """A server as all runs have it, for some faults under `pipeinfer up`. seconds: that it
        runs besides the time of a run's requests."""
        arguments = [*self.arguments, *(["--spares", str(self.spares)] if self.spares else [])]
        seconds += FIRST_SECONDS + self.answer_seconds + DRAIN_SECONDS
        if fault in (*WHOLE, *DISKS):
            return whole.start(self.ranks, arguments, cache, seconds, disk=fault in DISKS,
                               **(environ or {}))
        return ServerJob(self.ranks, arguments, seconds=seconds,
                         environ={"PIPEINFER_CACHE": str(cache), **(environ or {})})


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What the requests get when nothing goes wrong, and how long things take then.

    ready: seconds until the server took requests. first: until the last request's first token.
    ends: text and reason of the end
    """

    tokens: tuple[tuple[int, ...], ...]
    ready: float
    first: float
    ends: tuple[tuple[str, str], ...] = ()

    @property
    def patience(self) -> float:
        """Seconds in which a disturbed server has to be ready."""
        return 30.0 + 5 * self.ready


def bodies(count: int, tokens: int, seed: int, *, mixed: bool = False
           ) -> tuple[dict[str, Any], ...]:
    """Requests, always the same for a seed: short and long prompts, greedy and sampled.

    mixed: whether they ask for JSON, grammars, several answers, log-probabilities, stop texts,
    penalties and calls of tools, in turn
    """
    rng = random.Random(f"requests {seed}")
    made: list[dict[str, Any]] = []
    for index in range(count):
        prompt = "".join(rng.choice(_SNIPPETS) for _ in range(rng.choice((1, 3, 25))))
        sampling: dict[str, Any] = {"temperature": 0.0} if index % 2 else {
            "temperature": 0.8, "seed": rng.randrange(2**31)}
        asked = _MIXED[index % len(_MIXED)] if mixed else {"ignore_eos": True}
        words = {"messages": [{"role": "user", "content": prompt}]} if "tools" in asked else {
            "prompt": prompt}
        made.append({**words, "max_tokens": rng.randint(3 * tokens // 4, tokens), **asked,
                     **sampling})
    return tuple(made)


async def undisturbed(setup: Setup) -> Undisturbed:
    """Run the requests with nothing going wrong. Raises Trouble when that fails already."""
    job = setup.start(setup.cache, environ=_STORES if setup.kv else None)
    try:
        await asyncio.to_thread(job.await_ranks, FIRST_SECONDS)
        up = time.monotonic()
        await asyncio.to_thread(job.await_ready, FIRST_SECONDS)
        begin = time.monotonic()
        answers = await asyncio.gather(*(setup.complete(job.url, b) for b in setup.bodies))
        bad = [answer.trouble for answer in answers if answer.trouble]
        if bad:
            raise job.trouble(f"without any fault a request failed ({bad[0]})")
        if not all(map(_holds, setup.bodies, answers)):
            raise job.trouble("without any fault an answer is not the JSON that was asked for")
        if (code := await asyncio.to_thread(job.drain, DRAIN_SECONDS)) != 0:
            raise job.trouble(f"without any fault the server's exit code is {code}")
    finally:
        await asyncio.to_thread(job.close)
        keep_log(setup, job, "undisturbed")
    return Undisturbed(tuple(tuple(answer.tokens) for answer in answers), begin - up,
                       max(answer.times[0] for answer in answers) - begin,
                       tuple((answer.text, answer.reason) for answer in answers))


def _holds(body: dict[str, Any], answer: Answer) -> bool:
    """Whether a complete answer is the JSON that its request asked for, if it did."""
    if not {"response_format", "tools"} & body.keys() or answer.reason == "length":
        return True
    try:
        return sorted(json.loads(answer.text)) == sorted(_PERSON["required"])
    except (ValueError, TypeError):
        return False


async def trial(setup: Setup, wanted: Undisturbed, outcome: Outcome, rng: random.Random) -> Outcome:
    """Run the fault and moment that `outcome` names, and fill in what came of it."""
    run = _Trial(setup, wanted, outcome, rng)
    started = time.monotonic()
    try:
        await run.run()
    except Trouble as error:
        outcome.trouble = str(error)
        run.look_for_fault()
        outcome.lost = outcome.lost or dict.fromkeys(range(len(setup.bodies)), "never sent")
    finally:
        await asyncio.to_thread(run.close)
    outcome.seconds = time.monotonic() - started
    return outcome


class _Trial:
    def __init__(self, setup: Setup, wanted: Undisturbed, outcome: Outcome, rng: random.Random
                 ) -> None:
        self._setup, self._wanted, self._rng, self._out = setup, wanted, rng, outcome
        self._cache = self._own_cache()  # survivors leave shards in it that no other run wants
        self._deaths: list[float] = []
        self._tokens = 0
        self._damaged: tuple[Path, bytes] | None = None
        self._processes: dict[int, psutil.Process] = {}
        self._holders = list(range(1, setup.ranks - setup.spares))
        environ = {}
        self._by_rank = outcome.fault in INSIDE or (
            outcome.fault in SIGNALS and outcome.moment == "load")
        if self._by_rank:
            spec = self._inside()
            outcome.what = f"--hook fault={spec}"
            environ["PIPEINFER_HOOK"] = f"fault={spec}"
        if outcome.fault in KV:
            environ |= _STORES
        if outcome.fault == BETWEEN:
            environ |= {"PIPEINFER_TIMEOUT": _CUT_SECONDS, "PIPEINFER_SUM_PATH": "messages"}
        elif outcome.fault == "corrupt-cache":
            self._corrupt()
        self._job = setup.start(self._cache, outcome.fault, environ=environ)

    def _inside(self) -> str:
        """A fault that a rank brings about itself, as `--hook fault=` takes it."""
        rng, victims, fault = self._rng, self._setup.victims, self._out.fault
        if fault == BETWEEN:
            self._out.hit = [*victims.pair(self._holders, rng)]
            after = rng.randint(50, 2000) if victims.wide else rng.randint(10, 100)
            return "cut-link@{}:peer={}:after={}".format(*self._out.hit, after)
        (rank, *_), _ = victims.pick(self._holders, rng)
        self._out.hit = [rank]
        if fault == "slow":
            return f"slow@{rank}:ms={rng.choice((2, 10, 30))}"
        if fault == "slow-link":
            return f"slow-link@{rank}:ms={rng.choice((5, 20, 50))}"
        if fault == "lose-cancel":
            return f"lose-cancel@{rank}:every={rng.randint(1, 3)}"
        if fault in KV:
            if fault == "kv-full" or (fault == "kv-slow" and rng.random() < 0.5):
                # so that there is something to write
                shutil.rmtree(self._cache / "kv", ignore_errors=True)
            return f"{fault}@{rank}:" + {
                "kv-corrupt": f"every={rng.randint(1, 3)}", "kv-full": f"after={rng.randint(0, 6)}",
                "kv-slow": f"ms={rng.choice((20, 100, 400))}"}[fault]
        if fault == "disk-full":
            shutil.rmtree(self._cache)  # or nothing would be written
            return f"disk-full@{rank}:load"
        if self._out.moment == "load":  # with an empty cache, so that there is something to do
            shutil.rmtree(self._cache)
            phase = rng.choice(("extracting", "loading", "measuring"))
            return f"{fault}@{rank}:load={phase}"
        when = f"prefill={rng.randint(1, 4)}" if self._out.moment == "prefill" else \
            f"decode={rng.randint(1, 40)}"
        more = {"error": f":layer={rng.randint(0, 3)}",
                "clock": f":s={rng.choice((-1e6, -3600, -1, 1, 3600, 1e6))}"}.get(fault, "")
        return f"{fault}@{rank}:{when}{more}"

    def _own_cache(self) -> Path:
        """A copy of the campaign's cache for this run alone."""
        own = self._setup.cache.with_name(f"run-{self._out.number}")
        shutil.copytree(self._setup.cache, own)
        return own

    def _corrupt(self) -> None:
        """Damage one of the shards that the undisturbed run has left."""
        shards = sorted(self._cache.glob("*.gguf"))
        if not shards:
            return  # every stage runs off the model's own file
        shard = self._rng.choice(shards)
        flip_byte(shard)
        layers = "-".join(shard.name.split("-")[1:3])
        self._out.what = f"a byte of the cached layers {layers} is flipped"
        self._out.happened = True
        self._damaged = shard, shard.read_bytes()

    # --- the run ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start, strike, ask, compare, end. Raises Trouble."""
        out, job = self._out, self._job
        if out.fault in SIGNALS and not self._by_rank:
            self._processes = await asyncio.to_thread(job.await_ranks, self._wanted.patience)
        out.ready = await asyncio.to_thread(job.await_ready, self._wanted.patience)
        await self._ask()
        status, health = await client.get(job.url, "/health")
        if status == 200 and isinstance(health, dict):
            out.recoveries = int(health.get("recoveries", -1))
        out.exit_code = await asyncio.to_thread(job.drain, DRAIN_SECONDS)
        if out.exit_code is None:
            out.left.append(f"the job did not end {DRAIN_SECONDS:g} s after it was asked to")
        out.left += await asyncio.to_thread(job.left_over, GONE_SECONDS)
        # Who is killed while it writes cannot delete what it wrote; a later start does.
        if out.moment not in ("load", "recovery"):
            out.left += [f"file {path.name}" for suffix in ("tmp", "part")
                         for path in self._cache.glob(f"*.{suffix}")]
        if self._damaged is not None and self._damaged[0].read_bytes() == self._damaged[1]:
            out.left.append("the damaged shard, which was not detected")

    async def _ask(self) -> None:
        """All requests at once, the fault among them."""
        out, job, setup = self._out, self._job, self._setup
        if out.fault in SIGNALS and out.moment != "load":
            self._holders = await holders(job.url) or self._holders
        begin, stop = time.monotonic(), asyncio.Event()
        answers = [Answer() for _ in setup.bodies]
        side: list[asyncio.Task[Any]] = []
        if out.fault == "storm":
            out.what, out.happened = f"a storm of {STORM_CLIENTS} clients", True
            side.append(asyncio.create_task(
                client.storm(job.url, STORM_CLIENTS, self._rng, stop)))
            await asyncio.sleep(0.3)
        elif out.fault in (*WHOLE, *DISKS):
            side.append(asyncio.create_task(self._strike_the_whole(begin)))
        elif out.fault in SIGNALS and out.moment != "load":
            side.append(asyncio.create_task(self._strike_while_serving(begin)))
        asked = [asyncio.create_task(self._insist(body, answer))
                 for body, answer in zip(setup.bodies, answers, strict=True)]
        late = (await asyncio.wait(asked, timeout=setup.answer_seconds))[1]
        for task in late:
            task.cancel()
        stop.set()
        for task in side:
            await task if out.fault == "storm" else task.cancel()
        await asyncio.gather(*asked, *side, return_exceptions=True)
        for task, answer in zip(asked, answers, strict=True):
            if task in late:  # what was cancelled has the trouble of a broken stream
                answer.trouble = f"no end after {setup.answer_seconds:g} s"
        self.look_for_fault()
        self._compare(answers)

    async def _insist(self, body: dict[str, Any], answer: Answer) -> None:
        """An honest client: it comes again when the queue is full, and, where nothing else can be
        expected, when its connection has broken."""
        again = self._out.fault in CONNECTIONS_LOST
        key = f"{self._job.id}-{id(answer)}" if again else ""
        while True:
            await self._setup.complete(self._job.url, body, on_token=self._count, answer=answer,
                                       key=key)
            if answer.status != _QUEUE_FULL and not (again and answer.trouble):
                return
            await asyncio.sleep(0.2)

    def _count(self) -> None:
        self._tokens += 1

    def _compare(self, answers: Sequence[Answer]) -> None:
        out = self._out
        for index, (answer, tokens) in enumerate(
                zip(answers, self._wanted.tokens, strict=True)):
            ended = not answer.trouble and len(answer.tokens) == len(tokens)
            if tuple(answer.tokens) != tokens[:len(answer.tokens)] or (
                    ended and (answer.text, answer.reason) != self._wanted.ends[index]):
                out.different.append(index)
            elif answer.trouble or len(answer.tokens) < len(tokens):
                out.lost[index] = (f"{len(answer.tokens)} of {len(tokens)} tokens, "
                                   f"{answer.trouble or 'and no more'}")
        if self._deaths and out.moment != "load":
            times = [resumed(answer.times, self._deaths[-1])
                     for index, answer in enumerate(answers) if index not in out.lost]
            out.next_all = [t for t in times if t is not None]
            out.next_any = min(out.next_all, default=None)
        if out.lost:
            out.trouble = f"the end of the server's log:\n{self._job.tail()}".rstrip()

    def look_for_fault(self) -> None:
        """Ranks say on standard error when they do what they were asked to."""
        out, job = self._out, self._job
        out.exit_code = job.process.poll()
        if not self._by_rank:
            return
        if poll(lambda: job.said_at("pipeinfer: fault: ") is not None, 1.0):
            out.happened = True
            if out.fault in ("error", "memory", BETWEEN, *SIGNALS):
                self._deaths.append(job.said_at("pipeinfer: fault: ") or 0.0)

    # --- striking -----------------------------------------------------------------------------

    async def _strike_while_serving(self, begin: float) -> None:
        out, rng, victims = self._out, self._rng, self._setup.victims
        first, second = victims.pick(self._holders, rng)
        out.what = f"{out.fault} {' and '.join(map(victims.name, first))}"
        await self._moment_comes()
        for rank in first:
            self._blow(rank, begin)
        for rank in second if out.moment == "recovery" else ():
            delay = rng.uniform(0.0, _SECOND_BLOW)
            out.what += f" and {victims.name(rank)} {delay * 1e3:.0f} ms later"
            await asyncio.sleep(delay)
            self._blow(rank, begin)

    async def _strike_the_whole(self, begin: float) -> None:
        out = self._out
        out.what = out.fault
        await self._moment_comes()
        if out.fault in DISKS:
            out.happened = await asyncio.to_thread(
                whole.strike_disk, self._job, self._cache, out.fault)
            return
        who, number = WHOLE[out.fault]
        found = await asyncio.to_thread(whole.processes, self._job, who)
        now = time.monotonic()
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
                out.at, out.happened = now - begin, True
        self._deaths.append(now)
        if out.fault in NOBODY_LEFT:
            await asyncio.to_thread(self._job.start_again)

    async def _moment_comes(self) -> None:
        out, rng = self._out, self._rng
        if out.moment == "prefill":
            delay = rng.uniform(0.0, self._wanted.first)
            out.what += f" {delay * 1e3:.0f} ms into the prompts"
            await asyncio.sleep(delay)
        else:
            share = rng.uniform(0.05, 0.7)
            count = int(share * sum(map(len, self._wanted.tokens)))
            out.what += f" after {count} tokens"
            while self._tokens < count:
                await asyncio.sleep(0.002)

    def _blow(self, rank: int, begin: float) -> None:
        process = self._processes.get(rank)
        now = time.monotonic()
        if process is None or not process.is_running():
            return
        with contextlib.suppress(psutil.Error):
            process.send_signal(SIGNALS[self._out.fault])
            self._deaths.append(now)
            self._out.hit.append(rank)
            self._out.at, self._out.happened = now - begin, True

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Nothing of the run stays."""
        self._job.close()
        keep_log(self._setup, self._job, f"run-{self._out.number + 1:03}")
        whole.remove(self._cache)
        shutil.rmtree(self._cache, ignore_errors=True)


def keep_log(setup: Setup, job: ServerJob, name: str) -> None:
    """Write a job's log where the campaign's logs go, if anywhere."""
    if setup.logs is not None:
        setup.logs.mkdir(parents=True, exist_ok=True)
        (setup.logs / f"{name}.log").write_text("".join(job.log), encoding="utf-8")


async def holders(url: str) -> list[int]:
    """Ranks other than 0 that hold layers, as the server says; empty when it does not."""
    for path, keys in (("/health", ("stages",)), ("/props", ("pipeinfer", "stages"))):
        status, found = await client.get(url, path)
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if status == 200 and isinstance(found, list) and found:
            return sorted({int(stage["rank"]) for stage in found} - {0})
    return []


def remove_leftovers(cache: Path) -> None:
    """Delete a campaign's directory."""
    shutil.rmtree(cache, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(cache.parent)
