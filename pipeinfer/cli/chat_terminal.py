"""The terminal of `pipeinfer chat`: reads messages and shows answers.

On a terminal of its own, lines are edited (prompt_toolkit) and answers shown as Markdown (rich);
through pipes, text passes unchanged. This module uses no conversation and no model.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from pipeinfer.cli.terminal import plain, reaches_terminal
from pipeinfer.host import moves_cursor

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from rich.live import Live

_FRAMES_PER_SECOND = 12.0
_NARROWEST = 20  #: columns
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")


class InputSource(Protocol):
    """The source of messages. by_hand: whether a user types them."""

    by_hand: bool

    def next(self, prompt: str, write: Callable[[str], None], text: str = "") -> str | None:
        """Return the next line without its end, None at the end of the input.

        prompt: shown before the line. write: shows text.
        text: initial content of the line, if it can be edited.
        Raises KeyboardInterrupt.
        """


def own_terminal() -> tuple[InputSource, TextIO]:
    """Return the source of lines and the output for answers: standard input and output."""
    edits = moves_cursor() and sys.stdin.isatty() and sys.stdout.isatty()
    return Editor() if edits else TypedLines(0), sys.stdout


class TypedLines:
    """Reads lines from a file descriptor. A signal ends the wait for one, even just before it
    begins."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest, self._ended = descriptor, b"", False
        self.by_hand = os.isatty(descriptor)
        self._woken, waker = os.pipe()
        for end in (self._woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def next(self, prompt: str, write: Callable[[str], None], text: str = "") -> str | None:
        """Return the next line without its end, None at the end of the input."""
        del text
        if self.by_hand:
            write(prompt)
        while b"\n" not in self._rest and not self._ended:
            ready, _, _ = select.select([self._descriptor, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
            if self._descriptor in ready:
                data = os.read(self._descriptor, 65536)
                self._rest, self._ended = self._rest + data, not data
        line, found, self._rest = self._rest.partition(b"\n")
        if not line and not found:
            return None
        return line.decode("utf-8", "replace").rstrip("\r")


class Editor:
    """Reads messages at a terminal: Enter sends, Alt-Enter begins a line, pasted lines stay
    together."""

    by_hand = True

    def __init__(self) -> None:
        self._session: PromptSession[str] | None = None

    def next(self, prompt: str, write: Callable[[str], None], text: str = "") -> str | None:
        """Return the next line without its end, None at the end of the input."""
        if self._session is None:
            self._session = _session()
        try:
            return self._session.prompt(prompt, default=text)
        except EOFError:
            write("\n")
            return None


def history_path() -> Path:
    """Return the history file: $XDG_STATE_HOME/pipeinfer/chat, by default under ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "pipeinfer" / "chat"


def _session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    with contextlib.suppress(OSError):
        path = history_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        history = FileHistory(str(path))
    return PromptSession(history=history, key_bindings=keys, multiline=True,
                         prompt_continuation=". ", enable_open_in_editor=False)


# --- answers ----------------------------------------------------------------------------------


class Plain:
    """Writes an answer as it is: unchanged to a pipe, without control characters to a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._is_shown = out, reaches_terminal(out)

    def write(self, piece: str) -> None:
        """Show a further piece."""
        self._out.write(plain(piece) if self._is_shown else piece)
        self._out.flush()

    def end(self) -> None:
        """End the answer."""
        self.write("\n")


class Formatted:
    """Shows an answer as Markdown, wrapped at words. Complete paragraphs are printed once; the
    last paragraph is redrawn as it grows. Control characters never reach the terminal."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._out = out
        columns, rows = _size(out)
        self._console = Console(file=out, force_terminal=True, width=columns, height=rows,
                                highlight=False)
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True,
                                vertical_overflow="crop")
        self._text, self._drawn = "", 0.0
        self._live.start()

    def write(self, piece: str) -> None:
        self._fit()
        self._text += plain(piece)
        size = settled(self._text)
        if size:
            done, self._text = self._text[:size], self._text[size:]
            self._live.update("", refresh=True)  # else each print draws the paragraph again below
            self._print(done)
        now = time.monotonic()
        if now - self._drawn > 1 / _FRAMES_PER_SECOND:
            self._drawn = now
            self._live.update(self._tail(), refresh=True)

    def end(self) -> None:
        self._fit()
        self._live.update("")
        self._live.stop()
        self._print(self._text)

    def _fit(self) -> None:
        """Wrap at the terminal's present width from now on."""
        from rich.console import ConsoleDimensions

        size = _size(self._out)
        if size != self._console.size:
            self._console.size = ConsoleDimensions(*size)

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(_markdown(text))
            self._console.print()

    def _tail(self) -> Any:
        """Return the end of the growing paragraph, as much as the screen has space for."""
        from rich.segment import Segment, Segments

        lines = self._console.render_lines(_markdown(self._text), pad=False)
        seen = lines[-max(self._console.height - 2, 1):]
        parts = [part for line in seen for part in [Segment.line(), *line]]
        return Segments(parts[1:])  # a line's end at the end would count as a further line


def _size(out: TextIO) -> tuple[int, int]:
    """Return columns and rows of a terminal, 80 and 24 where it reports none."""
    columns = rows = 0
    with contextlib.suppress(OSError):
        columns, rows = os.get_terminal_size(out.fileno())
    return max(columns or 80, _NARROWEST), rows or 24


def settled(text: str) -> int:
    """Return how many characters from the start are complete paragraphs or code blocks, which
    later text cannot change."""
    fence, size, at = "", 0, 0
    for line in text.splitlines(keepends=True):
        at += len(line)
        if not line.endswith("\n"):
            break
        found = _FENCE.match(line)
        if fence:
            closes = found and found[1].startswith(fence) and not line.strip().strip(fence[0])
            if closes:
                fence, size = "", at
        elif found:
            fence = found[1]
        elif not line.strip():
            size = at
    return size


def _markdown(text: str) -> Any:
    from rich.markdown import Markdown

    return Markdown(text, hyperlinks=False, code_theme="ansi_dark")
