"""What the commands about machines that join take."""

from __future__ import annotations

import pytest

from pipeinfer.errors import UsageError
from pipeinfer.supervise.join.commands import address_of


@pytest.mark.parametrize(("text", "host", "port"), [
    ("192.0.2.1", "192.0.2.1", 7700), ("192.0.2.1:80", "192.0.2.1", 80), ("box", "box", 7700),
    ("fd00::1", "fd00::1", 7700), ("[fd00::1]", "fd00::1", 7700), ("[fd00::1]:80", "fd00::1", 80),
    (":80", "", 80)])
def test_addresses_of_heads(text, host, port):
    assert address_of(text) == (host, port)


@pytest.mark.parametrize("text", ["box:", "box:http", "box:65536", "[fd00::1]x", "box:-1"])
def test_addresses_that_are_none(text):
    with pytest.raises(UsageError, match="ADDRESS:PORT"):
        address_of(text)
