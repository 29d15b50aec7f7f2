"""Pictures on the page, in a real browser: pasted, scaled, shown in the turn, answered, kept.

Set PIPEINFER_SCREENSHOTS to a folder to get a picture of it.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from pathlib import Path

import pytest

from tests.kit.random_projectors import picture, write_family
from tests.kit.served import serve
from tests.server.test_pictures import answer_of, chatml

pytestmark = pytest.mark.slow
MARK = "<__media__>"
PASTE = """([data, name]) => {
    const bytes = Uint8Array.from(atob(data), one => one.charCodeAt(0));
    const given = new DataTransfer();
    given.items.add(new File([bytes], name, { type: 'image/png' }));
    document.querySelector('#prompt').dispatchEvent(new ClipboardEvent(
        'paste', { clipboardData: given, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return write_family("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def server(family):
    with serve(1, "-m", str(family[0]), "-c", "2048", "--temp", "0") as served:
        served.wait_until_ready()
        yield served


def paste(page, data, name="shot.png"):
    page.tab.evaluate(PASTE, [base64.b64encode(data).decode(), name])


def test_a_pasted_picture_is_scaled_shown_answered_and_kept(page, family):
    tab = page.tab
    page.set(max_tokens="12")
    paste(page, picture(2000, 1200))
    tab.wait_for_selector("#files img")
    with tab.expect_request("**/v1/chat/completions") as asked:
        page.ask("What is it?")
    shown, text = asked.value.post_data_json["messages"][-1]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    data = base64.b64decode(shown["image_url"]["url"].partition(",")[2])
    if data.startswith(b"\x89PNG"):
        width, height = struct.unpack_from(">II", data, 16)
        assert 1_100_000 < width * height <= 1_201_000
    else:
        assert data.startswith(b"\xff\xd8")  # a photo
    wanted = answer_of(family, chatml(("user", f"{MARK}What is it?")), [data])
    page.answer()
    kept = "document.querySelector('.answer:last-child .text').textContent"
    assert tab.evaluate(kept).split() == wanted.split()
    assert tab.get_attribute(".user .files img", "alt") == "shot.png"
    if folder := os.environ.get("PIPEINFER_SCREENSHOTS"):
        tab.screenshot(path=Path(folder) / "picture.png")
    with tab.expect_request("**/v1/chat/completions") as again:
        page.ask("And now?")
    messages = again.value.post_data_json["messages"]
    assert messages[0]["content"][0] == shown  # the second turn has it, too
    page.answer()
    tab.reload()
    page.ready()
    tab.wait_for_selector(".user .files img")


def test_a_picture_stays_in_branches_exports_and_imports(page):
    tab = page.tab
    page.set(max_tokens="4")
    paste(page, picture(60, 40), "a.png")
    tab.wait_for_selector("#files img")
    page.ask("One")
    page.answer()
    tab.click(".user .edit")
    tab.fill(".editor textarea", "Two")
    with tab.expect_request("**/v1/chat/completions") as edited:
        tab.keyboard.press("Enter")
    content = edited.value.post_data_json["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"]
    page.answer()
    if not tab.is_visible("#beside [data-id]"):
        tab.click("#open-chats")
    with tab.expect_download() as saved:
        tab.locator("button", has_text="JSON").first.click()
    data = json.loads(Path(saved.value.path()).read_text())
    turns = [turn for turn in data["turns"].values() if turn.get("files")]
    assert {turn["files"][0]["media"] for turn in turns} == {content[0]["image_url"]["url"]}
    with tab.expect_download() as saved:
        tab.locator("button", has_text="Export").first.click()
    assert f"![a.png]({content[0]['image_url']['url']})" in Path(saved.value.path()).read_text()
    tab.set_input_files("#import-file", {
        "name": "b.json", "mimeType": "application/json",
        "buffer": json.dumps({**data, "title": "again"}).encode()})
    tab.locator(".open", has_text="again").first.click()
    tab.wait_for_selector(".user .files img")
