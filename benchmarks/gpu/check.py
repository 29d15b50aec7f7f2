"""The steps of the check; benchmarks/gpu/run.sh starts it."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import jobs
from benchmarks.gpu.devices import HERE, VULKAN, Device, build_plugin, fetch_vulkan
from benchmarks.gpu.jobs import ALL, DRAFT, ROOT, TARGET
from benchmarks.gpu.steps import Report, Step, StepError, child, json_lines
from benchmarks.peers.runs import parse_speculative

#: source text, as the embedded pair was trained on: of its own, a greedy text soon repeats a line
PROMPT = (ROOT / "pipeinfer" / "text_table.py").read_text()[:900]
#: attention and cache as llama.cpp runs them, as the exact route on a processor does, and without
#: flash attention
OPTIONS: tuple[dict[str, str], ...] = (
    {}, {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}, {"flash_attn": "off"})
TESTS = ("tests/backends/test_contract.py", "tests/backends/test_split_parity.py",
         "tests/backends/test_kv_state.py", "tests/backends/test_windows.py")
TORCH_TESTS = ("tests/backends/test_torch_backend.py", "tests/backends/test_torch_cells.py",
               "tests/backends/test_torch_gguf.py", "tests/backends/test_torch_bita.py",
               "tests/backends/test_torch_slices.py")
Measured = tuple[str, float, str]
Contestant = Callable[[float], list[Measured]]
_COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped|deselected)")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", re.MULTILINE)


@dataclass(slots=True)
class Check:
    """One run of the check. build: the folder of the build; packed: .gpu, what was prepared."""

    device: Device
    report: Report
    out: Path
    work: Path
    build: Path
    packed: Path

    def steps(self) -> list[Step]:
        """All steps in order; lanes as `steps.Runner` runs them."""
        return [
            Step("facts", "facts", 20, self.facts),
            Step("library", "build", 330, self.library),
            Step("models", "models", 200, self.models),
            Step("torch", "torch", 90, self.torch),
            Step("devices", "device", 30, self.devices, ("library",)),
            Step("bits", "device", 200, self.bits, ("library",)),
            Step("bits of wide models", "device", 80, self.wide_bits, ("library", "models")),
            # alone on the device
            Step("curve", "device", 60, self.curve, ("library", "models"), ("torch",)),
            Step("speed", "device", 150, self.speed, ("library", "models"), ("torch",)),
            Step("jobs", "device", 320, self.jobs, ("library",)),
            Step("tests", "device", 230, self.tests, ("library",)),
            Step("torch jobs", "torch", 150, self.torch_jobs, ("library",), ("speed",)),
            Step("strategies", "torch", 100, self.strategies, ("library",), ("speed",)),
            Step("torch tests", "torch", 100, self.torch_tests, ("library",), ("speed",)),
        ]

    @property
    def log(self) -> Path:
        """Where steps' programs write their standard errors."""
        return self.out / "log"

    def facts(self, _seconds: float) -> dict[str, Any]:
        """The machine."""
        words = {
            "gpu": ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap,"
                    "pcie.link.gen.current,clocks.max.sm", "--format=csv,noheader"),
            "nvcc": ("nvcc", "--version"), "mpirun": ("mpirun", "--version"),
            "cmake": ("cmake", "--version"), "ninja": ("ninja", "--version"),
            "commit": ("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")}
        found: dict[str, Any] = {name: _said(command) for name, command in words.items()}
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        found |= {"processor": model[1] if model else platform.processor(),
                  "cores": os.cpu_count(), "python": platform.python_version(),
                  "kernel": platform.release(), "packages": _versions()}
        return found

    def library(self, seconds: float) -> dict[str, Any]:
        """llama.cpp for this device, built here unless an earlier call did."""
        if self.device.kind == "vulkan":
            if not any(self.device.libraries.glob("libllama-*")):
                fetch_vulkan(self.device.libraries)
            return {"built": False, "folder": VULKAN}
        said = child(["bash", str(HERE / "build.sh"), str(self.packed / "llama.tar.xz"),
                      str(self.build), self.device.kind], seconds, self.log)
        if self.device.kind == "rpc":
            build_plugin(self.device.libraries, self.build / "llama.cpp")
        size = sum(path.stat().st_size for path in self.device.libraries.glob("*.so"))
        return {"said": said.splitlines()[-12:], "bytes": size}

    def models(self, seconds: float) -> dict[str, Any]:
        """The embedded pair inflated to real shapes: the text and its acceptance stay."""
        sizes, found = self.device.sizes, {}
        todo = [("draft", DRAFT, sizes.draft, "Q8_0"), ("wide-Q8_0", DRAFT, sizes.wide, "Q8_0"),
                ("wide-F16", DRAFT, sizes.wide, "F16"), ("big", TARGET, sizes.big, "Q8_0")]
        running = []
        for name, source, (layers, width, heads, kv, ff), kind in todo:
            path = self.model(name)
            if path.exists():
                continue
            command = [sys.executable, "-m", "benchmarks.inflate", str(source), "-o", str(path),
                       "--n-layer", str(layers), "--n-embd", str(width), "--n-head", str(heads),
                       "--n-head-kv", str(kv), "--n-ff", str(ff), "--type", kind, "--no-verify",
                       "--json"]
            running.append((name, command))
        for name, command in running:
            found[name] = json_lines(child(command, seconds, self.log, os.environ))[0]
        return found

    def model(self, name: str) -> Path:
        """The file of an inflated model."""
        return self.work / f"{name}.gguf"

    def devices(self, seconds: float) -> list[Any]:
        """What llama.cpp sees."""
        with self.device.open() as env:
            return json_lines(child(self._python("device_list"), seconds, self.log,
                                    self._env(env)))

    def bits(self, seconds: float) -> list[Any]:
        """Padded and unpadded rows of the embedded target, of the draft where that is slow."""
        if self.device.kind == "vulkan":
            return self._lines("bits", seconds, str(DRAFT))
        return self._lines("bits", seconds, str(TARGET), "--options", json.dumps(OPTIONS))

    def wide_bits(self, seconds: float) -> list[Any]:
        """The same of matrices as wide as a 7 B's, in two types."""
        found = []
        for name in ("wide-Q8_0", "wide-F16"):
            found += self._lines("bits", seconds / 2, str(self.model(name)), "--options",
                                 json.dumps(OPTIONS[:1] + OPTIONS[2:]))
        return found

    def jobs(self, seconds: float) -> dict[str, Any]:
        """Losslessness of whole jobs."""
        return jobs.run_all(self.device, self.work, self.log, seconds)

    def tests(self, seconds: float) -> dict[str, Any]:
        """The tests of the backend's contract, with every layer on the device."""
        with self.device.open() as env:
            return self._pytest(TESTS, seconds, env, "contract", PIPEINFER_TEST_GPU_LAYERS=str(ALL))

    def curve(self, seconds: float) -> list[Any]:
        """What rows cost."""
        rounds = "12" if self.device.kind == "cuda" else "3"
        return self._lines("curve", seconds, str(self.model("big")), "--rounds", rounds)

    def torch(self, seconds: float) -> list[Any]:
        """The torch backend's bits and speed."""
        return json_lines(child(
            [*self._python("torch_check"), "--device", self.device.torch_device], seconds,
            self.log, self._env({})))

    def torch_jobs(self, seconds: float) -> dict[str, Any]:
        """Strategies on torch: one answer each over one rank and two."""
        found: dict[str, Any] = {}
        common = ["--backend", "torch", "--device", self.device.torch_device, "-t", "1"]
        asked = [*common, "-p", PROMPT, "-n", str(self.device.sizes.tokens), "--temp", "0", "-c",
                 "512", "--json"]
        kinds: dict[str, list[str]] = {
            "plain": ["-md", "none", "--policy", "iterative"], "draft": [],
            "lookahead": ["--proposer", "lookahead", "-md", "none"],
            "bita": ["--proposer", "bita", "--bita", str(TARGET.with_name("bita.safetensors")),
                     "-md", "none"]}
        for name, own in kinds.items():
            for ranks in (1, 2):
                with self.device.open(ranks) as env:
                    out = self._job(env, ranks, ["generate", *asked, *own], seconds / 3)
                answer = json_lines(out)[0]
                found[f"{name}, {ranks}"] = {
                    "tokens_per_second": answer["stats"]["tokens_per_second"],
                    "R": answer["stats"]["exact_width"], "text": answer["text"][:60],
                    "accepted": answer["stats"]["accepted_speculative"]}
                found.setdefault("_tokens", {})[f"{name}, {ranks}"] = answer["tokens"]
        tokens = found.pop("_tokens")
        for key, own_tokens in tokens.items():
            found[key]["as_plain"] = own_tokens == tokens["plain, 1"]
        return found

    def strategies(self, seconds: float) -> dict[str, Any]:
        """Answers in several threads on torch: the same text over one rank and two."""
        common = ["--backend", "torch", "--device", self.device.torch_device, "-t", "1"]
        methods = ("plain", "pasta", "pdos", "apar", "pasta+lookahead@speculative")
        texts = {}
        for ranks in (1, 2):
            folder = self.work / f"compare-{ranks}"
            words = ["compare", "-m", "task", *common, "--tasks", "1", "-n", "300", "-o",
                     str(folder), "--no-plots", "--temp", "0",
                     *(word for method in methods for word in ("--method", method))]
            with self.device.open(ranks) as env:
                self._job(env, ranks, words, seconds / 2)
            texts[ranks] = json.loads((folder / "results.json").read_text())["answers"]
        return {
            method: {"same_over_two_ranks": [a["text"] for a in texts[1][method]]
                     == [a["text"] for a in texts[2][method]],
                     "steps": [a["steps"] for a in texts[1][method]]} for method in methods}

    def torch_tests(self, seconds: float) -> dict[str, Any]:
        """The tests of the torch backend, on this device."""
        with self.device.open() as env:
            return self._pytest(TORCH_TESTS, seconds, env, "torch",
                                PIPEINFER_TEST_DEVICE=self.device.torch_device)

    def speed(self, seconds: float) -> dict[str, Any]:
        """Tokens per second beside llama.cpp's own programs, each alone on the device, in turn; as
        many rounds as there is time for. One that fails is named at the end, others go on."""
        sizes = self.device.sizes
        until, longest = time.monotonic() + seconds, 0.0
        found: dict[str, Any] = {"speeds": {}, "stats": {}, "texts": {}}
        prompt = self.work / "prompt.txt"
        prompt.write_text(PROMPT)
        errors = []
        for turn, (name, run) in itertools.product(
                range(sizes.rounds), self._contestants(prompt, found["stats"]).items()):
            begun = time.monotonic()
            if begun > until or (turn and begun + longest > until):
                break
            try:
                for what, speed, text in run(max(1.0, until - begun)):
                    found["speeds"].setdefault(what, []).append(round(speed, 2))
                    if text:
                        found["texts"].setdefault(text[:4000], []).append(name)
            except Exception as error:
                errors.append(f"{name}: {type(error).__name__}: {error}"[-400:])
            longest = max(longest, time.monotonic() - begun)
        if errors:
            raise StepError("; ".join(errors), _told_apart(found))
        return _told_apart(found)

    def _contestants(self, prompt: Path, stats: dict[str, Any]) -> dict[str, Contestant]:
        """Name -> what measures it: gets seconds, gives (name, tokens per second, text)."""
        big, draft, layers = str(self.model("big")), str(self.model("draft")), ["-ngl", str(ALL)]
        tokens = str(self.device.sizes.speed_tokens)
        asked = ["-m", big, "-f", str(prompt), "-n", tokens, "-c", "1024", "--ignore-eos", *layers]
        # two threads of a process cannot share its one connection to an RPC device
        guess = ["-md", draft, "-ngld", "0" if self.device.kind == "rpc" else str(ALL)]
        plain = ["-md", "none", "--speculation", "off"]
        sampled = ["--temp", "0.8", "--seed", "7"]

        def bench(flash: str) -> Contestant:
            def run(left: float) -> list[Measured]:
                command = ["llama-bench", "-m", big, "-p", "512", "-n", "128", *layers, "-o",
                           "json", "-fa", flash, "-r", "2"]
                rows = json.loads(self._own(command, left)[0])
                return [(f"llama-bench -fa {flash}, "
                         f"{'prompt of 512' if row['n_prompt'] else 'plain'}", row["avg_ts"], "")
                        for row in rows]
            return run

        def simple(words: list[str]) -> Contestant:
            def run(left: float) -> list[Measured]:
                command = ["llama-speculative-simple", *asked, *guess, "--spec-type",
                           "draft-simple", *words]
                out, err = self._own(command, left)
                name = f"llama-speculative-simple {' '.join(words)}"
                return [(name, parse_speculative(out, err, command).tokens_per_second, "")]
            return run

        def ours(name: str, ranks: int, words: list[str]) -> Contestant:
            def run(left: float) -> list[Measured]:
                with self.device.open(ranks) as env:
                    out = self._job(env, ranks, ["generate", *asked, "--json", *words], left)
                answer = json_lines(out)[0]
                own = answer["stats"]
                stats[name] = {
                    "R": own["exact_width"], "load_seconds": own["load_seconds"],
                    "accepted": own["accepted_speculative"], "steps": own["steps"],
                    "first_token_seconds": own["time_to_first_token"], "notes": own["notes"][:6]}
                return [(name, own["tokens_per_second"], answer["text"])]
            return run

        greedy, off = ["--temp", "0"], ["--exact", "off"]
        lookup, single = ["-md", "none", "--proposer", "prompt-lookup"], ["--set", "pad=1"]
        return {
            "bench 1": bench("1"),
            **{name: ours(name, ranks, words) for name, ranks, words in (
                ("plain", 1, [*plain, *greedy]), ("draft", 1, [*guess, *greedy]),
                ("draft, exact off", 1, [*guess, *greedy, *off]),
                ("plain, pad 1", 1, [*plain, *greedy, *single]),
                ("draft, pad 8", 1, [*guess, *greedy, "--set", "pad=8"]))},
            "simple 4": simple(["--spec-draft-n-max", "4", *greedy]),
            "simple 8": simple(["--spec-draft-n-max", "8", *greedy]),
            **{name: ours(name, ranks, words) for name, ranks, words in (
                ("sampled, plain", 1, [*plain, *sampled]),
                ("sampled, draft, exact off", 1, [*guess, *sampled, *off]),
                ("plain, exact off", 1, [*plain, *greedy, *off]),
                ("lookup, exact off", 1, [*lookup, *greedy, *off]),
                ("three ranks, plain", 3, [*plain, *greedy]),
                ("three ranks, draft", 3, [*guess, *greedy]),
                ("three ranks, draft, exact off", 3, [*guess, *greedy, *off]))},
            "simple 4 sampled": simple(["--spec-draft-n-max", "4", *sampled]),
            "bench 0": bench("0")}

    def _own(self, command: list[str], seconds: float) -> tuple[str, str]:
        """What one of llama.cpp's programs printed and logged."""
        log = self.work / "program.log"
        log.unlink(missing_ok=True)
        with self.device.open() as env:
            if self.device.kind == "rpc":
                port = env.pop("PIPEINFER_RPC_PORT")
                command = [*command, "--rpc", f"127.0.0.1:{port}"]
            env.pop("GGML_BACKEND_PATH", None)
            out = child([str(self.device.libraries / command[0]), *command[1:]], seconds, log, env)
        return out, log.read_text(errors="replace")

    def _job(self, env: Mapping[str, str], ranks: int, words: Sequence[str], seconds: float) -> str:
        command = jobs.command(ranks, [sys.executable, "-m", "pipeinfer", *words])
        return child(command, seconds, self.log, jobs.job_environment(
            env, MPIEXEC_TIMEOUT=str(max(5, int(seconds))), PIPEINFER_TURNS="auto"))

    def _lines(self, program: str, seconds: float, *words: str) -> list[Any]:
        with self.device.open() as env:
            return json_lines(child([*self._python(program), *words], seconds, self.log,
                                    self._env(env)))

    def _python(self, program: str) -> list[str]:
        return [sys.executable, "-m", f"benchmarks.gpu.{program}"]

    def _env(self, own: Mapping[str, str]) -> dict[str, str]:
        return jobs.job_environment(own)

    def _pytest(self, files: Sequence[str], seconds: float, env: Mapping[str, str], name: str,
                **more: str) -> dict[str, Any]:
        """How many tests passed, and which did not."""
        log = self.out / f"tests-{name}"
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-p",
                   "no:cacheprovider", "-o", "addopts=-p tests.kit.fixtures",
                   "-o", "filterwarnings=", "--timeout", "120", *files]
        with log.open("w") as file:
            try:
                subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False,
                               cwd=ROOT, timeout=seconds, env=jobs.job_environment(env, **more))
                ended = True
            except subprocess.TimeoutExpired:
                ended = False
        text = log.read_text(errors="replace")
        counts = {kind: int(count) for count, kind in _COUNTS.findall(text[-2000:])}
        failed = [f"{test} {why or ''}".strip()[:240] for test, why in _FAILED.findall(text)]
        found = {"ended": ended, **counts, "names": failed[:60]}
        if not ended or not counts:
            raise StepError(f"pytest did not end: {text[-600:]}", found)
        return found


def _told_apart(found: dict[str, Any]) -> dict[str, Any]:
    """Which answers have the same text, in place of the texts."""
    texts = found.pop("texts", {})
    return found | {"same_text": [sorted(set(names)) for names in texts.values()],
                    "texts_begin": [text[:120] for text in texts]}


def _said(command: Sequence[str]) -> str:
    """What a command printed, or why it did not run."""
    if shutil.which(command[0]) is None:
        return "not found"
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=15)
    return " ".join(done.stdout.split())[-300:] or done.stderr.strip()[-300:]


def _versions() -> dict[str, str]:
    """Versions of the packages that matter."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("numpy", "torch", "transformers", "mpi4py", "msgspec", "gguf", "pytest"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
