"""Writes docs/benchmarks.md and a page for each group from the records in this folder.

    python -m benchmarks.records.write            # writes the pages
    python -m benchmarks.records.write --check    # fails when a page is not what the records give

A TOML file is a group (order, title, intro, processor, perhaps command) with `[[record]]` tables:

    id         unique, the anchor on the page
    what       what was measured
    value      the figure as text; or columns and rows, a table; or picture, a file (from here)
    date       day on which the figure was first written down, YYYY-MM-DD
    commit     the commit that first stated it, or "unknown"
    processor, command    the group's unless given; "unknown" where nobody wrote them down
    labels     such as "emulated", "virtual time", "paced": what the figure is not
    claim      what README or a page of docs states of it, in a line; its command is in this tree
    kept_at    the commit that keeps the command's program (and its raw results), where this tree
               no longer has it
    notes      what a reader has to know as well
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "benchmarks.md"
PAGES = HERE
_UNKNOWN = "unknown"
_FIELDS = {"id", "what", "value", "columns", "rows", "picture", "date", "commit", "processor",
           "command", "labels", "notes", "claim", "kept_at"}
#: modules that a command runs, and its scripts
_PROGRAM = re.compile(r"python -m ((?:benchmarks|pipeinfer)[\w.]*)|\b(benchmarks/[\w/]+\.\w+)")

#: of docs/benchmarks.md
OPENING = HERE / "opening.txt"
RECORD_OPENING = """\
Records of this project's measurements, written by `python -m benchmarks.records.write`: change the
TOML file, not this page. [What labels mean, and what the figures do not
say](../../docs/benchmarks.md). A command *at* a commit has its program there. *unknown*: it was not
written down at the time, so no page states the figure.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """A section of the page; records have their group's processor and command filled in."""

    name: str
    order: int
    title: str
    intro: str
    processor: str
    records: tuple[dict[str, Any], ...]


def read(folder: Path = HERE) -> list[Group]:
    """Every group, in the page's order. Raises ValueError for a record that lacks something."""
    groups, seen = [], set()
    for path in sorted(folder.glob("*.toml")):
        data = tomllib.loads(path.read_text())
        processor, command = data.get("processor", _UNKNOWN), data.get("command", _UNKNOWN)
        records = []
        for given in data["record"]:
            record = {"processor": processor, "command": command, "labels": [], **given}
            _check(path.name, record)
            if record["id"] in seen:
                raise ValueError(f"{path.name}: there are two records {record['id']}")
            seen.add(record["id"])
            records.append(record)
        groups.append(Group(path.stem, data["order"], data["title"],
                            data.get("intro", "").strip(), processor, tuple(records)))
    return sorted(groups, key=lambda group: group.order)


def _check(name: str, record: dict[str, Any]) -> None:
    where = f"{name}, record {record.get('id', '(without id)')}"
    missing = {"id", "what", "date", "commit"} - set(record)
    if missing:
        raise ValueError(f"{where}: no {', '.join(sorted(missing))}")
    if set(record) - _FIELDS:
        raise ValueError(f"{where}: unknown {', '.join(sorted(set(record) - _FIELDS))}")
    if not {"value", "columns", "picture"} & set(record):
        raise ValueError(f"{where}: neither value nor columns nor picture")
    if any(len(row) != len(record["columns"]) for row in record.get("rows", ())):
        raise ValueError(f"{where}: a row differs in length from the columns")
    datetime.date.fromisoformat(record["date"])
    if gone := missing_programs(record["command"]):
        if "kept_at" not in record:
            raise ValueError(f"{where}: {', '.join(gone)} is not in this tree: name the commit "
                             "that keeps it, kept_at")
        if "claim" in record:
            raise ValueError(f"{where}: {', '.join(gone)} of a claim is not in this tree")
    stated = record["command"], record["processor"]
    if "claim" in record and any(text.startswith(_UNKNOWN) for text in stated):
        raise ValueError(f"{where}: a claim needs its command and processor")


