"""A tab of a real browser with the server's page, for tests."""

from __future__ import annotations

import re
import shutil
import time

CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
PROMPT = "Write a function that reverses a string"
#: what a browser itself writes: an answer is an error, no answer comes, this test reads pixels
OWN = re.compile(r"Failed to load resource|net::ERR_|getImageData are faster")


def stored_turns(tab):
    """The turns of the only chat that is stored."""
    return tab.evaluate("""(async () => {
        const {Store} = await import('/store.js');
        const store = new Store(), [head] = await store.list();
        const turns = head ? (await store.get(head.id)).turns : {};
        return Object.values(turns).filter((turn) => turn.id);
    })()""")


class Page:
    """A tab, and everything that its console said."""

    def __init__(self, browser, url, path="/", **options):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800},
                                              **options})
        self.context.set_default_timeout(60_000)  # a page of 1,000 tokens took 18 s alone
        self.tab = self.context.new_page()
        self.said = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.add_init_script(
            "document.addEventListener('securitypolicyviolation', "
            "e => console.error('CSP: ' + e.violatedDirective + ' ' + e.blockedURI));")
        self.url = url
        self.tab.goto(url + path)

    def ready(self):
        self.tab.wait_for_selector("#state[data-state=ready]")
        return self

    def answers_of(self, tokens):
        """Answers have so many tokens from now on: where one would end depends on the processor."""
        def whole(route):
            asked = {**route.request.post_data_json, "max_tokens": tokens, "ignore_eos": True}
            route.continue_(post_data=asked)

        self.context.route("**/v1/chat/completions", whole)
        return self

    def ask(self, text=PROMPT):
        self.tab.fill("#prompt", text)
        self.tab.press("#prompt", "Enter")

    def set(self, **fields):
        """Fill fields of the settings."""
        self.tab.click("#open-settings")
        for name, value in fields.items():
            self.tab.fill(f"#{name.replace('__', '-')}", value)
        self.tab.click("#settings-form .primary")

    def until(self, script):
        """Wait for a script to be true. (Playwright's own way needs eval: the page forbids it.)"""
        self.wait(lambda: self.tab.evaluate(script), script)

    def wait(self, true, what):
        deadline = time.monotonic() + 60  # machines are busy
        while not true():
            assert time.monotonic() < deadline, what
            self.tab.wait_for_timeout(50)

    def answer(self):
        """The text of the last answer, once it is complete."""
        self.tab.wait_for_selector(".answer:last-child:not([aria-busy]) .foot")
        return self.tab.inner_text(".answer:last-child .text")

    def problem(self):
        return self.tab.inner_text(".answer:last-child .problem")

    def pixels(self, selector):
        """How many different colours a canvas shows, and a checksum of it."""
        return self.tab.evaluate(
            """(selector) => {
                const canvas = document.querySelector(selector);
                const data = canvas.getContext('2d')
                    .getImageData(0, 0, canvas.width, canvas.height).data;
                const colours = new Map();
                let sum = 0;
                for (let i = 0; i < data.length; i += 4) {
                    const colour = (data[i] << 16) | (data[i + 1] << 8) | data[i + 2];
                    if (data[i + 3] === 255) colours.set(colour, (colours.get(colour) ?? 0) + 1);
                    sum = (sum * 31 + colour + data[i + 3]) >>> 0;
                }
                return [[...colours].filter(([, n]) => n > 8).map(([c]) => c), sum];
            }""", selector)

    def close(self):
        """Nothing was said in the console but what the browser says of its own accord."""
        self.context.close()
        assert [text for text in self.said if not OWN.search(text)] == []
