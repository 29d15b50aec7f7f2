"""The generated tables of the documentation: what trying and declarations say."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import tables as table
from pipeinfer.models.shard import SPLITTABLE
from tests.kit.sample import mostly_full

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


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


def test_the_command_replaces_the_table_alone(tmp_path, monkeypatch):
    page = tmp_path / "models.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    monkeypatch.setattr(table, "DOCS", tmp_path)
    done = CliRunner().invoke(table.main, ["--architectures", "--only", "smollm3"])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert text.startswith("before\n")
    assert "old" not in text
    assert text.endswith("\nafter\n")
    assert list(table.table_in(text)) == ["smollm3"]


def test_other_generated_pages_are_what_their_sources_give(tmp_path, monkeypatch):
    def run(*words):
        return CliRunner().invoke(table.main, list(words))

    done = run("--check")
    assert done.exit_code == 0, done.output
    for name in ("options.md", "api.md", "features.md", "architecture.md"):
        text = (PAGE.parent / name).read_text()
        (tmp_path / name).write_text(text.replace("\n- `", "\n- changed `").replace("| ", "|"))
    monkeypatch.setattr(table, "DOCS", tmp_path)
    done = run("--check")
    assert done.exit_code == 1
    assert "run python -m benchmarks.tables" in done.output
    assert run().exit_code == 0
    assert run("--check").exit_code == 0
