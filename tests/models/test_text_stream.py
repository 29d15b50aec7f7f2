"""Tokens to text that may be shown, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.models.text.text_stream import StopText, TextStream


def pushed(stopper, text, data):
    """What is shown of a text in pieces of any sizes, and whether a stop has ended it."""
    shown, rest, stopped = "", text, False
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        piece, stopped = stopper.push(rest[:size])
        shown, rest = shown + piece, rest[size:]
    return shown + ("" if stopped else stopper.rest()), stopped


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
       st.data())
def test_stop_text_cuts_at_the_first_stop_whatever_the_pieces(text, stops, data):
    shown, stopped = pushed(StopText(stops), text, data)
    found = [at for s in stops if (at := text.find(s)) >= 0]
    assert stopped == bool(found)
    if not found:
        assert shown == text
    else:  # a longer stop may begin earlier and end later than the one that was met first
        assert text.startswith(shown)
        assert any(text[len(shown):].startswith(s) for s in stops)


@given(st.lists(st.sampled_from(["a", "b", " ", "<", "<t>", "</t>"]), max_size=12).map("".join),
       st.booleans(), st.lists(st.sampled_from(["a", "ab", "<t>b", ">"]), max_size=2), st.data())
def test_no_stop_counts_within_reasoning_whatever_the_pieces(text, inside, stops, data):
    shown, stopped = pushed(StopText(stops, ("" if inside else "<t>", "</t>")), text, data)
    thought, end, _ = text.partition("</t>")
    thinks = inside or text.lstrip().startswith("<t>")
    start = 0 if not thinks else len(thought + end)
    found = [at for s in stops if (at := text.find(s, start)) >= 0]
    assert stopped == bool(found)
    assert text.startswith(shown)
    assert len(shown) >= start
    assert found or shown == text


@given(text=st.text("ab é漢", max_size=20),
       stops=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2),
       sizes=st.lists(st.integers(1, 5), max_size=30))
def test_bytes_in_any_pieces_give_the_text_up_to_the_stop(tokenizer, text, stops, sizes):
    stream, data, shown, parts = TextStream(tokenizer, stops), text.encode(), "", []
    for size in [*sizes, len(data)]:
        start = stream.produced
        parts.append((start, stream.push(0, data[:size])))
        data = data[size:]
        assert stream.taken == len(shown)
        shown += stream.take()
        assert stream.certain == len(shown)
    stream.finish()
    shown += stream.take()
    assert stream.stopped == any(s in text for s in stops)
    assert text.startswith(shown)
    if not stream.stopped:
        assert shown == text
    kept = [stream.cut(start, part) for start, part in parts]
    assert "".join(part for part in kept if part is not None) == shown


@pytest.mark.parametrize("stops", [(), ("\ufffd",)])
def test_half_a_character_at_the_end_is_left_out(tokenizer, stops):
    stream = TextStream(tokenizer, stops)
    assert stream.push(0, b"\xf0\x9f\x98") == stream.take() == ""
    stream.finish()
    assert stream.take() == ""
    assert not stream.stopped
