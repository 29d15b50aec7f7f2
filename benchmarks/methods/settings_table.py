"""The table of settings in docs/options.md, from their declarations.

    python -m benchmarks.methods.settings_table                          # prints it
    python -m benchmarks.methods.settings_table --write docs/options.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeinfer.cli.options import declared, default_of

BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"


def table() -> str:
    """Return the table as Markdown."""
    rows = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    for name, option in declared().items():
        if option.flags:
            continue
        values = ", ".join(option.choices) or (
            "true, false" if option.kind == "flag" else f"{option.low:g} to {option.high:g}")
        rows.append(f"| `{name}` | {str(default_of(name)).lower()} | {values} | {option.help} |")
    return "\n".join(rows)


def between(text: str, begin: str, end: str, table: str) -> str:
    """Return a page with a table between two marks."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def page(text: str) -> str:
    """Return a page with the table of settings between its marks."""
    return between(text, BEGIN, END, table())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        path = Path(sys.argv[2])
        path.write_text(page(path.read_text()))
    else:
        print(table())
