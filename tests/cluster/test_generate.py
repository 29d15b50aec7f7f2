"""One process: text, stop strings, interrupts of the text, figures, traces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeinfer import cli
from pipeinfer.cli.summary import FATES, chrome_trace, memory_figures, summary
from pipeinfer.cluster.generate import Generated, run_request, sampling_params
from pipeinfer.config import JobConfig, SamplingConfig
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import ContextOverflow, UsageError
from pipeinfer.scheduler.events import LaneStats
from pipeinfer_lab.timeline import draw_timeline


@pytest.mark.parametrize("text", ["x", "5", "5*2", "a+1", "5+x", "99999999999+1", "5+nan", "5-inf"])
def test_a_malformed_logit_bias_is_named(text):
    with pytest.raises(UsageError, match="--logit-bias"):
        sampling_params(SamplingConfig(logit_bias=(text,)), 1)


def test_logit_biases_are_read():
    params = sampling_params(SamplingConfig(logit_bias=("5+1.5", "7-2")), 1)
    assert params.logit_bias == ((5, 1.5), (7, -2.0))


@pytest.fixture(scope="module")
def session():
    from pipeinfer.cluster.launch import join

    config = JobConfig.of(ctx=256, threads=1, threads_draft=1, draft_p_min=0.1, trace="on")
    with join(config).lead() as opened:
        yield opened


@pytest.mark.slow
class TestOneProcess:
    """Requests one after the other over one session."""

    def test_same_seed_same_text(self, session):
        prompt = session.tokenizer.encode("import os\n")
        first, second, other = (
            run_request(
                session, prompt, sampling_params(SamplingConfig(), seed), 40, ignore_eos=True
            )
            for seed in (3, 3, 4)
        )
        assert first.tokens == second.tokens
        assert first.text == second.text == session.tokenizer.decode(first.tokens)
        assert other.tokens != first.tokens
        assert len(first.times) == 40
        assert first.times == sorted(first.times)

    def test_a_stop_string_ends_the_text_before_it(self, session):
        prompt = session.tokenizer.encode("def f(x):\n")
        free = run_request(session, prompt, SamplingParams(), 60, ignore_eos=True)
        stop = free.text[20:24]
        cut = run_request(session, prompt, SamplingParams(), 60, stops=[stop], ignore_eos=True)
        assert cut.reason == "stop"
        assert cut.text == free.text[: free.text.index(stop)]

    def test_an_interrupt_ends_in_one_terminal_event(self, session):
        shown: list[str] = []
        out = run_request(session, session.tokenizer.encode("x"), SamplingParams(), 200,
                          ignore_eos=True, on_text=shown.append,
                          interrupted=lambda: len(shown) > 5)
        assert out.reason == "interrupted"
        assert 5 < len(out.tokens) < 200
        assert "".join(shown) == out.text

    def test_too_long_and_empty_prompts(self, session):
        with pytest.raises(ContextOverflow, match="-c 330"):
            run_request(session, [5] * 320, SamplingParams(), 10)
        with pytest.raises(UsageError, match="empty"):
            run_request(session, [], SamplingParams(), 10)

    def test_log_probabilities_come_along(self, session):
        out = run_request(session, [5, 6, 7], SamplingParams(n_logprobs=2), 10, ignore_eos=True)
        assert all(p is not None and p <= 0 for p in out.logprobs)

    def test_no_token_at_all(self, session):
        out = run_request(session, [5, 6], SamplingParams(), 0)
        assert (out.reason, out.tokens) == ("length", [])


def test_the_summary_and_its_figures():
    out = Generated(tokens=[1, 2, 3], times=[0.5, 0.6, 0.8], reason="length", n_prompt=4)
    figures = out.stats()
    assert figures["tokens_per_second"] == pytest.approx(2 / 0.3)
    assert figures["inter_token_latency_mean"] == pytest.approx(0.15)
    assert figures["time_to_first_after_prompt"] == pytest.approx(0.1)
    stages = {1: {"layers": [0, 4], "host": "a", "busy_share": 0.5, "sent_bytes": 10,
                  "rss": 2**28, "rank": 1}}
    figures |= memory_figures(figures["tokens_per_second"], stages, 2**28)
    text = summary(figures, stages, ["careful"])
    assert "next 100.0 ms after the prompt's end" in text
    assert "0.50 GiB resident over all ranks, 13.3 tokens/s per GiB" in text
    assert "3 tokens at 6.7 tokens/s" in text
    assert "layers 0-3 on a, busy 50%" in text
    assert "note: careful" in text
    assert summary(Generated().stats(), {}, []).startswith("0 tokens")
    assert "threads" not in text


@pytest.mark.parametrize(("steps", "gave_up", "wanted"), [
    (55, 0, []), (56, 0, ["56 steps for the 50 tokens that are shown"]),
    (30, 2, ["2 ended because they were too long"])])
def test_the_summary_says_what_threads_cost(steps, gave_up, wanted):
    out = Generated(tokens=[1] * 60, visible=50, times=[0.1] * 60,
                    lane=LaneStats(steps=steps, gave_up=gave_up))
    lines = [line for line in summary(out.stats(), {}, []).splitlines() if "threads:" in line]
    assert len(lines) == len(wanted)
    assert all(part in line for part, line in zip(wanted, lines, strict=True))


def test_memory_counts_a_rank_once_and_only_where_all_were_measured():
    stages = {1: {"rank": 0, "rss": 300}, 2: {"rank": 1, "rss": 200}}
    assert memory_figures(1.0, stages, 310)["resident_bytes"] == 510
    assert memory_figures(1.0, {**stages, 3: {"rank": 2}}, 310) == {}
    assert memory_figures(1.0, {}, 310) == {}


@pytest.mark.slow
def test_a_picture_and_the_page_name_and_colour_runs_alike():
    web = Path(cli.__file__).parents[1] / "server" / "web"
    page = re.findall(r'\["(\w+)", "([^"]+)", "([^"]+)"', (web / "runs.js").read_text())
    colours = dict(re.findall(r"--(\w+): (#\w{6});", (web / "app.css").read_text()))
    found = {name: (words.partition(" or ")[0], colours[style]) for style, words, name in page}
    assert len(found) == 5
    assert {name: FATES[name] for name in found} == found


def test_a_trace_can_be_drawn(tmp_path):
    reports = {1: {"host": "a", "events": [[0, 1.0, 1.01, "computed", 1, 0.004],
                                           [1, 1.02, 1.021, "skipped", 2, 0.0]],
                   "stage": 1, "member": 1, "n_sums": 24}}
    data = chrome_trace([(0, 0.99, False, 1)], [(1.0, (1,))], [(0, 1.03)], reports,
                        {0: "accepted"})
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert [e["cat"] for e in slices] == ["accepted", "skipped"]
    assert [e["args"].get("waited_ms") for e in slices] == [4.0, None]
    assert "stage 1 member 1 (a)" in [e["args"].get("name") for e in data["traceEvents"]]
    file, picture = tmp_path / "t.json", tmp_path / "t.png"
    file.write_text(json.dumps(data))
    draw_timeline(file, picture, start_ms=0, span_ms=100)
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": 3}'])
def test_what_is_no_trace_is_refused(tmp_path, text):
    file = tmp_path / "t.json"
    file.write_text(text)
    with pytest.raises(UsageError):
        draw_timeline(file, tmp_path / "x.png", start_ms=0, span_ms=1)
