"""The pages of records in this folder, as data.

A page has records of one group: a table with a line for each simple one, and a block for each with
a table of its own:

    | <a id="NAME"></a>what | measured | labels | date, commit | command |

    <a id="NAME"></a>**What** (*label*; date; commit C; `command`)

    | column | column |

A command that is followed by "at COMMIT" has its program there. HISTORY.md has a line for each
figure whose program is gone. Sentences of docs/benchmarks.md are claims: each links to its record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CLAIMS = ROOT / "docs" / "benchmarks.md"
HISTORY = "HISTORY.md"
_ID = re.compile(r'<a id="([\w-]+)"></a>')
_CLAIM = re.compile(r'^- <a id="([\w-]+)"></a>.*'
                    r"\[record\]\(\.\./benchmarks/records/(\S+)#([\w-]+)\)", re.MULTILINE)
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
#: modules that a command runs, and its scripts
_PROGRAM = re.compile(r"python -m ((?:benchmarks|pipeinfer)[\w.]*)|\b(benchmarks/[\w/]+\.\w+)")
_KEPT = re.compile(r"` at [0-9a-f]{7,}\b")


@dataclass(frozen=True, slots=True)
class Record:
    """One record. rows: of its table, a value is a row of one cell. facts: labels, date, commit and
    command as the page has them."""

    name: str
    page: str
    rows: list[list[str]]
    facts: str
    processor: str

    @property
    def date(self) -> str:
        """The day on which the figure was first written down; "" without one."""
        found = _DATE.search(self.facts)
        return found[0] if found else ""

    @property
    def kept_elsewhere(self) -> bool:
        """Whether the record names the commit that has its program."""
        return _KEPT.search(self.facts) is not None


def read(folder: Path = HERE) -> dict[str, Record]:
    """Every record by its name. Raises ValueError for a name that two records have."""
    found: dict[str, Record] = {}
    for path in sorted(folder.glob("*.md")):
        if path.name != HISTORY:
            for record in _records(path):
                if record.name in found:
                    raise ValueError(f"{path.name}: there are two records {record.name}")
                found[record.name] = record
    return found


def _records(path: Path) -> list[Record]:
    text = path.read_text(encoding="utf-8")
    usual = re.search(r"^Processor, unless said otherwise: (.*)\.$", text, re.MULTILINE)
    processor, found = usual[1] if usual else "unknown", []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        name = _ID.search(line)
        if name is None:
            continue
        if line.startswith("| "):
            _, value, *facts = _cells(line)
            rows, about = [[value]], "; ".join(facts)
        else:
            rows, about = _block(lines[number + 1:]), line.partition("** (")[2]
        found.append(Record(name[1], path.name, rows, about, processor))
    return found


def _cells(line: str) -> list[str]:
    return line.removeprefix("| ").removesuffix(" |").split(" | ")


def _block(lines: list[str]) -> list[list[str]]:
    """The rows of the first table of a block, or its first paragraph."""
    own: list[str] = []
    for line in lines:
        if _ID.search(line):
            break
        own.append(line)
    table = [line for line in own if line.startswith("|")]
    if table:
        return [_cells(line) for line in table[2:]]
    return [[next((line for line in own if line), "").removesuffix(".")]]


def claims(text: str) -> dict[str, tuple[str, str]]:
    """Page and record by the name of the claim."""
    return {name: (page, record) for name, page, record in _CLAIM.findall(text)}


def missing_programs(command: str) -> list[str]:
    """The modules and scripts of a command that this tree does not have."""
    def here(module: str, script: str) -> bool:
        path = ROOT / (script or module.replace(".", "/"))
        return path.is_file() or path.with_suffix(".py").is_file() \
            or (path / "__main__.py").is_file()

    return [module or script for module, script in _PROGRAM.findall(command)
            if not here(module, script)]


def problems(records: dict[str, Record], text: str) -> list[str]:
    """What records, and claims in this text of docs/benchmarks.md, lack; a line each."""
    found = []
    for record in records.values():
        where = f"{record.page}, {record.name}"
        if not record.date:
            found.append(f"{where}: no date")
        gone = missing_programs(record.facts)
        if gone and not record.kept_elsewhere:
            found.append(f"{where}: {', '.join(gone)} is not in this tree: name the commit that "
                         f"has it, or make the record a line of {HISTORY}")
    for name, (page, other) in claims(text).items():
        claimed = records.get(other)
        if claimed is None or claimed.page != page:
            found.append(f"{name}: {page} has no record {other}")
            continue
        if "`" not in claimed.facts or missing_programs(claimed.facts) or (
                claimed.processor.startswith("unknown") and "*on " not in claimed.facts):
            found.append(f"{name}: a claim needs a processor, and a command that is in this tree")
    return found
