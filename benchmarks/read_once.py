"""What a cluster with prompts on disks saves, over hosts that are network namespaces.

    python -m benchmarks.read_once [--tokens 2300 --tokens 8000] [-m smollm2] [--without]
    python -m benchmarks.read_once --day        # 20 turns of an agent, and a crash amid them

Four hosts, each with a disk of its own: the head and three stages under `pipeinfer up`. A prompt is
asked once, and again after each of these: all processes are killed, a stage is killed amid the
answer, a link is cut, a host is lost with its disk, the job has fewer ranks, `reload`, another
model and back. Prints the seconds to the first token or, for what happens amid an answer, the
longest pause; the tokens that were read from disks; and whether the text is the same. Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.kit.namespaces import ROOT, Cluster

_PORT, _ANSWER, _START = 8133, 64, 120.0
_PIPEINFER = [sys.executable, "-P", "-m", "pipeinfer"]
#: prints a line for each piece of an answer: seconds since the request, text; then its timings
_ASK = f"""
import json, sys, time, urllib.request
body = open(sys.argv[1], "rb").read()
request = urllib.request.Request("http://127.0.0.1:{_PORT}/v1/completions", body,
                                 {{"Content-Type": "application/json"}})
began = time.monotonic()
with urllib.request.urlopen(request, timeout=900) as answer:
    for line in answer:
        if line.startswith(b"data: {{"):
            found = json.loads(line[6:])
            text = "".join(one["text"] for one in found.get("choices", ()))
            print(json.dumps([time.monotonic() - began, text, found.get("timings")]), flush=True)
