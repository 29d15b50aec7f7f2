"""Several tabs on one chat, a page that is left amid an answer, and what it says meanwhile.

The engine is scripted, so that an answer is as far as a test wants it.
"""

from __future__ import annotations

import pytest

from pipeinfer.server.frames import Abort, Changed, Ended, Recovering, Status, Submit
from tests.kit.server_peer import FACTS, MODEL, front
from tests.server.pages import stored_turns

pytestmark = pytest.mark.slow
STAGES = [{"node": 1, "stage": 1, "rank": 0, "host": "a", "layers": [0, 12], "exact_width": 4}]
KNOWN = FACTS | {"stages": STAGES, "changes": []}


@pytest.fixture(scope="module")
def shared():
    with front(MODEL, parallel=4, facts=KNOWN) as server:
        yield server


@pytest.fixture
def held(server):
    """The module's server, whose answers come when a test sends them."""
    server.peer.answer = lambda frame: None
    return server


def another(page):
    """A second tab on the chat that a page shows."""
    tab = page.context.new_page()
    tab.goto(page.tab.url)
    tab.wait_for_selector("#state[data-state=ready]")
    return tab


def texts(tab):
    return [text.strip() for text in tab.locator(".log > li .text").all_inner_texts()]


def stored(tab):
    """The contents of all turns of the only chat that is stored."""
    return sorted(turn["content"].strip() for turn in stored_turns(tab))


def begin(server, text="one two", count=1):
    """The first words of the answer to the last message; its id at the engine."""
    number = server.peer.wait_for(Submit, count).id
    server.peer.news(server.peer.say(number, text, None))
    return number


def begun(page, server, seen):
    """The id of a first answer, once a page has its first words: `seen(tab)`."""
    page.ask("hello")
    number = begin(server)
    page.wait(lambda: seen(page.tab) == ["hello", "one two"], "the beginning")
    return number


def test_another_tab_follows_an_answer_and_sends_nothing_meanwhile(page, held):
    number = begun(page, held, stored)
    other = another(page)
    page.wait(lambda: texts(other) == ["hello", "one two"], "what is stored")
    page.wait(lambda: "coming in another tab" in other.inner_text(".answer .foot"), "the note")
    held.peer.news(held.peer.say(number, " three", None))
    page.wait(lambda: texts(other)[-1] == "one two three", "what came since")
    other.fill("#prompt", "me too")
    other.press("#prompt", "Enter")
    assert "coming in another tab" in other.inner_text(".notice")
    assert other.input_value("#prompt") == "me too"
    held.peer.news(held.peer.say(number, " four"))
    page.answer()
    page.wait(lambda: other.locator(".answer .foot button:has-text('Again')").count() == 1,
              "the end")
    assert texts(other)[-1] == "one two three four"
    page.wait(lambda: other.locator(".notice").count() == 0, "the notice's end")
    other.press("#prompt", "Enter")
    begin(held, "yes", 2)
    page.wait(lambda: texts(page.tab)[2:] == ["me too", "yes"], "the other one's message")


def test_tabs_that_know_nothing_of_each_other_lose_no_turn(open_page, held):
    page = open_page(held.url).ready()
    page.context.add_init_script("delete window.BroadcastChannel")
    page.tab.reload()
    page.ask("hello")
    held.peer.news(held.peer.say(held.peer.wait_for(Submit).id, "one"))
    page.answer()
    other = another(page)
    page.wait(lambda: texts(other) == ["hello", "one"], "what is stored")
    page.ask("left")
    held.peer.news(held.peer.say(held.peer.wait_for(Submit, 2).id, "sinister"))
    page.wait(lambda: texts(page.tab)[2:] == ["left", "sinister"], "the left one")
    other.fill("#prompt", "right")
    other.press("#prompt", "Enter")
    held.peer.news(held.peer.say(held.peer.wait_for(Submit, 3).id, "dexter"))
    page.wait(lambda: "dexter" in stored(page.tab), "the right one")
    assert stored(page.tab) == sorted(["hello", "one", "left", "sinister", "right", "dexter"])
    page.tab.reload()
    page.wait(lambda: len(texts(page.tab)) == 4, "it is open again")
    assert " 2 / 2 " in page.tab.inner_text(".user >> nth=1 >> .branches").replace("\n", " ")


