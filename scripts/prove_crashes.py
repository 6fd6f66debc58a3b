#!/usr/bin/env python3
"""Killed again and again: runs, loads and exports end as those that nobody killed.

    python scripts/prove_crashes.py --work DIR
    200 kills of each kind, about an hour on two cores; interrupted, the same command goes on with the kind it was at
    trying the script itself: --kills 8

A run of 60 tiny steps that commits every one is killed (SIGKILL) at moments drawn from its first byte in the store to its end,
gone on with by the same command, killed again. After each kill the newest manifest must be at least as new as the last whose
folder had been flushed by then, as a log of the process's own calls says; each run that comes to its end must have left the
states, losses and export of a run nobody killed, to the last bit. At least three kills in four have to fall between a commit's
or an update's first write and the flush of the folder that names it. Loads are killed until step 0 is committed, exports from
their first file to their end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import crashes
from proof.crashes import Lost, Place, Tally, placed
from proof.report import Row, conclude, holds
from proof.runs import fresh
from proof.setting import Setting, parser, run_script

WITHIN = 0.75  # of the kills, inside a commit or an update
EACH = 10  # kills of one run


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=200, help="of each kind")
    options.add_argument("--seed", type=int, default=1)
    return options.parse_args()


def kinds(place: Place, *, kills: int, seed: int) -> dict[str, Callable[[], Tally]]:
    """What is killed, by name."""

    def of_runs(name: str) -> Callable[[], Tally]:
        return lambda: crashes.kill_runs(place, name, crashes.VARIANTS[name], kills=kills, each=EACH, seed=seed)

    return {
        **{name: of_runs(name) for name in crashes.VARIANTS},
        "loads": lambda: crashes.kill_loads(place, kills=kills, seed=seed),
        "exports": lambda: crashes.kill_exports(place, kills=kills, seed=seed),
    }


def counted(once: Callable[[], Tally]) -> dict[str, Any]:
    """The tally as it is kept; what was lost makes it a failure."""
    try:
        tally = once()
    except Lost as error:
        return {"failed": str(error)}
    return {"kills": tally.kills, "within": tally.within, "runs": tally.runs, "steps": tally.steps}


def judged(what: str, result: dict[str, Any], *, kills: int) -> list[Row]:
    if result.get("failed"):
        return [holds(what, "nothing lost", "lost", False, note=str(result["failed"])[:2000])]
    made, runs, within = result["kills"], result["runs"], result["within"]
    rows = [
        holds(
            f"{what}: kills, after which nothing committed was lost", f"{kills}", f"{made}", made >= kills,
            note=f"{runs} whole runs compared, all bitwise as one nobody killed", values=result,
        ),
    ]  # fmt: skip
    if what in crashes.VARIANTS:
        share = f"{within} ({within / made:.0%})" if made else "none"
        asked = f">= {WITHIN:.0%} of {made}"
        rows.append(holds(f"{what}: kills inside a commit or an update", asked, share, within >= WITHIN * made > 0))
    return rows


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows: list[Row] = []
    with placed(fresh(setting.work / "crashes")) as place:
        for what, once in kinds(place, kills=options.kills, seed=options.seed).items():
            key = f"{what}, {options.kills} kills, seed {options.seed}"
            result = setting.measure(key, lambda once=once: counted(once))  # type: ignore[misc]
            rows += judged(what, result, kills=options.kills)
    settings = {"kills": options.kills, "seed": options.seed, "each": EACH, "steps": crashes.STEPS, "model": "1m"}
    return conclude(f"prove_crashes-{options.seed}", rows, results=setting.results, settings=settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
