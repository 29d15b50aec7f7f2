"""Answers that are asked for again, of an HTTP process with a journal that is killed meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
import requests
from msgspec import structs

from pipeinfer.server.frames import Abort, Bye, Draining, Ended, Status, Submit
from tests.kit.server_peer import SECONDS
from tests.server.test_door import TEXT, Door, begun, missing, rest, some

pytestmark = pytest.mark.slow


class Kept(Door):
    """A door with a journal, which can be killed and come back."""

    def __init__(self, folder, **settings):
        self.folder, self.count, self.answers = folder, 0, []
        self.journal = folder / "journal"
        super().__init__(folder, journal=str(self.journal), **{"journal_sync": 0.02, **settings})

    def killed(self):
        """kill -9, and another one; it has heard of no rank 0 yet."""
        self.process.kill()
        self.process.wait(SECONDS)
        self.control.close()
        self.children[-1].link.close()
        self.peer.close()
        self.count += 1
        self.path = self.folder / f"inner{self.count}" / "door"
        self.path.parent.mkdir()
        self.process = self.spawn()

    def ask(self, path, body=None, key="", **headers):
        method = "GET" if body is None else "POST"
        if key:
            headers["Idempotency-Key"] = key
        self.answers.append(requests.request(method, self.url + path, json=body, headers=headers,
                                             timeout=SECONDS, stream=True))
        return self.answers[-1]

    def close(self):
        super().close()
        for answer in self.answers:
            if hasattr(answer, "lines"):
                answer.lines.close()
            answer.close()

    def entries(self, kind):
        """How many entries of a kind the file has."""
        return sum(path.read_bytes().count(f'"op":"{kind}"'.encode()) for path in (
            self.journal, self.journal.with_name("journal-wal")) if path.exists())


def numbered(answer):
    """(number, data) of every event, as they come; its connection stays."""
    if not hasattr(answer, "lines"):
        answer.lines = answer.iter_lines()
    number = None
    for line in answer.lines:
        if line.startswith(b"id: "):
            number = int(line[4:])
        elif line.startswith(b"data: {"):
            yield number, json.loads(line[6:])
            number = None


def all_events(answer):
    return list(numbered(answer))


def said(events):
    """The text of a chat."""
    return "".join(e["choices"][0]["delta"].get("content", "") for _, e in events)


def begin(answer, count):
    """The next events of a stream that has not ended."""
    found = list(itertools.islice(numbered(answer), count))
    assert len(found) == count, found
    return found


@pytest.fixture
def door(tmp_path):
    with contextlib.closing(Kept(tmp_path)) as one:
        yield one


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100, "stream": True}
ITEMS = {"input": "x", "max_output_tokens": 100, "stream": True, "seed": 5}


def test_how_much_of_a_prompt_is_read_is_no_numbered_event(door):
    """It has no place in the answer that every reader gets alike."""
    door.peer.answer = lambda frame: None
    asked = door.ask("/v1/chat/completions", {**CHAT, "return_progress": True}, key="one")
    number = door.peer.wait_for(Submit).id
    door.peer.send(Status(1.0, {"waiting": 0, "lanes": [
        {"request": number, "prompt": 9, "prefilled": 4, "reused": 0}]}))
    opening, read = begin(asked, 2)
    assert (opening[0], read[0], read[1]["prompt_progress"]["processed"]) == (0, None, 4)
    door.peer.news(door.peer.say(number, TEXT))
    rest = begin(asked, 1)
    assert rest[0][0] == 1
    name = read[1]["id"]
    again = all_events(door.ask(f"/v1/chat/completions/{name}?stream=true"))
    assert [place for place, _ in again] == list(range(len(again)))
    assert not any("prompt_progress" in data for _, data in again)


def test_a_repeated_request_gets_the_rest_after_a_kill(door):
    """By its key from an event on, by the answer's id from the beginning, and as a whole."""
    some(door, 3)
    chat = door.ask("/v1/chat/completions", CHAT, key="one")
    items = door.ask("/v1/responses", ITEMS)
    whole = door.ask("/v1/completions", {"prompt": "x", "max_tokens": 50, "stream": True})
    seen = begin(chat, 3)
    first = begin(items, 5)
    name, text_name = first[0][1]["response"]["id"], begin(whole, 1)[0][1]["id"]
    door.peer.wait_for(Submit, 3)  # it is noted behind its answer
    asked = {frame.id: frame for frame in door.peer.seen if isinstance(frame, Submit)}
    door.until(lambda: door.entries("tokens") >= 3)
    door.killed()
    door.enter(answer=lambda frame: missing(door, frame))
    frames = [door.peer.wait_for(Submit, count) for count in (1, 2, 3)]
    assert {(f.prompt, f.max_tokens, f.params) for f in frames} == {
        (f.prompt, f.max_tokens, f.params) for f in asked.values()}

    last = seen[-1][0]
    more = all_events(door.ask("/v1/chat/completions", CHAT, key="one",
                               **{"Last-Event-ID": str(last)}))
    assert [number for number, _ in more] == list(range(last + 1, last + 1 + len(more)))
    assert said(seen + more) == TEXT
    assert more[-1][1]["timings"]["restarts_n"] == 1
    assert more[-1][1]["timings"]["same_arithmetic"] is True
    assert {e["id"] for _, e in seen + more} == {seen[0][1]["id"]}

    events = all_events(door.ask(f"/v1/responses/{name}?stream=true&starting_after=4"))
    both = [e for _, e in first + events]
    assert [e["sequence_number"] for e in both] == list(range(len(both)))
    assert "".join(e["delta"] for e in both if e["type"] == "response.output_text.delta") == TEXT
    assert len({e["item_id"] for e in both if "item_id" in e}) == 1
    answer = door.ask(f"/v1/responses/{name}").json()
    assert (answer["status"], answer["output"][0]["content"][0]["text"]) == ("incomplete", TEXT)
    assert answer == events[-1][1]["response"]
    answer = door.ask(f"/v1/completions/{text_name}").json()
    assert answer["choices"][0]["text"] == TEXT