def test_a_chat_that_another_tab_deletes_stays_deleted(page, held):
    number = begun(page, held, stored)
    other = another(page)
    other.wait_for_selector("#beside [aria-label='Delete: hello']")
    other.click("#beside [aria-label='Delete: hello']")
    page.tab.wait_for_selector("#empty:not([hidden])")
    held.peer.wait_for(Abort, id=number)
    page.tab.wait_for_selector("#send:not([hidden])")  # the answer has ended here, too
    page.wait(lambda: page.tab.locator("#chat-list li").count() == 0, "it is gone")
    other.click("#chats-note button:has-text('Undo')")
    page.wait(lambda: stored(other) == ["hello", "one two"], "it is back")


@pytest.mark.parametrize("shown", [True, False])
def test_a_page_that_is_left_gets_the_rest_from_a_journal(open_page, tmp_path, shown):
    """shown: whether anything of the answer had come."""
    with front(MODEL, facts=KNOWN, journal=str(tmp_path / "journal")) as server:
        server.peer.answer = lambda frame: None
        page = open_page(server.url).ready()
        with page.tab.expect_response("**/v1/chat/completions"):
            page.ask("hello")
        number = begin(server, "one two" if shown else "")
        page.wait(lambda: any(turn.get("asked") for turn in stored_turns(page.tab)), "the id")
        if shown:
            page.wait(lambda: texts(page.tab) == ["hello", "one two"], "the beginning")
        page.tab.reload()
        server.peer.news(server.peer.say(number, " three" if shown else "one two three", None))
        page.wait(lambda: texts(page.tab) == ["hello", "one two three"], "the rest so far")
        assert page.tab.get_attribute(".answer", "aria-busy") == "true"
        server.peer.news(server.peer.say(number, " four"))
        assert page.answer().strip() == "one two three four"
        assert "incomplete" not in page.tab.inner_text(".answer .foot")
        assert stored(page.tab) == ["hello", "one two three four"]
        page.ask("more")  # an answer that is stopped is not computed for nobody
        number = begin(server, "and", 2)
        page.wait(lambda: texts(page.tab)[-1] == "and", "the next beginning")
        page.tab.keyboard.press("Escape")
        server.peer.wait_for(Abort, id=number)


def test_a_page_that_is_left_says_what_is_lost_without_a_journal(page, held):
    number = begun(page, held, texts)
    page.tab.reload()
    held.peer.wait_for(Abort, id=number)
    page.tab.wait_for_selector(".problem")
    assert "The rest of this answer is lost" in page.problem()
    assert "--journal FILE" in page.problem()
    assert "Continue goes on" in page.problem()
    assert page.tab.locator(".problem button").count() == 0
    assert texts(page.tab) == ["hello", "one two"]
    assert "incomplete" in page.tab.inner_text(".answer .foot")
    with page.tab.expect_request("**/v1/chat/completions") as asked:
        page.tab.click(".answer button:has-text('Continue')")
    assert asked.value.post_data_json["messages"][-1]["content"].strip() == "one two"
    number = begin(held, " three", 2)
    held.peer.news([Ended(number, "stop")])
    page.wait(lambda: texts(page.tab) == ["hello", "one two three"], "more of it")
    page.tab.reload()
    page.wait(lambda: texts(page.tab) == ["hello", "one two three"], "it is stored")
    page.tab.wait_for_selector(".answer .foot button")
    assert page.tab.locator(".problem").count() == 0


def test_a_long_prompt_shows_how_much_of_it_is_read(page, held):
    page.ask("hello")
    number = held.peer.wait_for(Submit).id
    held.peer.send(Status(1.0, {"waiting": 0, "runs": 1, "cells": 1, "cells_used": 1,
        "totals": {"accepted": 0, "guesses_tested": 0, "accepted_speculative": 0},
        "lanes": [{"request": number, "prompt": 3900, "prefilled": 1200, "reused": 0}]}))
    page.tab.wait_for_selector(".answer .reading")
    assert page.tab.inner_text(".answer .reading") == "reading 1,200 of 3,900 tokens"
    held.peer.news(held.peer.say(number, "one"))
    page.answer()
    assert page.tab.locator(".reading").count() == 0


