"""Files that a user writes: options, nodes, hosts, keys, profiles, prompts, grammars, traces.

The first byte of an input says which of them the rest is. A case is read by the function that the
command line calls; some go through the command line itself.
"""

from __future__ import annotations

import functools
import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fuzz.mutate import INTEGERS, TEXTS, VALUES, change_bytes, change_value
from benchmarks.fuzz.runner import Kind

ROOT = Path(__file__).resolve().parents[2]
_OPTIONS = """\
model = "big.gguf"
model-draft = "small.gguf"
threads = 8
ctx-size = 4096
policy = "pipeinfer"
proposer = ["draft", "prompt-lookup"]
top-p = 0.9
temp = 0.7
no-adapt = false
ablate = ["cancel"]
logit-bias = ["15043+1"]
layers = "10,12,12,6"
stop = ["\\n\\n"]
host = "0.0.0.0"
port = 8080
api-key = ["secret-key"]
max-body = 65536
cors-origin = ["https://chat.example.org"]
seed = 9
timeout = 60.5
"""
_HOSTS = """\
# the cluster
node1 slots=1
node2 slots = 4 max_slots=8
user@node3:2
192.168.0.7 max-slots=2
"""
_PROMPTS = '{"question": "1 + 1?", "answer": 2}\nplain text\n{"question": "why?"}\n'
_GRAMMAR = 'root ::= "a" ( item ", " )* item?\nitem ::= [a-z0-9]+ | "\\x41" # comment\n'
_TRACE = {"traceEvents": [{"ph": "X", "ts": 1.0, "dur": 5.0, "tid": 1, "cat": "computed",
                           "args": {"run": 3}}]}


@functools.cache
def seeds() -> dict[str, tuple[str, ...]]:
    """Good files by kind."""
    profiles = (ROOT / "pipeinfer/emulation/profiles.toml").read_text(encoding="utf-8")
    nodes = (ROOT / "hostfiles/beowulf-hetero.toml").read_text(encoding="utf-8")
    return {
        "o": (_OPTIONS,), "n": (nodes, "layers = [4, 4]\n[defaults]\nmemory = 8000000000\n"),
        "h": (_HOSTS, (ROOT / "hostfiles/beowulf-hetero").read_text(encoding="utf-8")),
        "k": ("# keys\nfirst-key\nsecond-key\n",), "p": (profiles,), "q": (_PROMPTS,),
        "g": (_GRAMMAR,), "j": (json.dumps({"type": "object", "properties": {
            "a": {"type": "integer"}, "b": {"enum": ["x", 1]}}, "required": ["a"]}),),
        "t": (json.dumps(_TRACE),), "O": (_OPTIONS,), "N": (nodes,),
    }


def make(draw: random.Random) -> bytes:
    """A file with one to three changes."""
    kind = draw.choice("ooonnnhhhkkppqqgjt" * 4 + "ON")
    raw = draw.choice(seeds()[kind]).encode()
    if kind in "onpON" and draw.random() < 0.6:
        value = tomllib.loads(raw.decode())
        for _ in range(draw.choice((1, 1, 2, 3))):
            value = change_value(draw, value)
        return kind.encode() + _toml(value)
    if kind in "jt" and draw.random() < 0.7:
        value = change_value(draw, json.loads(raw))
        return kind.encode() + json.dumps(value).encode("utf-8", "surrogatepass")
    for _ in range(draw.choice((1, 1, 2, 4))):
        raw = _change_text(draw, raw) if draw.random() < 0.5 else change_bytes(draw, raw)
    return kind.encode() + raw


def _change_text(draw: random.Random, raw: bytes) -> bytes:
    """A word or a line replaced, doubled or removed."""
    by = draw.choice((b"\n", b" ", b"=", b","))
    parts = raw.split(by)
    at = draw.randrange(len(parts))
    other = draw.choice((*map(str, VALUES), *TEXTS, *map(str, INTEGERS), "[" * 5000, "{" * 5000,
                         "=", '"', "slots=0", "slots=99999999999999999999", "[a.b.c]", "[[x]]"))
    new = draw.choice((other.encode("utf-8", "surrogatepass"), parts[at] * 2, b"",
                       draw.choice(parts)))
    return by.join([*parts[:at], new, *parts[at + 1 :]])


