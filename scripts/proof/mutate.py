"""Changes real files at random: as bytes, as lines, and as the JSON that they are.

A change of bytes alone seldom gets past a parser's first token; a change of a value alone never breaks one. All are drawn from
the given generator: the same one makes the same inputs.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

_DEEP = 70  # lists in one another: more than any of our files has, fewer than a parser's stack
_TOKENS = (
    b"NaN", b"-Infinity", b"1e999", b"-1", b"9223372036854775808", b"18446744073709551616", b"1" * 301, b"0x", b"[" * 70,
    b'{"":' * 70, b"null", b"true", b'""', b'"\\ud800"', b"\\u0000", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\0", b"../",
    b"/etc/passwd", b"${seed}", b"&a [*a, *a]", b"*a", b"<<: ", b"!!python/name:os.system", b"- ", b": ", b"{", b"}", b"[",
    b"]", b",", b'"', b"\n", b"\r", b"\t", b"~",
)  # fmt: skip
_DEEPEST: Any = []
for _ in range(_DEEP):
    _DEEPEST = [_DEEPEST]
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 4095, 4096, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**299,
    10**310, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "x" * 300, "../x", "/etc/passwd", "relative", "\0",
    "\ud800", "\udc80", "\x1b[2J", "~", "~nosuchuser/x", "cpu", "float32", "bfloat16", "committed", "loading", [], {}, [[]],
    [0] * 70, {"": {}}, {"a": None}, _DEEPEST,
)  # fmt: skip
_KEY = re.compile(rb'"([A-Za-z_][A-Za-z0-9_.]{0,40})"\s*:')


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Makes one to three changes. `others`: what a part may be taken from."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(_WAYS)(data, rng, others)
    return data


def _of_json(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Changes a value in it. If it is no JSON, or has many lines of JSON, changes one of its lines."""
    try:
        whole: list[Any] = [json.loads(data)]
    except (ValueError, RecursionError):
        return _of_lines(data, rng, others)
    holder, key = _place(whole, rng)
    _change(holder, key, rng)
    try:
        return json.dumps(whole[0]).encode()
    except (RecursionError, ValueError):  # a list that was put into itself
        return data


def _place(whole: list[Any], rng: random.Random) -> tuple[Any, Any]:
    """Draws a list or an object, and an index or key in it. Deeper places are likelier, because most values are there."""
    holder, key = whole, 0
    while isinstance(inner := holder[key], (dict, list)) and inner and rng.random() < 0.85:
        holder, key = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    return holder, key


def _change(holder: Any, key: Any, rng: random.Random) -> None:
    value, how = holder[key], rng.randrange(8)
    if how == 0 and isinstance(value, int):
        holder[key] = value + rng.choice((1, -1, 4096, -4096))
    elif how == 1 and len(holder) > 1:
        del holder[key]
    elif how == 2 and isinstance(holder, dict):
        holder[rng.choice(("", "x", "\0", "_", "surprise", "auto_map", "__metadata__"))] = rng.choice(_VALUES)
    elif how == 3 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), value)
    elif how == 4:
        holder[key] = [value]
    elif how == 5 and isinstance(holder, dict) and len(holder) > 1:
        holder[key] = holder[rng.choice(list(holder))]
    elif how == 6 and isinstance(value, str):
        holder[key] = rng.choice((value[:-1], value + value, value.upper(), value + "\0", "/" + value, value[1:]))
    else:
        holder[key] = rng.choice(_VALUES)


def _of_lines(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Leaves a line out, doubles, moves or indents it, or puts it in another file's place."""
    lines = data.split(b"\n")
    at, how = rng.randrange(len(lines)), rng.randrange(6)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(at, lines[at])
    elif how == 2:
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    elif how == 3:
        lines[at] = b" " * rng.randrange(1, 5) + lines[at]
    elif how == 4 and others:
        lines[at] = rng.choice(rng.choice(others).split(b"\n"))
    else:
        name, mark, _ = lines[at].partition(b": ")
        lines[at] = name + mark + rng.choice(_TOKENS)
    return b"\n".join(lines)


def _of_bytes(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Changes a bit, a byte, or a run of bytes, or cuts what follows a place."""
    if not data:
        return rng.choice(_TOKENS)
    at, how = rng.randrange(len(data)), rng.randrange(7)
    end = min(len(data), at + rng.randrange(1, 17))
    if how == 0:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if how == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if how == 2:
        return data[:at]
    if how == 3:
        return data[:at] + data[end:]
    if how == 4:
        return data[:end] + data[at:]
    if how == 5 and others:
        other = rng.choice(others)
        return data[:at] + other[rng.randrange(len(other) + 1) :]
    return data[:at] + rng.choice(_TOKENS) + data[end if rng.random() < 0.5 else at :]


def _twice(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Writes a key of an object twice."""
    keys = list(_KEY.finditer(data))
    if not keys:
        return _of_bytes(data, rng, others)
    found = rng.choice(keys)
    value = rng.choice((b"0", b"{}", b'""', b"null"))
    return data[: found.start()] + found[0] + value + b", " + data[found.start() :]


_Way = Callable[[bytes, random.Random, Sequence[bytes]], bytes]
_WAYS: tuple[_Way, ...] = (_of_json, _of_json, _of_json, _of_json, _of_bytes, _of_bytes, _of_lines, _twice)
