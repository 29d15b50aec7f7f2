"""The terminal of `pipeinfer chat`: its editor at a real terminal, Markdown, control characters."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from pipeinfer.cli import chat_terminal
from pipeinfer.cli.chat_loop import ChatLoop, Interrupts
from pipeinfer.cli.chat_terminal import Formatted, settled
from pipeinfer.errors import RequestError
from tests.kit.random_projectors import picture, sound
from tests.kit.refusals import process_kept
from tests.kit.sample import full


@pytest.mark.parametrize(("text", "done"), [
    ("one\ntwo", ""), ("one\n\ntwo", "one\n\n"), ("```\na\n\nb\n", ""),
    ("```\na\n\nb\n```\nc", "```\na\n\nb\n```\n"), ("````\n```\n\n````\n", "````\n```\n\n````\n"),
    ("~~~\n```\n\n", ""), ("a\n\n```py\nx", "a\n\n"),
])
def test_what_is_complete_is_known(text, done):
    assert text[:settled(text)] == done


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_markdown_is_wrapped_and_no_control_character_passes(size):
    text = ("# Title\n\nSome **bold** " + "words " * 30 + "\n\n```python\nprint('\x1b]0;bad\x07')\n"
            "```\n\n- one \x9b31m\n- two\r\x1b[2J\n")
    out = io.StringIO()
    view = Formatted(out)
    for at in range(0, len(text), size):
        view.write(text[at:at + size])
    view.end()
    shown = out.getvalue()
    assert not {"\x07", "\x9b"} & set(shown)
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert "**" not in shown
    assert "bold" in shown
    assert "```" not in shown


class Screen(io.StringIO):
    """A terminal that wraps, scrolls, moves its cursor up and erases lines."""

    def __init__(self, columns, rows):
        super().__init__()
        self.size = os.terminal_size((columns, rows))
        self.lines, self.x, self.y = [""], 0, 0

    def fileno(self):
        return 1

    def write(self, text):
        for match in re.finditer(r"\x1b\[([\d;?]*)([A-Za-z])|[^\x1b]", text):
            self._take(match[0], match[1], match[2])
        return len(text)

    def _take(self, sign, number, order):
        if order == "A":
            self.y = max(self.y - int(number or 1), 0, len(self.lines) - self.size.lines)
        elif order == "K":
            assert number == "2"
            self.lines[self.y] = ""
        elif sign == "\r":
            self.x = 0
        elif sign == "\n":
            self._down()
        elif not order:
            if self.x == self.size.columns:
                self._down()
            line = self.lines[self.y].ljust(self.x)
            self.lines[self.y] = line[:self.x] + sign + line[self.x + 1:]
            self.x += 1

    def _down(self):
        self.x, self.y = 0, self.y + 1
        if self.y == len(self.lines):
            self.lines.append("")

    def shown(self):
        return [line.rstrip() for line in self.lines]


@pytest.fixture
def screen(monkeypatch):
    """Makes a terminal in which an answer comes slowly: it is drawn again at most pieces."""
    def make(columns=80, rows=24):
        made = Screen(columns or 80, rows or 24)  # some report no size
        unknown = os.terminal_size((0, 0))
        monkeypatch.setattr(chat_terminal.os, "get_terminal_size",
                            lambda *_: made.size if columns else unknown)
        return made

    clock = itertools.count(0, 0.05)
    monkeypatch.setattr(chat_terminal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    return make


def paragraphs(count, seed=0):
    """Paragraphs of a beginning that is found nowhere else, and 3 to 60 words."""
    words = random.Random(seed)
    return [" ".join([f"Start{number:02}", *("w" * words.randint(1, 11) for _ in range(
        words.randint(3, 60)))]) for number in range(count)]


@pytest.mark.parametrize(("columns", "rows", "size"), [
    (80, 24, 4), (0, 0, 9), (79, 3, 7), full(80, 24, 1), full(80, 6, 5), full(40, 24, 3),
    full(120, 40, 7), full(80, 24, 200), full(23, 10, 5), full(200, 5, 9)])
def test_each_line_of_a_streamed_answer_is_there_once(screen, columns, rows, size):
    out, said = screen(columns, rows), paragraphs(15)
    text = "\n\n".join(said)
    view = Formatted(out)
    for at in range(0, len(text), size):
        view.write(text[at:at + size])
        beginnings = re.findall(r"Start\d\d", "\n".join(out.lines[-(rows or 24):]))
        assert len(beginnings) == len(set(beginnings)), out.shown()
    view.end()
    width = max(columns or 80, 20)
    wanted = [line for one in said for line in [*textwrap.wrap(one, width), ""]]
    assert [line for line in out.shown() if line] == [line for line in wanted if line]


@pytest.mark.parametrize(("before", "after"), [(80, 50), (80, 120), (120, 31), (40, 80)])
def test_a_window_that_is_resized_cuts_no_word(screen, before, after):
    out, said = screen(before), paragraphs(8, seed=3)
    text = "\n\n".join(said)
    view, half = Formatted(out), text.index("Start04") - 2
    view.write(text[:half])
    out.size = os.terminal_size((after, 24))
    for at in range(half, len(text), 5):
        view.write(text[at:at + 5])
    view.end()
    shown = "\n".join(out.shown())
    wanted = "\n".join(line for one in said[4:] for line in [*textwrap.wrap(one, after), ""])
    assert wanted.strip() in shown


class Script:
    """Lines that stand ready."""

    by_hand = False

    def __init__(self, *lines):
        self.lines, self.begun = list(lines), []

    def next(self, prompt, write, text=""):
        self.begun.append(text)
        return self.lines.pop(0) if self.lines else None


class Echo:
    """Answers with a number, and fails when asked to."""

    name = "echo"

    def __init__(self):
        self.asked = []

    def answer(self, messages, wishes, interrupts, write):
        self.asked.append(([one["content"] for one in messages], wishes.temperature, wishes.seed))
        if messages[-1]["content"] == "fail":
            raise RequestError("no")
        write(f"a{len(self.asked)}")
        return ""


@pytest.fixture
def talk():
    def run(*lines):
        partner, script, out = Echo(), Script(*lines), io.StringIO()
        failed = ChatLoop(partner, script, out, Interrupts(), "", -1).run()
        return partner.asked, out.getvalue(), script.begun, failed

    with process_kept():
        yield run


def test_the_last_message_is_asked_again_or_edited(talk, capsys):
    asked, out, begun, failed = talk("/retry", "one", "/retry", "two", "/edit zwei", "/edit",
                                     "drei", "/edit", "", "fail", "/retry")
    assert "there is no message yet" in capsys.readouterr().err
    said = [messages for messages, *_ in asked]
    assert said == [["one"], ["one"], ["one", "a2", "two"], ["one", "a2", "zwei"],
                    ["one", "a2", "drei"], ["one", "a2", "drei", "a5", "fail"],
                    ["one", "a2", "drei"]]
    assert begun[6] == "zwei"  # what is edited stands there already
    assert out == "a1\na2\na3\na4\na5\na7\n"
    assert failed


def test_temperature_and_files(talk, capsys, tmp_path):
    file = tmp_path / "kept.json"
    asked, *_ = talk("/temp hot", "/temp 0.5", "/seed 7", "one", "/system Be kind.",
                     f"/save {file}", "/clear", "/system Other.", f"/load {file}", "/temp", "two",
                     "/load /nowhere", f"/save {tmp_path}/none/x", "/load", "/save")
    assert asked == [(["one"], 0.5, 7), (["Be kind.", "one", "a1", "two"], None, 7)]
    said = capsys.readouterr().err
    assert "a temperature is a number from 0 to 100" in said
    assert "2 messages written" in said
    assert "/nowhere cannot be read: No such file" in said
    assert f"cannot write {tmp_path}/none/x" in said
    for wrong in ("{", "[]", '{"form": "pipeinfer chat 1", "messages": [{"role": "system"}]}'):
        file.write_text(wrong)
        talk(f"/load {file}")
        assert f"{file} cannot be read: it" in capsys.readouterr().err


def test_a_picture_goes_along_with_the_next_message_and_stays_in_it(talk, capsys, tmp_path):
    png, wav, file = tmp_path / "a.png", tmp_path / "a.wav", tmp_path / "kept.json"
    png.write_bytes(picture(8, 8))
    wav.write_bytes(sound(0.01))
    asked, *_ = talk(f"/image {png}", f"/image {wav}", "/image /nowhere", f"/image {file}",
                     f"/image {__file__}", "one", "two", f"/save {file}", "/clear",
                     f"/load {file}", "/retry")
    uri = f"data:image/any;base64,{base64.b64encode(png.read_bytes()).decode()}"
    shown = [{"type": "image_url", "image_url": {"url": uri}},
             {"type": "input_audio", "input_audio": {
                 "data": base64.b64encode(wav.read_bytes()).decode()}},
             {"type": "text", "text": "one"}]
    assert [messages for messages, *_ in asked] == [
        [shown], [shown, "a1", "two"], [shown, "a1", "two"]]
    said = capsys.readouterr().err
    assert "a.wav goes along with the next message (2 do)" in said
    assert "/image /nowhere: No such file" in said
    assert "not a JPEG, PNG, GIF or BMP" in said


EDITOR = """
from pipeinfer.cli.chat_terminal import Editor
editor = Editor()
while (line := editor.next("> ", print)) is not None:
    print("got", ascii(line), flush=True)
