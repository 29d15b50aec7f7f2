"""Changes to bytes and to JSON-like values. Everything is drawn from a given `random.Random`."""

from __future__ import annotations

import json
import random
from typing import Any

#: numbers at which counts, sizes and signs go wrong
INTEGERS = (0, 1, 2, 3, 7, 8, 31, 32, 33, 127, 128, 255, 256, 4095, 65535, 65536, 2**24, 2**31 - 1,
            2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -2**31)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "\0", "a\0b", "..", "../../etc/passwd", "/etc/passwd", "a/b", "\n", "é", "\ud7ff",
         "%s%n", "{{ 1 }}", "x" * 300, "blk.0.attn_q.weight", "-1", "1e999", "nan", "<|im_end|>")
VALUES: tuple[Any, ...] = (None, True, False, *INTEGERS, *FLOATS, *TEXTS, 10**40, [], {}, [[]],
                           [None], {"": {}}, [1, 2, 3], {"a": 1})


def json_of(draw: random.Random, value: Any) -> bytes:
    """`value` as JSON, now and then nested deeper than any reader goes."""
    text = json.dumps(value)
    if draw.random() < 0.02:
        text = text.replace(":", ":" + "[" * 100_000, 1)
    return text.encode("utf-8", "surrogatepass")


def change_bytes(draw: random.Random, data: bytes, low: int = 0, high: int | None = None) -> bytes:
    """`data` with one change within `[low, high)`: bits, bytes, numbers, pieces, or its end cut."""
    out = bytearray(data)
    high = len(out) if high is None else min(high, len(out))
    if low >= high:
        return bytes(out) + bytes([draw.randrange(256)])
    at = draw.randrange(low, high)
    kind = draw.randrange(8)
    if kind == 0:
        out[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        out[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    elif kind in (2, 3):
        size = draw.choice((4, 8))
        number = draw.choice(INTEGERS) % (1 << 8 * size)
        out[at : at + size] = number.to_bytes(size, "little")[: len(out) - at]
    elif kind == 4:
        del out[at : at + draw.randint(1, 40)]
    elif kind == 5:
        out[at:at] = draw.randbytes(draw.randint(1, 40))
    elif kind == 6:
        length = draw.randint(1, 64)
        source = draw.randrange(low, high)
        out[at : at + length] = out[source : source + length]
    else:
        del out[at:]
    return bytes(out)


def change_value(draw: random.Random, value: Any, depth: int = 0) -> Any:
    """A JSON-like value with one change somewhere inside it."""
    inside = isinstance(value, dict | list) and len(value) > 0
    if not inside or (depth and draw.random() < 0.15):
        return _other(draw, value)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw.choice(keys)
    copy = dict(value) if isinstance(value, dict) else list(value)
    act = draw.random()
    if act < 0.12:
        del copy[key]
    elif act < 0.22 and isinstance(copy, dict):
        copy[draw.choice((*TEXTS, *map(str, keys)))] = draw.choice((copy[key], *VALUES))
    elif act < 0.22:
        copy.insert(draw.randrange(len(copy) + 1), draw.choice((copy[key], *VALUES)))
    else:
        copy[key] = change_value(draw, copy[key], depth + 1)
    return copy


def _other(draw: random.Random, value: Any) -> Any:
    """Another value, often of the same type."""
    act = draw.random()
    if act < 0.3:
        return draw.choice(VALUES)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((value + draw.choice((-1, 1)), value * 2, -value, value // 2,
                            draw.choice(INTEGERS)))
    if isinstance(value, float):
        return draw.choice((value * 2, -value, draw.choice(FLOATS)))
    if isinstance(value, str):
        cut = draw.randrange(len(value) + 1)
        return draw.choice((value[:cut], value[cut:], value + draw.choice(TEXTS),
                            value[:cut] + draw.choice(TEXTS) + value[cut:], value * 2,
                            draw.choice(TEXTS)))
    return draw.choice(VALUES)
