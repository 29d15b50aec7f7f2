"""A server of this process that answers what is asked of it by a function."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: of a JSON body and its headers: a status and the answer, bytes or what becomes JSON
Answer = Callable[[Any, Mapping[str, str]], tuple[int, Any]]


def spoken(text: str) -> tuple[int, Any]:
    """An OpenAI-compatible answer to a conversation."""
    return 200, {"choices": [{"message": {"content": text}}]}


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The address of a server that answers each POST by `answer`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, said = answer(json.loads(body), self.headers)
            content = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
