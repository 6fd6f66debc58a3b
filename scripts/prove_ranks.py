#!/usr/bin/env python3
"""Shows that several ranks of torch.distributed end bitwise as one process: losses, norms, weights and states.

    python scripts/prove_ranks.py
    a quarter of an hour on two cores; to try it: --only llama

Every family of the tests and two mixtures, in float32 and bfloat16, on 2 ranks and on 3, with stages dealt as a run deals them
and drawn by a seed; then the cases of tests/engine/test_ranks.py on 3 ranks. Each rank is a process of one thread, joined by
gloo. Also compared: bytes between ranks, as the map of owners says, and everything else that ranks tell each other, 64 KiB a
step at most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.verdicts import Row, conclude, holds, plain_parser, say

from tests.engine.families import FAMILIES
from tests.engine.ring import Case, Workers, compare, in_dtype
from tests.engine.test_ranks import CASES

MIXTURES = ("qwen3_moe", "gpt_oss")
ASKED = "the bits of one process"


def arguments() -> argparse.Namespace:
    made = plain_parser(__doc__)
    made.add_argument("--only", default="", metavar="WORDS", help="lines whose name has these words")
    made.add_argument("--seed", type=int, default=1, help="of the owners that are drawn (1)")
    return made.parse_args()


def lines(seed: int) -> Iterator[tuple[str, Case, int]]:
    """Yields the name of a line, its case, and how many ranks it takes."""
    for family in (*FAMILIES, *MIXTURES):
        for dtype in ("float32", "bfloat16"):
            for ranks in (2, 3):
                for owners in ("deal", seed):
                    told = "dealt" if owners == "deal" else f"drawn by {seed}"
                    yield (
                        f"{family}, {dtype}, {ranks} ranks, {told}",
                        in_dtype(Case(family=family, owners=owners), dtype),
                        ranks,
                    )
    for name, case in CASES.items():
        yield f"{name}, 3 ranks", case, 3


def main() -> int:
    options, rows = arguments(), list[Row]()
    chosen = [line for line in lines(options.seed) if options.only in line[0]]
    workers: Workers | None = None
    for number, (name, case, ranks) in enumerate(chosen, start=1):
        workers, begun, why = workers or Workers(3), time.monotonic(), ""
        try:
            compare(case, workers, ranks)
        except AssertionError as error:
            why = (str(error).splitlines() or ["other numbers"])[-1][:200]
            workers.stop()  # a rank that failed is behind the others
            workers = None
        rows.append(holds(name, ASKED, why or "the same", not why))
        say(f"{number} of {len(chosen)}: {name}: {why or 'the same'}, {time.monotonic() - begun:.1f} s")
    if workers is not None:
        workers.stop()
    settings = {"seed": options.seed, "only": options.only}
    return conclude("prove_ranks", rows, results=options.results, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
