"""`pipeinfer top`: shows a server in the terminal, from its /health, /props, /slots and
/metrics; and the hosts of `pipeinfer up`, if it runs here."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeinfer.cli.client import DEFAULT_URL
from pipeinfer.errors import RequestError
from pipeinfer.supervise.state import Folder
from pipeinfer.transport import http_client
from pipeinfer.transport.http_client import HttpFailure

_SECONDS = 5.0  #: for an answer
_HISTORY = 60
_BARS = "▁▂▃▄▅▆▇█"
_WIDE = 110  #: columns where there is no terminal
_MIB = float(1 << 20)


@dataclass(slots=True)
class Screen:
    """The state of a server at one time.

    state: of /health. name, facts: of /props. lanes: of /slots.
    figures: of /metrics, by name, and by name and stage.
    supervisor: the state of `pipeinfer up`, if it runs here.
    rate: tokens of all requests per second since the frame before.
    """

    at: float
    url: str
    state: str = ""
    reason: str = ""
    name: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    lanes: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    supervisor: dict[str, Any] = field(default_factory=dict)
    rate: float | None = None
    seen: float = 0.0  #: of a clock that does not jump

    def figure(self, name: str, **labels: object) -> float:
        """Return a figure of /metrics; 0 if it does not exist."""
        more = "".join(f",{key}={labels[key]}" for key in sorted(labels))
        return self.figures.get(f"pipeinfer_{name}{more}", 0.0)


def read(text: str) -> dict[str, float]:
    """Return the figures in Prometheus' format, by "name,label=value,..."."""
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = "".join(f",{key}={one.labels[key]}" for key in sorted(one.labels))
            found[one.name + labels] = float(one.value)
    return found


def look(url: str, headers: Mapping[str, str], before: Screen | None = None) -> Screen:
    """Query the server. A server that does not answer gives a frame with the state "silent".

    before: the last frame, for the rate. Raises RequestError if a key is needed or the server is
        not pipeinfer.
    """
    frame = Screen(time.time(), url, seen=time.monotonic())

    def get(path: str) -> Any:
        answer = http_client.ask("GET", url + path, timeout=_SECONDS, headers=headers)
        if answer.status == 401:
            raise RequestError("the server wants an API key: give it with --api-key or "
                               "PIPEINFER_API_KEY")
        if path == "/metrics":
            return answer.text
        return answer.json() if answer.status in (200, 503) else {}

    try:
        health = get("/health")
        frame.state, frame.reason = str(health.get("status", "")), str(health.get("reason", ""))
        frame.figures = read(get("/metrics"))
        if frame.state == "ok":
            props = get("/props")
            frame.name, frame.facts = str(props.get("model_alias", "")), props.get("pipeinfer", {})
            slots = get("/slots")
            frame.lanes = [one["lane"] for one in slots if one.get("lane")] if isinstance(
                slots, list) else []
    except HttpFailure as error:
        frame.state, frame.reason = "silent", str(error)
    except (ValueError, AttributeError, TypeError) as error:
        raise RequestError(f"the program at {url} is no `pipeinfer serve`: {error}") from error
    if before is not None and frame.seen > before.seen:
        new = frame.figure("generated_tokens_total") - before.figure("generated_tokens_total")
        if frame.figures and before.figures and new >= 0:
            frame.rate = new / (frame.seen - before.seen)
    if not frame.facts and before is not None:
        frame.name, frame.facts = before.name, before.facts  # of the last job
    return frame


# --- drawing ----------------------------------------------------------------------------------


def draw(frame: Screen, rates: collections.deque[float]) -> RenderableType:
    """Return a frame for the terminal. rates: of the last frames."""
    facts, parts = frame.facts, list[RenderableType]()
    good = frame.state == "ok"
    parts.append(Text.assemble(
        (_clean(frame.name or "?"), "bold"), f" at {_clean(frame.url)}  ",
        ("ready" if good else frame.state, "green" if good else "bold red"),
        f"  {_clean(frame.reason)}" if frame.reason and not good else "",
        f"  pipeinfer {_clean(facts['version'])}, policy {_clean(facts['policy'])}"
        if facts else ""))
    rate = "-" if frame.rate is None else f"{frame.rate:.1f}"
    parts.append(Text.assemble(("tokens/s ", "dim"), (f"{rate:>7} ", "bold"),
                               (spark(rates), "cyan")))
    parts.append(Text(_requests(frame)))
    parts.append(Text(_speculation(frame)))
    if facts:
        parts += [Text(), _stages(frame)]
        if others := _others(facts):
            parts.append(Text(others))
    if frame.lanes:
        parts += [Text(), _lanes(frame)]
    if hosts := [one for one in frame.supervisor.get("hosts", []) if one["state"] != "used"]:
        parts.append(Text("hosts    " + "; ".join(
            _clean(f"{one['host']} {one['state']}" + (f" ({one['why']})" if one["why"] else ""))
            for one in hosts), style="yellow"))
    return Group(*parts)


def _requests(frame: Screen) -> str:
    ended = {key.rpartition("=")[2]: value for key, value in frame.figures.items()
             if key.startswith("pipeinfer_requests_total,") and value}
    text = (f"requests {frame.figure('open_choices'):.0f} open, {frame.figure('waiting'):.0f} "
            f"waiting; ended: " + (", ".join(f"{value:.0f} {name}" for name, value in
                                             sorted(ended.items())) or "none"))
    first = _mean(frame, "time_to_first_token_seconds")
    between = _mean(frame, "inter_token_seconds")
    if first is not None:
        text += f"; first token {first:.2f} s"
    return text if between is None else f"{text}, then every {1000 * between:.0f} ms (means)"


