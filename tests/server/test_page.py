"""The page in a real browser against a real server: type, stream, stop, errors, the pipeline.

Set PIPEINFER_SCREENSHOTS to a folder to get pictures of it.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.kit.served import serve
from tests.server.pages import PROMPT

pytestmark = pytest.mark.slow
#: what keeps the controller from finding that guesses do not pay here
GUESSING = ("--set", "adapt=false", "--set", "draft_max=2", "--set", "credit=5")


@pytest.fixture(scope="module")
def server():
    with serve(1, "--parallel", "2", "--hook", "pace=8", *GUESSING) as served:  # to be looked at
        served.wait_until_ready()
        yield served


def test_a_message_is_answered_as_a_stream(page):
    tab = page.tab
    page.set(seed="3", max_tokens="60", temperature="0.8", top_k="40", system="You write Python.")
    with tab.expect_request("**/v1/chat/completions") as asked:
        page.ask()
    body = asked.value.post_data_json
    assert body["messages"] == [{"role": "system", "content": "You write Python."},
                                {"role": "user", "content": PROMPT}]
    given = {name: body.get(name) for name in ("seed", "max_tokens", "temperature", "top_k")}
    assert given == {"seed": 3, "max_tokens": 60, "temperature": 0.8, "top_k": 40}
    assert body["stream"] is True
    assert "min_p" not in body
    first = page.answer()
    assert len(first) > 20
    assert tab.inner_text(".user .text") == PROMPT
    assert "tokens" in tab.inner_text(".answer .foot")
    assert "% drafted" in tab.inner_text(".answer .foot")
    guessed = "".join(tab.eval_on_selector_all(
        ".answer .guess", "spans => spans.map(s => s.textContent)"))
    assert 0 < len(guessed) < len(first)
    assert tab.input_value("#prompt") == ""
    with tab.expect_request("**/v1/chat/completions") as again:
        page.ask("And now in one line")
    roles = [message["role"] for message in again.value.post_data_json["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    page.answer()
    tab.press("#prompt", "ArrowUp")
    assert tab.input_value(".editor textarea") == "And now in one line"
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.id") == "prompt"
    tab.click("#new-chat")
    assert tab.is_visible("#empty")
    assert tab.inner_text("#api-base") == page.url + "/v1"
    page.ask()
    assert page.answer() == first  # the same seed


def test_keys_send_break_lines_and_stop(page, server):
    tab = page.answers_of(1000).tab
    tab.focus("#prompt")
    tab.keyboard.type("one")
    tab.keyboard.press("Shift+Enter")
    tab.keyboard.type("two")
    assert tab.input_value("#prompt") == "one\ntwo"
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".answer[aria-busy] p")
    assert tab.is_visible("#stop")
    tab.keyboard.press("Escape")
    page.answer()
    assert "stopped" in tab.inner_text(".answer .foot")
    assert tab.is_visible("#send")
    server.until(lambda: all(not slot["is_processing"] for slot in server.get("/slots")[1]),
                 "the end of the stopped request")


def test_an_answer_goes_on_while_the_status_is_looked_at(page):
    tab = page.answers_of(1000).tab
    page.ask()
    tab.wait_for_selector(".answer[aria-busy] p")
    tab.focus("#prompt")
    tab.keyboard.type("the next one")
    tab.keyboard.press("Enter")
    tab.keyboard.press("Enter")
    assert tab.locator(".notice").all_inner_texts() == [
        "The answer is still coming. Esc or Stop ends it; then the message can be sent.\n\nClose"]
    assert tab.input_value("#prompt") == "the next one"
    with page.context.expect_page() as opened:
        tab.click("#to-status")
    status = opened.value
    status.wait_for_selector("#stages tr")
    assert not status.is_visible("#waits-hint")
    tab.bring_to_front()
    assert tab.get_attribute(".answer", "aria-busy") == "true"
    page.answer()
    assert "cut off at the limit" in tab.inner_text(".answer .foot")
    assert tab.locator(".notice").count() == 0
    status.click("#to-chat")  # leads back to this conversation
    status.wait_for_selector(".answer .text")
    assert status.inner_text(".user .text") == PROMPT


def test_an_answer_whose_page_is_left_is_marked(page):
    tab = page.answers_of(1000).tab
    tab.route("**/v1/chat/completions", lambda _: None)  # nothing of it comes, nothing is kept
    page.ask()
    tab.wait_for_selector(".answer[aria-busy]")
    tab.reload()
    tab.unroute("**/v1/chat/completions")
    assert "left before one came" in page.problem()
    tab.click(".problem button:has-text('Try again')")
    page.until("document.querySelector('.answer .text').innerText.length > 20")


def test_an_answer_that_was_cut_goes_on(page):
    tab = page.tab
    page.set(temperature="0", max_tokens="12")
    page.ask()
    first = page.answer()
    with tab.expect_request("**/v1/chat/completions") as asked:
        tab.click(".answer button:has-text('Continue')")
    body = asked.value.post_data_json
    assert body["continue_final_message"] is True
    assert [one["role"] for one in body["messages"]] == ["user", "assistant"]
    assert body["messages"][-1]["content"].split() == first.split()
    page.answer()
    longer = tab.inner_text(".answer .text")
    assert longer.split()[:2] == first.split()[:2]
    assert len(longer) > len(first)
    assert tab.locator(".answer").count() == 1
    assert "24 tokens" in tab.inner_text(".answer .foot")
    assert tab.locator(".branches").count() == 0
    page.answers_of(1000)
    tab.click(".answer button:has-text('Continue')")
    page.until(f"document.querySelector('.answer .text').innerText.length > {len(longer) + 20}")
    tab.keyboard.press("Escape")
    page.answer()
    tab.reload()  # as it was kept, with its end by the user
    tab.wait_for_selector(".answer button:has-text('Continue')")
    assert "stopped" in tab.inner_text(".answer .foot")
    tab.route("**/v1/chat/completions", lambda route: route.abort())
    tab.click(".answer button:has-text('Continue')")
    tab.wait_for_selector(".answer .problem")
    assert len(tab.inner_text(".answer .text")) > len(longer)  # nothing of it is lost


def test_the_end_is_one_press_away(page):
    tab = page.tab
    page.set(seed="8", temperature="1", max_tokens="40")
    page.ask("word " * 2000)
    page.answer()
    assert not tab.is_visible("#to-end")
    tab.hover("#scroll")
    tab.mouse.wheel(0, -3000)
    tab.wait_for_selector("#to-end:not([hidden])")
    tab.click("#to-end")
    tab.wait_for_selector("#to-end", state="hidden")
    assert tab.evaluate(IN_SIGHT, ".answer:last-child .foot")
    assert page.tab.evaluate("""() => {  // an event after the wheel does not lead back to the end
        const box = document.querySelector('#scroll');
        box.dispatchEvent(new WheelEvent('wheel', { deltaY: -100 }));
        box.dispatchEvent(new Event('scroll'));  // of the page's own step to the end
        return !document.querySelector('#to-end').hidden;
    }""")


def test_everything_can_be_reached_by_keyboard(page):
    tab = page.tab
    tab.focus(".skip")
    assert tab.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    seen = []
    while "hold" not in seen and len(seen) < 20:
        tab.keyboard.press("Tab")
        seen.append(tab.evaluate("document.activeElement.id || document.activeElement.className"))
    wanted = ["new-chat", "open-settings", "import", "attach", "prompt", "send", "span", "hold"]
    assert [name for name in seen if name in wanted] == wanted
    assert tab.evaluate("document.activeElement.matches(':focus-visible')")
    tab.focus("#open-settings")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.querySelector('#settings').open")
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.id") == "open-settings"
    names = tab.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, select, canvas')]
            .filter(e => !(e.labels?.length || e.textContent.trim() || e.ariaLabel
                           || e.getAttribute('aria-labelledby')))
            .map(e => e.outerHTML)""")
    assert names == []


