"""A browser for the tests of the page, and a tab of the module's `server`."""

from __future__ import annotations

import pytest

from tests.server.pages import CHROMIUM, Page


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def server(shared):
    """The module's server, as if nobody had asked it anything."""
    shared.peer.reset()
    return shared


@pytest.fixture
def open_page(browser):
    """Opens tabs, which are closed at the end."""
    opened = []

    def make(url, path="/", **options):
        opened.append(Page(browser, url, path, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def page(open_page, server):
    return open_page(server.url).ready()
