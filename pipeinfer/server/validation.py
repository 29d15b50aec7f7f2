"""Explains to a client what is wrong with the form of its request."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError

from pipeinfer.server.errors import ApiError, bad


def explain(error: RequestValidationError) -> ApiError:
    """Return a validation error as one message with the first wrong field."""
    found = error.errors()
    # Every alternative of a union reports an error; that of the right type is the most specific.
    first = max((e for e in found if e["loc"][:2] == found[0]["loc"][:2]),
                key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])))
    path = [part for part in first["loc"] if part not in ("body", "path", "query")]
    if first["type"] == "json_invalid":
        return bad(f"the request is not valid JSON: {first['ctx']['error']}")
    if not path:
        return bad("the request is not a JSON object; is its Content-Type application/json?")
    param = ".".join([str(part) for part in path if not _is_branch(part)] or [str(path[-1])])
    return bad(f"{param}: {first['msg']}", param)


def _is_branch(part: Any) -> bool:
    """Whether a part of a location names an alternative of a union and no field."""
    return isinstance(part, str) and (
        part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper()
        or part.startswith("constrained-"))
