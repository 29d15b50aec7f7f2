"""The experiments' results file, and the report."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.paper import experiments, figures_wide, reality, results
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.plots import Size
from pipeinfer.cli.options import parse
from pipeinfer.config import JobConfig
from pipeinfer.emulation.scenarios import Experiment
from pipeinfer.emulation.wide import WideExperiment
from pipeinfer.errors import UsageError

SMALL = Size(1, 32, quick=True)


def jobs(count, **more):
    return [results.Job(Experiment("c", "dolphin-tinyllama", nodes=4, tokens=16, prompt=16,
                                   prompt_seed=seed, **more)) for seed in range(count)]


def stored(path, wanted):
    store = results.Store(path)
    results.fill(store, wanted, 0, show=False)
    store.close()
    return path.read_bytes()


def test_finished_experiments_are_not_run_again(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    before = stored(path, jobs(3))
    monkeypatch.setattr(results, "compute", lambda job: pytest.fail("ran again"))
    assert stored(path, jobs(3)) == before


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_half_written_line_is_dropped_with_a_notice_and_run_again(tmp_path, monkeypatch, cut):
    path = tmp_path / "results.jsonl"
    before = stored(path, jobs(3))
    lines = before.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + (lines[2][:cut]))
    ran = []
    real = results.compute
    monkeypatch.setattr(results, "compute", lambda job: ran.append(job) or real(job))
    store = results.Store(path)
    assert len(store) == 2
    assert "half written" in store.notices[0]
    assert path.read_bytes() == b"".join(lines[:2])
    results.fill(store, jobs(3), 0, show=False)
    store.close()
    assert ran == jobs(3)[2:]
    assert path.read_bytes() == before


def test_a_damaged_line_in_the_middle_costs_itself_alone(tmp_path):
    path = tmp_path / "results.jsonl"
    lines = stored(path, jobs(3)).splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{nonsense\n" + lines[2])
    store = results.Store(path)
    assert [job in store for job in jobs(3)] == [True, False, True]
    assert "line 2 is no result" in store.notices[0]
    store.close()


def test_results_of_other_sources_are_not_used(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    stored(path, jobs(2))
    monkeypatch.setattr(results, "version", lambda: "another")
    store = results.Store(path)
    assert len(store) == 0
    assert "2 results of other versions" in store.notices[0]
    store.close()


def test_one_run_at_a_time(tmp_path):
    store = results.Store(tmp_path / "results.jsonl")
    with pytest.raises(UsageError, match="in use by another run"):
        results.Store(tmp_path / "results.jsonl")
    store.close()
    results.Store(tmp_path / "results.jsonl").close()


@pytest.mark.slow
def test_a_pool_gives_the_same_results(tmp_path):
    here = stored(tmp_path / "here.jsonl", jobs(4))
    store = results.Store(tmp_path / "pool.jsonl")
    results.fill(store, jobs(4), 2, show=False)
    store.close()
    pool = (tmp_path / "pool.jsonl").read_bytes()
    assert sorted(here.splitlines()) == sorted(pool.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_keeps_what_it_finished_and_lets_go_of_the_file(tmp_path, how):
    path = tmp_path / "results.jsonl"
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.paper", "--quick", "--only", "cancellation", "--out",
         str(tmp_path)],
        cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    end = time.monotonic() + 180
    try:
        while not (path.exists() and path.read_bytes().count(b"\n") >= 2):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(how)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    while True:
        try:
            store = results.Store(path)
            break
        except UsageError:  # its workers are on their way out
            assert time.monotonic() < end
            time.sleep(0.05)
    assert len(store) >= 2
    store.close()


def test_a_model_that_does_not_fit_is_a_result():
    found = results.compute(results.Job(Experiment("gpu", "mixtral-mistral")))
    assert "it lacks" in found["error"]


def test_the_scheduler_is_timed_and_put_back():
    (job,) = jobs(1)
    timed = results.compute(results.Job(job.experiment, timed=True))
    assert 0 < timed["scheduler_seconds"] < timed["processor_seconds"] + 1
    assert timed["tokens_per_second"] == results.compute(job)["tokens_per_second"]
    assert results.virtual.Scheduler is results.Scheduler


def test_every_figure_names_its_experiments(monkeypatch):
    monkeypatch.setattr(figures_wide, "_grid", lambda cluster, nodes, kind, pair, tokens:
                        WideExperiment(cluster, pair, nodes=nodes, tokens=tokens, sum_type=kind,
                                       widths=(2,) * (nodes // 2 - 1)))  # the best takes long
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    for figure in FIGURES:
        wanted = list(figure.needs(Size()))
        assert wanted
        assert len(list(figure.needs(SMALL))) < len(wanted)
        assert all(isinstance(job, results.Job) for job in wanted)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("paper")
    wanted = experiments.chosen(["speed", "ttft", "cancellation", "time"])
    return experiments.run(wanted, SMALL, out, 0, show=False)


@pytest.mark.slow
def test_the_report_is_whole_and_loads_nothing(report):
    text = report.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert sources
    assert all(s.startswith(("data:image/png;base64,", "#")) for s in sources)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    pictures = sorted(path.name for path in report.parent.glob("*.png"))
    assert pictures == ["gain.png", "speed.png", "time.png", "ttft.png"]
    assert text.count("<img ") == len(pictures)
    assert "tokens differ from those of iterative decoding in 0" in text
    for name in ("speed", "ttft"):
        assert f'id="{name}"' in text


@pytest.mark.slow
def test_the_dated_files_agree(report):
    (data_file,) = report.parent.glob("paper-*.json")
    (table_file,) = report.parent.glob("paper-*.csv")
    data = json.loads(data_file.read_text())
    rows = [row for figure in data["figures"].values() for row in figure["rows"]]
    with table_file.open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows)
    for one, other in zip(table, rows, strict=True):
        assert float(one["mean"]) == pytest.approx(other["mean"], rel=1e-3)
        assert one["case"] == other["case"]


@pytest.mark.slow
def test_the_main_part_can_be_published(report, tmp_path):
    (tmp_path / "paper-2000-01-01.csv").write_text("old")
    experiments.copy_main(report.parent, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".csv")
    assert names == ["gain.png", "speed.png", "summary.md", "time.png", "ttft.png"]
    assert [path.read_text() != "old" for path in tmp_path.glob("*.csv")] == [True]
    text = (tmp_path / "summary.md").read_text()
    assert "| Generation speed and nodes (Fig. 4) |" in text
    assert "| aim | measured | met |" in text


@pytest.mark.slow
def test_drawing_again_computes_nothing(report, monkeypatch):
    monkeypatch.setattr(results, "compute", lambda job: pytest.fail("ran again"))
    again = experiments.run(experiments.chosen(["ttft"]), SMALL, report.parent, 0, show=False)
    assert again == report


def test_options_of_a_way_are_the_same_for_a_job_and_its_prediction():
    for way in reality.ALL_WAYS:
        asked = parse(["--policy", way.policy.value, *way.flags]).config.job.speculation
        assert asked == JobConfig.of(policy=way.policy.value, **way.options).speculation


def test_unknown_figures_are_named(tmp_path):
    done = CliRunner().invoke(experiments.main, ["--only", "sped", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "there is no figure 'sped'; did you mean speed?" in done.output
