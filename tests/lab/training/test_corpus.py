"""The sources that the embedded models were trained on, and those that were held out."""

from __future__ import annotations

from pathlib import Path

from pipeinfer_lab.training.corpus import is_held_out, library


def test_sources_are_split_by_name_and_tests_are_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for i in range(60):
        (tmp_path / f"module_{i}.py").write_text(f"# module {i} of a library\n" * 30)
    (tmp_path / "tests" / "test_all.py").write_text("# a test\n" * 50)
    split = {held: list(library(held_out=held, root=tmp_path)) for held in (True, False)}
    names = {text.splitlines()[0]: f"module_{text.split()[2]}.py"
             for texts in split.values() for text in texts}
    assert len(names) == 60
    assert split[True]
    for held, texts in split.items():
        assert {is_held_out(names[text.splitlines()[0]]) for text in texts} == {held}


def test_tables_are_no_sources(tmp_path: Path) -> None:
    (tmp_path / "table.py").write_text("X = [" + "1234567890, " * 100 + "]\n")
    (tmp_path / "text.py").write_text("# words and words\n" * 50)
    found = [text for held in (True, False) for text in library(held_out=held, root=tmp_path)]
    assert found == ["# words and words\n" * 50]
