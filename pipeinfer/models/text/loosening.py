"""JSON schemas of which a grammar can hold a part only: the rest is left out, and named.

A schema without one of its keywords allows more texts, never fewer. Handles JSON, no grammars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: keywords that every grammar holds, or that say nothing about a text; the last to be suspected
_PLAIN = ("title", "description", "default", "examples", "$comment", "properties", "items",
          "additionalProperties", "type", "const", "enum", "anyOf", "allOf", "$ref")
#: keywords with schemas inside, and how the places of these are written
_MAPS = {"properties": ".{}", "patternProperties": ".{}", "$defs": ".$defs.{}",
         "definitions": ".definitions.{}"}
_LISTS = {"anyOf": "", "oneOf": "", "allOf": "", "prefixItems": "[{}]", "items": "[{}]"}
_ONES = {"items": "[]", "additionalProperties": ".*", "additionalItems": "[]"}
_ROOTS = ("$defs", "definitions")


def loosened(schema: dict[str, Any], fits: Callable[[dict[str, Any]], bool]
             ) -> tuple[dict[str, Any], list[str]]:
    """Return a schema that fits, with as many of the keywords as possible, and those left out.

    fits: returns whether a grammar can hold a schema
    Each keyword that is left out is named with its place, as in `uniqueItems of tags`.
    """
    if fits(schema):
        return schema, []
    work = _Loosening(schema, fits)
    return work.result, list(dict.fromkeys(work.left_out))


class _Loosening:
    def __init__(self, schema: dict[str, Any], fits: Callable[[dict[str, Any]], bool]) -> None:
        self._fits = fits
        self.left_out: list[str] = []
        self._roots = {key: schema[key] for key in _ROOTS if key in schema}
        body = {key: value for key, value in schema.items() if key not in _ROOTS}
        for change in (self._alone, self._whole):
            self._roots = self._each(self._roots, "", change)
            body = change(body, "")
        self.result = body | self._roots

    def _fit(self, part: dict[str, Any]) -> bool:
        return self._fits(part | self._roots)

    def _alone(self, schema: Any, place: str) -> Any:
        """The schema without keywords that do not fit whatever is inside and around it."""
        if not isinstance(schema, dict):
            return schema
        out = self._each(schema, place, self._alone)
        own = {key: _hollow(key, value) for key, value in out.items() if key != "$ref"}
        return self._fitting(out, own, [key for key in own if key not in _PLAIN], place)

    def _whole(self, schema: Any, place: str) -> Any:
        """The schema without keywords that do not fit together with those inside."""
        if not isinstance(schema, dict) or self._fit(schema):
            return schema
        out = self._each(schema, place, self._whole)
        keys = sorted(out, key=lambda key: -_PLAIN.index(key) if key in _PLAIN else -len(_PLAIN))
        return self._fitting(out, out, keys, place)

    def _fitting(self, out: dict[str, Any], own: dict[str, Any], suspects: list[str], place: str
                 ) -> dict[str, Any]:
        """`out` without those of the suspects that have to go so that `own` fits."""
        if not suspects or self._fit(own):
            return out
        others = {key: value for key, value in own.items() if key not in suspects}
        guilty = [key for key in suspects if not self._fit(others | {key: own[key]})]
        for key in guilty or suspects:
            if self._fit(own):
                break
            self.left_out.append(f"{key} of {place[1:]}" if place else key)
            while key in own and not self._fit(own):
                own, out = _weaker(own, key), _weaker(out, key)
        return out

    @staticmethod
    def _each(schema: dict[str, Any], place: str, change: Callable[[Any, str], Any]
              ) -> dict[str, Any]:
        """The schema with the schemas inside it changed."""
        out = dict(schema)
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, dict):
                out[key] = {name: change(inner, place + _MAPS[key].format(name))
                            for name, inner in value.items()}
            elif key in _LISTS and isinstance(value, list):
                out[key] = [change(inner, place + _LISTS[key].format(at))
                            for at, inner in enumerate(value)]
            elif key in _ONES and isinstance(value, dict):
                out[key] = change(value, place + _ONES[key])
        return out


def _hollow(key: str, value: Any) -> Any:
    """A keyword's value with schemas inside that allow everything."""
    if key in _MAPS and isinstance(value, dict):
        return dict.fromkeys(value, True)
    if key in _LISTS and key != "oneOf" and isinstance(value, list):  # which have to differ
        return [True] * len(value)
    return True if key in _ONES and isinstance(value, dict) else value


def _weaker(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """The schema with a keyword that demands less, or without it."""
    out = {name: value for name, value in schema.items() if name != key}
    if key == "oneOf" and "anyOf" not in schema:
        out["anyOf"] = schema[key]
    elif key == "required" and isinstance(schema[key], list):
        known = [name for name in schema[key] if name in schema.get("properties", ())]
        if known != schema[key]:
            out["required"] = known
    return out
