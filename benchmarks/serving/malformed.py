"""Malformed requests against a real server: none may bring a 500, all answers keep to the
OpenAPI description, and the server answers a good request as before.

    python -m benchmarks.serving.malformed --cases 2000
    python -m benchmarks.serving.malformed --cases 2000 --np 4

Three kinds: requests that schemathesis makes from the description (valid and invalid ones), and
bodies that no description covers: cut or nested JSON, wrong types and encodings, huge numbers.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.kit.served import serve

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance,
          response_schema_conformance, negative_data_rejection]
NOTHING_TO_ASK = ("/pipeline", "/rebalance", "/rebalance/plan")  #: no fields; the first never ends
MOST_TOKENS = 4  #: a valid request is shortened to this: its answer is not the point here
SECONDS = 60.0


@dataclass
class Tally:
    """What came back. failures: (what was sent, what was wrong)."""

    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, kind: str, status: int, seconds: float) -> None:
        """Note one answer."""
        self.kinds[kind] += 1
        self.statuses[status] += 1
        self.slowest = max(self.slowest, seconds)

    @property
    def cases(self) -> int:
        """Requests sent."""
        return self.kinds.total()


def shorten(body: Any) -> Any:
    """The same request with few tokens; what is malformed stays so."""
    if not isinstance(body, dict) or not ({"prompt", "messages"} & body.keys()):
        return body
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > MOST_TOKENS:
            body[name] = MOST_TOKENS
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = MOST_TOKENS
    if isinstance(body.get("n"), int) and not isinstance(body["n"], bool) and 4 < body["n"] <= 128:
        body["n"] = 4
    return body


def from_description(url: str, cases: int, seed: int, tally: Tally) -> None:
    """Requests that schemathesis makes, shared out over the operations and both modes."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations() if found.ok() is not None]
    operations = [o for o in operations if o.path not in NOTHING_TO_ASK]
    weights = [10 if "requestBody" in o.definition.raw else 1 for o in operations]
    for operation, weight in zip(operations, weights, strict=True):
        modes = list(GenerationMode) if weight > 1 else [GenerationMode.POSITIVE]
        for mode in modes:
            count = max(1, round(cases * weight / sum(weights) / len(modes)))
            _exhaust(operation, mode, count, seed, tally)


def _exhaust(operation: Any, mode: GenerationMode, count: int, seed: int, tally: Tally) -> None:
    streams, number = operation.path.startswith("/v1/c"), 0
    asks = "requestBody" in operation.definition.raw

    @hypothesis_seed(seed)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        nonlocal number
        case.body = shorten(case.body)
        number += 1
        if mode is GenerationMode.POSITIVE and streams and number % 2 and asks:
            case.body["stream"] = True
        start = time.monotonic()
        try:
            response = case.call(timeout=SECONDS)
        except (requests.RequestException, ValueError) as error:
            if isinstance(error, requests.exceptions.Timeout | requests.ConnectionError):
                tally.failures.append((case.as_curl_command()[:400], repr(error)))
            return  # what no HTTP client can send reaches nobody
        tally.add(mode.value, response.status_code, time.monotonic() - start)
        try:
            case.validate_response(response, checks=CHECKS)
        except (Failure, FailureGroup) as error:
            tally.failures.append((case.as_curl_command()[:600], _short(error)))

    one()


def _short(error: BaseException) -> str:
    parts = getattr(error, "exceptions", None) or [error]
    return "; ".join(" ".join(str(part).split())[:300] for part in parts)


GOOD = {
    "/v1/completions": {"prompt": "def f(", "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/tokenize": {"content": "def f("},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": [{"role": "user", "content": "hi"}]},
}
NASTY: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, "", "x", "\x00",
    "\ud800", "\U0001f4a9" * 50, "a" * 20000, [], [[]], [None], [[1], [None]], {}, {"": {}},
    {"type": "object"}, {"type": "json_schema"}, [{"type": "text"}], [{"role": "user"}],
    [0] * 3000, [2**31 - 1], ["\udfff"], {"0": 1e400}, {"-1": 1}, {"9" * 5000: 1}, [[0, 101]],
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
]
RAW = [
    b"", b"{", b"[", b"null", b"\xff\xfe", b"{}", b"[]", b'"x"', b"NaN", b"{" * 100_000,
    b"[" * 100_000, b'{"prompt":' * 30_000, b'{"a":1}{"b":2}', b'{"prompt":"\\ud800"}',
    b'{"prompt":NaN}', b'{"prompt":1e999}', b'{"prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
    b"prompt=x", b"\x00" * 100, '{"prompt":"é"}'.encode("latin-1"),
    '{"prompt":"x"}'.encode("utf-16"), b'{"prompt":"x","prompt":[1],"max_tokens":1}',
]


