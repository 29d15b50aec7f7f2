"""Records that users share: what is stored is what is shown."""

from __future__ import annotations

import json

import pytest
import yaml

from benchmarks.shared import __main__ as shared
from pipeinfer.cli import measuring
from pipeinfer.errors import UsageError


def test_the_page_has_every_record():
    found = shared.records()
    assert found
    assert (shared.FOLDER / "README.md").read_text() == shared.page(found)


def test_a_record_tells_nothing_that_names_a_machine():
    for name, record in shared.records().items():
        assert "/" not in record.model.name, name
        assert set(json.loads((shared.FOLDER / "records" / f"{name}.json").read_text())) == {
            *measuring.Record.__struct_fields__}


@pytest.mark.parametrize("change", [{"format": 9}, {"hosts": "mine"}, {"address": "10.0.0.1"}])
def test_what_is_no_record_is_refused(tmp_path, change):
    first = next((shared.FOLDER / "records").glob("*.json"))
    path = tmp_path / "other.json"
    path.write_text(json.dumps(json.loads(first.read_text()) | change))
    with pytest.raises(UsageError, match=r"other\.json"):
        shared.read(path)


def test_the_table_has_a_place_for_yours_and_the_rates_of_others():
    lines = shared.page(shared.records()).partition("-->")[2].split("\n")
    rows = [line for line in lines if line.startswith("| ")]
    assert rows[1] == "| *your cluster* | | | | |"
    assert len(rows) == 2 + len(shared.records())
    for found, record in zip(rows[2:], shared.records().values(), strict=True):
        assert f"| {record.model.name} | {record.runs[0].rate:.1f} / " in found


def test_the_form_of_an_issue_takes_a_record():
    folder = shared.FOLDER.parents[1] / ".github" / "ISSUE_TEMPLATE"
    form = yaml.safe_load((folder / "shared-record.yml").read_text())
    fields = {one["id"]: one for one in form["body"] if one["type"] != "markdown"}
    assert fields["record"]["attributes"]["render"] == "json"
    assert fields["record"]["validations"]["required"]
    assert fields["agreed"]["attributes"]["options"][0]["required"]
    assert f"*{form['name']}*" in (shared.FOLDER / "README.md").read_text()
