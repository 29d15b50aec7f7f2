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
        default = default_of(name)
        values = ", ".join(option.choices) or (
            "true, false" if option.kind == "flag" else f"{option.low:g} to {option.high:g}")
        rows.append(f"| `{name}` | {str(default).lower()} | {values} | {option.help} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return a page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        path = Path(sys.argv[2])
        path.write_text(page(path.read_text()))
    else:
        print(table())
