"""`pipeinfer measure`: what a real job does, as a record that can be shared.

Knows how to ask; what is measured is in `cli.measuring`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from pipeinfer.cli import measuring
from pipeinfer.cli.loading import progress_hook
from pipeinfer.cli.options import JOB, config_options
from pipeinfer.cli.terminal import fetch_models, note, show_over
from pipeinfer.cluster.launch import join
from pipeinfer.config import Resolved
from pipeinfer.errors import ClusterError, RankLost, UsageError
from pipeinfer.host import launched_rank
from pipeinfer.loading import LAB, plug_ins
from pipeinfer.models.locate import model_paths


@config_options(*JOB, "request")
@click.option("--share", type=click.Path(path_type=Path, dir_okay=False),
              help="Write the record there, such as ours.json, and a picture beside it.")
@click.option("--programs", type=click.Path(path_type=Path, file_okay=False),
              help="Folder, on every host, with llama-bench and ggml-rpc-server: measure them on "
              "the same hosts before.")
@click.option("--note", "remark", default="", help="What you want to say about the machines.")
def measure_command(resolved: Resolved, share: Path | None, programs: Path | None,
                    remark: str) -> None:
    """Measure a job on these machines: with and without speculation, for one user and for four.

    It takes about three minutes at most behind the start, and seven more with --programs. The
    record has processors, cores, memory, links and speeds, but no names, addresses or texts.
    Nothing is sent anywhere.

    \b
    launch/ssh hostfiles/xeon 8 measure -m big-q8_0.gguf -md small.gguf --share ours.json
    """
    if share is not None and share.suffix != ".json":
        raise UsageError(f"--share {share}: give the name of a JSON file, such as ours.json")
    base = resolved.config.job.replace(parallel=max(measuring.USERS))
    if base.speculation.policy or base.speculation.decomposer:
        raise UsageError("measure decides about --policy and --decomposer: leave them out")
    if programs is not None and launched_rank() == 0:
        _peers().find(programs)
    fetch_models(base)
    joined = join(base)
    hosts, links = measuring.surroundings(joined.place)
    baseline = None
    if programs is not None:
        if joined.place.rank == 0:
            show_over("llama.cpp's own programs")
        try:
            baseline = _peers().measure(joined.place, programs, model_paths(base)[0], hosts)
        except RankLost:
            raise
        except ClusterError as error:
            note(f"llama.cpp's programs were not measured: {error}")
    if joined.place.rank:
        joined.serve()
        return
    with joined.lead(progress_hook(resolved.config.request)) as session:
        session.on_change = note
        record = measuring.measure(session, base, hosts, links, show_over)
        show_over("")
    record = msgspec.structs.replace(record, note=remark, baseline=baseline)
    click.echo(measuring.paragraph(record))
    if share is not None:
        share.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        measuring.draw(share.with_suffix(".png"), {share.stem: record})
        click.echo(f"{share} and {share.with_suffix('.png')} are written; "
                   "benchmarks/shared/README.md says how to add them")
    if not record.equal:
        raise SystemExit(1)


def _peers() -> Any:
    """Return the module that measures llama.cpp's own programs. Raises UsageError."""
    found = plug_ins("pipeinfer.peers")
    if not found:
        raise UsageError(f"--programs is not installed: {LAB}")
    return found[0].load()
