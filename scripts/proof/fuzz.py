"""Feeds parsers with changed inputs. Every input must give a value, or one error with exit code 2 and a message. Nothing may be
left behind, and none may take seconds.

An input with a new outcome (an error of another shape, without names and numbers) is kept and changed further. So the corpus is
one small file for each thing that can be wrong.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

from fuyou_cli.core.errors import FuyouError, UsageError

from .parsers import Parser

PATIENCE = 10.0  # seconds of the processor for one input
MOST_KEPT = 10  # inputs of one parser
LARGEST_KEPT = 4096  # bytes of each
_MOST_CHANGED = 256  # inputs that are changed further

_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`")
_PATH = re.compile(r"(?:/[^\s:,;/]*)+")
_NUMBER = re.compile(r"\b[0-9a-f]{8,}\b|-?\d+(?:[.,_]\d+)*(?:e[+-]?\d+)?|\b(?:inf|nan)\b", re.IGNORECASE)
_UNKNOWN = re.compile(r"[^;]*: unknown key[^;]*")


class Crashed(Exception):
    """Says that an input ended otherwise. `why`: how."""

    def __init__(self, parser: Parser, data: bytes, why: str) -> None:
        super().__init__(f"{parser.name}: {why}")
        self.parser, self.data, self.why = parser, data, why


class TooSlow(BaseException):
    """Says that time is up. No parser catches this."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts the outcomes of one parser's inputs."""

    runs: int = 0
    values: int = 0  # inputs that were taken
    seconds: float = 0.0
    kept: int = 0
    outcomes: set[str] = field(default_factory=set)


def shape(message: str) -> str:
    """Returns an error without what is the input's own."""
    text = _QUOTED.sub("'x'", message)
    text = _UNKNOWN.sub("x: unknown key", _NUMBER.sub("0", _PATH.sub("/x", text)))
    return " ".join(text.split())[:160]


def outcome(parser: Parser, folder: Path, data: bytes) -> str:
    """Returns the outcome of the input. Raises Crashed."""
    try:
        with _bounded():
            found = parser(folder, data)
    except UsageError as error:
        if not error.message.strip() or error.exit_code != UsageError.exit_code:
            raise Crashed(parser, data, "an error without words") from error
        error.message.encode(errors="surrogateescape")
        return shape(error.message)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except FuyouError as error:
        raise Crashed(parser, data, f"exit code {error.exit_code}: {error.message}") from error
    except TooSlow as error:
        raise Crashed(parser, data, f"more than {PATIENCE:.0f} s") from error
    except BaseException as error:
        raise Crashed(parser, data, f"{type(error).__name__}: {error}") from error
    return "nothing" if found is None else "taken"


@contextmanager
def _bounded() -> Iterator[None]:
    """Limits the processor's time, because pytest's own timeout uses the clock."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def corpus_of(parser: Parser, corpus: Path) -> list[bytes]:
    """Returns the inputs that were kept, in the order of names."""
    return [path.read_bytes() for path in sorted((corpus / parser.name).glob("*")) if path.is_file()]


def name_of(data: bytes) -> str:
    return sha256(data).hexdigest()[:12]


def fuzz(parser: Parser, *, folder: Path, runs: int, seed: int, corpus: Path, keep: bool) -> Tally:
    """Runs what was kept, then as many changed inputs as make up `runs`. Raises Crashed at the first one that is wrong."""
    rng, tally = random.Random(f"{seed} {parser.name}"), Tally()
    kept, seeds = corpus_of(parser, corpus), parser.seeds()
    pool = [*seeds, *kept]
    parser.lay_out(folder)
    files = {*parser.beside, parser.file}
    began = time.perf_counter()
    for number in range(max(runs, len(pool))):
        data = pool[number] if number < len(seeds) + len(kept) else mutated(rng.choice(pool), rng, pool)
        came = outcome(parser, folder, data)
        tally.runs += 1
        tally.values += came == "taken"
        if left := {path.name for path in folder.iterdir()} - files:
            raise Crashed(parser, data, f"it left {sorted(left)} behind")
        if came not in tally.outcomes and number >= len(seeds) + len(kept):
            if len(pool) < _MOST_CHANGED:
                pool.append(data)
            if keep and len(kept) + tally.kept < MOST_KEPT and len(data) <= LARGEST_KEPT:
                _keep(corpus / parser.name, data)
                tally.kept += 1
        tally.outcomes.add(came)
    tally.seconds = time.perf_counter() - began
    return tally


def _keep(folder: Path, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name_of(data)).write_bytes(data)


# ---- changed inputs --------------------------------------------------------------------------------------------------


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
