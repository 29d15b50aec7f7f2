"""`pipeinfer train draft`.

Does not know: how anything is trained; torch is imported when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeinfer.errors import UsageError
from pipeinfer.lab.training.commands import answer_options, need_torch, one_budget, run_options, say


@click.command()
@click.argument("target", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="The draft, a GGUF file.")
@run_options(".work/draft", "Answers, checkpoint and report", threads=2)
@click.option("--layers", type=click.IntRange(1), default=3, show_default=True,
              help="Layers of the target that the draft keeps.")
@answer_options()
@click.option("--quantisation", type=click.Choice(("q4_0", "q4_1", "q8_0")), default="q4_0",
              show_default=True, help="Of the draft's matrices.")
def draft(**given: Any) -> None:
    """Make a draft for TARGET, a GGUF file of the llama architecture with tied embeddings.

    The draft begins as a copy of a few of the target's layers and is taught by answers that the
    target gives here, so it needs no data. Use it with -md.
    """
    one_budget(given["minutes"], given["steps"])
    need_torch()
    if given["out"].suffix != ".gguf":
        raise UsageError("--out must end in .gguf")
    from pipeinfer.lab.training.draft.own_draft import Settings, run

    if given["texts"]:
        given["answer_minutes"] = None
    run(Settings(**given), report=say)
