"""A browser for the tests of the page, and a tab of the module's `server`."""

from __future__ import annotations

import pytest

from tests.server.pages import CHROMIUM, Page


@pytest.fixture(scope="module")
def browser():
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
def page(browser, server):
    opened = Page(browser, server.url).ready()
    yield opened
    opened.close()