def _toml(value: Any, prefix: str = "") -> bytes:
    """TOML of a changed document; what has no TOML becomes text that is none."""
    if not isinstance(value, dict):
        return repr(value).encode("utf-8", "surrogatepass")
    lines, tables = [], []
    for key, one in value.items():
        name = json.dumps(key)
        if isinstance(one, dict) and prefix.count(".") < 2:
            tables.append(_toml(one, f"{prefix}.{name}" if prefix else name))
        else:
            lines.append(f"{name} = {_inline(one)}\n".encode("utf-8", "surrogatepass"))
    head = [f"[{prefix}]\n".encode("utf-8", "surrogatepass")] if prefix else []
    return b"".join([*head, *lines, *tables])


def _inline(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value)
    return "none" if value is None else repr(value)


# --- use ------------------------------------------------------------------------------------------


def prepare() -> None:
    """Import what cases use."""
    import pipeinfer.cli.main
    import pipeinfer.cli.serve
    import pipeinfer.cluster.generate
    import pipeinfer.cluster.launch
    import pipeinfer.emulation.profiles
    import pipeinfer.nodes  # noqa: F401
    import pipeinfer_lab.commands.compare
    import pipeinfer_lab.timeline  # noqa: F401

    seeds()


def examine(data: bytes, directory: Path) -> str:
    """Read the file as the command line does."""
    kind, path = chr(data[0]), directory / "input"
    path.write_bytes(data[1:])
    readers: dict[str, Callable[[Path], None]] = {
        "o": _options, "n": _nodes, "h": _hosts, "k": _keys, "p": _profiles, "q": _prompts,
        "g": _grammar, "j": _schema, "t": _trace, "O": _command_line, "N": _command_line_nodes}
    readers[kind](path)
    return kind


def _options(path: Path) -> None:
    import click

    from pipeinfer.cli.options import parse
    from pipeinfer.cluster.generate import sampling_params
    from pipeinfer.errors import UsageError

    try:
        resolved = parse(["--config", str(path)])
    except click.UsageError as error:  # the command line says it in a line of its own
        raise UsageError(error.format_message()) from None
    assert "secret-key" not in resolved.show()
    sampling_params(resolved.config.sampling, 0)


def _nodes(path: Path) -> None:
    from pipeinfer.nodes import read_nodes

    nodes = read_nodes(path)
    for host in ("xeon1", "optiplex3.lab", "", "*"):
        nodes.of(host).options()


def _hosts(path: Path) -> None:
    from pipeinfer.nodes import ranks_of, read_hostfile

    entries = read_hostfile(path)
    assert len(ranks_of(entries, 1, path)) == 1


def _keys(path: Path) -> None:
    from pipeinfer.cli.serve import api_keys
    from pipeinfer.config import ServeConfig

    assert all(api_keys(ServeConfig(api_key_file=str(path))))


def _profiles(path: Path) -> None:
    from pipeinfer.emulation.profiles import load_profiles

    load_profiles(path)


def _prompts(path: Path) -> None:
    from pipeinfer_lab.commands.compare import file_prompts

    assert file_prompts(path)


def _grammar(path: Path) -> None:
    from pipeinfer.cluster.generate import grammar_text
    from pipeinfer.config import GrammarConfig
    from pipeinfer.models.text.gbnf import to_lark

    to_lark(grammar_text(GrammarConfig(grammar_file=str(path)))[1], {"<a>": 1}.get, (2,))


def _schema(path: Path) -> None:
    from pipeinfer.errors import UsageError
    from pipeinfer.models.text.grammar import from_schema

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("an argument is text") from error
    from_schema(text)


def _trace(path: Path) -> None:
    from pipeinfer_lab.timeline import read_trace

    read_trace(path)


def _command_line(path: Path) -> None:
    _run(["generate", "--config", str(path), "--show-config"])
    _run(["serve", "--config", str(path), "--show-config"])


def _command_line_nodes(path: Path) -> None:
    _run(["generate", "--nodes", str(path), "--show-config"])


def _run(arguments: list[str]) -> None:
    from unittest import mock

    from click.testing import CliRunner

    from pipeinfer.cli.main import main
    from pipeinfer.errors import UsageError

    with mock.patch("pipeinfer.cli.terminal.end_job"):  # it would end this process with the job
        done = CliRunner().invoke(main, arguments)
    assert "Traceback" not in done.output, done.output
    assert "secret-key" not in done.output
    assert done.exit_code in (0, 2), (done.exit_code, done.output, done.exception)
    if done.exit_code:
        raise UsageError(done.output.strip())


KIND = Kind("config", make, examine, prepare)
