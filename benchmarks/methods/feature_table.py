"""Write docs/features.md: which options exclude one another, from `pipeinfer.cluster.features`.

    python -m benchmarks.methods.feature_table --write docs/features.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeinfer.cluster import features

PAGE = """\
# Options that exclude one another

{n} features, by the names that messages use. The {pairs} pairs below do not work together; all
others do. This page is generated (`python -m benchmarks.methods.feature_table`) from
[`cluster/features.py`](../pipeinfer/cluster/features.py), the only place that decides it.

## Refused

Before anything loads, with a message that names what to leave out.

| feature | cannot be combined with |
|---|---|
{refused}

## Left out

pipeinfer chooses these by itself, and leaves them out with any of the others.

| feature | left out with |
|---|---|
{omitted}
"""


def pairs(verdict: str) -> dict[str, list[str]]:
    """Return the second features of all pairs with a verdict, by their first one."""
    found: dict[str, list[str]] = {}
    for one in features.exclusions():
        found.setdefault(one.feature, []).extend(
            other for other in one.others if features.verdict(one.feature, other) == verdict)
    return {name: others for name, others in found.items() if others}


def rows(found: dict[str, list[str]]) -> str:
    """Return the rows of a table in Markdown."""
    return "\n".join(f"| {_code(name)} | {', '.join(map(_code, others))} |"
                     for name, others in found.items())


def page() -> str:
    """Return the whole page."""
    refused, omitted = pairs("refused"), pairs("left out")
    names = {name for table in (refused, omitted) for first, others in table.items()
             for name in (first, *others)}
    count = sum(len(others) for table in (refused, omitted) for others in table.values())
    return PAGE.format(n=len(names), pairs=count, refused=rows(refused), omitted=rows(omitted))


def _code(name: str) -> str:
    return f"`{name}`" if name.startswith("-") else name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    if given.write:
        given.write.write_text(page())
    else:
        print(page())
