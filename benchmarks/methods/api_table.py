"""The lists of calls and fields in docs/api.md, from the OpenAPI schema of the HTTP application.

    python -m benchmarks.methods.api_table                      # prints them
    python -m benchmarks.methods.api_table --write docs/api.md
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from benchmarks.methods.settings_table import entries, main
from pipeinfer.server import schema_requests
from pipeinfer.server.answers import Answers
from pipeinfer.server.app import Server
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.settings import Settings


@cache
def schema() -> dict[str, Any]:
    """Return the schema that `/openapi.json` has."""
    client = EngineClient(Settings(model="model", name="model"), Metrics())
    return Server(Answers(client)).app.openapi()


def paths() -> str:
    """Return a line for each call; paths with the same one share it."""
    calls: dict[tuple[str, str], list[str]] = {}
    for path, methods in schema()["paths"].items():
        for method, call in methods.items():
            text = " ".join(call["description"].partition("\n\n")[0].split())
            calls.setdefault((method.upper(), f"{text.partition('. ')[0].rstrip('.')}."),
                             []).append(path)
    return entries((f"{method} {', '.join(f'`{path}`' for path in found)}", text)
                   for (method, text), found in calls.items())


def _type(field: dict[str, Any]) -> str:
    """Return a field's type, with its bounds where a client may meet them."""
    if kinds := [kind for kind in field.get("anyOf", ()) if kind.get("type") != "null"]:
        return " or ".join(dict.fromkeys(map(_type, kinds)))
    if values := field.get("enum", [field["const"]] if "const" in field else ()):
        return ", ".join(map(str, values))
    kind: str = "object" if "$ref" in field else field.get("type", "any value")
    if kind == "array":
        kind = f"list ({_type(field.get('items', {}))})"
    elif "maximum" in field and field["maximum"] < 1000:
        kind += f" {field['minimum']:g} to {field['maximum']:g}"
    return kind


def fields() -> str:
    """Return a line for each field of chats and completions."""
    found = schema()["components"]["schemas"]
    chat, completion = (found[name]["properties"] for name in ("ChatRequest", "CompletionRequest"))
    rows = []
    for name in {**chat, **completion}:
        kinds = {where: _type(known[name]) for where, known in
                 (("chat", chat), ("completions", completion)) if name in known}
        kind = next(iter(kinds.values())) if len(set(kinds.values())) == 1 else \
            "; ".join(f"{k}: {v}" for k, v in kinds.items())
        where = "" if len(kinds) == 2 else f" ({next(iter(kinds))})"
        rows.append((f"`{name}`{where}", kind))
    return entries(rows)


def refused() -> str:
    """Return a line for each field that is refused by name."""
    return entries((f"`{name}`", why) for name, why in schema_requests.REFUSED.items())


TABLES: dict[str, Callable[[], str]] = {"paths": paths, "fields": fields,
                                       "refused": refused}

if __name__ == "__main__":
    main(TABLES)
