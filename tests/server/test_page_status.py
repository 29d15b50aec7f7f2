"""The operator's page, and a rank that dies while an answer comes, in a real browser."""

from __future__ import annotations

import contextlib
import os
import re
import signal

import msgspec
import psutil
import pytest

from pipeinfer.server import orders
from tests.kit.served import serve
from tests.server.test_door import Door, let_sleep, obeyed

pytestmark = [pytest.mark.slow, pytest.mark.mpi]

SLOWLY = ["--speculation", "off", "--hook", "pace=20"]


def pid_of(rank, launcher):
    """The process of a rank of the job."""
    return next(one.pid for one in psutil.Process(launcher).children(recursive=True)
                if one.environ().get("OMPI_COMM_WORLD_RANK") == str(rank))


def test_members_of_a_wide_stage_show_what_their_stage_does(open_page):
    with serve(4, *SLOWLY, "--grid", "1x2", "--spares", "1") as served:
        served.wait_until_ready()
        chat = open_page(served.url).ready().answers_of(40)
        status = open_page(served.url, "/status")
        chat.ask()
        busy = """(() => {
            const rows = [...document.querySelectorAll('#stages tr')];
            const loads = rows.map((row) => row.querySelector('meter').value);
            return rows.length === 2 && loads[0] > 0 && Math.abs(loads[0] - loads[1]) < 0.01
                && rows.every((row) => / ms$/.test(row.cells[7].textContent)
                    && / ms$/.test(row.cells[8].textContent));
        })()"""
        status.until(busy)
        assert status.tab.inner_text("#stages tr:last-child td") == "1.2"
        assert "is spare: it replaces a machine that is lost" in status.tab.inner_text(
            "#ranks tr:last-child")
        chat.answer()


def test_stages_loads_a_plan_and_a_lost_rank_are_shown(open_page):
    with serve(3, *SLOWLY) as served:
        served.wait_until_ready()
        chat = open_page(served.url).ready().answers_of(100)
        status = open_page(served.url, "/status").ready()
        tab = status.tab
        status.until("document.querySelectorAll('#stages tr').length === 2")
        text = tab.inner_text("main")
        assert "Nothing: the stages are those of the start." in text
        assert re.search(r"stage 1, layers 0 to \d+", text)
        tab.click("#preview")
        status.until("/layers would stay|times as fast/.test("
                     "document.querySelector('#plan').textContent)")
        with tab.expect_request("**/rebalance") as asked:
            tab.click("#rebalance")
        assert asked.value.method == "POST"
        assert asked.value.headers["content-type"] == "application/json"
        assert asked.value.post_data_json == {}
        status.until("/layers/.test(document.querySelector('#plan').textContent)")
        chat.ask()
        chat.until("document.querySelector('.answer .text').textContent.length > 40")
        rank = int(tab.inner_text("#stages tr:last-child td:nth-child(2)"))
        os.kill(pid_of(rank, served.process.pid), signal.SIGKILL)
        chat.wait(lambda: chat.tab.locator(".notice.lost").count() == 1, "what happened")
        assert f"Rank {rank} (stage" in chat.tab.inner_text(".notice.lost")
        chat.until("/rank \\d lost, /.test(document.querySelector('#lanes-text').textContent)")
        chat.answer()
        foot = chat.tab.inner_text(".answer .foot")
        assert re.search(rf"rank {rank} was lost on the way: [\d.]+ s of pause, no token", foot)
        status.until("document.querySelector('#recoveries').textContent === '1'")
        assert tab.inner_text("#ranks tr.lost td").startswith(str(rank))
        assert f"Rank {rank} was lost." in tab.inner_text("#changes")


#: what the pages show of a job
FACTS = {"version": "1", "parallel": 1, "changes": [], "lost": []}


@contextlib.contextmanager
def door_of_a_job(folder):
    with contextlib.closing(Door(folder)) as door:
        door.leave()
        door.away()
        door.enter(**FACTS)
        yield door


def test_a_job_that_sleeps_is_shown_and_a_message_wakes_it(open_page, tmp_path):
    with door_of_a_job(tmp_path) as door:
        opened = open_page(door.url).ready()
        assert let_sleep(door) == "asleep"
        opened.tab.wait_for_selector("#state[data-state=asleep]:has-text('asleep')")
        late = open_page(door.url, "/status")
        late.tab.wait_for_selector("#state[data-state=asleep]:has-text('asleep')")
        opened.ask()
        door.away()
        opened.tab.wait_for_selector("#state[data-state=restarting]")
        door.enter(answer=lambda frame: door.peer.say(frame.id, "one two"), **FACTS)
        assert opened.answer() == "one two"
        assert "has failed" not in opened.tab.inner_text("body")
        late.tab.wait_for_selector("#state[data-state=ready]")


def test_the_page_offers_the_models_that_a_request_can_bring(open_page, tmp_path):
    with door_of_a_job(tmp_path) as door:
        opened = open_page(door.url).ready()
        opened.tab.click("#open-settings")
        assert not opened.tab.is_visible("#which")
        opened.tab.click("#settings-form .primary")
        obeyed(door, orders.Offer(names=("m", "other"), until=1e9))
        opened.tab.reload()
        opened.ready()
        opened.tab.click("#open-settings")
        opened.tab.select_option("#which", "other")
        opened.tab.click("#settings-form .primary")
        opened.ask()
        door.until(lambda: obeyed(door, orders.Look(until=1e9))["wanted"] == "other")
        obeyed(door, orders.Move(why="it changes", new_model=False, until=1e9))
        door.leave()
        opened.tab.wait_for_selector(".notice:has-text('The cluster starts again. It changes.')")
        door.enter(msgspec.structs.replace(door.settings, name="other"),
                   lambda frame: door.peer.say(frame.id, "of other"), **FACTS)
        assert opened.answer() == "of other"
        opened.tab.wait_for_selector("#model:has-text('other')")