def _speculation(frame: Screen) -> str:
    drafted = frame.figure("drafted_tokens_total")
    accepted = frame.figure("accepted_tokens_total")
    right = f"{accepted / drafted:.0%} accepted" if drafted else "of answers that have ended: none"
    return (f"drafted  {right}; cache {frame.figure('cells_used'):.0f} of "
            f"{frame.figure('cells'):.0f} tokens; recoveries {frame.figure('recoveries'):.0f}, "
            f"new jobs {frame.figure('restarts_total'):.0f}")


def _stages(frame: Screen) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("stage", "rank", "host", "layers", "weights", "cache", "free then", "threads",
                 "ms a row", "of its best"):
        table.add_column(name, justify="left" if name == "host" else "right", no_wrap=True)
    memory = {one["rank"]: one["memory"] for one in frame.facts["ranks"]}
    for one in frame.facts["stages"]:
        where = {"stage": one["stage"], "rank": one["rank"], "host": one["host"]}
        seconds, slow = frame.figure("stage_seconds", **where), frame.figure(
            "stage_slowdown", **where)
        start, stop = one["layers"]
        slices = f" {one['slices']}/{one['of_slices']}" if one["of_slices"] else ""
        table.add_row(
            str(one["stage"]), str(one["rank"]), _clean(one["host"]), f"{start}-{stop - 1}{slices}",
            _size(one["weight_bytes"]), _size(one["cache_bytes"]),
            _size(memory.get(one["rank"], 0)), str(one["threads"]),
            f"{1000 * seconds:.2f}" if seconds else "-",
            Text(f"{slow:.2f}x" if slow else "-", style="red" if slow > 1.5 else ""))
    return table


def _others(facts: Mapping[str, Any]) -> str:
    """Describe the ranks without a stage."""
    hosts = {one["rank"]: one["host"] for one in facts["ranks"]}
    said = []
    if 0 in hosts and 0 not in {one["rank"] for one in facts["stages"]}:
        said.append(f"rank 0 ({hosts[0]}) takes requests"
                    + (" and drafts" if facts.get("draft") else ""))
    said += [f"rank {rank} ({hosts.get(rank, '?')}) is a spare" for rank in facts["spares"]]
    said += [f"rank {rank} ({hosts.get(rank, '?')}) is lost" for rank in facts["lost"]]
    return "others   " + "; ".join(map(_clean, said)) if said else ""


def _lanes(frame: Screen) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = list(dict.fromkeys(name for lane in frame.lanes for name, value in lane.items()
                               if isinstance(value, int | float | str)))
    for name in names:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for lane in frame.lanes[:12]:
        table.add_row(*(_clean(lane.get(name, "")) for name in names))
    return table


def spark(rates: collections.deque[float]) -> str:
    """Return a line of bars, the highest for the largest value."""
    most = max(rates, default=0.0)
    return "".join(_BARS[round((len(_BARS) - 1) * rate / most)] if most else " " for rate in rates)


def _mean(frame: Screen, name: str) -> float | None:
    count = frame.figure(f"{name}_count")
    return frame.figure(f"{name}_sum") / count if count else None


def _size(count: float) -> str:
    mib = count / _MIB
    return f"{mib:.1f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def _clean(text: object) -> str:
    """Replace control characters, since a server's text must not control the terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


# --- the command ------------------------------------------------------------------------------


@click.command("top")
@click.option("--url", help="The server. [default: the one of `pipeinfer up`, else "
                            f"{DEFAULT_URL}]")
@click.option("--api-key", default="", envvar="PIPEINFER_API_KEY",
              help="Key for that server. PIPEINFER_API_KEY keeps it off the command line.")
@click.option("--name", default="default", show_default=True, help="Which one is up here.")
@click.option("--interval", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True,
              help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one frame as a JSON object and end.")
def top_command(url: str | None, api_key: str, name: str, interval: float, once: bool,
                as_json: bool) -> None:
    """Watch a server: stages, hosts, memory, load, tokens per second, requests, recoveries.

    Ctrl-C ends it.
    """
    folder = Folder(name)
    headers = {"Authorization": f"Bearer {api_key.split(',')[0]}"} if api_key else {}

    def next_frame(before: Screen | None) -> Screen:
        supervisor = folder.read() if url is None and folder.alive else {}
        base = (url or supervisor.get("url") or DEFAULT_URL).rstrip("/").removesuffix("/v1")
        frame = look(base if "://" in base else f"http://{base}", headers, before)
        frame.supervisor = supervisor
        return frame

    frame = next_frame(None)
    if once or as_json:
        if frame.state == "silent":
            raise RequestError(f"no server answers at {frame.url} ({frame.reason}): start "
                               "`pipeinfer up` or `pipeinfer serve`, or give another --url")
        time.sleep(interval)
        frame = next_frame(frame)
        if as_json:
            click.echo(json.dumps(asdict(frame)))
        else:
            console = Console(width=None if os.isatty(1) else _WIDE, highlight=False)
            console.print(draw(frame, collections.deque()))
        return
    rates: collections.deque[float] = collections.deque(maxlen=_HISTORY)
    with contextlib.suppress(KeyboardInterrupt), Live(
            draw(frame, rates), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            frame = next_frame(frame)
            rates.append(frame.rate or 0.0)
            live.update(draw(frame, rates), refresh=True)
