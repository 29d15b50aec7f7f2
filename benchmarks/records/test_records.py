"""Records have what they need, claims have records, tables are what their raw results give."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.records import check, pages, raw_files
from benchmarks.records.pages import Record

PAGE = """# A group

Processor, unless said otherwise: a machine.

| what | measured | labels | date, commit | command |
| --- | --- | --- | --- | --- |
| <a id="one"></a>something | 3 ms | *emulated* | 2026-11-22, unknown | `pipeinfer bench` |

<a id="two"></a>**A table** (2026-11-23; commit a1b2c3d; `python -m benchmarks.paper`)

| by | speed |
| --- | --- |
| us | 3 |
| others | - |

Notes with | a bar.

<a id="three"></a>**A picture** (2026-11-24; commit unknown; `python -m benchmarks.gone`)

4 ms.
"""
CLAIM = '- <a id="x"></a>It is fast (2026-11-22; [record](../benchmarks/records/a.md#{}))'


@pytest.fixture
def records(tmp_path):
    (tmp_path / "a.md").write_text(PAGE)
    (tmp_path / pages.HISTORY).write_text('- <a id="one"></a>something else\n')
    return pages.read(tmp_path)


def test_a_page_is_read_as_records(records):
    assert {name: one.rows for name, one in records.items()} == {
        "one": [["3 ms"]], "two": [["us", "3"], ["others", "-"]], "three": [["4 ms"]]}
    assert {one.processor for one in records.values()} == {"a machine"}
    assert [one.date for one in records.values()] == ["2026-11-22", "2026-11-23", "2026-11-24"]


def test_a_name_is_one_records(tmp_path, records):
    (tmp_path / "b.md").write_text(PAGE)
    with pytest.raises(ValueError, match="there are two records one"):
        pages.read(tmp_path)


def test_a_record_lacks_no_date_and_no_program(records):
    found = pages.problems(records, "")
    assert found == ["a.md, three: benchmarks.gone is not in this tree: name the commit that "
                     "has it, or make the record a line of HISTORY.md"]
    kept = replace(records["three"], facts="2026-11-24; `python -m benchmarks.gone` at a1b2c3d")
    assert pages.problems({"three": kept}, "") == []
    assert pages.problems({"three": replace(kept, facts="`pipeinfer bench`")}, "") == [
        "a.md, three: no date"]
    assert pages.missing_programs("python -m benchmarks.paper; bash benchmarks/gpu/run.sh") == []


@pytest.mark.parametrize(("name", "says"), [
    ("two", ""), ("four", "x: a.md has no record four"),
    ("three", "x: a claim needs a processor, and a command that is in this tree")])
def test_a_claim_has_a_record_whose_command_is_here(records, name, says):
    del records["one"]
    found = pages.problems(records, CLAIM.format(name))
    assert found[-1:] == ([says] if says else found[-1:])
    assert says or not [one for one in found if one.startswith("x:")]


def test_records_and_claims_are_whole_and_tables_are_what_their_raw_results_give(
        monkeypatch, capsys):
    assert check.main() == 0
    assert "0 differences and lacks" in capsys.readouterr().out
    found = pages.read()
    found["published-gain"].rows[0][1] = "1.60"
    monkeypatch.setattr(pages, "read", lambda: found)
    assert check.main() == 1
    assert "published-gain: Dolphin 70B" in capsys.readouterr().err


def test_some_dozens_of_records_are_claims():
    assert 25 <= len(pages.claims(pages.CLAIMS.read_text())) <= 60


def test_history_repeats_no_record():
    names = re.findall(r'<a id="([\w-]+)"', (pages.HERE / pages.HISTORY).read_text())
    assert len(set(names)) == len(names)
    assert not {*names} & {*pages.read()}


def test_emulated_figures_say_so():
    """A figure over profiles must not look like one of the machines that it names."""
    for record in pages.read().values():
        if record.page == "emulated.md" and "*on " not in record.facts:
            said = re.search(r"\*(computed|emulated|paced|virtual time)\*", record.facts)
            assert said, record.name


@pytest.mark.parametrize("name", ["found.json", "found.json.gz"])
def test_raw_results_are_read_as_they_were_written(tmp_path, name):
    path = tmp_path / name
    raw_files.add(path, {"speed": 1.5})
    raw_files.add(path, {"speed": 2.5})
    assert raw_files.read(path) == [{"speed": 1.5}, {"speed": 2.5}]
    before = path.read_bytes()
    raw_files.write(path, raw_files.read(path))
    assert path.read_bytes() == before  # the same numbers give the same file


def record(name, *rows, date="2026-11-22"):
    return Record(name, "a.md", [*map(list, rows)], date, "a machine")


def test_columns_that_no_program_makes_are_not_compared(monkeypatch):
    monkeypatch.setattr(check, "BY_HAND", {"one": (0, 2)})
    assert check.kept_rows(record("one", "abc")) == [["b"]]
    assert check.kept_rows(record("two", "abc")) == [["a", "b", "c"]]
    assert check.wrong_rows([["a", "-"]], [["a ", ""]]) == []


def test_new_tables_need_raw_results():
    new = check.KEPT_SINCE
    records = {"new": record("new", "12", date=new), "made": record("made", "12", date=new),
               "old": record("old", "12"), "value": record("value", "1", date=new)}
    assert check.without_raw(records, {"made"}) == ["new"]
