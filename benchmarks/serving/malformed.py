"""Hooks of `schemathesis run`, which makes valid and invalid requests from a server's OpenAPI
description: none may bring a 500, and all answers keep to the description.

    schemathesis --config-file benchmarks/serving/malformed.toml run URL/openapi.json -n 200

Bodies and headers that no description covers are `benchmarks.fuzz.http_case`.
"""

from __future__ import annotations

import itertools
from typing import Any

import schemathesis

MOST_TOKENS = 4  #: a valid request is shortened to this: its answer is not the point here
_number = itertools.count()


@schemathesis.hook
def before_call(_context: Any, case: Any, _options: dict[str, Any]) -> None:
    """Ask for few tokens, and for every second answer as a stream; what is malformed stays so."""
    body = case.body
    if not isinstance(body, dict) or not ({"prompt", "messages"} & body.keys()):
        return
    for name in ("max_tokens", "max_completion_tokens"):
        if _is_number(body.get(name)):
            body[name] = min(body[name], MOST_TOKENS)
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = MOST_TOKENS
    if _is_number(body.get("n")) and body["n"] <= 128:
        body["n"] = min(body["n"], 4)
    if next(_number) % 2 and case.path.startswith("/v1/c") and case.meta is not None \
            and case.meta.generation.mode.is_positive:
        body["stream"] = True


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
