"""Addresses, keys and files that people mistype: one line that says what is wrong."""

from __future__ import annotations

import pytest

from pipeinfer.cli.client import Remote
from pipeinfer.cli.generate import prompt_text
from pipeinfer.cli.serve import api_keys
from pipeinfer.config import RequestConfig, ServeConfig
from pipeinfer.errors import UsageError
from pipeinfer.server.keys import Allowance


@pytest.mark.parametrize("url", [
    "http://a..b", f"http://{'a' * 70}.example", "http://[::1", "http://a:99999", "http://",
    "ftp://a", "http://a:b"])
def test_addresses(url):
    with pytest.raises(UsageError, match="is not an address") as raised:
        Remote(url)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("key", ["se\ncret", "s\u00e9cret", "se\x00cret"])
def test_keys_that_no_header_can_carry_are_refused_and_not_shown(key):
    for refused in (lambda: Remote("http://a", key), lambda: api_keys(ServeConfig(api_key=(key,)))):
        with pytest.raises(UsageError) as raised:
            refused()
        assert "cret" not in str(raised.value)


def test_blanks_around_keys_do_not_count():
    assert Remote("http://a", " key ")._headers == {"Authorization": "Bearer key"}
    assert api_keys(ServeConfig(api_key=(" key ", " key2"))) == dict.fromkeys(
        ("key", "key2"), Allowance())


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfdef f(")
    assert prompt_text(RequestConfig(file=str(path))) == "def f("
