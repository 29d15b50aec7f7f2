"""`pipeinfer ablate`: what each of PipeInfer's components brings, on ranks or emulated.

Knows how to ask; what is compared with what is in `cli.ablations`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import click

from pipeinfer import host
from pipeinfer.cli.ablations import (
    TEXTS,
    Sample,
    as_text,
    configs_of,
    draw,
    emulated,
    measured,
    rows_of,
    samples,
    variants_of,
    whose,
)
from pipeinfer.cli.loading import progress_hook
from pipeinfer.cli.options import JOB, config_options
from pipeinfer.cli.terminal import fetch_models, note, show_over
from pipeinfer.cluster.generate import draw_seed
from pipeinfer.cluster.launch import join
from pipeinfer.config import JobConfig, Resolved
from pipeinfer.errors import UsageError


@config_options(*JOB, "sampling", "request")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True,
              help="How often each text is asked, sampled anew; emulated: how many texts.")
@click.option("--texts", type=click.Path(path_type=Path, dir_okay=False, exists=True),
              help="Your own texts, one per line [default: five short ones].")
@click.option("--cluster", default="", help="Emulate this cluster profile instead, in virtual "
                                            "time.")
@click.option("--pair", default="dolphin-tinyllama", show_default=True,
              help="With --cluster: profile of a target and its draft.")
@click.option("--size", type=click.IntRange(0), default=0, metavar="N",
              help="With --cluster: number of nodes [default: all].")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False),
              help="Draw the table there, such as ablate.png.")
def ablate_command(resolved: Resolved, rounds: int, texts: Path | None, cluster: str, pair: str,
                   size: int, out: Path | None) -> None:
    """Measure what each component of PipeInfer brings.

    \b
    mpirun -np 4 pipeinfer ablate -m big.gguf -md small.gguf --rounds 3
    pipeinfer ablate --cluster c --pair goliath-xwin7b --size 8 --rounds 10
    pipeinfer ablate --policy published --cluster c --size 8    # the paper's own components
    """
    request = resolved.config.request
    if out is not None and out.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"-o {out}: give the name of a picture, such as ablate.png")
    configs, policy = configs_of(resolved.config.job), whose(resolved.config.job)
    if cluster:
        if host.launched_size() > 1:
            raise UsageError("an emulated cluster needs one process: leave out mpirun")
        found = samples(rounds, emulated(cluster, pair, size, request.n_predict),
                        variants=variants_of(policy))
        title = (f"cluster {cluster}, {pair}, {size or 'all'} nodes, {rounds} texts of "
                 f"{request.n_predict} tokens, virtual time")
    else:
        answer = _on_ranks(resolved, configs, rounds, texts)
        if answer is None:
            return
        title, found = answer
    rows = rows_of(found)
    if request.json:
        click.echo(json.dumps({"title": title, "rows": rows, "samples": {
            name: [dataclasses.asdict(one) for one in own] for name, own in found.items()}}))
    else:
        click.echo(as_text(title, rows))
    if out is not None:
        draw(out, title, rows)
    if not all(row["equal"] for row in rows):
        raise SystemExit(1)


def _on_ranks(resolved: Resolved, configs: Mapping[str, JobConfig], rounds: int,
              texts: Path | None) -> tuple[str, dict[str, list[Sample]]] | None:
    if host.launched_size() == 1:
        raise UsageError("a single process has no pipeline to take apart: start it with mpirun "
                         "-np N, or emulate a cluster with --cluster")
    chosen = TEXTS if texts is None else tuple(filter(None, texts.read_text(
        encoding="utf-8").splitlines()))
    base, request = resolved.config.job, resolved.config.request
    variants = variants_of(whose(base))
    fetch_models(base)
    joined = join(base.replace(turns="off"))  # what is taken apart is what overlaps
    if joined.place.rank:
        joined.serve()
        return None

    with joined.lead(progress_hook(request)) as session:
        session.on_change = note
        if not session.draft_name and not base.speculation.proposer:
            raise UsageError("there is no proposer, so nothing to leave out: give -md "
                             "or --proposer")
        if len({one.host for one in session.hosts}) == 1 and not any(
                one.startswith("pace=") for one in base.cluster.hook):
            note(f"all ranks share {session.hosts[0].cores_host} cores, so what should overlap "
                 "competes and the table may be upside down: --hook pace=40+8 gives every stage "
                 "the time of a larger model (docs/experiments.md)")
        prompts = [session.tokenizer.encode_chat([{"role": "user", "content": text}])
                   if request.chat else session.tokenizer.encode(text) for text in chosen]
        sampling = resolved.config.sampling
        measure = measured(session, configs, prompts, sampling, draw_seed(sampling),
                           request.n_predict)
        measure(variants[1], 0)  # what is slow only once
        found = samples(rounds * len(chosen), measure, show_over, variants)
        show_over("")
        title = (f"{session.model_name}, draft {session.draft_name or 'none'}, "
                 f"{session.n_stages} stages, {rounds * len(chosen)} texts of "
                 f"{request.n_predict} tokens")
    return title, found