"""


@pytest.mark.slow
def test_a_paste_stays_whole_and_history_outlives_the_program(tmp_path):
    def session(*keys):
        master, slave = pty.openpty()
        env = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm",
                            "PROMPT_TOOLKIT_NO_CPR": "1"}
        process = subprocess.Popen([sys.executable, "-c", EDITOR], stdin=slave, stdout=slave,
                                   stderr=slave, env=env, start_new_session=True)
        os.close(slave)
        seen = ""
        try:
            for typed, wanted in keys:
                deadline = time.monotonic() + 30
                os.write(master, typed)
                while wanted not in seen:
                    ready, _, _ = select.select([master], [], [], deadline - time.monotonic())
                    assert ready, seen
                    seen += os.read(master, 4096).decode("utf-8", "replace")
                seen = seen[seen.index(wanted) + len(wanted):]
            process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            os.close(master)

    prompt = (b"", ">")  # before it the terminal itself would take keys
    session(prompt, (b"\x1b[200~one\r\ntwo\x1b[201~ three\r", "got 'one\\ntwo three'"), prompt,
            (b"four\x1b\rfive\r", "got 'four\\nfive'"), prompt, (b"\x04", ""))
    file = tmp_path / "pipeinfer" / "chat"
    assert file.stat().st_mode & 0o777 == 0o600
    session(prompt, (b"\x1b[A\x1b[A\r", "got 'four\\nfive'"), prompt, (b"\x04", ""))
