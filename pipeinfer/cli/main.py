"""The command line: converts declarations of `config` to options and errors to exit codes.

It prints and does not compute; a command's module is imported when it is called. Commands are
entry points of the group `pipeinfer.commands`, so that higher packages, and others, may add some.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Any

import click

from pipeinfer import __version__, host
from pipeinfer.cli import inherited
from pipeinfer.cli.terminal import INTERRUPTED, Stopped, fail, leave
from pipeinfer.cluster.shutdown import note_exit
from pipeinfer.errors import PipeinferError, UsageError
from pipeinfer.loading import LAB, plug_ins, uncollected
from pipeinfer.transport.base import Dismissed

GROUP = "pipeinfer.commands"  #: entry points
#: development tools, and where they are
_ELSEWHERE = {
    **dict.fromkeys(("bench", "chaos", "compare", "compare-text", "sample", "shard", "trace",
                     "train"), LAB),
    "inflate": "in a checkout it is python -m benchmarks.inflate"}
#: errors of files and streams that no program can prevent
_FROM_OUTSIDE = (errno.EAGAIN, errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EISDIR,
                 errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EROFS)
_AFTER_RANK_0 = 2.0  #: seconds for rank 0 to print the error that every rank has


class _Main(click.Group):
    """Prints pipeinfer's errors as one line and exits with their code; imports commands when
    needed."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        inherited.settle()
        host.take_secrets()
        if host.launched_rank() == 0:
            try:
                return super().main(*args, **kwargs)
            except SystemExit as error:
                note_exit(error.code if isinstance(error.code, int) else int(bool(error.code)))
                raise
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            time.sleep(_AFTER_RANK_0)
            raise SystemExit(error.exit_code) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(one.name for one in plug_ins(GROUP))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = {one.name: one for one in plug_ins(GROUP)}
        if not found:
            raise UsageError("this installation names no commands (it is older than its sources): "
                             "install pipeinfer again, or call launch/test --version in a checkout")
        if cmd_name not in found:
            if cmd_name in _ELSEWHERE:
                return _missing(cmd_name, _ELSEWHERE[cmd_name])
            return super().get_command(ctx, cmd_name)
        try:
            with uncollected():
                command: click.Command = found[cmd_name].load()
        except ModuleNotFoundError as error:
            if not found[cmd_name].module.startswith(str(error.name)):
                raise
            return _missing(cmd_name, f"this installation lacks {error.name} (it is older than its "
                                      "sources, or a part was removed): install pipeinfer again")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PipeinferError as error:
            if host.launched_rank() > 0:
                _leave_it_to_rank_0(error)
            fail(error)
        except Stopped:
            leave(INTERRUPTED)
        except Dismissed:  # rank 0 has ended the job
            leave(0)
        except BrokenPipeError:  # the reader of our output has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            leave(1)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            if host.launched_rank() > 0:
                raise
            hint = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
            click.echo(f"pipeinfer: error: {error.format_message()}{hint}", err=True)
            raise SystemExit(error.exit_code) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:  # end every rank
            if said := _outside(error):
                click.echo(f"pipeinfer: error: {said}", err=True)
                leave(1)
            import traceback  # it is a bug

            click.echo(traceback.format_exc(), err=True, nl=False)
            click.echo(f"pipeinfer: error: {type(error).__name__}: {error} (this is a bug)",
                       err=True)
            leave(1)


def _outside(error: Exception) -> str:
    """Return what happened, and the remedy, if the system caused an error; "" for a bug."""
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return (f"{error.object[:80]!a} is not UTF-8 text: correct the option, the variable "
                "or the name of the file")
    if isinstance(error, OSError) and error.errno in _FROM_OUTSIDE:
        return (f"{error.filename or 'standard input or output'}: {error.strerror}: check where "
                "the command reads and writes")
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working folder was deleted: change to another one with cd"
    return ""


def _missing(name: str, why: str) -> click.Command:
    """Return a replacement for a command that is not installed. It raises UsageError when run.

    why: with what to do.
    """
    def refuse(**_given: Any) -> None:
        raise UsageError(f"{name} is not installed: {why}")

    return click.Command(name, callback=refuse, help="Not installed.", add_help_option=False,
                         context_settings={"ignore_unknown_options": True},
                         params=[click.Argument(["words"], nargs=-1)])


def _leave_it_to_rank_0(error: PipeinferError) -> None:
    """Return only if rank 0 neither has the same error nor can receive this one."""
    from pipeinfer.cluster import handshake

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which is how rank 0 ends the job
    handshake.refuse(error)


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"],
                                          "max_content_width": 100})
@click.version_option(__version__, prog_name="pipeinfer")
def main() -> None:
    """Run a large language model over a cluster, as fast as one user's text can come."""
