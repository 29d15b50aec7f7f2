"""The lists of options and settings in docs/options.md, from their declarations.

    python -m benchmarks.methods.settings_table                          # prints them
    python -m benchmarks.methods.settings_table --write docs/options.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from pipeinfer.cli.options import declared, default_of
from pipeinfer.config import SECTIONS, Option

TITLES = {"model": "Models and backends", "cluster": "Ranks and hosts",
          "speculation": "Speculation and scheduling", "sampling": "Sampling",
          "grammar": "Grammar (`generate`)", "request": "Prompt and output (`generate`)",
          "serve": "Server (`serve`)"}


def entries(rows: Iterable[tuple[str, str]]) -> str:
    """Return a Markdown list of names and what they mean."""
    return "\n".join(f"- {name}: {text}" for name, text in rows)


def settings() -> str:
    """Return the list of what `--set` takes."""
    return entries((f"`{name}` ({str(default_of(name)).lower()}; {_values(option)})", option.help)
                   for name, option in declared().items() if not option.flags)


def _values(option: Option) -> str:
    return ", ".join(option.choices) or (
        "true, false" if option.kind == "flag" else f"{option.low:g} to {option.high:g}")


def flags() -> str:
    """Return a list of options for each section."""
    return "\n\n".join(
        f"### {TITLES[section]}\n\n" + entries(
            (", ".join(f"`{flag}`" for flag in option.flags), option.help)
            for option in declared(section).values() if option.flags)
        for section in SECTIONS)


def between(text: str, begin: str, end: str, table: str) -> str:
    """Return a page with a table between two marks."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


TABLES: dict[str, Callable[[], str]] = {"options": flags, "settings": settings}


def page(text: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """Return a page with each table between its marks."""
    for name, made in tables.items():
        text = between(text, f"<!-- {name}: begin -->", f"<!-- {name}: end -->", made())
    return text


def main(tables: dict[str, Callable[[], str]]) -> None:
    """Print the tables, or write them into a page (`--write PAGE`)."""
    if sys.argv[1:2] == ["--write"]:
        path = Path(sys.argv[2])
        path.write_text(page(path.read_text(), tables))
    else:
        print("\n\n".join(made() for made in tables.values()))


if __name__ == "__main__":
    main(TABLES)
