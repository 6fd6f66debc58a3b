#!/usr/bin/env python3
"""Feeds changed files to everything in fuyou that reads a file of somebody else: recipes, configurations, safetensors headers
and their index, tokenizer files, data, manifests, part and plan files, profiles of machines.

    python scripts/fuzz_parsers.py [--runs 1000000] [--seed 0] [--parsers manifest index ...] [--results DIR]
    needs no GPU and no model; about ten minutes

An input is a real file with one to three changes: of its bytes, its lines, or its JSON. The reader must take it, or refuse it
with one error and exit code 2. The first input that ends otherwise is saved and ends the script with exit code 1. An input with
a new kind of outcome is kept in the corpus, which runs first. The same seed and corpus make the same inputs.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.fuzz import Crashed, Tally, fuzz, name_of
from proof.parsers import HEAVY, LIGHT, Parser
from proof.verdicts import ROOT, Row, conclude, holds, plain_parser, reported, say, show_command

_MEMORY = Path("/dev/shm")  # a file on a disk takes ten times as long to write as to read
PARSERS = {parser.name: parser for parser in (*LIGHT, *HEAVY)}


def shares(parsers: Sequence[Parser], runs: int) -> dict[str, int]:
    """Divides the runs among the parsers; together they get at least as many as asked for."""
    whole = sum(parser.share for parser in parsers)
    return {parser.name: -int(-runs * parser.share // whole) for parser in parsers}


def row(name: str, tally: Tally) -> Row:
    rate = tally.runs / tally.seconds if tally.seconds else 0.0
    refused = f"{tally.runs - tally.values:,} refused, {len(tally.outcomes)} outcomes, {tally.kept} inputs kept"
    values = {**asdict(tally), "outcomes": len(tally.outcomes)}
    return reported(name, f"{tally.runs:,} runs, {rate:,.0f} a second", note=refused, values=values)


def rows(parsers: Sequence[Parser], *, runs: int, seed: int, corpus: Path) -> Iterator[Row]:
    """Yields a row per parser when it is done, then one for all."""
    began, total, wanted = time.perf_counter(), 0, shares(parsers, runs)
    what, asked = "executions without a crash", f">= {runs:,}"
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as scratch:
        nowhere = Path(scratch) / "nowhere"  # a parser that writes where it stands is found out
        nowhere.mkdir()
        for parser in parsers:
            try:
                with chdir(nowhere):
                    folder = Path(scratch) / parser.name
                    tally = fuzz(parser, folder=folder, runs=wanted[parser.name], seed=seed, corpus=corpus, keep=True)
                if left := [path.name for path in nowhere.iterdir()]:
                    raise Crashed(parser, b"", f"it left {left} where it ran")
            except Crashed as error:
                yield holds(what, asked, f"{total:,}", False, note=f"{error}; the input is {_saved(error, corpus)}")
                return
            total += tally.runs
            yield row(parser.name, tally)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    note = f"{time.perf_counter() - began:.0f} s, {peak:,.0f} MiB at most"
    yield holds(what, asked, f"{total:,}", total >= runs, note=note)


def _saved(error: Crashed, corpus: Path) -> Path:
    """Saves the input beside those that were kept, so that it runs first from now on. Returns its path."""
    path = corpus / error.parser.name / f"crash-{name_of(error.data)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(error.data)
    return path


def main(words: Sequence[str] | None = None) -> int:
    options = plain_parser(__doc__)
    options.add_argument("--runs", type=int, default=1_000_000, help="executions of all parsers (default: %(default)s)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--corpus", type=Path, default=ROOT / "tests" / "corpus", help="inputs kept (default: tests/corpus)")
    options.add_argument(
        "--parsers", nargs="+", choices=PARSERS, default=list(PARSERS), metavar="NAME", help=", ".join(PARSERS)
    )
    asked = options.parse_args(words)
    show_command("scripts/fuzz_parsers.py", words)
    found = []
    for one in rows([PARSERS[name] for name in asked.parsers], runs=asked.runs, seed=asked.seed, corpus=asked.corpus.resolve()):
        say(f"{one.what}: {one.measured}; {one.note}")
        found.append(one)
    settings = {"runs": asked.runs, "seed": asked.seed, "parsers": asked.parsers}
    return conclude(f"fuzz_parsers-{asked.seed}", found, results=asked.results, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
