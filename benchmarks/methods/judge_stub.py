"""A judge by rule behind the OpenAI API, for trying `compare --judge` without a model.

    python -m benchmarks.methods.judge_stub --port 8099
    pipeinfer compare -m smollm2 --kind mixed --judge http://127.0.0.1:8099/v1

Marks and pairs go by the share of the reference's words that a text has (where there is one) and
by how little it repeats itself. It shows that judging works; it says nothing of a text's sense.
"""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import click

from pipeinfer.lab.quality.scores import words


def worth(text: str, reference: str = "") -> float:
    """0 .. 1: words of the reference, or else length up to 80 words; times new ones of trigrams."""
    found = words(text)
    grams = list(zip(found, found[1:], found[2:], strict=False))
    fresh = len(set(grams)) / len(grams) if grams else float(bool(found))
    wanted = set(words(reference))
    if wanted:
        return fresh * len(wanted & set(found)) / len(wanted)
    return fresh * min(1.0, len(found) / 80)


def verdict(asked: str) -> str:
    """The answer to a prompt of `quality.judge`."""
    if pair := re.search(r"Answer A:\n(.*)\n\nAnswer B:\n(.*)", asked, re.DOTALL):
        first, second = worth(pair[1]), worth(pair[2])
        return f"{'A' if first >= second else 'B'} {min(1.0, abs(first - second)):.2f}"
    parts = re.search(r"Reference answer: (.*?)\nAI assistant's answer: (.*)", asked, re.DOTALL)
    if parts is None:
        return "I was not asked to judge."
    good = worth(parts[2], "" if parts[1] == "(none)" else parts[1])
    return f"Reason: by rule. Score: {1 + round(4 * good)}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = verdict(str(body["messages"][-1]["content"]))
        answer = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": {
            "role": "assistant", "content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: there are two requests for each answer."""


def server(port: int = 0) -> ThreadingHTTPServer:
    """A judge on this host alone, not serving yet; 0: any free port."""
    return ThreadingHTTPServer(("127.0.0.1", port), _Handler)


@click.command()
@click.option("--port", default=8099, show_default=True)
def main(port: int) -> None:
    """Judge until interrupted, on this host alone."""
    server(port).serve_forever()


if __name__ == "__main__":
    main()