def by_hand(url: str, cases: int, seed: int, tally: Tally) -> None:
    """Good requests with one or more fields made bad, and bodies that are no JSON."""
    draw = random.Random(seed)
    names = sorted({*_fields(url), "unknown", "functions", "audio", "suffix", "\ud800", ""})
    kinds = ["application/json", "application/json; charset=utf-16", "text/plain", "", "a/b;;=",
             "multipart/form-data", "application/x-www-form-urlencoded"]
    with requests.Session() as session:
        for number in range(cases):
            path = draw.choice(sorted(GOOD))
            if number % 4 == 0:
                data, kind = draw.choice(RAW), draw.choice(kinds)
            else:
                body = json.loads(json.dumps(GOOD[path]))
                for _ in range(draw.randint(1, 3)):
                    body[draw.choice([*names, *body])] = draw.choice(NASTY)
                data, kind = json.dumps(shorten(body)).encode(), "application/json"
                if draw.random() < 0.1:
                    data = data[: draw.randrange(len(data))]
            start = time.monotonic()
            response = session.post(url + path, data, headers={"Content-Type": kind},
                                    timeout=SECONDS)
            tally.add("by hand", response.status_code, time.monotonic() - start)
            _look(path, data, response, tally)


def _look(path: str, data: bytes, response: requests.Response, tally: Tally) -> None:
    wrong = ""
    if response.status_code >= 500:
        wrong = f"status {response.status_code}: {response.text[:300]}"
    elif response.status_code >= 400:
        try:
            error = response.json()["error"]
            assert isinstance(error["message"], str), "no message"
            assert error["message"], "an empty message"
        except (ValueError, KeyError, TypeError, AssertionError) as failure:
            wrong = f"no error object ({failure}): {response.text[:200]}"
    if wrong:
        tally.failures.append((f"POST {path} {data[:300]!r}", wrong))


def _fields(url: str) -> set[str]:
    schemas = requests.get(f"{url}/openapi.json", timeout=SECONDS).json()["components"]["schemas"]
    return {name for kind in ("CompletionRequest", "ChatRequest", "TokenizeRequest")
            for name in schemas[kind]["properties"]}


def answer(url: str) -> str:
    """A good request's text."""
    response = requests.post(f"{url}/v1/completions", timeout=SECONDS, json={
        "prompt": "import os\n", "max_tokens": 24, "temperature": 0})
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


def run(url: str, cases: int, seed: int = 1) -> Tally:
    """At least `cases` requests, a third of them by hand."""
    tally = Tally()
    before = answer(url)
    by_hand(url, cases // 3, seed, tally)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while tally.cases < cases:
            from_description(url, cases - tally.cases, seed + tally.cases, tally)
    if answer(url) != before:
        tally.failures.append(("a good request", "its text is another one afterwards"))
    return tally


def main() -> int:
    """Run and report; 1 when something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--np", type=int, default=1)
    parser.add_argument("--url", help="a running server instead of one of its own")
    options = parser.parse_args()
    if options.url:
        tally = run(options.url, options.cases, options.seed)
    else:
        with serve(options.np, "-c", "256", "--queue", "200", seconds=7200) as served:
            served.wait_until_ready()
            tally = run(served.url, options.cases, options.seed)
    print(json.dumps({"cases": tally.cases, "kinds": tally.kinds, "statuses": tally.statuses,
                      "slowest_s": round(tally.slowest, 2), "failures": len(tally.failures)}))
    for sent, wrong in tally.failures[:40]:
        print(f"--- {wrong}\n    {sent}", file=sys.stderr)
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