def missing_programs(command: str) -> list[str]:
    """The modules and scripts of a command that this tree does not have."""
    root = HERE.parents[1]

    def here(module: str, script: str) -> bool:
        path = root / (script or module.replace(".", "/"))
        return path.is_file() or path.with_suffix(".py").is_file() \
            or (path / "__main__.py").is_file()

    return [module or script for module, script in _PROGRAM.findall(command)
            if not here(module, script)]


def page(groups: list[Group]) -> str:
    """Return docs/benchmarks.md: the claims of every group."""
    parts = [OPENING.read_text()]
    for group in groups:
        if claims := [_claim(group, r) for r in group.records if "claim" in r]:
            parts += [f"### {group.title}", "\n".join(claims)]
    parts.append("## Records")
    parts.append("\n".join(f"- [{g.title}](../benchmarks/records/{g.name}.md)" for g in groups))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _claim(group: Group, record: dict[str, Any]) -> str:
    name, processor = record["id"], record["processor"]
    machine = re.search(r"Zen \d|Intel Xeon|H200|virtual time", processor)
    where = machine[0] if machine else processor.partition(",")[0]
    facts = [*(f"*{label}*" for label in record["labels"] if label != where), where,
             record["date"], f"[record](../benchmarks/records/{group.name}.md#{name})"]
    return f'- <a id="{name}"></a>{record["claim"]} ({"; ".join(facts)})'


def pages(groups: list[Group]) -> dict[Path, str]:
    """Return every page by its file."""
    homes = {record["id"]: group.name for group in groups for record in group.records}
    found = {PAGE: page(groups)}
    for group in groups:
        def elsewhere(link: re.Match[str], name: str = group.name) -> str:
            home = homes.get(link[1], name)
            return link[0] if home == name else f"]({home}.md#{link[1]})"

        found[PAGES / f"{group.name}.md"] = re.sub(r"\]\(#([\w-]+)\)", elsewhere, group_page(group))
    return found


def group_page(group: Group) -> str:
    """Return the page of a group: all of its records."""
    parts = [f"# {group.title}", RECORD_OPENING, group.intro,
             f"Processor, unless said otherwise: {group.processor}."]
    simple = [r for r in group.records if "columns" not in r and "picture" not in r]
    if simple:
        parts.append(table(
            ["what", "measured", "labels", "date, commit", "command"],
            [[f'<a id="{r["id"]}"></a>{r["what"]}', r["value"], _labels(group, r),
              f"{r['date']}, {r['commit']}", _code(r)] for r in simple]))
    for record in group.records:
        if record not in simple:
            parts += _block(group, record)
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _block(group: Group, record: dict[str, Any]) -> list[str]:
    head = f'<a id="{record["id"]}"></a>**{record["what"][0].upper()}{record["what"][1:]}**'
    facts = [_labels(group, record), record["date"], f"commit {record['commit']}",
             _code(record)]
    parts = [f"{head} ({'; '.join(fact for fact in facts if fact)})"]
    if "value" in record:
        parts.append(record["value"] + ".")
    if "columns" in record:
        parts.append(table(record["columns"], record["rows"]))
    if "notes" in record:
        parts.append(record["notes"])
    if "picture" in record:
        parts.append(f"![{record['id']}]({record['picture']})")
    return parts


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; an empty cell is a dash."""
    lines = [[cell or " " for cell in columns], ["---"] * len(columns),
             *([cell.strip() or "-" for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _labels(group: Group, record: dict[str, Any]) -> str:
    found = list(record["labels"])
    if record["processor"] != group.processor and not record["processor"].startswith("none"):
        found.append(f"on {record['processor']}")
    return ", ".join(f"*{label}*" for label in found)


def _code(record: dict[str, Any]) -> str:
    command, kept = record["command"], record.get("kept_at")
    return command if command == _UNKNOWN else f"`{command}`" + (f" at {kept}" if kept else "")


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description="writes pages from the records")
    parser.add_argument("--check", action="store_true", help="only compare")
    check, wrong = parser.parse_args(argv).check, 0
    for path, wanted in pages(read()).items():
        if not check:
            path.write_text(wanted)
        elif not path.exists() or path.read_text() != wanted:
            wrong = 1
            print(f"{path.name} is not what benchmarks/records give: run "
                  "python -m benchmarks.records.write", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
