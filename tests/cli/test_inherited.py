"""What a process inherits: odd standard streams, encodings, homes and folders. No traceback, and
nothing that was to be written is lost."""

from __future__ import annotations

import errno
import os
import pwd
import stat
import subprocess
import sys
import tempfile

import pytest

from pipeinfer.cli import inherited
from pipeinfer.cli.main import _outside
from tests.kit import launch
from tests.kit.sample import mostly_full

PIPEINFER = [sys.executable, "-P", "-m", "pipeinfer"]
WRITER = """
import sys
from pipeinfer.cli import inherited
inherited.settle()
print("e\\u0301t\\u00e9 \\u6f22 \\udce4", flush=True)
sys.stderr.write("\\u6f22\\n")
print(sys.stdin.read() == "", flush=True)
"""


def run(command, *, closed=(), timeout=60, **options):
    env = {**launch.environment(), **options.pop("env", {})}
    for name in [name for name, value in env.items() if value is None]:
        del env[name]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(
        command, check=False, timeout=timeout, env=env, **{**streams, **options},
        preexec_fn=lambda: [os.close(number) for number in closed])


@pytest.mark.parametrize("env", mostly_full([
    {}, {"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "cp1252:strict"}, {"PYTHONIOENCODING": "utf-16"},
    {"PYTHONIOENCODING": "ascii:surrogateescape"}, {"LC_ALL": "C", "PYTHONIOENCODING": None},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "xx_YY.nothing"}, {"LANG": "", "LC_ALL": ""}],
    {"PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}), ids=repr)
def test_every_letter_can_be_written_in_every_encoding(env):
    done = run([sys.executable, "-c", WRITER], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr
    encoding = env.get("PYTHONIOENCODING") or "utf-8"
    text = done.stdout.decode(encoding.partition(":")[0], "surrogateescape")
    assert "\u6f22" in text or "\\u6f22" in text
    assert text.endswith("True\n")


@pytest.mark.parametrize("closed", mostly_full(
    [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], (1,), (2,), (0, 1, 2)))
def test_closed_streams_lose_only_what_is_written_there(closed, tmp_path):
    """A file that is opened afterwards must not become standard output, either."""
    program = WRITER + f"print('own', file=open({str(tmp_path / 'file')!r}, 'w'))\n"
    done = run([sys.executable, "-c", program], closed=closed)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "own\n"
    assert (done.stdout == b"") == (1 in closed)
    assert (done.stderr == b"") == (2 in closed)
    if 1 in closed and 2 not in closed:
        assert b"standard output is closed" in done.stderr


def test_a_stream_that_does_not_block_is_written_in_full():
    program = ("import os, sys\nfrom pipeinfer.cli import inherited\nos.set_blocking(1, False)\n"
               "inherited.settle()\nprint('x' * 3_000_000)\n")
    done = run([sys.executable, "-c", program])
    assert done.stdout == b"x" * 3_000_000 + b"\n", done.stderr


# --- homes ------------------------------------------------------------------------------------


@pytest.fixture
def no_entry(monkeypatch, tmp_path):
    """A user whom the system does not know, and a folder for temporary files."""
    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "")  # what is there now comes back
    return tmp_path


@pytest.mark.parametrize("home", [None, "", "relative", "/nonexistent", "/dev/null", "~"])
def test_who_has_no_home_gets_a_private_one(no_entry, monkeypatch, home):
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    inherited.settle()
    found = no_entry / f"pipeinfer-home-{os.getuid()}"
    assert os.environ["HOME"] == str(found)
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    inherited.settle()
    assert os.environ["HOME"] == str(found)  # the next command has the same caches


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_home_that_others_could_have_made_is_not_taken(no_entry, monkeypatch, kind):
    place = no_entry / f"pipeinfer-home-{os.getuid()}"
    if kind == "open":
        place.mkdir()
        place.chmod(0o777)
    elif kind == "link":
        (no_entry / "other").mkdir(mode=0o700)
        place.symlink_to(no_entry / "other")
    else:
        place.write_text("")
    inherited.settle()
    assert os.environ["HOME"] != str(place)
    assert stat.S_IMODE(os.stat(os.environ["HOME"]).st_mode) == 0o700


def test_a_home_that_is_there_stays(tmp_path, monkeypatch):
    for home in (str(tmp_path), pwd.getpwuid(os.getuid()).pw_dir):
        monkeypatch.setenv("HOME", home)
        inherited.settle()
        assert os.environ["HOME"] == home
    monkeypatch.delenv("HOME")
    inherited.settle()
    assert os.environ["HOME"] == home


# --- whole commands ---------------------------------------------------------------------------


@pytest.mark.slow
def test_an_answer_to_a_prompt_with_an_ideogram_is_not_lost(tmp_path):
    prompt = tmp_path / "prompt"
    prompt.write_text("x = '漢'\n", encoding="utf-8")
    done = run([*PIPEINFER, "generate", "-m", "embedded", "-f", str(prompt), "-n", "4", "--temp",
                "0"], env={"PYTHONIOENCODING": "latin-1", "HOME": None})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"x = '\\u6f22'\n")
    assert b"tokens" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", mostly_full(["env", "models"], "env"))
def test_a_full_disk_is_one_line(command):
    with open("/dev/full", "wb") as full:
        done = run([*PIPEINFER, command], stdout=full)
    assert done.returncode == 1
    assert done.stderr == (b"pipeinfer: error: standard input or output: No space left on device: "
                           b"check where the command reads and writes\n")


def surrogate():
    try:
        "\udcff".encode()
    except UnicodeEncodeError as error:
        return error


@pytest.mark.parametrize(("error", "says"), [
    (OSError(errno.ENOSPC, "No space left on device"), "standard input or output: No space left"),
    (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "/x/y: No space left on device"),
    (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    (OSError(errno.EROFS, "Read-only file system", "/x"), "/x: Read-only file system"),
    (OSError(errno.EMFILE, "Too many open files", "/x"), "/x: Too many open files"),
    (OSError(errno.EBADF, "Bad file descriptor"), "standard input or output: Bad file"),
    (surrogate(), "is not UTF-8 text"),
    (OSError(errno.EINVAL, "Invalid argument"), ""),  # a bug
    (UnicodeEncodeError("ascii", "\u6f22", 0, 1, "ordinal not in range(128)"), ""),
    (ValueError("x"), ""), (FileNotFoundError(errno.ENOENT, "No such file"), ""),
])
def test_errors_of_the_system_are_told_from_bugs(error, says):
    said = _outside(error)
    assert bool(said) == bool(says)
    assert says in said


def test_a_working_folder_that_was_deleted_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "the working folder was deleted" in _outside(FileNotFoundError(errno.ENOENT, "No such"))
