"""A real HTTP process with a scripted engine at the other end of its link, for tests.

Everything between a client's socket and the frames is the product's own; only what the engine
answers is written by the test. `tests/mpi/test_serve.py` has the real engine.
"""

from __future__ import annotations

import contextlib
import threading
import time

import requests

from pipeinfer.models.locate import open_tokenizer
from pipeinfer.server import http_process

SECONDS = 30.0
FACTS = {"model": "m.gguf", "draft": "", "policy": "pipeinfer", "n_ctx": 256, "stages": []}


class Peer:
    """The engine's end. `answer(frame)` gives news items for a submitted request, None holds it
    until it is aborted; frames seen so far are in `seen`."""

    def __init__(self, link, tokenizer):
        self.link, self.tokenizer, self.seen = link, tokenizer, []
        self.answer = lambda frame: self.say(frame["id"], "ok")
        self._arrived, self._changed = threading.Event(), threading.Condition()
        self._over, self._sending = False, threading.Lock()
        link.on_frame = self._arrived.set
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, request_id, text, reason="stop", each=None, **stats):
        """News: the tokens of a text and the end."""
        items = [["t", request_id, token, i % 2 == 1, -0.5, [[token, -0.5], [1, -3.0]], None]
                 for i, token in enumerate(each or self.tokenizer.encode(text, add_bos=False))]
        return [*items, ["end", request_id, reason, stats]] if reason else items

    def send(self, frame):
        """A frame to the HTTP process; from any thread."""
        with self._sending:
            self.link.send(frame)

    def news(self, items):
        self.send({"op": "news", "items": items})

    def wait_for(self, op, count=1, **fields):
        """The `count`-th frame of this kind, waiting for it."""
        def found():
            return [f for f in self.seen if f["op"] == op
                    and all(f.get(k) == v for k, v in fields.items())]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, SECONDS), self.seen
        return found()[count - 1]

    def reset(self):
        with self._changed:
            self.seen.clear()
        self.answer = lambda frame: self.say(frame["id"], "ok")

    def close(self):
        self._over = True
        self._arrived.set()
        self._thread.join(SECONDS)

    def _run(self):
        while not self._over and not self.link.closed:
            with self._sending:
                waits = self.link.pump()
            self._arrived.wait(0.02 if waits else SECONDS)
            self._arrived.clear()
            while (frame := self.link.take()) is not None:
                items = self._reply(frame)
                if items:
                    self.news(items)
                with self._changed:
                    self.seen.append(frame)
                    self._changed.notify_all()

    def _reply(self, frame):
        match frame["op"]:
            case "submit":
                return self.answer(frame)
            case "abort":
                return [["end", frame["id"], frame["reason"], {}]]
        return None


class Front:
    """The HTTP process. url, and its Peer once `ready` has been sent."""

    def __init__(self, model, **settings):
        listener = http_process.listen("127.0.0.1", 0, settings.get("client_timeout", 60.0))
        self.child = http_process.start({"model": str(model), "name": "m", **settings}, listener)
        self.tokenizer = open_tokenizer(model)
        self.peer = Peer(self.child.link, self.tokenizer)
        self.url = self.child.url

    def ready(self, **facts):
        self.peer.send({"op": "ready", "facts": FACTS | facts})
        self.until(lambda: self.get("/health").status_code == 200)
        return self

    def get(self, path, **options):
        return requests.get(self.url + path, timeout=SECONDS, **options)

    def post(self, path, body, **options):
        return requests.post(self.url + path, json=body, timeout=SECONDS, **options)

    def until(self, true, seconds=SECONDS):
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self):
        with contextlib.suppress(Exception):
            self.peer.send({"op": "bye"})
        self.peer.close()
        code = self.child.end(SECONDS)
        self.tokenizer.close()
        return code


@contextlib.contextmanager
def front(model, *, ready=True, facts=None, **settings):
    """A running front, ended in any case."""
    server = Front(model, **settings)
    try:
        yield server.ready(**(facts or {})) if ready else server
    finally:
        server.close()
