#!/usr/bin/env python3
"""Everything that reads a file somebody else may have written, beside inputs that nobody meant: recipes, configurations,
safetensors headers and their index, tokenizer files, data, manifests, part and plan files, profiles of machines.

    python scripts/fuzz_parsers.py [--runs 1000000] [--seed 0] [--parsers manifest index ...]
    needs no GPU and no model; ten minutes or so

An input is a real file with one to three changes: of its bytes, its lines, or the JSON that it is. It must be taken, or refused
with one error and exit code 2. The first that is not ends the script with exit code 1, and is saved. What comes to an outcome
of a new kind is kept in the corpus, which is run first; the same seed and corpus make the same inputs.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.fuzz import Crashed, Tally, fuzz, name_of
from proof.parsers import HEAVY, LIGHT, Parser
from proof.report import ROOT

PARSERS = {parser.name: parser for parser in (*LIGHT, *HEAVY)}


def shares(parsers: Sequence[Parser], runs: int) -> dict[str, int]:
    """How many of the runs each gets; together no fewer than asked for."""
    whole = sum(parser.share for parser in parsers)
    return {parser.name: -int(-runs * parser.share // whole) for parser in parsers}


def line(name: str, tally: Tally) -> str:
    rate = tally.runs / tally.seconds if tally.seconds else 0.0
    refused = f"{tally.runs - tally.values:>9,} refused, {len(tally.outcomes):>4} outcomes, {tally.kept:>2} kept"
    return f"{name:<18} {tally.runs:>9,} runs {rate:>8,.0f} /s {refused}"


def run(parsers: Sequence[Parser], *, runs: int, seed: int, corpus: Path) -> int:
    """The exit code."""
    began, total, wanted = time.perf_counter(), 0, shares(parsers, runs)
    with tempfile.TemporaryDirectory() as scratch:
        nowhere = Path(scratch) / "nowhere"  # a parser that writes where it stands is found out
        nowhere.mkdir()
        with chdir(nowhere):
            for parser in parsers:
                folder = Path(scratch) / parser.name
                try:
                    tally = fuzz(parser, folder=folder, runs=wanted[parser.name], seed=seed, corpus=corpus, keep=True)
                except Crashed as error:
                    print(f"{error}\nthe input is {_saved(error, corpus)}")
                    return 1
                total += tally.runs
                print(line(parser.name, tally), flush=True)
                if left := [path.name for path in nowhere.iterdir()]:
                    print(f"{parser.name}: it left {left} where it ran")
                    return 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{total:,} executions in {time.perf_counter() - began:.0f} s, 0 crashes, seed {seed}; memory {peak:,.0f} MiB at most"
    )
    return 0


def _saved(error: Crashed, corpus: Path) -> Path:
    """Where the input is now: beside what was kept, so that it is run first from now on."""
    path = corpus / error.parser.name / f"crash-{name_of(error.data)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(error.data)
    return path


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=1_000_000, help="executions of all parsers (default: %(default)s)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--corpus", type=Path, default=ROOT / "tests" / "corpus", help="inputs kept (default: tests/corpus)")
    options.add_argument(
        "--parsers", nargs="+", choices=PARSERS, default=list(PARSERS), metavar="NAME", help=", ".join(PARSERS)
    )
    asked = options.parse_args(words)
    return run([PARSERS[name] for name in asked.parsers], runs=asked.runs, seed=asked.seed, corpus=asked.corpus.resolve())


if __name__ == "__main__":
    sys.exit(main())