def test_what_clients_without_a_key_have_left_comes_behind_others(door):
    """One after the other, and at once where a client asks for it."""
    door.peer.answer = lambda frame: None
    names = [begin(door.ask("/v1/chat/completions", CHAT), 1)[0][1]["id"] for _ in range(4)]
    begin(door.ask("/v1/chat/completions", CHAT, key="one"), 1)
    door.peer.wait_for(Submit, 5)
    door.until(lambda: door.entries("begun") >= 5)
    door.killed()
    door.enter()
    first = [door.peer.wait_for(Submit, count) for count in (1, 2)]  # with the key, and one without
    live = door.ask("/v1/completions", {"prompt": "y", "max_tokens": 3, "stream": True})
    begin_at = door.peer.wait_for(Submit, 3)
    assert begin_at.max_tokens == 3  # none of the others came before it
    again = door.ask(f"/v1/chat/completions/{names[3]}?stream=true")
    asked_for = door.peer.wait_for(Submit, 4)
    door.peer.news(door.peer.say(asked_for.id, TEXT))
    assert said(all_events(again)) == TEXT
    assert requests.delete(f"{door.url}/v1/chat/completions/{names[1]}", timeout=SECONDS).ok
    running = min(first, key=lambda frame: frame.id).id  # that with the key came last
    door.peer.news(door.peer.say(running, TEXT))
    last = door.peer.wait_for(Submit, 5)  # the one that is left
    door.peer.news(door.peer.say(last.id, TEXT))
    whole = door.ask(f"/v1/chat/completions/{names[2]}").json()
    assert whole["choices"][0]["message"]["content"] == TEXT
    assert sum(isinstance(frame, Submit) for frame in door.peer.seen) == 5
    live.close()


