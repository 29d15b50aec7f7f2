"""`pipeinfer shard` and `pipeinfer trace`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("model")
@click.option("--stages", type=click.IntRange(1), required=True, help="Number of stages.")
def shard(model: str, stages: int) -> None:
    """Cut MODEL into shards ahead of time, into the cache directory."""
    from pipeinfer.models.gguf import ModelFile
    from pipeinfer.models.locate import find
    from pipeinfer.models.shard import check_splittable, extract_shard
    from pipeinfer.planning.planner import equal_ranges, load_of

    source = ModelFile(find(model).path)
    if stages > 1:
        check_splittable(source)
    for node, (start, stop) in enumerate(equal_ranges(load_of(source, 0, 1), stages), 1):
        label = f"stage {node}, layers {start}-{stop - 1}"
        with click.progressbar(length=1, label=label, file=sys.stderr) as bar:
            state = {"done": 0}

            def progress(done: int, total: int, bar: Any = bar,
                         state: dict[str, int] = state) -> None:
                bar.length = total
                bar.update(done - state["done"])
                state["done"] = done

            path = extract_shard(source, start, stop, progress=progress)
            bar.update(max(0, (bar.length or 1) - state["done"]))
        click.echo(f"{label}: {path}")


@click.command()
@click.argument("trace_file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True,
              help="Picture to write (PNG, SVG or PDF).")
@click.option("--start-ms", type=float, default=0.0, help="Milliseconds to skip at the beginning.")
@click.option("--span-ms", type=click.FloatRange(min=0.001), default=400.0, show_default=True,
              help="Milliseconds to show.")
def trace(trace_file: Path, output: Path, start_ms: float, span_ms: float) -> None:
    """Draw a trace: stages against time, runs coloured by fate."""
    from pipeinfer_lab.timeline import draw_timeline

    draw_timeline(trace_file, output, start_ms=start_ms, span_ms=span_ms)
    click.echo(f"wrote {output}")
