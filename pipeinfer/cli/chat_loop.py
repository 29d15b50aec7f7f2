"""The conversation of `pipeinfer chat`: messages, commands, interrupts. A `Partner` answers."""

from __future__ import annotations

import base64
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TextIO, TypeAlias

import click

from pipeinfer.cli.chat_terminal import Formatted, InputSource, Plain
from pipeinfer.cli.terminal import Stopped, plain, stop_again
from pipeinfer.errors import RequestError, UsageError
from pipeinfer.files import write_atomically

HELP = """\
/retry         another answer to the last message
/edit [TEXT]   change the last message and ask again (without TEXT: edit it here)
/clear         start over with an empty conversation
/save FILE     write the conversation to a file
/load FILE     go on with a conversation from a file
/image FILE    send a picture or a sound with the next message (repeatable)
/system TEXT   begin the conversation with this system prompt (without TEXT: show it)
/temp N        use this temperature (without N: as at the start)
/seed N        use this seed from now on (without N: a new one for every answer)
/speed         show tokens and speed after an answer, or not
/quit          leave (as does Ctrl-D)
Alt-Enter begins a new line, as does a \\ at a line's end. Ctrl-C stops an answer; press it twice to
leave."""
_FORM = "pipeinfer chat 1"
_HOTTEST = 100.0
#: role and content; with pictures also `images`, data: URIs
Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wishes:
    """Sampling values that commands have set; None: as at the start."""

    seed: int | None = None
    temperature: float | None = None


class Partner(Protocol):
    """The source of answers."""

    name: str

    def answer(
        self, messages: list[Message], wishes: Wishes, interrupts: Interrupts,
        write: Callable[[str], None],
    ) -> str:
        """Write the answer as it arrives; return a summary of it, such as its speed.

        messages: the conversation. wishes: sampling values. interrupts: an interrupt ends the
            answer early.
        write: called with each piece. Raises RequestError when there is no answer.
        """