def test_what_has_ended_is_there_after_a_kill_until_it_is_deleted(door):
    rest(door)
    body = {"prompt": ["x", "y"], "stop": ["four"]}
    before = door.ask("/v1/completions", body, key="k").json()
    count = before.pop("timings")["predicted_n"]
    door.until(lambda: door.entries("ended") >= 2)  # both choices
    door.killed()
    door.enter()
    door.peer.answer = None  # nothing is computed
    after = door.ask("/v1/completions", body, key="k").json()
    assert after.pop("timings")["predicted_n"] == count
    assert after == before
    assert [c["text"] for c in after["choices"]] == ["one two three "] * 2
    refused = door.ask("/v1/completions", body | {"prompt": "z"}, key="k")
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        422, "idempotency_key_reused")
    url = f"{door.url}/v1/completions/{after['id']}"
    assert requests.delete(url, timeout=SECONDS).json()["deleted"] is True
    assert requests.get(url, timeout=SECONDS).status_code == 404


def test_who_leaves_may_come_back_with_a_key_and_ends_the_request_without(door):
    some(door, 2)
    with door.ask("/v1/chat/completions", CHAT, key="one") as answer:
        begin(answer, 2)
    with door.ask("/v1/chat/completions", CHAT) as answer:
        name = begin(answer, 2)[0][1]["id"]
    door.peer.wait_for(Abort, reason="disconnected")
    assert door.ask(f"/v1/chat/completions/{name}").status_code == 404
    assert sum(isinstance(frame, Abort) for frame in door.peer.seen) == 1
    first = door.peer.wait_for(Submit)
    door.peer.news(door.peer.say(first.id, "", "length", door.tokens[2:]))
    assert said(all_events(door.ask("/v1/chat/completions", CHAT, key="one"))) == TEXT


def test_an_end_of_the_server_is_none_of_its_requests(door):
    client = begun(door, 2)
    door.peer.send(Draining(1.0))
    name, number = client.last["id"], door.peer.wait_for(Submit).id
    door.peer.answer = None
    door.peer.news([Ended(number, "shutdown")])
    assert client.ended().last["error"]["code"] == "shutting_down"
    door.leave(Bye())
    door.process.wait(SECONDS)
    door.killed()
    door.enter(answer=lambda frame: missing(door, frame))
    assert door.ask(f"/v1/completions/{name}").json()["choices"][0]["text"] == TEXT


def test_keys_of_others_and_requests_that_are_not_kept(tmp_path):
    with contextlib.closing(Kept(tmp_path, keys=("a", "b"), journal_keep=0.3)) as door:
        rest(door)
        body = {"prompt": "x"}
        name = door.ask("/v1/completions", body, key="k", **{"X-Api-Key": "a"}).json()["id"]
        other = door.ask("/v1/completions", body, key="k", **{"X-Api-Key": "b"}).json()["id"]
        assert name != other
        found = door.ask(f"/v1/completions/{name}", **{"X-Api-Key": "b"})
        assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")
        private = door.ask("/v1/completions", body | {"prompt": "secret", "store": False},
                           **{"X-Api-Key": "a"}).json()["id"]
        assert door.ask(f"/v1/completions/{private}", **{"X-Api-Key": "a"}).status_code == 404
        door.until(lambda: door.ask(f"/v1/completions/{name}", **{"X-Api-Key": "a"}).status_code
                   == 404)


def test_another_model_takes_up_nothing(door):
    some(door, 2)
    body = {"prompt": "x", "stream": True}  # under a key: it goes on when its client has left
    name = begin(door.ask("/v1/completions", body, key="k"), 1)[0][1]["id"]
    door.killed()
    other = door.folder / "other.gguf"
    other.symlink_to(door.settings.model)
    door.enter(structs.replace(door.settings, model=str(other)))
    answer = door.ask(f"/v1/completions/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "other_model")
    rest(door)
    assert door.ask("/v1/completions", {"prompt": "x"}).json()["choices"][0]["text"] == TEXT
    door.peer.wait_for(Submit)  # it is noted behind its answer
    assert sum(isinstance(frame, Submit) for frame in door.peer.seen) == 1
