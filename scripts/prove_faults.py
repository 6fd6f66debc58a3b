#!/usr/bin/env python3
"""Makes every call on a run's files fail in turn: no hang, no wrong byte, nothing leaked, every error named.

    python scripts/prove_faults.py --work DIR --every 1
    many hours on two cores; --every 20 samples every twentieth point; the same command continues
    to try the script itself: --every 200 --kinds eio short; other runs: --run lora, qlora, int8, moe or moe-lora

For n = 1, 2, 3 and on, the n-th call that a kind of fault applies to fails, once or from then on, until a run meets no fault.
This is done while a model is loaded, in three steps that are committed, in a resumed run, and in an export. The kinds are: EIO,
a full disk, a read-only remount, a call to be tried again, an interrupted one, a part done, a bit flipped in what was read, up
to 10 ms more for every call (so that they end in another order), and a wall clock that is in turn a year ahead and a year
behind.

A run with a fault ends well with the right bytes, or with an error that says what, where and what to do. Then the same command
ends with the right bytes (scripts/proof/faults.py). Flips in a checkpoint or a log that has no checksum are counted apart. Runs
that train an adapter read the checkpoint to their end. An interrupted call is interrupted 500 times at most, because Python
retries without end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import faults
from proof.faults import FROM_THEN_ON, KINDS, ONCE, SCENARIOS, How
from proof.setting import Setting, fresh, lost_row, parser, run_script
from proof.tiny_runs import Place, ask_for_run, named, placed
from proof.verdicts import Row, holds, missing

ASKED = "0 hangs, 0 wrong bytes, 0 leaks, errors named"


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--every", type=int, default=20, help="point of the sweep: every so many calls")
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    options.add_argument("--seed", type=int, default=1)
    ask_for_run(options)
    return options.parse_args()


def struck(setting: Setting, options: argparse.Namespace, place: Place, name: str) -> Iterator[Row]:
    """Tries every kind of fault in one scenario."""
    scenario = cache(lambda: faults.scenario(place, name))  # only where something is left to do

    def sweep(kind: str, how: How) -> dict[str, Any]:
        return faults.sweep(place, scenario(), kind, how, every=options.every, seed=options.seed).as_values()

    for kind, how in product(options.kinds, (ONCE, FROM_THEN_ON)):
        key = named(f"{name}, {kind} {how}, every {options.every}, seed {options.seed}", options.run)
        yield judged(f"{name}: {kind} {how}", setting.attempt(key, partial(sweep, kind, how)))


def judged(what: str, result: dict[str, Any]) -> Row:
    if result.get("failed"):  # undisturbed as well
        return lost_row(what, ASKED, result)
    if not result["points"]:
        return missing(what, ASKED, "0 points: fewer calls than --every")
    count = result["problems_count"]
    note = f"{result['survived']} ended well, {result['refused']} with an error"
    note += f", {result['unsummed']} in what has no sum" if result["unsummed"] else ""
    note += "".join(f"\n    {problem}" for problem in result["problems"])
    return holds(what, ASKED, f"{result['points']} points, {count} problems", not count, note=note, values=result)


def prove(setting: Setting, options: argparse.Namespace) -> int:
    work = fresh(setting.work / "faults")
    with placed(work, under=work / "faults", run=options.run) as place:
        rows = [row for name in options.scenarios for row in struck(setting, options, place, name)]
    points, problems = (sum(row.values.get(name, 0) for row in rows) for name in ("points", "problems_count"))
    rows.append(holds("all of it", "0 problems", f"{points} points, {problems} problems", points > 0 and not problems))
    settings = {"every": options.every, "kinds": options.kinds, "scenarios": options.scenarios, "seed": options.seed}
    name = named(f"prove_faults-every-{options.every}", options.run)
    return setting.conclude(name, rows, {**settings, "model": place.model.name, "run": options.run})


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
