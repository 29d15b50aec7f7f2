"""Check the records that users shared, and draw all of them.

    python -m benchmarks.shared            # after adding a file to benchmarks/shared/records
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeinfer.cli import measuring
from pipeinfer.errors import UsageError

FOLDER = Path(__file__).parent
_MARK = "<!-- written by python -m benchmarks.shared -->"
_HEADER = """\
| record | hosts | model | tokens/s of 1 user, plain / with speculation | of 4 users |
|---|---|---|---|---|
| *your cluster* | | | | |"""


def read(path: Path) -> measuring.Record:
    """Read a shared record. Raises UsageError for a file that is none."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=measuring.Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path}: no record of `pipeinfer measure`: {error}") from None
    if record.format != measuring.FORMAT:
        raise UsageError(f"{path}: format {record.format}; this version reads {measuring.FORMAT}")
    return record


def records() -> dict[str, measuring.Record]:
    """All records, by name. Raises UsageError for a file that is none."""
    return {path.stem: read(path)
            for path in sorted((FOLDER / "records").glob("*.json"))}


def row(name: str, record: measuring.Record) -> str:
    """The row of a record: the rates of a short prompt, plain and with speculation."""
    hosts = ", ".join(sorted({one.processor for one in record.hosts}))
    rates = [" / ".join(f"{one.rate:.1f}" for policy in (measuring.PLAIN, measuring.SPECULATION)
                        for one in record.runs if (one.policy, one.users, one.prompt) == (
                            policy, users, measuring.PROMPTS[0])) for users in measuring.USERS]
    return f"| [{name}](#{name}) | {len(record.hosts)} x {hosts} | {record.model.name} | " \
           f"{' | '.join(rates)} |"


def page(found: dict[str, measuring.Record]) -> str:
    """The README with a row and a paragraph for each record."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8").partition(_MARK)[0]
    table = "\n".join([_HEADER, *(row(name, one) for name, one in found.items())])
    parts = [f"### {name}\n\n{measuring.paragraph(one)}"
             + (f"\nIts maker: {one.note}" if one.note else "") for name, one in found.items()]
    return text + _MARK + "\n\n" + "\n\n".join([table, *parts]) + "\n"


def main() -> None:
    """Write page and picture."""
    found = records()
    (FOLDER / "README.md").write_text(page(found), encoding="utf-8")
    measuring.draw(FOLDER / "all.png", found)


if __name__ == "__main__":
    main()
