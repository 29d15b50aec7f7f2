"""python -m benchmarks.gpu: see the package."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import click

from benchmarks.gpu.devices import KINDS, Device
from benchmarks.gpu.steps import Report, Runner

_FORMAT = 1


@click.group()
def main() -> None:
    """Checks pipeinfer on a GPU that can be had for minutes."""


@main.command("prepare")
def prepare_command() -> None:
    """Make .gpu/: what the check needs on a machine without a network."""
    from benchmarks.gpu.prepare import PACKED, prepare

    size = prepare()
    click.echo(f"{PACKED.name}: {size / 2**20:.1f} MiB together with all tracked files")


@main.command("check")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), required=True,
              help="For what a further call on this machine can use again.")
@click.option("--device", type=click.Choice(KINDS), default="cuda")
@click.option("--limit", type=float, default=480.0, help="Seconds.")
@click.option("--only", default="", help="Steps to run, separated by commas.")
@click.option("--libraries", type=click.Path(path_type=Path, exists=True), default=None,
              help="The folder of libllama; by default it is built.")
def check_command(out: Path, work: Path, device: str, limit: float, only: str,
                  libraries: Path | None) -> None:
    """Run the check; benchmarks/gpu/run.sh prepares for it and calls it."""
    from benchmarks.gpu.check import Check
    from benchmarks.gpu.prepare import PACKED

    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    builds = Path(os.environ.get("PIPEINFER_GPU_BUILDS") or work)
    build = build_folder(builds, PACKED / "llama.tar.xz", device)
    hidden = [f"{one}/" for one in (Path(sys.executable).parent, work, PACKED.parent)]
    report = Report(out / "gpu.json", hidden, format=_FORMAT, device=device, limit=limit,
                    date=time.strftime("%Y-%m-%d %H:%M", time.gmtime()), only=only)
    check = Check(Device(device, libraries or build / "bin"), report, out, work, build, PACKED)
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


if __name__ == "__main__":
    main()
