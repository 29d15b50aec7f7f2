"""``pipeinfer train``: the training commands.

Does not know: what a command does; torch is imported when one runs.
"""

from __future__ import annotations

import click

from pipeinfer_lab.training.adapt.adapt_commands import apar_sft, baseline_sft, merge
from pipeinfer_lab.training.bita.bita_command import bita
from pipeinfer_lab.training.pasta.pasta_commands import annotate, pasta_bonbon, pasta_sft


@click.group()
def main() -> None:
    """Train adapters for models that you have."""


for _command in (annotate, pasta_sft, apar_sft, baseline_sft, pasta_bonbon, merge, bita):
    main.add_command(_command)

if __name__ == "__main__":
    main()
