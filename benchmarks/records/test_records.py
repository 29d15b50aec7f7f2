"""Pages are what the records give, and records say what they have to."""

from __future__ import annotations

import pytest

from benchmarks.records import check, raw_files, write

GOOD = """
order = 1
title = "A group"
processor = "a machine"
[[record]]
id = "one"
what = "something"
value = "3 ms"
date = "2026-11-22"
commit = "unknown"
labels = ["emulated"]
"""


def test_the_pages_are_what_the_records_give():
    assert write.main(["--check"]) == 0


def test_a_page_that_was_edited_by_hand_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(write, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(write, "PAGES", tmp_path)
    assert write.main(["--check"]) == 1
    assert write.main([]) == 0
    assert write.main(["--check"]) == 0
    write.PAGE.write_text(write.PAGE.read_text().replace("3,328", "3,329", 1))
    assert write.main(["--check"]) == 1
    assert "python -m benchmarks.records.write" in capsys.readouterr().err


def test_tables_are_what_their_raw_results_give(monkeypatch, capsys):
    assert check.main() == 0
    assert "0 rows differ" in capsys.readouterr().out
    groups = write.read()
    for group in groups:
        for record in group.records:
            if record["id"] == "published-gain":
                record["rows"][0][1] = "1.60"
    monkeypatch.setattr(write, "read", lambda: groups)
    assert check.main() == 1
    assert "published-gain: Dolphin 70B" in capsys.readouterr().err


def test_a_group_becomes_a_section(tmp_path):
    (tmp_path / "a.toml").write_text(GOOD)
    text = write.group_page(*write.read(tmp_path))
    assert text.startswith("# A group")
    assert '| <a id="one"></a>something | 3 ms | *emulated* | 2026-11-22, unknown | unknown |' \
        in text


@pytest.mark.parametrize(("change", "message"), [
    (("id = \"one\"\n", ""), "no id"),
    (("value = \"3 ms\"\n", ""), "neither value nor columns"),
    (("value = \"3 ms\"", 'columns = ["a", "b"]\nrows = [["1"]]'), "differs in length"),
    (("labels", "lables"), "unknown lables"),
    (("2026-11-22", "last week"), "isoformat"),
    (("[[record]]", GOOD[GOOD.index("[[record]]"):] + "[[record]]"), "two records one"),
    (('"unknown"', '"unknown"\nclaim = "3"'), "a claim needs its command"),
    (('"unknown"', '"unknown"\ncommand = "python -m benchmarks.gone --all"'),
     "benchmarks.gone is not"),
    (('"unknown"', '"unknown"\ncommand = "bash benchmarks/gone.sh"\nclaim = "3"\nkept_at = "a1"'),
     "benchmarks/gone.sh of a claim"),
])
def test_records_that_lack_something_are_refused(tmp_path, change, message):
    (tmp_path / "a.toml").write_text(GOOD.replace(*change, 1))
    with pytest.raises(ValueError, match=message):
        write.read(tmp_path)


def test_programs_that_are_gone_are_kept_at_a_commit(tmp_path):
    (tmp_path / "a.toml").write_text(GOOD.replace(
        'commit = "unknown"', 'commit = "unknown"\ncommand = "python -m benchmarks.gone"\n'
        'kept_at = "a1"'))
    assert "| `python -m benchmarks.gone` at a1 |" in write.group_page(*write.read(tmp_path))
    assert write.missing_programs("python -m benchmarks.paper; bash benchmarks/gpu/run.sh") == []


def test_some_dozens_of_records_are_claims():
    """Links to docs/benchmarks.md lead to claims alone: tests/test_docs_links.py."""
    claims = [record["id"] for group in write.read() for record in group.records
              if "claim" in record]
    assert 25 <= len(claims) <= 60
    assert [name for name in claims if f'<a id="{name}"></a>' not in write.PAGE.read_text()] == []


def test_links_between_records_lead_to_the_page_of_their_group(tmp_path):
    (tmp_path / "a.toml").write_text(GOOD.replace("something", "as [here](#two) and [here](#one)"))
    (tmp_path / "b.toml").write_text(GOOD.replace('"one"', '"two"'))
    pages = write.pages(write.read(tmp_path))
    assert "as [here](b.md#two) and [here](#one)" in pages[write.PAGES / "a.md"]


def test_emulated_figures_say_so():
    """A figure over profiles must not look like one of the machines that it names."""
    emulated = next(group for group in write.read() if group.name == "emulated")
    for record in emulated.records:
        if record["processor"] == emulated.processor:
            assert {"emulated", "paced", "virtual time"} & set(record["labels"]), record["id"]


@pytest.mark.parametrize("name", ["found.json", "found.json.gz"])
def test_raw_results_are_read_as_they_were_written(tmp_path, name):
    path = tmp_path / name
    raw_files.add(path, {"speed": 1.5})
    raw_files.add(path, {"speed": 2.5})
    assert raw_files.read(path) == [{"speed": 1.5}, {"speed": 2.5}]
    before = path.read_bytes()
    raw_files.write(path, raw_files.read(path))
    assert path.read_bytes() == before  # the same numbers give the same file


def test_columns_that_no_program_makes_are_not_compared(monkeypatch):
    monkeypatch.setattr(check, "BY_HAND", {"one": (0, 2)})
    assert check.kept_rows({"id": "one", "rows": [["a", "b", "c"]]}) == [["b"]]
    assert check.kept_rows({"id": "two", "rows": [["a", "b", "c"]]}) == [["a", "b", "c"]]
    assert check.kept_rows({"id": "two", "value": "0"}) == [["0"]]


def test_new_tables_need_raw_results():
    table = {"rows": [["1"]], "date": check.KEPT_SINCE}
    records = {"new": table, "made": table, "old": {**table, "date": "2026-11-27"},
               "value": {"value": "1", "date": check.KEPT_SINCE}}
    assert check.without_raw(records, {"made"}) == ["new"]