def test_the_pipeline_is_drawn_while_runs_pass(page):
    tab = page.tab
    tab.evaluate(  # a page at rest draws nothing: it is open on people's laptops all day
        """() => {
            window.drawn = 0;
            const clear = CanvasRenderingContext2D.prototype.clearRect;
            CanvasRenderingContext2D.prototype.clearRect = function (...args) {
                window.drawn += this.canvas.id === 'lanes';
                clear.apply(this, args);
            };
        }""")

    def at_rest():
        count = tab.evaluate("window.drawn")
        tab.wait_for_timeout(500)
        return tab.evaluate("window.drawn") == count

    page.wait(at_rest, "a page that rests")
    before = {name: page.pixels(name)[1] for name in ("#lanes", "#rate-chart",
                                                       "#acceptance-chart")}
    page.set(temperature="0", max_tokens="400")
    tab.evaluate(  # the speed is shown while tokens come, which a busy machine may sleep through
        """() => {
            const rate = document.querySelector('#rate');
            window.fastest = 0;
            new MutationObserver(() => {
                window.fastest = Math.max(window.fastest, rate.textContent);
            }).observe(rate, { childList: true, characterData: true, subtree: true });
        }""")
    page.ask()
    page.until("window.fastest > 0")
    page.until("/accepted \\d+/.test(document.querySelector('#legend').textContent)")
    wanted = tab.evaluate(
        """() => ['plain', 'accepted', 'rejected'].map(name => parseInt(getComputedStyle(
            document.documentElement).getPropertyValue('--' + name).trim().slice(1), 16))""")
    page.wait(lambda: len(set(wanted) & set(page.pixels("#lanes")[0])) >= 2, "bars in colours")
    tab.press("#prompt", "Escape")
    page.answer()
    assert re.fullmatch(r"\d+ %", tab.inner_text("#acceptance"))
    assert "1 stage (12 layers)" in tab.inner_text("#facts")
    for name, checksum in before.items():  # at rest the status comes every 5 s
        page.wait(lambda name=name, checksum=checksum: page.pixels(name)[1] != checksum, name)
    page.until("/\\d+ runs, of them/.test(document.querySelector('#lanes-text').textContent)")
    tab.click("#hold")
    held = page.pixels("#lanes")
    box = tab.query_selector("#lanes").bounding_box()
    found = False
    for x in range(70, int(box["width"]), 3):
        tab.mouse.move(box["x"] + x, box["y"] + 0.6 * box["height"])
        if tab.is_visible("#tip"):
            found = True
            break
    assert found
    assert re.match(r"run \d+, \d+ row", tab.inner_text("#tip"))
    assert page.pixels("#lanes") == held


