"""The table of architectures in docs/models.md says what trying them says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.methods import architecture_table as table
from pipeinfer.models.shard import SPLITTABLE
from tests.support.sample import mostly_full

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_and_the_command_know_all_that_can_be_cut():
    rows = table.table_in(PAGE.read_text())
    assert set(rows) == set(table.ROWS) == set(SPLITTABLE)
    assert all(models for _, models in table.ROWS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_full(table.ROWS, "qwen3moe", "smollm3"))
def test_the_page_says_what_is_found(name):
    """But for the exact width, which another processor may have another of."""
    page = table.table_in(PAGE.read_text())[name]
    found = table.study(name, width=False).cells()
    assert page[:-1] == found[:-1]
    assert page[-1].isdigit()


def test_the_command_replaces_the_table_alone(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.main(["smollm3", "--write", str(page)])
    before, row, after = page.read_text().split("|\n| `")[0], page.read_text(), "\nafter\n"
    assert before.startswith("before\n")
    assert "old" not in row
    assert row.endswith(after)
    assert list(table.table_in(row)) == ["smollm3"]
    assert "smollm3" in capsys.readouterr().err
