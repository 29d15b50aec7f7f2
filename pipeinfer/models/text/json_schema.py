"""JSON schemas as their authors mean them for models: an object has only the fields listed.

By the standard, an object with `properties` may have any other fields, too; a model would invent
fields until it is cut off. Handles JSON, no grammars.
"""

from __future__ import annotations

from typing import Any

from pipeinfer.errors import RequestError

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "prefixItems", "items")
_ONES = ("items", "additionalProperties", "additionalItems", "contains", "unevaluatedItems")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def closed(schema: Any) -> Any:
    """Return the schema with objects closed that have `properties` and no rule for other fields.

    Fields that are required without being described are listed with those that are.

    Objects that several schemas describe together (allOf, or parts besides properties) stay open,
    because each part would forbid the others' fields. Raises RequestError for a schema nested too
    deeply.
    """
    try:
        return _Closing(schema).close(schema)
    except RecursionError:
        raise RequestError("it is nested too deeply") from None


class _Closing:
    def __init__(self, schema: Any) -> None:
        self._shared: set[int] = set()  # identities of parts of what several schemas describe
        self._mark(schema, schema)

    def close(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        out = dict(schema)
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, dict):
                out[key] = {name: self.close(inner) for name, inner in value.items()}
            elif key in (*_LISTS, "allOf") and isinstance(value, list):
                out[key] = [self.close(inner) for inner in value]
            elif key in _ONES and isinstance(value, dict):
                out[key] = self.close(value)
        if _is_closable(schema) and id(schema) not in self._shared:
            out["additionalProperties"] = False
            out["properties"] |= {name: True for name in _listed(schema, "required")
                                  if isinstance(name, str) and name not in out["properties"]}
        return out

    def _mark(self, schema: Any, root: Any) -> None:
        """Find the parts of objects that are described by several schemas."""
        if not isinstance(schema, dict):
            return
        several = [part for key in ("allOf", "anyOf", "oneOf") for part in _listed(schema, key)]
        if len(_listed(schema, "allOf")) > 1 or ("properties" in schema and (
                several or "$ref" in schema)):
            for part in [*several, schema]:
                self._share(part, root)
        for key in _MAPS:
            inner = schema.get(key)
            for value in inner.values() if isinstance(inner, dict) else ():
                self._mark(value, root)
        for value in [*several, *_listed(schema, "items"), *_listed(schema, "prefixItems"),
                      *(schema.get(key) for key in _ONES)]:
            self._mark(value, root)

    def _share(self, part: Any, root: Any) -> None:
        if not isinstance(part, dict) or id(part) in self._shared:
            return
        self._shared.add(id(part))
        self._share(target(part.get("$ref"), root), root)
        for key in ("allOf", "anyOf", "oneOf"):
            for inner in _listed(part, key):
                self._share(inner, root)


def _is_closable(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("properties"), dict) and not any(key in schema for key in _OPEN)


def _listed(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def target(reference: Any, root: Any) -> Any:
    """The part of the schema that a reference points to; None for one outside the schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    at = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        at = at.get(name) if isinstance(at, dict) else None
    return at