def test_an_error_of_the_request_says_what_to_do(page):
    tab = page.tab
    page.set(max_tokens="100000")
    page.ask("word " * 4000)
    page.answer()
    assert "too long for the model" in page.problem()
    assert "The server said: " in page.problem()
    tab.click(".problem button:has-text('New chat')")
    assert tab.is_visible("#empty")
    page.set(max_tokens="8")
    page.ask()
    page.answer()
    assert "cut off at the limit" in tab.inner_text(".answer .foot")


def test_settings_are_kept_and_the_key_for_the_tab_only(open_page, server):
    opened = open_page(server.url).ready()
    opened.set(top_p="0.5", seed="7", api__key="secret")
    opened.tab.reload()
    opened.ready()
    opened.tab.click("#open-settings")
    assert opened.tab.input_value("#top_p") == "0.5"
    assert opened.tab.input_value("#api-key") == "secret"
    assert opened.tab.evaluate("JSON.stringify(localStorage)").count("secret") == 0
    other = opened.context.new_page()
    other.goto(server.url + "/")
    assert other.input_value("#top_p") == "0.5"
    assert other.input_value("#api-key") == ""
    other.close()
    opened.tab.click("#reset")
    assert opened.tab.input_value("#top_p") == ""
    assert opened.tab.get_attribute("#top_p", "placeholder") == "0.95"


#: whether something is within what the conversation shows
IN_SIGHT = """(selector) => {
    const box = document.querySelector('#scroll').getBoundingClientRect();
    const found = document.querySelector(selector).getBoundingClientRect();
    return found.top >= box.top && found.bottom <= box.bottom + 1;
}"""


def test_the_end_of_an_answer_and_what_to_do_about_an_error_stay_in_sight(page):
    tab = page.tab
    page.set(seed="8", temperature="1", max_tokens="300")
    page.ask("word " * 300)
    page.answer()
    page.until("document.querySelector('#scroll').scrollTop > 0")
    page.wait(lambda: tab.evaluate(IN_SIGHT, ".answer:last-child .foot"), "the end in sight")
    page.set(max_tokens="100000")
    page.ask("word " * 4000)
    page.answer()
    page.wait(lambda: tab.evaluate(IN_SIGHT, ".answer:last-child .problem button"),
              "what to do in sight")
    tab.evaluate("document.querySelector('#scroll').scrollTop = 0")
    page.set(max_tokens="300")
    tab.wait_for_timeout(100)
    tab.click(".problem button:has-text('New chat')")
    page.ask("word " * 300)
    page.until("document.querySelector('#scroll').scrollTop > 50")
    tab.hover("#scroll")

    def at_the_beginning():  # a turn of the wheel is lost when the page scrolls in the same frame
        tab.mouse.wheel(0, -2000)
        return tab.evaluate("document.querySelector('#scroll').scrollTop === 0")

    page.wait(at_the_beginning, "the beginning in sight")
    page.answer()  # the reader is left there
    assert tab.evaluate("document.querySelector('#scroll').scrollTop") == 0


@pytest.mark.parametrize("width", [360, 390])
def test_on_a_phone_nothing_is_cut_off(open_page, server, width):
    opened = open_page(server.url, viewport={"width": width, "height": 740}, is_mobile=True,
                       has_touch=True, reduced_motion="reduce").ready()
    tab = opened.tab
    assert tab.is_visible("#model")
    assert tab.inner_text("#model")
    opened.set(max_tokens="40", seed="2")
    opened.ask()
    opened.answer()
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert not tab.is_visible("#lanes")
    assert tab.get_attribute("#fold", "aria-expanded") == "false"
    tab.tap("#fold")
    assert tab.is_visible("#lanes")
    opened.until("document.querySelector('#lanes').width > 0")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    small = tab.evaluate(
        """() => [...document.querySelectorAll('.bar button, .composer button')]
            .filter(b => b.offsetParent && b.getBoundingClientRect().height < 36)
            .map(b => b.id)""")
    assert small == []