class Interrupts:
    """Handles Ctrl-C: the first one stops the present action, the second one leaves.

    count: number of interrupts since `expect` was called. The first one raises what `expect` was
        given: Stopped during the start, KeyboardInterrupt while waiting for a line or a server.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first: type[BaseException] = Stopped
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        sys.unraisablehook = stop_again

    def expect(self, first: type[BaseException]) -> None:
        """Begin a new phase: count from 0, and let the first Ctrl-C raise `first`."""
        self.count, self._first = 0, first

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.count += 1
        if self.count > 1 or number == signal.SIGTERM:
            raise Stopped
        raise self._first


class ChatLoop:
    """Reads messages and shows answers. formatted: whether to show Markdown on a terminal."""

    def __init__(
        self, partner: Partner, lines: InputSource, out: TextIO, interrupts: Interrupts,
        system: str, seed: int, *, formatted: bool = False,
    ) -> None:
        self._partner, self._lines, self._out = partner, lines, out
        self._interrupts, self._formatted = interrupts, formatted
        self._system = system
        self._wishes = Wishes(seed if seed >= 0 else None)
        self._said: list[Message] = []
        self._images: list[str] = []  # for the next message
        self._by_hand = lines.by_hand
        self._speed = True
        self._failed = False

    def run(self) -> bool:
        """Run until the input ends; return whether an answer has failed without a user at the
        terminal."""
        if self._by_hand:
            self._note(f"{self._partner.name}. /help lists the commands.")
        self._interrupts.expect(KeyboardInterrupt)
        going, warned = True, False
        while going:
            try:
                text = self._read()
                warned = False
                if text is None or text.startswith("/"):
                    going = text is not None and self._command(text)
                elif text.strip():
                    images, self._images = self._images, []
                    self._ask(self._said, text, images)
            except KeyboardInterrupt:  # one that no answer took
                if warned:  # the editor handles the key itself, so `count` has missed it
                    raise Stopped from None
                warned = True
                self._write("\n")
                self._note("press Ctrl-C again or type /quit to leave")
        return self._failed and not self._by_hand

    def _read(self, text: str = "") -> str | None:
        """Return the next message, None at the end of the input."""
        parts: list[str] = []
        while True:
            line = self._lines.next("> " if not parts else ". ", self._write, text)
            self._interrupts.expect(KeyboardInterrupt)
            if line is None:
                return "\n".join(parts) if parts else None
            if not line.endswith("\\"):
                return "\n".join([*parts, line])
            parts.append(line[:-1])
            text = ""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _note(self, text: str) -> None:
        """Show a text that is not an answer: on a terminal with the answers, else on standard
        error."""
        if self._by_hand:
            self._write(click.style(plain(text), dim=True) + "\n")
        else:
            click.echo(plain(text), err=True)

    # --- commands -----------------------------------------------------------------------------

    def _command(self, text: str) -> bool:
        """Execute a command; return whether the conversation continues."""
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return False
        known: dict[str, Callable[[str], None]] = {
            "/clear": self._clear, "/system": self._set_system, "/seed": self._set_seed,
            "/temp": self._set_temperature, "/retry": self._retry, "/edit": self._edit,
            "/image": self._show, "/save": self._save, "/load": self._load,
            "/speed": self._switch_speed, "/help": lambda _: self._note(HELP)}
        if name in known:
            known[name](rest)
        else:
            self._note(f"unknown command {name}; /help lists the commands. To send a message "
                       "that begins with /, put a space before it")
        return True

    def _show(self, rest: str) -> None:
        from pipeinfer.models.media import check

        try:
            data = Path(rest).expanduser().read_bytes()
            kind = check(data)
        except (OSError, RequestError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._note(f"/image {rest}: {reason}")
            return
        self._images.append(f"data:{kind}/any;base64,{base64.b64encode(data).decode()}")
        self._note(f"{rest} goes along with the next message ({len(self._images)} do)")

    def _clear(self, _: str) -> None:
        self._said, self._images = [], []
        self._note("the conversation has been cleared")

    def _set_system(self, rest: str) -> None:
        self._system = rest or self._system
        self._note(f"system prompt: {self._system or '(none)'}")

    def _set_seed(self, rest: str) -> None:
        if rest and not (rest.isascii() and rest.isdigit() and int(rest) < 2**63):
            self._note("a seed is a whole number of 0 or more")
            return
        seed = int(rest) if rest else None
        self._wishes = Wishes(seed, self._wishes.temperature)
        self._note(f"seed: {'a new one each time' if seed is None else seed}")

    def _set_temperature(self, rest: str) -> None:
        try:
            value = float(rest) if rest else None
        except ValueError:
            value = -1.0
        if value is not None and not 0 <= value <= _HOTTEST:
            self._note(f"a temperature is a number from 0 to {_HOTTEST:g}")
            return
        self._wishes = Wishes(self._wishes.seed, value)
        self._note(f"temperature: {'as at the start' if value is None else format(value, 'g')}")

    def _switch_speed(self, _: str) -> None:
        self._speed = not self._speed
        self._note(f"tokens and speed are {'shown' if self._speed else 'not shown'}")

    def _retry(self, _: str) -> None:
        if (last := self._last()) is not None:
            self._again(last, self._said[last]["content"])

    def _edit(self, rest: str) -> None:
        last = self._last()
        if last is None:
            return
        text = rest or self._read(self._said[last]["content"]) or ""
        if text.strip():
            self._again(last, text)
        else:
            self._note("the message stays as it was")

    def _again(self, last: int, text: str) -> None:
        self._ask(self._said[:last], text, self._said[last].get("images", ()))

    def _last(self) -> int | None:
        """Return the index of the last message; if there is none, show a note and return None."""
        found = [i for i, one in enumerate(self._said) if one["role"] == "user"]
        if not found:
            self._note("there is no message yet")
            return None
        return found[-1]

    def _save(self, rest: str) -> None:
        if not rest:
            self._note("/save wants the name of a file")
            return
        data = {"form": _FORM, "system": self._system, "messages": self._said}
        try:
            write_atomically(Path(rest).expanduser(), json.dumps(data, indent=1) + "\n")
        except UsageError as error:
            self._note(str(error))
            return
        self._note(f"{len(self._said)} messages written to {rest}")

    def _load(self, rest: str) -> None:
        if not rest:
            self._note("/load wants the name of a file")
            return
        try:
            system, said = _read_conversation(Path(rest).expanduser())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._note(f"{rest} cannot be read: {reason}")
            return
        self._system, self._said = system, said
        self._note(f"{len(said)} messages read from {rest}")

    # --- answers ------------------------------------------------------------------------------

    def _ask(self, before: list[Message], text: str, images: Sequence[str]) -> None:
        """Request an answer and show it. Then the conversation is `before`, the message and its
        answer."""
        shown = {"images": list(images)} if images else {}
        said = [*before, {"role": "user", "content": text, **shown}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        parts: list[str] = []
        view = Formatted(self._out) if self._formatted else Plain(self._out)

        def write(piece: str) -> None:
            parts.append(piece)
            view.write(piece)

        try:
            summary = self._partner.answer(
                system + [_sent(one) for one in said], self._wishes, self._interrupts, write)
        except RequestError as error:
            if parts or self._formatted:
                view.end()
            click.echo(f"pipeinfer: error: {plain(str(error))}", err=True)
            self._failed = True
            return
        except BaseException:
            if self._formatted:
                view.end()  # gives the cursor back
            raise
        finally:
            self._interrupts.expect(KeyboardInterrupt)
        view.end()
        if self._by_hand and self._speed:
            self._note(summary)
        self._said = [*said, {"role": "assistant", "content": "".join(parts)}]


def _read_conversation(path: Path) -> tuple[str, list[Message]]:
    """Return system prompt and messages of a file that /save wrote. Raises OSError, ValueError."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(data, dict) or data.get("form") != _FORM:
        raise ValueError("it holds no conversation that /save has written")
    system, messages = data.get("system", ""), data.get("messages")
    if not isinstance(system, str) or not isinstance(messages, list) or not all(
            isinstance(one, dict) and one.get("role") in ("user", "assistant")
            and isinstance(one.get("content"), str) and isinstance(one.get("images", []), list)
            and all(isinstance(uri, str) for uri in one.get("images", [])) for one in messages):
        raise ValueError("its messages are damaged")
    return system, [{name: one[name] for name in ("role", "content", "images") if name in one}
                    for one in messages]


def _sent(message: Message) -> Message:
    """Return a message as the API takes it: its pictures before its text."""
    if not message.get("images"):
        return {"role": message["role"], "content": message["content"]}
    parts: list[Message] = [
        {"type": "input_audio", "input_audio": {"data": uri.partition(",")[2]}}
        if uri.startswith("data:audio") else {"type": "image_url", "image_url": {"url": uri}}
        for uri in message["images"]]
    return {"role": message["role"],
            "content": [*parts, {"type": "text", "text": message["content"]}]}
