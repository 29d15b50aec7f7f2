"""A host leaves and comes back, another is added, the server is reloaded: one run, under load.

    python -m benchmarks.resilience.hosts

Four hosts in network namespaces (tests/rig/namespaces.py), `pipeinfer up` on the first with
the first three in its hostfile. Four clients of the official openai library ask one thing after
another all the time. The third host's link goes down; it comes up again and `pipeinfer rescale`
takes the host back; the fourth is written into the hostfile, and `rescale` again; `pipeinfer
reload` with other options; then with another model file in the place of the old one. Every answer
is compared with that of an undisturbed server. Between two of these the clients' speed is measured
for --seconds. Needs root and the `test` extra. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeinfer.lab.chaos.trial import bodies
from tests.rig.launch import ROOT
from tests.rig.namespaces import Cluster, why_not

PIPEINFER = [sys.executable, "-P", "-m", "pipeinfer"]
MODEL = ROOT / "pipeinfer" / "models" / "embedded" / "target.gguf"
URL, CLIENTS, PLACES = "http://127.0.0.1:8128", 4, 60.0


def ask_on_and_on(folder: Path) -> None:
    """Runs on the first host: every body once, then CLIENTS at a time until `folder`/stop is there.
    One JSON line an answer: its body, tokens, their times (of the machine's monotonic clock)."""
    from openai import OpenAI, OpenAIError

    asked = json.loads((folder / "bodies").read_text(encoding="utf-8"))
    lock = threading.Lock()

    def one(index: int) -> None:
        body = dict(asked[index])
        line: dict[str, Any] = {"body": index, "tokens": [], "times": [], "error": "", "again": []}
        try:
            with OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
                for chunk in client.completions.create(
                        model="embedded", prompt=body.pop("prompt"), stream=True,
                        extra_body={**body, "pipeinfer": {"detail": True}}):
                    more = chunk.model_extra or {}
                    tokens = (more.get("pipeinfer") or {}).get("tokens", [])
                    line["tokens"] += tokens
                    line["times"] += [time.monotonic()] * len(tokens)
                    timings = more.get("timings") or {}
                    if "restarts_n" in timings:
                        line["again"] = [timings["restarts_n"], timings["same_arithmetic"]]
        except OpenAIError as error:
            line["error"] = str(error) or type(error).__name__
        with lock:
            print(json.dumps(line), flush=True)

    def on_and_on(number: int) -> None:
        while not (folder / "stop").exists():
            one(number % len(asked))
            number += CLIENTS + 1

    for index in range(len(asked)):
        one(index)
    threads = [threading.Thread(target=on_and_on, args=(n,)) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Trial:
    """The server on its hosts, and what its clients get."""

    def __init__(self, cluster: Cluster, folder: Path, given: argparse.Namespace) -> None:
        self._cluster, self._folder, self._seconds = cluster, folder, given.seconds
        self.model, self._hosts = folder / "model.gguf", folder / "hosts"
        shutil.copy(MODEL, self.model)
        self._lines = cluster.hostfile.read_text(encoding="utf-8").splitlines(keepends=True)
        self._hosts.write_text("".join(self._lines[:3]), encoding="utf-8")
        self._environ = {"PIPEINFER_STATE": str(folder / "state"), "PYTHONPATH": str(ROOT)}
        self.serve = ["serve", "-m", str(self.model), "--alias", "embedded", "--port", "8128", "-c",
                      "2048", "-t", "1", "--pace-ms", str(given.pace_ms)]
        self._asked = bodies(8, given.tokens, given.seed)
        (folder / "bodies").write_text(json.dumps(self._asked), encoding="utf-8")
        self._answers = folder / "answers"
        self.moments: list[dict[str, Any]] = []

    def run(self) -> None:
        """All of it. Raises AssertionError when something is refused or never comes."""
        cluster = self._cluster
        with (self._folder / "up.log").open("wb") as log, self._answers.open("wb") as answers:
            up = self._start(log, *PIPEINFER, "up", "--hosts", str(self._hosts), "--stay",
                             "--overlap", "auto", "--ask-hosts-every", "2", "--", *self.serve)
            self._hosts_are("used", "used", "used")
            clients = self._start(answers, sys.executable, "-m", "benchmarks.resilience.hosts",
                                  "--ask", str(self._folder))
            try:
                self._until(lambda: len(self._found()) >= len(self._asked), "first answers")
                self._measure("three hosts", lambda: "")
                self._measure("the third host is cut off", self._cut)
                self._measure("it is back: rescale", self._back)
                self._measure("a fourth host: rescale", self._add)
                self._measure("reload, other options", lambda: self._call(
                    "reload", "--", *self.serve, "--queue", "8"))
                self._measure("reload, another model file", self._other_file)
                (self._folder / "stop").touch()
                clients.wait(120)
                up.send_signal(signal.SIGTERM)
                up.wait(60)
            finally:
                cluster.kill_jobs()
                for process in (clients, up):
                    process.kill()
                    process.wait()

    def _start(self, out: Any, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._cluster.command(1, command), stdout=out, stderr=sys.stderr
            if command[0] == sys.executable and "--ask" in command else out,
            stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True,
            env=self._cluster.environment(MPIEXEC_TIMEOUT="1800", **self._environ))

    def _call(self, *words: str) -> str:
        done = self._cluster.run([*PIPEINFER, *words], timeout=200, **self._environ)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _until(self, there: Any, what: str) -> None:
        deadline = time.monotonic() + 2 * PLACES
        while not there():
            assert time.monotonic() < deadline, f"{what} never came"
            time.sleep(0.2)

    def _hosts_are(self, *states: str) -> None:
        def there() -> bool:
            done = self._cluster.run([*PIPEINFER, "status", "--json"], timeout=60, **self._environ)
            if not done.stdout.startswith("{"):
                return False
            return tuple(h["state"] for h in json.loads(done.stdout)["hosts"]) == states

        self._until(there, f"hosts that are {', '.join(states)}")

    # --- what happens -------------------------------------------------------------------------

    def _measure(self, what: str, act: Any) -> None:
        begin = time.monotonic()
        said = act()
        ready = time.monotonic()
        time.sleep(self._seconds)
        self.moments.append({"what": what, "begin": begin, "ready": ready,
                             "end": time.monotonic(), "said": said})
        print(f"{what}: {ready - begin:.1f} s; {said}", file=sys.stderr, flush=True)

    def _cut(self) -> str:
        self._cluster.unplug(3)
        self._hosts_are("used", "used", "lost")
        return ""

    def _back(self) -> str:
        self._cluster.plug(3)
        said = self._call("rescale")
        self._hosts_are("used", "used", "used")
        return said

    def _add(self) -> str:
        self._hosts.write_text("".join(self._lines[:4]), encoding="utf-8")
        said = self._call("rescale")
        self._hosts_are("used", "used", "used", "used")
        return said

    def _other_file(self) -> str:
        beside = self.model.with_suffix(".new")
        shutil.copy(MODEL, beside)
        beside.replace(self.model)
        return self._call("reload", "--wait", "120")

    # --- what came of it ----------------------------------------------------------------------

    def _found(self) -> list[dict[str, Any]]:
        raw = self._answers.read_bytes()
        return [json.loads(line) for line in raw[:raw.rfind(b"\n") + 1].splitlines()]

    def verdict(self) -> dict[str, Any]:
        """Answers that were whole; speeds (tokens/s of all clients) after, and silences over, each
        moment."""
        found = self._found()
        first, rest = found[:len(self._asked)], found[len(self._asked):]
        wanted = [line["tokens"] for line in first]
        rows = []
        for moment in self.moments:
            times = [t for line in rest for t in line["times"]]
            count = sum(moment["ready"] < t <= moment["end"] for t in times)
            silences = [b - a for line in rest for a, b in pairwise(line["times"])
                        if b > moment["begin"] and a < moment["ready"]]
            rows.append({
                "what": moment["what"], "said": moment["said"],
                "took_s": round(moment["ready"] - moment["begin"], 1),
                "longest_silence_s": round(max(silences, default=0.0), 1),
                "tokens_per_s": round(count / (moment["end"] - moment["ready"]), 1)})
        wrong = [{"body": line["body"], "tokens": len(line["tokens"]), "error": line["error"]}
                 for line in rest if line["error"] or line["tokens"] != wanted[line["body"]]]
        return {"moments": rows, "answers": len(rest), "wrong": wrong,
                "undisturbed": [len(tokens) for tokens in wanted],
                "taken_up": sum(bool(line["again"]) for line in rest),
                "other_arithmetic": sum(line["again"][1:] == [False] for line in rest)}


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=20.0, help="speeds are measured for")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pace-ms", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        ask_on_and_on(given.ask)
        return 0
    if reason := why_not():
        sys.exit(f"no cluster of namespaces here: {reason}")
    with tempfile.TemporaryDirectory() as folder, Cluster(4) as cluster:
        trial = Trial(cluster, Path(folder), given)
        try:
            trial.run()
        except AssertionError:
            print((Path(folder) / "up.log").read_text(encoding="utf-8")[-3000:], file=sys.stderr)
            raise
        found = trial.verdict()
    print(json.dumps(found, indent=1))
    return int(bool(found["wrong"]) or not all(found["undisturbed"]))


if __name__ == "__main__":
    sys.exit(main())
