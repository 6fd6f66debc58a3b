"""Feeds parsers with changed inputs. Every input must give a value, or one error with exit code 2 and a message. Nothing may be
left behind, and none may take seconds.

An input with a new outcome (an error of another shape, without names and numbers) is kept and changed further. So the corpus is
one small file for each thing that can be wrong.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import FrameType

from fuyou_cli.core.errors import FuyouError, UsageError

from .mutate import mutated
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
