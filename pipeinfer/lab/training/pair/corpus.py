"""The training text of the embedded pair: the standard library's own sources and documentation.

What counts as a document: one ``.py`` file of the running interpreter's standard library, one
topic of ``pydoc_data.topics``, or one function with a docstring written as a chat exchange. The
split is by a hash of the file's relative path, so that it is the same on every machine and no
function of a held-out file is ever trained on.

Does not know: tokens, models, or where the text will be stored.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Directories that are not the library itself: installed packages, caches, and test material that
#: is broken Python on purpose.
_SKIP_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__", "bad", "lib2to3_data"})
#: Generated tables: megabytes of numbers that would teach nothing but numbers.
_SKIP_FILES = re.compile(
    r"^(encodings/(cp|iso|mac|koi|hp|kz|ptcp|tis|aliases).*|pydoc_data/topics\.py"
    r"|_sysconfigdata.*|html/entities\.py|.*(cjk|unicode_ident|badsyntax|bad_coding|big5|gb).*)$"
)
#: One file in this many is held out.
HELD_OUT_ONE_IN = 20
IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Document:
    """One text with the name it is known by; ``kind`` is library, test, doc or chat."""

    name: str
    kind: str
    text: str


@dataclass(slots=True)
class Corpus:
    """Training and held-out documents, in a fixed order."""

    train: list[Document] = field(default_factory=list)
    held_out: list[Document] = field(default_factory=list)

    def counts(self) -> dict[str, dict[str, int]]:
        """Number of documents and characters by split and kind, for the provenance file."""
        out: dict[str, dict[str, int]] = {}
        for split, documents in (("train", self.train), ("held_out", self.held_out)):
            for document in documents:
                row = out.setdefault(f"{split}/{document.kind}", {"documents": 0, "characters": 0})
                row["documents"] += 1
                row["characters"] += len(document.text)
        return out


def is_held_out(name: str) -> bool:
    """True when the file of this relative path (forward slashes) belongs to the held-out split."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def build(root: Path | None = None, *, chat: bool = True) -> Corpus:
    """Collect the corpus under ``root`` (default: the running interpreter's standard library)."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    corpus = Corpus()
    for document in _python_files(root):
        held = is_held_out(document.name)
        (corpus.held_out if held else corpus.train).append(document)
        if chat and not held and document.kind == "library":
            corpus.train.extend(_chat_documents(document))
    corpus.train.extend(_topics(root))
    return corpus


def _python_files(root: Path) -> Iterator[Document]:
    """Readable, mostly ASCII ``.py`` files in path order, with tabs and trailing blanks tidied."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        name = relative.as_posix()
        if _SKIP_DIRS.intersection(relative.parts) or _SKIP_FILES.match(name):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if len(text) < 200 or not _is_prose_or_code(text):
            continue
        tests = {"test", "tests", "idle_test"}.intersection(relative.parts)
        text = "\n".join(line.rstrip() for line in text.expandtabs(8).splitlines()) + "\n"
        yield Document(name, "test" if tests else "library", text)


def _is_prose_or_code(text: str) -> bool:
    """False for tables: too many digits or non-ASCII characters, or very long lines."""
    digits = sum(character.isdigit() for character in text)
    odd = sum(not character.isascii() for character in text)
    longest = max(map(len, text.splitlines()), default=0)
    return digits < 0.12 * len(text) and odd < 0.02 * len(text) and longest < 500


def _chat_documents(document: Document) -> Iterator[Document]:
    """One exchange per documented function: its docstring asks, its source answers."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return
    lines = document.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        doc = ast.get_docstring(node)
        source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if not doc or len(source) > 2400 or len(node.body) < 2:
            continue
        request = doc.split("\n\n")[0].strip()
        if len(request) < 12:
            continue
        source = textwrap.dedent(source).strip()
        yield Document(
            f"{document.name}:{node.lineno}",
            "chat",
            f"{IM_START}user\nWrite a Python function {node.name}: {request}{IM_END}\n"
            f"{IM_START}assistant\n{source}{IM_END}\n",
        )


def _topics(root: Path) -> Iterator[Document]:
    """The language reference as ``pydoc`` ships it: a dictionary of plain-text topics."""
    path = root / "pydoc_data" / "topics.py"
    if not path.exists():
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in ast.literal_eval(node.value).items():
                yield Document(f"pydoc_data/topics.py#{topic}", "doc", text)
