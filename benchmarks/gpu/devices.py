"""The devices that a check can run on, and the models that fit them.

cuda: the GPU that the check is for. rpc: llama.cpp's RPC device on loopback, whose arithmetic is
the CPU's, bit for bit, and whose memory is another process's. vulkan: llama.cpp's Vulkan device,
here on Mesa's software driver. The last two are rehearsals, for machines without a GPU.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.steps import StepError, die_with_parent, kill_group
from benchmarks.peers.programs import fetch

HERE = Path(__file__).resolve().parent
KINDS = ("cuda", "rpc", "vulkan")
_START_SECONDS = 20.0
_TRIES = 3  #: of ports for the servers
_LAVAPIPE = "/usr/share/vulkan/icd.d/lvp_icd.x86_64.json"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a check does. Shapes are layers, width, heads, key/value heads, feed forward."""

    big: tuple[int, int, int, int, int]
    draft: tuple[int, int, int, int, int]
    wide: tuple[int, int, int, int, int]  #: made of the embedded draft's 2 layers
    prompts: int
    tokens: int
    speed_tokens: int
    rounds: int
    jobs_at_once: int


#: the pair inflated to the shape of a 7 B and of a 0.6 B
FULL = Sizes((32, 4096, 64, 8, 11008), (16, 1536, 24, 8, 4096), (2, 4096, 64, 8, 11008),
             prompts=4, tokens=64, speed_tokens=256, rounds=3, jobs_at_once=4)
_TINY = (14, 512, 8, 4, 1024), (2, 256, 4, 2, 768), (2, 512, 8, 4, 1024)
SMALL = Sizes(*_TINY, prompts=2, tokens=24, speed_tokens=48, rounds=1, jobs_at_once=2)
#: a software driver takes a tenth to half a second for a token, and compiles for each process
TINY = Sizes(*_TINY, prompts=1, tokens=12, speed_tokens=8, rounds=1, jobs_at_once=1)
#: steps that such a driver has no time for, or that no device changes
_LEFT_OUT = {"vulkan": frozenset({
    "bits of wide models", "models", "curve", "speed", "tests", "torch", "torch jobs",
    "strategies", "torch tests"})}
#: a prebuilt llama.cpp with Vulkan, and the state of llama.cpp that it is made of
VULKAN = "cyllama-vulkan==0.7.0"


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device. libraries: the folder with libllama.so, which the build step fills."""

    kind: str
    libraries: Path

    @property
    def sizes(self) -> Sizes:
        """How much the check does there."""
        return {"cuda": FULL, "rpc": SMALL, "vulkan": TINY}[self.kind]

    @property
    def left_out(self) -> frozenset[str]:
        """Steps that are not taken there."""
        return _LEFT_OUT.get(self.kind, frozenset())

    @property
    def torch_device(self) -> str:
        """What `--device` says for torch."""
        return "cuda" if self.kind == "cuda" else "cpu"

    @contextmanager
    def open(self, ranks: int = 1, memory: int = 0) -> Iterator[dict[str, str]]:
        """The environment for a job of so many ranks, each with the device to itself; of a GPU,
        all with the same one. memory: bytes that an RPC device reports; 0: the host's. Raises
        StepError."""
        env = dict(os.environ)
        found = sorted(self.libraries.glob("libllama.so")) or sorted(
            self.libraries.glob("libllama-*.so*"))
        if not found:
            raise StepError(f"{self.libraries} has no libllama.so")
        env["PIPEINFER_LLAMA_LIBRARY"] = str(found[0])
        if self.kind == "vulkan":
            # software drivers are passed over unless named; fusion crashes in older ones
            env |= {"GGML_VK_VISIBLE_DEVICES": "0", "GGML_VK_DISABLE_FUSION": "1",
                    "LP_NUM_THREADS": "1"}
            if Path(_LAVAPIPE).exists():
                env["VK_ICD_FILENAMES"] = _LAVAPIPE
        if self.kind != "rpc":
            yield env
            return
        with ExitStack() as stack:
            first = self._servers(stack, ranks, memory)
            yield env | {"GGML_BACKEND_PATH": str(self.libraries / "rpc-device.so"),
                         "PIPEINFER_RPC_PORT": str(first)}

    def _servers(self, stack: ExitStack, ranks: int, memory: int) -> int:
        """Start a server for each rank, on ports in a row; the first of them. Other ports, where
        another program has taken one meanwhile. Raises StepError."""
        for left in reversed(range(_TRIES)):
            first = _free_ports(ranks)
            with ExitStack() as started:
                try:
                    for rank in range(ranks):
                        started.enter_context(self._server(first + rank, memory))
                except StepError:
                    if not left:
                        raise
                    continue
                stack.push(started.pop_all())
                return first
        raise AssertionError

    @contextmanager
    def _server(self, port: int, memory: int) -> Iterator[None]:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "rpc_server.py"), str(self.libraries), str(port), "1",
             str(memory)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=die_with_parent)
        try:
            _await_port(process, port)
            yield
        finally:
            kill_group(process)
            process.wait()


def build_plugin(libraries: Path, source: Path) -> None:
    """Compile the plug-in for the RPC device into `libraries`. source: llama.cpp's."""
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", str(HERE / "rpc_device.c"), "-o",
         str(libraries / "rpc-device.so"), "-I", str(source / "ggml" / "include"), "-L",
         str(libraries), "-lggml-rpc", "-lggml-base", "-Wl,-rpath,$ORIGIN"],
        check=True, capture_output=True, text=True)


def fetch_vulkan(libraries: Path) -> None:
    """Put llama.cpp with Vulkan into `libraries`. Raises ClickException where it cannot be had."""
    with tempfile.TemporaryDirectory() as name:
        platforms = [word for version in (28, 31, 34, 35)
                     for word in ("--platform", f"manylinux_2_{version}_x86_64")]
        fetch(VULKAN, Path(name), "-q", "--only-binary=:all:", "--python-version", "3.12",
              "--implementation", "cp", "--abi", "abi3", *platforms)
        (wheel,) = Path(name).glob("*.whl")
        libraries.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as packed:
            for inside in packed.namelist():
                if inside.startswith("cyllama_vulkan.libs/"):
                    (libraries / Path(inside).name).write_bytes(packed.read(inside))


def _free_ports(count: int) -> int:
    """The first of so many ports in a row on which nobody listened a moment ago."""
    for _ in range(50):
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for more in range(1, count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + more))
            except OSError:
                continue
            return port
    raise StepError(f"no {count} free ports in a row")


def _await_port(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server listens, without connecting: it takes one client at a time. A rank
    that connects to another program's listener there would die."""
    until = time.monotonic() + _START_SECONDS
    wanted = f":{port:04X}"
    while time.monotonic() < until:
        if process.poll() is not None:
            raise StepError(f"the RPC server ended with status {process.returncode}")
        lines = map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
        sockets = {f"socket:[{line[9]}]" for line in lines
                   if line[1].endswith(wanted) and line[3] == "0A"}
        if sockets & _files_of(process.pid):
            return
        time.sleep(0.02)
    raise StepError(f"the RPC server did not listen on port {port} within {_START_SECONDS:.0f} s")


def _files_of(pid: int) -> set[str]:
    """What the open files of a process are."""
    found = set()
    with suppress(OSError):  # it may end, and close some, at any moment
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(path))
    return found
