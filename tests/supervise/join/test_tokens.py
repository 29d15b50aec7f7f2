"""Tokens and the head's certificate: what they hold, and who can use them."""

from __future__ import annotations

import stat
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.errors import UsageError
from pipeinfer.supervise.join.tokens import JoinToken, JoinTokens

HEX = {n: st.binary(min_size=n, max_size=n).map(bytes.hex) for n in (4, 16, 20)}


@given(st.builds(JoinToken, id=HEX[4], secret=HEX[16], fingerprint=HEX[20]))
def test_a_token_is_its_text(token):
    assert JoinToken.of(f"  {token.text}\n") == token


@pytest.mark.parametrize("text", ["", "pipeinfer-", "pipeinfer-AAAA", "hf_abc",
                                  "pipeinfer-" + "ä" * 54, "pipeinfer-" + "A" * 55])
def test_other_texts_are_refused_with_the_command_that_makes_one(text):
    with pytest.raises(UsageError, match="tokens --new"):
        JoinToken.of(text)


def test_a_secret_proves_its_token_alone(tmp_path):
    tokens = JoinTokens(tmp_path)
    one, other = tokens.new(), tokens.new()
    assert one.proves(one.secret)
    assert not any(one.proves(secret) for secret in (other.secret, "", "é"))


def test_certificate_and_tokens_stay_and_only_this_user_reads_them(tmp_path):
    first = JoinTokens(tmp_path)
    made = first.usable()
    again = JoinTokens(tmp_path)
    assert again.token(again.usable()) == first.token(made)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"head.pem": 0o600, "tokens.json": 0o600}


def test_after_its_end_a_token_admits_only_those_that_have_joined_by_it(tmp_path):
    tokens = JoinTokens(tmp_path)
    made = tokens.new(60.0)
    tokens.joined(made.id, "old")
    later = time.time() + 61.0
    found = tokens.find(made.id)
    assert found.admits("new", time.time())
    assert found.admits("old", later)
    assert not found.admits("new", later)
    assert tokens.revoke(made.id)
    assert not tokens.revoke(made.id)
    assert tokens.find(made.id) is None


@pytest.mark.parametrize("name", ["head.pem", "tokens.json"])
def test_a_damaged_file_is_named(tmp_path, name):
    JoinTokens(tmp_path).usable()
    (tmp_path / name).write_text("-----BEGIN CERTIFICATE-----")
    with pytest.raises(UsageError, match=name):
        JoinTokens(tmp_path).issued()
