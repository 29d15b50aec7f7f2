"""`pipeinfer cache`: lists the shard cache of this host, and deletes shards."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

import click

from pipeinfer.errors import ModelError
from pipeinfer.files import parse_bytes
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard_cache import (
    KeptFile,
    cache_directory,
    in_use,
    kept,
    limit,
    mapped,
    shrink,
)
from pipeinfer.text_table import aligned

_AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


@click.command()
@click.option("--remove", is_flag=True, help="Delete every shard that no process uses.")
@click.option("--to", "size", metavar="SIZE",
              help='Delete those used longest ago until the rest takes at most SIZE ("20 GiB").')
@click.option("--unused-for", "days", type=click.FloatRange(min=0), metavar="DAYS",
              help="Delete what was not used for so many days.")
def cache_command(remove: bool, size: str | None, days: float | None) -> None:
    """Show the shards that this host keeps, or delete some of them.

    A shard that is missed later is made, or received, again. $PIPEINFER_CACHE names the directory;
    $PIPEINFER_CACHE_SIZE bounds it for good.
    """
    if sum((remove, size is not None, days is not None)) > 1:
        raise click.UsageError("--remove, --to and --unused-for exclude each other: choose one")
    directory = cache_directory()
    files = kept(directory)
    if remove or size is not None or days is not None:
        bound = 0 if size is None else parse_bytes(size, "--to")
        old = time.time() - 86400 * (days or 0.0)
        gone = shrink([one for one in files if days is None or one.used < old], bound)
        click.echo(f"{len(gone)} of {len(files)} shards deleted, {_bytes(_sum(gone))} freed; "
                   f"{_bytes(_sum(kept(directory)))} are left in {directory}")
        return
    most = limit()
    count = f"{len(files)} shard{'s' * (len(files) != 1)}"
    bounded = "no bound" if most is None else f"at most {_bytes(most)}"
    click.echo(f"{directory}: {_bytes(_sum(files))} in {count}, {bounded} (PIPEINFER_CACHE_SIZE)")
    for line in _table(files, mapped()):
        click.echo(line)


def _table(files: Sequence[KeptFile], held: Collection[tuple[str, int]]) -> list[str]:
    """Return a line per model, the most recently used first."""
    by_model: dict[str, list[KeptFile]] = {}
    for one in reversed(files):
        by_model.setdefault(one.model, []).append(one)
    rows = [("model", "shards", "size", "last used", "in use")]
    for own in by_model.values():
        used = sum(in_use(one.path, held) for one in own)
        rows.append((_name(own[0].path), str(len(own)), _bytes(_sum(own)), _age(own[0].used),
                     str(used or "-")))
    return aligned(rows) if by_model else []


def _name(path: Path) -> str:
    """Return the model's own name, with the beginning of its shards' file names."""
    start = path.name[:8]
    try:
        name = ModelFile(path).get("general.name")
    except ModelError:
        return f"damaged ({start})"
    return f"{name} ({start})" if isinstance(name, str) and name else start


def _age(when: float) -> str:
    passed = max(0.0, time.time() - when)
    for seconds, word in _AGES:
        if passed >= seconds:
            count = int(passed / seconds)
            return f"{count} {word}{'s' * (count != 1)} ago"
    return "now"


def _sum(files: Sequence[KeptFile]) -> int:
    return sum(one.size for one in files)


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