"""


class Site:
    """Four hosts, and the server that runs on them."""

    def __init__(self, cluster: Cluster, folder: Path, options: list[str]) -> None:
        self._cluster, self._folder, self._options = cluster, folder, options
        self.lines: list[str] = []

    def up(self, model: str, hosts: int = 4, *, disks: bool = True) -> None:
        """Start the server over the first hosts, and wait until it is ready."""
        lines = (self._cluster.hostfile.read_text().splitlines())[:hosts]
        file = self._folder / "hosts"
        file.write_text("\n".join(lines) + "\n")
        process = self._cluster.start(
            [*_PIPEINFER, "up", "--hosts", str(file), "-np", str(hosts), "--", "serve",
             *self._serving(model, disks=disks)], timeout=3600,
            PIPEINFER_STATE=str(self._folder / "state"))
        said = self.lines = []
        threading.Thread(target=lambda: said.extend(iter(process.stderr.readline, "")),
                         daemon=True).start()
        self.until(" on http://")

    def until(self, text: str) -> None:
        """Wait until the server has printed a text since its start."""
        deadline = time.monotonic() + _START
        while not any(text in line for line in self.lines):
            if time.monotonic() > deadline:
                raise SystemExit(f"no {text!r}:\n{''.join(self.lines)[-3000:]}")
            time.sleep(0.05)

    def _serving(self, model: str, *, disks: bool = True) -> list[str]:
        return ["-m", model, "-md", "none", "--port", str(_PORT), "-c", "16384", "-t", "1", "--set",
                "split=equal", "--timeout", "20", *(self._options if disks else ())]

    def reload(self, model: str = "") -> None:
        """Start the job again, with another model if one is named."""
        more = ["--", "serve", *self._serving(model)] if model else []
        done = self._cluster.run([*_PIPEINFER, "reload", *more], timeout=300,
                                 PIPEINFER_STATE=str(self._folder / "state"))
        if done.returncode:
            raise SystemExit(done.stderr)

    def ask(self, body: Path, amid: Callable[[], None] | None = None) -> dict[str, Any]:
        """Ask, and do something in the middle of the answer; return what came, and when."""
        process = self._cluster.start([sys.executable, "-c", _ASK, str(body)], timeout=900)
        pieces = []
        for line in process.stdout:
            pieces.append(json.loads(line))
            if len(pieces) == _ANSWER // 4 and amid is not None:
                amid()
        if process.wait(20):
            raise SystemExit(process.stderr.read())
        times = [at for at, text, _ in pieces if text]
        timings = next(found for _, _, found in reversed(pieces) if found)
        return {"first": times[0], "text": "".join(text for _, text, _ in pieces),
                "pause": max(b - a for a, b in itertools.pairwise(times)),
                "restored": timings.get("restored_n", 0)}

    def kill_rank(self, node: int) -> None:
        """SIGKILL to the process of a rank."""
        for pid in self._cluster.pids(node):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"\0serve\0" in file.read():
                    os.kill(pid, signal.SIGKILL)


def _prompt(tokens: int, seed: int) -> str:
    words = (ROOT / "docs" / "algorithms.md").read_text().split()
    rng = random.Random(seed)
    return " ".join(rng.choice(words) for _ in range(int(tokens / 1.35)))


def _show(name: str, key: str, found: dict[str, Any], want: str) -> None:
    same = "same" if found["text"] == want else "OTHER"
    print(f"{name:<42}{key:<6}{found[key]:8.1f} s  {found['restored']:6} tokens  {same}",
          flush=True)


def _scenes(cluster: Cluster, site: Site, body: Path, model: str) -> None:
    want = ""

    def show(name: str, key: str, amid: Callable[[], None] | None = None) -> None:
        nonlocal want
        found = site.ask(body, amid)
        want = want or found["text"]
        _show(name, key, found, want)

    def restart(hosts: int = 4) -> None:
        time.sleep(3)  # until the journal has the end of the answer, or the next job asks it again
        cluster.kill_jobs()
        site.up(model, hosts)

    site.up(model)
    show("cold", "first")
    show("again, from memory", "first")
    restart()
    show("after kill -9 of everything", "first")
    show("a stage is killed amid the answer", "pause", lambda: site.kill_rank(3))
    restart()
    show("a link is cut amid the answer", "pause", lambda: cluster.separate(2, 3))
    restart(3)
    show("one rank fewer", "first")
    site.reload()
    show("after reload", "first")
    site.reload("embedded")
    site.reload(model)
    show("after another model", "first")


def _turns(count: int) -> list[str]:
    """Prompts of an agent that reads files of this project: each has all of the one before."""
    files = sorted((ROOT / "pipeinfer" / "core").glob("*.py"))
    text, made = (ROOT / "CONTRIBUTING.md").read_text()[:12_000], []
    for number in range(count):
        read = files[number % len(files)].read_text()[1000 * (number // len(files)):][:1200]
        text += f"\n\n<tool_result number={number}>\n{read}\n</tool_result>\n"
        made.append(text)
    return made


def _day(cluster: Cluster, site: Site, body: Path, model: str, asked: dict[str, Any]) -> None:
    """An agent's turns; all processes are killed in the middle. Texts are compared with those of a
    server without disks that nobody disturbs."""
    turns, texts = _turns(20), []
    for disks in (False, True):
        if not disks:
            site.up(model, disks=False)
        else:
            cluster.kill_jobs()
            site.up(model)
        for number, prompt in enumerate(turns):
            if disks and number == len(turns) // 2:
                time.sleep(3)
                cluster.kill_jobs()
                site.up(model)
            body.write_text(json.dumps({**asked, "prompt": prompt}))
            found = site.ask(body)
            if disks:
                _show(f"turn {number + 1}", "first", found, texts[number])
            else:
                texts.append(found["text"])


def _lost_host(cluster: Cluster, site: Site, body: Path, model: str) -> None:
    """A host is lost with its disk: in a cluster of its own, since it does not come back."""
    site.up(model)
    want = site.ask(body)["text"]
    found = site.ask(body, lambda: cluster.unplug(3))
    _show("a host is lost with its disk", "pause", found, want)


def main() -> None:
    """Run the scenes for each length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("-m", dest="model", default="smollm2")
    parser.add_argument("--without", action="store_true", help="without prompts on disks")
    parser.add_argument("--verbose", action="store_true", help="show the last server's output")
    parser.add_argument("--day", action="store_true", help="an agent's turns instead")
    given = parser.parse_args()
    for tokens in given.tokens or ([0] if given.day else [2300, 8000]):
        with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as disk:
            folder = Path(name)
            options = [] if given.without else ["--kv-disk", f"{disk}/kv"]
            body = folder / "body.json"
            asked = {"max_tokens": _ANSWER, "temperature": 0.7, "seed": 3, "ignore_eos": True,
                     "stream": True, "timings_per_token": True}
            body.write_text(json.dumps({**asked, "prompt": _prompt(tokens, 5)}))
            what = "an agent's turns" if given.day else f"about {tokens} tokens"
            print(f"{given.model}, {what}{', no disks' * given.without}", flush=True)
            for scenes in (partial(_day, asked=asked),) if given.day else (_scenes, _lost_host):
                with Cluster(4, private=[disk]) as cluster:
                    site = Site(cluster, folder, options)
                    scenes(cluster, site, body, given.model)
                if given.verbose:
                    print("".join(site.lines))
                shutil.rmtree(f"{disk}/kv", ignore_errors=True)


if __name__ == "__main__":
    main()
