"""Conversations on the page, in a real browser: Markdown, branches, files, the list, colours."""

from __future__ import annotations

import json
import re

import pytest

from tests.kit.served import serve
from tests.server.pages import PROMPT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    with serve(1, "--parallel", "2", "--speculation", "off", "-ctv", "q8_0") as served:
        served.wait_until_ready()
        yield served


# --- Markdown ---------------------------------------------------------------------------------

TEXT = """A stack keeps **on top** what `push` put there:

```python
class Stack:
    pass
```

1. one
2. two [a link](https://example.org/x)

| a | b |
|---|--:|
| 1 | 2 |

Next <b>😀</b> `open"""

SHOW = """async ([text, marks]) => {
    const {render} = await import('/markdown.js');
    const target = document.createElement('div');
    target.className = 'shown';
    document.body.append(target);
    render(target, text, marks);
    return [target.textContent, target.innerHTML,
            [...target.querySelectorAll('.guess')].map(s => s.textContent)];
}"""


def test_an_answer_is_shown_as_markdown_with_its_guesses_underlined(page):
    marks = [[5, i % 2 == 0] for i in range(len(TEXT) // 5 + 1)]
    text, html, guessed = page.tab.evaluate(SHOW, [TEXT, marks])
    assert "class Stack:\n    pass\n" in text
    assert "<b>😀</b> `open" in text
    assert all(part.strip() == part and "\n" not in part for part in guessed)
    rows = [TEXT[i:i + 5] for i in range(0, len(TEXT), 10)]
    said = re.sub(r"\s", "", "".join(guessed))
    wanted = re.sub(r"\s|[*`|]|\[|\]\(https://example.org/x\)|---|--:|python|1\.|2\.", "",
                    "".join(rows))
    assert said[:12] == wanted[:12]
    assert len(said) > 0.3 * len(re.sub(r"\s", "", text))
    _, plain, _ = page.tab.evaluate(SHOW, [TEXT, []])
    assert "<strong>on top</strong> what <code>push</code> put" in plain
    assert '<th align="right">b</th>' in plain
    assert "<ol>\n<li>one</li>" in plain
    assert 'rel="noopener noreferrer nofollow"' in plain
    assert html.count("<pre") == plain.count("<pre") == 1
    page.until("""(async () => { const {render} = await import('/markdown.js');
        render(document.querySelector('.shown'), '```python\\ndef f(): pass\\n```');
        return document.querySelectorAll('.shown .hljs-keyword').length > 0; })()""")


HOSTILE = [
    "<script>window.hit = 1</script>", "<img src=x onerror='window.hit = 1'>",
    "<svg/onload=window.hit=1>", "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "[x](javascript:window.hit=1)", "[x](JaVaScRiPt&colon;window.hit=1)",
    "[x](data:text/html,<script>1</script>)", "![x](http://example.invalid/pixel.png)",
    "![x](/health)", "[x](/rebalance)", "<https://a'onmouseover='window.hit=1>",
    "```\"onmouseover=window.hit=1\nx\n```", "```<b>\nx\n```",
    "[x](https://e.org 'y\" onclick=\"window.hit=1')", "<style>*{display:none}</style>",
    "<form action=/rebalance method=post><button>press</button></form>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 "
    "onerror=window.hit=1&gt;'>", "<a href='javascript:window.hit=1'>x</a>",
    "[a]: javascript:window.hit=1\n\n[a]", "<base href=//example.invalid>",
    "<input autofocus onfocus=window.hit=1>", "<details open ontoggle=window.hit=1>x",
    "`<img src=x onerror=window.hit=1>`", "| <img src=x onerror=window.hit=1> |\n|---|\n| x |",
    "&lt;img src=x onerror=window.hit=1&gt;", "<div class=problem role=alert id=prompt>x</div>",
    ">" * 3000 + " x", "[" * 3000, "*a " * 3000, "- " * 1500 + "x", "<" * 5000,
]


def test_no_text_of_a_model_becomes_html_or_script(page):
    tab = page.tab
    asked = []
    tab.on("request", lambda request: asked.append(request.url))
    for text in HOSTILE:
        tab.evaluate(SHOW, [text, []])
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.hit") is None
    found = tab.evaluate("""() => [...document.querySelectorAll('.shown *')].flatMap(e => [
        ...(/^(SCRIPT|IMG|SVG|IFRAME|FORM|INPUT|STYLE|OBJECT|EMBED|BASE|MATH|DETAILS|LINK|META)$/i
            .test(e.tagName) ? [e.outerHTML] : []),
        ...[...e.attributes].filter(a => /^on|^style$|^id$|^src$/i.test(a.name)
            || a.name === 'href' && !/^(https?|mailto):/i.test(a.value)).map(a => e.outerHTML)])""")
    assert found == []
    assert not [url for url in asked if not url.split("?")[0].endswith((".js", "/pipeline"))]
    shown = tab.inner_text(".shown >> nth=0")
    assert shown == HOSTILE[0]


def test_the_browser_itself_refuses_html_that_did_not_pass_the_sanitiser(page):
    assert page.tab.evaluate("""() => {
        try { document.createElement('div').innerHTML = '<b>x</b>'; return 'taken'; }
        catch (error) { return error.name; }
    }""") == "TypeError"
    said = "CSP: require-trusted-types-for"
    page.wait(lambda: any(said in text for text in page.said), "what the browser says of it")
    page.said = [text for text in page.said if "rusted" not in text and said not in text]


# --- branches ---------------------------------------------------------------------------------


def turns(page):
    return page.tab.eval_on_selector_all(
        ".log > li", "items => items.map(i => i.querySelector('.text').innerText)")


def test_messages_are_edited_and_answers_asked_for_again_as_branches(page):
    tab = page.tab
    page.set(max_tokens="12", temperature="1.5")
    tab.click("#starters button >> nth=0")  # a chip sends at once
    first = page.answer()
    assert turns(page)[0] == PROMPT
    page.ask("And then?")
    page.answer()
    assert tab.locator(".log > li").count() == 4
    with tab.expect_request("**/v1/chat/completions") as asked:
        tab.click(".answer >> nth=0 >> button:has-text('Again')")
    assert [one["content"] for one in asked.value.post_data_json["messages"]] == [PROMPT]
    page.wait(lambda: tab.locator(".log > li").count() == 2, "the other branch")
    page.answer()
    assert "2 / 2" in tab.inner_text(".answer .foot")
    tab.click("[aria-label='Version before']")
    assert tab.locator(".log > li").count() == 4
    assert turns(page)[1].strip() == first.strip()
    tab.click(".user >> nth=1 >> button:has-text('Edit')")
    assert tab.evaluate("document.activeElement.matches('.editor textarea')")
    tab.keyboard.press("Escape")
    assert turns(page)[2] == "And then?"
    tab.click(".user >> nth=1 >> button:has-text('Edit')")
    tab.fill(".editor textarea", "And now?")
    with tab.expect_request("**/v1/chat/completions") as asked:
        tab.keyboard.press("Enter")
    said = [one["content"] for one in asked.value.post_data_json["messages"]]
    assert (said[0], said[2]) == (PROMPT, "And now?")
    page.answer()
    tab.reload()
    page.ready()
    page.wait(lambda: tab.locator(".log > li").count() == 4, "what was kept")
    assert turns(page)[2] == "And now?"
    tab.click(".user >> nth=1 >> [aria-label='Version before']")
    assert turns(page)[2] == "And then?"


# --- the list ---------------------------------------------------------------------------------


def test_conversations_are_listed_renamed_exported_imported_and_deleted(page):
    tab = page.tab
    tab.set_viewport_size({"width": 1100, "height": 800})
    page.set(max_tokens="6", system="Be brief.")
    page.ask("The first one")
    page.answer()
    tab.click("#new-chat")
    page.set(max_tokens="7", system="")
    page.ask("The second one")
    page.answer()
    tab.click("#open-chats")
    names = ".chat-list .title"
    page.wait(lambda: tab.locator(names).count() == 2, "two conversations")
    assert tab.locator(names).all_inner_texts() == ["The second one", "The first one"]
    page.until("document.activeElement.getAttribute('aria-current') === 'true'")
    tab.click("[aria-label='Rename: The first one']")
    tab.fill("[aria-label=Name]", "Eins")
    tab.keyboard.press("Enter")
    page.wait(lambda: "Eins" in tab.locator(names).all_inner_texts(), "its new name")
    with tab.expect_download() as given:
        tab.click("[aria-label='Export: Eins']")
    text = given.value.path().read_text(encoding="utf-8")
    assert given.value.suggested_filename == "Eins.md"
    assert text.startswith("# Eins\n\n**System:** Be brief.\n\n## You\n\nThe first one\n\n## Model")
    with tab.expect_download() as given:
        tab.click("[aria-label='JSON: Eins']")
    kept = json.loads(given.value.path().read_text(encoding="utf-8"))
    tab.click(".chat-list .open:has-text('Eins')")
    page.wait(lambda: not tab.is_visible("#chats"), "the list is closed")
    page.wait(lambda: turns(page)[:1] == ["The first one"], "it is open")
    tab.click("#open-settings")  # each conversation has its own
    assert tab.input_value("#system") == "Be brief."
    assert tab.input_value("#max_tokens") == "6"
    tab.keyboard.press("Escape")
    tab.click("#open-chats")
    tab.fill("#find-chat", "eiN")
    found = tab.locator(".chat-list li:visible .title")
    page.wait(lambda: found.all_inner_texts() == ["Eins"], "the one that was searched for")
    tab.fill("#find-chat", "")
    tab.click("[aria-label='Delete: Eins']")
    page.wait(lambda: tab.locator(names).count() == 1, "one is gone")
    assert "“Eins” was deleted." in tab.inner_text("#chats-note")
    tab.click("#chats-note button:has-text('Undo')")
    page.wait(lambda: "Eins" in tab.locator(names).all_inner_texts(), "it is back")
    tab.click("[aria-label='Delete: Eins']")
    page.wait(lambda: tab.locator(names).count() == 1, "one is gone again")
    tab.set_input_files("#import-file", {"name": "eins.json", "mimeType": "application/json",
                                         "buffer": json.dumps(kept).encode()})
    page.wait(lambda: tab.locator(names).count() == 2, "it is back")
    for wrong, said in ((b"{}", "holds no conversation"), (b"\xff", "not JSON")):
        tab.set_input_files("#import-file", {"name": "x.json", "mimeType": "application/json",
                                             "buffer": wrong})
        page.wait(lambda said=said: said in tab.inner_text("#chats-note"), said)
    tab.click(".chat-list .open:has-text('Eins')")
    page.wait(lambda: turns(page)[:1] == ["The first one"], "it is open")


def test_on_a_wide_screen_the_list_stands_beside_the_conversation(page):
    tab = page.tab
    names = "#beside .chat-list .title"
    assert tab.is_visible("#beside")
    assert not tab.is_visible("#open-chats")
    page.set(max_tokens="6", temperature="0")
    page.ask("Where do ducks go in winter?\nThe lagoon FREEZES over.")
    page.answer()
    tab.click("#new-chat")
    page.answers_of(400)
    page.ask("The second one")
    page.wait(lambda: tab.locator(names).all_inner_texts() == [
        "The second one", "Where do ducks go in winter?"], "both, while one is answered")
    tab.click("[aria-label='Rename: The second one']")
    tab.fill("[aria-label=Name]", "Two")
    page.answer()
    assert tab.input_value("[aria-label=Name]") == "Two"  # it was not drawn again meanwhile
    tab.keyboard.press("Enter")
    page.wait(lambda: "Two" in tab.locator(names).all_inner_texts(), "its new name")
    tab.fill("#find-chat", "NOW?")
    page.wait(lambda: tab.locator(".chat-list li:visible").count() == 0, "none holds it")
    tab.fill("#find-chat", "goon freezes")
    page.wait(lambda: tab.locator(f"{names}:visible").all_inner_texts() == [
        "Where do ducks go in winter?"], "the one with these words")
    assert "lagoon FREEZES over." in tab.inner_text(".chat-list li:visible .place")
    tab.click(f"{names}:visible")
    page.wait(lambda: "lagoon" in turns(page)[0], "it is open")
    page.until("document.activeElement.getAttribute('aria-current') === 'true'")
    tab.set_viewport_size({"width": 900, "height": 800})
    page.wait(lambda: not tab.is_visible("#find-chat"), "the list is away")
    tab.click("#open-chats")
    assert tab.is_visible("#chats #find-chat")
    tab.set_viewport_size({"width": 1280, "height": 800})
    page.wait(lambda: tab.is_visible("#beside #find-chat"), "it is back")


# --- files, colours, no draft -----------------------------------------------------------------


def test_text_files_go_along_and_others_are_refused(page):
    tab = page.tab
    page.set(max_tokens="4")
    tab.set_input_files("#attach-file", [
        {"name": "a.py", "mimeType": "text/x-python", "buffer": b"x = '```'\n"},
        {"name": "b.png", "mimeType": "image/png", "buffer": b"\x89PNG\0\xff"},
        {"name": "c.bin", "mimeType": "application/any", "buffer": b"\0\xff"}])
    for why in ("b.png cannot be read by this browser", "c.bin is neither a picture"):
        page.until(f"document.querySelector('#notices').textContent.includes('{why}')")
    assert tab.locator("#files li").count() == 1
    with tab.expect_request("**/v1/chat/completions") as asked:
        page.ask("What is it?")
    content = asked.value.post_data_json["messages"][-1]["content"]
    assert content == "a.py:\n````\nx = '```'\n````\n\nWhat is it?"
    page.answer()
    assert "a.py" in tab.inner_text(".user .files")
    assert not tab.is_visible("#files")
    while tab.locator(".notice").count():
        tab.click(".notice button")


def test_colours_follow_the_system_or_a_choice(open_page, server):
    paper = "getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()"
    opened = open_page(server.url, color_scheme="dark").ready()
    tab = opened.tab
    assert tab.evaluate(paper) == "#16171a"
    tab.click("#open-settings")
    tab.select_option("#theme", "light")
    opened.until(f"{paper} === '#fbfaf7'")
    tab.reload()
    opened.ready()
    assert tab.evaluate(paper) == "#fbfaf7"
    tab.click("#open-settings")
    assert tab.input_value("#theme") == "light"


def test_without_a_draft_nothing_speaks_of_guesses(page):
    tab = page.tab
    page.until("document.body.classList.contains('plain')")
    page.set(temperature="0", max_tokens="400")
    empty = tab.inner_text("#empty")
    page.ask(f"{PROMPT} " * 60)  # long enough for the stages to be busy more than 0 % anywhere
    page.until("document.querySelector('#load').textContent !== '0 %'")
    page.answer()
    page.until("/tokens \\d+/.test(document.querySelector('#legend').textContent)")
    page.until("/\\d+ token/.test(document.querySelector('#lanes-text').textContent)")
    for text in (empty, tab.inner_text("body")):
        found = re.search(r".*(guess|draft).*", text, re.IGNORECASE)
        assert found is None, found[0]
    assert not tab.is_visible("#acceptance-chart")
    tab.click("#open-settings")
    assert not tab.is_visible("#mark")