def test_a_wrong_key_is_asked_for_and_a_right_one_opens(open_page):
    with serve(1, "--api-key", "sesame") as served:
        served.wait_until_ready()
        opened = open_page(served.url)
        opened.tab.wait_for_selector("#state[data-state=locked]")
        opened.until("document.activeElement.id === 'api-key'")  # before any message fails
        assert "wants an API key" in opened.tab.inner_text("#key-wanted")
        opened.tab.fill("#api-key", "wrong")
        opened.tab.press("#api-key", "Enter")
        opened.tab.wait_for_selector("#key-wanted:has-text('does not accept this key')")
        opened.tab.keyboard.press("Escape")
        opened.ask()
        opened.until("document.activeElement.id === 'api-key'")
        assert opened.tab.input_value("#prompt") == PROMPT
        assert opened.tab.locator(".log > li").count() == 0
        opened.tab.fill("#max_tokens", "8")
        opened.tab.fill("#api-key", "sesame")
        opened.tab.press("#api-key", "Enter")
        opened.ready()
        opened.tab.press("#prompt", "Enter")
        assert opened.answer()
        opened.tab.evaluate("sessionStorage.setItem('pipeinfer.api-key', 'another')")
        opened.ask()  # a key that is no longer accepted
        opened.tab.wait_for_selector(".problem:has-text('wants an API key')")
        opened.tab.click(".problem button:has-text('Open settings')")
        assert opened.tab.is_visible("#api-key")


def test_a_server_that_goes_is_told_of(open_page):
    with serve(1, "--hook", "pace=20", *GUESSING) as served:
        served.wait_until_ready()
        opened = open_page(served.url).ready().answers_of(1000)
        assert opened.tab.evaluate(
            "getComputedStyle(document.querySelector('.figures')).opacity") == "1"
        opened.ask()
        opened.tab.wait_for_selector(".answer[aria-busy] p")
        os.killpg(served.process.pid, signal.SIGKILL)
        served.process.wait(20)
        opened.answer()
        assert "Try again" in opened.problem()
        assert re.search("does not answer|was lost|has failed", opened.problem())
        opened.tab.wait_for_selector("#state[data-state=gone], #state[data-state=failed]")
        opened.tab.wait_for_selector("#state[data-state=gone]")
        faded = "getComputedStyle(document.querySelector('.figures')).opacity"
        assert opened.tab.evaluate(faded) == "0.4"  # what stands there is old
        opened.tab.click(".problem button:has-text('Try again')")
        opened.tab.wait_for_selector(".problem:has-text('does not answer')")


@pytest.mark.skipif("PIPEINFER_SCREENSHOTS" not in os.environ, reason="no folder for pictures")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "width", "height"), [("desktop", 1280, 800), ("phone", 390, 844)])
def test_pictures(open_page, name, width, height, scheme):
    folder = Path(os.environ["PIPEINFER_SCREENSHOTS"])
    with serve(4, *GUESSING) as served:
        served.wait_until_ready()
        opened = open_page(served.url, viewport={"width": width, "height": height},
                           color_scheme=scheme).ready()
        opened.set(seed="8", temperature="1", max_tokens="700")
        for text in ("Write a function that reverses a string", "What is a pipeline stage?"):
            opened.ask(text)
            opened.answer()
        opened.tab.click("#new-chat")
        opened.set(seed="11", temperature="1")
        opened.ask("Write a class for a stack")
        if name == "phone":
            opened.tab.click("#fold")
        opened.until("document.querySelector('.answer:last-child').textContent.length > 300")
        opened.tab.screenshot(path=folder / f"page-{name}-{scheme}.png")
        opened.answer()
        if name == "phone":
            opened.tab.click("#open-chats")
            opened.tab.wait_for_selector(".chat-list li")
            opened.tab.screenshot(path=folder / f"page-{name}-{scheme}-chats.png")
            opened.tab.click("#chats form button")
        opened.tab.fill("#find-chat", "stage") if name == "desktop" else None
        opened.tab.click("#open-race")
        opened.tab.click("#race-start")
        opened.tab.wait_for_selector(".race-lines li.begun:nth-child(3)", timeout=90_000)
        opened.tab.wait_for_timeout(2000)
        opened.tab.screenshot(path=folder / f"page-{name}-{scheme}-race.png")
        opened.tab.wait_for_selector("#race-note:has-text('times as fast')", timeout=60_000)