def test_the_state_is_not_ready_while_stages_are_taken_over(page, held):
    held.peer.send(Recovering("rank 2 is lost"))
    page.tab.wait_for_selector("#state[data-state=recovering]")
    assert page.tab.inner_text("#state") == "recovering"
    assert page.tab.get_attribute("#state", "title") == "rank 2 is lost"
    held.peer.send(Changed(KNOWN, "as it is now"))
    page.ready()


def test_the_demonstration_says_so_and_shows_its_stages(open_page):
    race = ("-m", "embedded", "-t", "1", "--temp", "0", "--hook", "pace=2+1", "-n", "8")
    with front(MODEL, race=race, facts=KNOWN) as server:
        page = open_page(server.url).ready()
        assert page.tab.inner_text("#open-race") == "Demonstration: five slow hosts …"
        page.tab.click("#open-race")
        page.tab.click("#race-start")
        page.tab.wait_for_selector(".race-stages >> nth=2")
        assert page.tab.locator(".race-stage").count() == 15
        assert page.tab.locator(".race-stage .plain").count() > 0
        assert "plain" in page.tab.inner_text("#race-legend")
        note = page.tab.inner_text("#race-note")
        speeds = [float(text.split()[0]) for text in
                  page.tab.locator(".race-speed").all_inner_texts()]
        for (name, before) in zip(("one token at a time", "synchronous"), speeds, strict=False):
            factor = float(note.split(f" times as fast as {name}")[0].split()[-1])
            assert factor == pytest.approx(speeds[2] / before, abs=0.15)


def test_a_notice_moves_no_text_and_can_be_closed(page, held):
    number = begun(page, held, texts)
    place = page.tab.locator(".answer .text").bounding_box()
    page.ask("too early")
    page.tab.wait_for_selector(".notice")
    assert page.tab.locator(".answer .text").bounding_box() == place
    page.tab.click(".notice button")
    held.peer.news([Ended(number, "stop")])
    page.answer()


def test_texts_are_seen_in_every_colour_and_width(open_page, server):
    page = open_page(server.url).ready()
    page.ask("A title that is longer than the list of chats is wide, and is to be read whole")
    page.answer()
    seen = page.tab.evaluate("""() => {
        const {width, left} = document.querySelector('#import').getBoundingClientRect();
        const title = document.querySelector('.chat-list .title');
        const edit = document.querySelector('.user .foot .edit');
        return [left < document.querySelector('#chats-title').getBoundingClientRect().left + 1,
            title.scrollWidth <= title.clientWidth, title.clientHeight > 30, width < 150,
            getComputedStyle(edit).opacity];
    }""")
    assert seen == [True, True, True, True, "1"]
    page = open_page(server.url, forced_colors="active").ready()
    page.until("document.querySelectorAll('#legend li').length > 3")
    colours = page.tab.evaluate("""() => [...document.querySelectorAll('#legend li')].map(
        (item) => getComputedStyle(item, '::before').backgroundColor)""")
    assert len(set(colours)) == len(colours)
    for path in ("/", "/status"):
        page = open_page(server.url, path, viewport={"width": 320, "height": 568},
                         is_mobile=True, has_touch=True).ready()
        page.tab.evaluate("""document.querySelector('#state').textContent =
            'loading, 1 of 3 stages: stage 2 reading 100 of 4,000 MB'""")
        assert page.tab.is_visible("h1")
        assert page.tab.evaluate("document.documentElement.scrollWidth") == 320


def test_a_slow_stage_comes_with_advice(open_page, server):
    page = open_page(server.url, "/status").ready()
    server.peer.send(Status(1.0, {"waiting": 0, "runs": 0, "cells": 1, "cells_used": 0, "lanes": [],
        "totals": {"accepted": 0}, "stage_seconds": [0.4], "stage_slowdown": [4.62]}))
    page.until("document.querySelector('#advice').textContent !== ''")
    assert "Stage 1 on a takes 4.62 times as long" in page.tab.inner_text("#advice")
    # what may cost speed is not the first thing to press
    assert page.tab.get_attribute("#rebalance", "class") == page.tab.get_attribute(
        "#preview", "class")
