"""docs/serving.md and docs/grafana.json speak of what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from pipeinfer.cli.main import main
from pipeinfer.server.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text()
BOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())


def exposed():
    """Names that /metrics has, as Prometheus stores them, and the labels of each."""
    metrics = Metrics()
    metrics.answered(200)
    metrics.status({"stage_seconds": [0.1], "stage_slowdown": [1.0]},
                   {"stages": [{"node": 1, "rank": 1, "host": "host"}]})
    names = {}
    for family in text_string_to_metric_families(metrics.render(0).decode()):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def used(text):
    """Metrics in an expression or a text, with the labels that they are asked for."""
    return [(name, re.findall(r'(\w+)(?:=~|=|!=)"', labels or ""))
            for name, labels in re.findall(r"(pipeinfer_\w+)(?:\{([^}]*)\})?", text)]


def test_the_dashboard_asks_for_metrics_that_are_there():
    known = exposed()
    expressions = [t["expr"] for panel in BOARD["panels"] for t in panel["targets"]]
    asked = [pair for text in expressions for pair in used(text)]
    assert len({name for name, _ in asked}) >= 15
    for name, labels in asked:
        assert name in known
        assert set(labels) <= known[name] | {"instance"}
    for by in re.findall(r"by \((\w+)\)", " ".join(expressions)):
        assert by in {"le", "outcome", "status"}


def test_the_dashboard_can_be_imported():
    """The fields that Grafana's import looks at; panels neither overlap nor leave the grid."""
    assert BOARD["id"] is None
    assert BOARD["title"]
    assert BOARD["schemaVersion"] >= 36
    variables = {v["name"] for v in BOARD["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    taken = set()
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in BOARD["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_text_names_metrics_that_are_there():
    known = exposed()
    found = used(TEXT)
    assert len(found) >= 8
    for name, labels in found:
        assert name in known or f"{name}_bucket" in known, name
        assert set(labels) <= known.get(name, set())


def test_the_text_names_options_that_are_there():
    options = set()
    for command in ("serve", "chat", "up", "status"):
        options |= set(re.findall(r"--[a-z][a-z-]+", CliRunner().invoke(
            main, [command, "--help-all" if command in ("serve", "chat") else "--help"]).output))
    ours = re.findall(r"`(--[a-z][a-z-]+)", TEXT) + [
        flag for line in TEXT.splitlines() if re.match(r"(pipeinfer|launch/|mpirun)", line)
        for flag in re.findall(r" (--[a-z][a-z-]+)", line)]
    assert len(ours) > 12
    assert set(ours) - {"--hostfile"} <= options


@pytest.mark.parametrize("code", sorted(set(re.findall(r"\| \d{3} `(\w+)`", TEXT))))
def test_the_codes_of_errors_are_those_of_the_server(code):
    sources = "".join(p.read_text() for p in (ROOT / "pipeinfer" / "server").glob("*.py"))
    assert f'"{code}"' in sources
