"""docs/alerts.yml and docs/grafana.json in a real Prometheus, where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import requests
import yaml

from tests.kit import launch
from tests.kit.server_peer import MODEL, SECONDS, front
from tests.server.test_docs import BOARD, ROOT, exposed, used

RULES = ROOT / "docs" / "alerts.yml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")


def test_alerts_ask_for_metrics_that_are_there_and_say_what_to_do():
    known = exposed()
    assert len(ALERTS) >= 10
    for alert in ALERTS:
        for name, labels in used(alert["expr"]):
            assert name in known, alert["alert"]
            assert set(labels) <= known[name]
        assert {"summary", "description"} == set(alert["annotations"])
        assert alert["labels"]["severity"] in ("warning", "critical")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_every_alert_fires_where_it_should_and_is_silent_where_all_is_well(tmp_path):
    wanted = (ROOT / "tests" / "server" / "alerts_test.yml").read_text()
    assert {alert["alert"] for alert in ALERTS} == set(re.findall(r"alertname: (\w+)", wanted)) \
        == set(re.findall(r'alertname="(\w+)"', wanted))
    (tmp_path / "test.yml").write_text(wanted.replace("[ALERTS]", f"[{RULES}]"))
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(tmp_path / "test.yml")]):
        done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed")
def test_prometheus_reads_the_server_the_alerts_and_every_expression_of_the_board(tmp_path):
    port = launch.free_port()
    url = f"http://127.0.0.1:{port}/api/v1"
    with front(MODEL, keys=["watching"]) as server:
        (tmp_path / "prometheus.yml").write_text(json.dumps({
            "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "pipeinfer", "authorization": {
                "credentials": "watching"}, "static_configs": [
                    {"targets": [server.url.removeprefix("http://")]}]}]}))
        with subprocess.Popen(
                [PROMETHEUS, f"--config.file={tmp_path}/prometheus.yml",
                 f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}",
                 "--log.level=error"], stderr=subprocess.DEVNULL) as prometheus:
            try:
                check(server, url)
            finally:
                prometheus.terminate()
                prometheus.wait(SECONDS)


def is_ready(url):
    try:
        return requests.get(url.replace("/api/v1", "/-/ready"), timeout=SECONDS).ok
    except requests.ConnectionError:
        return False


def check(server, url):
    def ask(expression):
        answer = requests.get(f"{url}/query", {"query": expression}, timeout=SECONDS).json()
        assert answer["status"] == "success", (expression, answer)
        return answer["data"]["result"]

    server.until(lambda: is_ready(url))
    server.until(lambda: ask("count_over_time(pipeinfer_ready[1m]) > 5"))
    server.post("/v1/completions", {"prompt": "x"}, headers={"X-Api-Key": "watching"})
    server.until(lambda: ask("pipeinfer_generated_tokens_total > 0"))
    expressions = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    for expression in expressions:
        ask(expression.replace("$__rate_interval", "5s").replace("$instance", ".*"))
    assert ask('sum(rate(pipeinfer_generated_tokens_total{instance=~".*"}[10s])) > 0')
    (group,) = requests.get(f"{url}/rules", timeout=SECONDS).json()["data"]["groups"]
    assert {rule["name"] for rule in group["rules"]} == {alert["alert"] for alert in ALERTS}
    assert {(rule["health"], rule["state"]) for rule in group["rules"]} == {("ok", "inactive")}
