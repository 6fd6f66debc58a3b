#!/usr/bin/env python3
"""Replays power cuts from a log: no commit is lost, whichever unflushed writes the disk has kept.

    python scripts/prove_power.py --work DIR
    500 cuts of four recorded runs, about 40 minutes on two cores; the same command continues
    to try the script itself: --points 10; other runs: --run lora, qlora, int8, moe or moe-lora

Every call below the folder of a run's store is recorded, with its data. The runs are: one that commits every
step, one every second, and one striped over two folders from their beginning, and one that continues a stopped run.
Cuts are drawn in turn from all moments of the log
and from those of its commits. For each cut the folder is rebuilt as a disk could hold it (scripts/proof/disk_model.py): flushed
writes are there; others are there, missing or torn; names are certain once their folder was flushed. The real command then
continues from it to the end.

There must be an intact state at least as new as the last one that was durable at the cut, so that no run falls back behind it.
In the end the states, losses and export must be those of the recorded run, bitwise.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import power
from proof.setting import Setting, fresh, lost_row, parser, run_script
from proof.tiny_runs import ANY_LENGTH, IN_RAM, TWO_FOLDERS, UNCLIPPED, Place, ask_for_run, named, placed
from proof.verdicts import Row, holds, reported

RUNS: dict[str, tuple[dict[str, Any], int]] = {  # changes of the recipe, and the step it goes on from
    "a new run, on the ssd, clipped": ({}, 0),
    "a new run, every second step, on the ssd, clipped": ({"checkpoint.commit_every_steps": 2}, 0),
    "a new run, over two folders, clipped": (TWO_FOLDERS, 0),
    "a resumed run, in RAM": ({**IN_RAM, **UNCLIPPED, **ANY_LENGTH}, 4),
}
AT_ONCE = 25  # cuts that are kept together


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--points", type=int, default=500, help="cuts in all")
    options.add_argument("--steps", type=int, default=power.STEPS, help="of the recorded runs")
    options.add_argument("--seed", type=int, default=1)
    ask_for_run(options)
    asked = options.parse_args()
    if asked.steps <= (least := max(resumed_at for _, resumed_at in RUNS.values())):
        options.error(f"--steps: more than {least}, from where a recorded run is resumed")
    return asked


def cut(setting: Setting, options: argparse.Namespace, place: Place, what: str, points: int) -> dict[str, Any]:
    """Makes the cuts of one recorded run, some at a time."""
    changes, resumed_at = RUNS[what]
    name = f"run{[*RUNS].index(what)}"
    recording = cache(lambda: power.recorded(place, name, changes, steps=options.steps, resumed_at=resumed_at))

    def some(count: int, seed: int) -> power.Cuts:
        return power.cut_power(place, recording(), points=count, seed=seed)

    title = named(f"{what}, {options.steps} steps, cuts", options.run)
    return setting.in_parts(title, points, AT_ONCE, options.seed, some, power.Cuts())


def judged(what: str, result: dict[str, Any], points: int) -> list[Row]:
    if result.get("failed"):
        return [lost_row(what, "nothing lost", result)]
    text = (
        f"{result['written']} unflushed writes were there, {result['torn']} torn, {result['missing']} missing; "
        f"{result['names_missing']} changes of names missing; {result['newer']} disks held more than was promised, "
        f"{result['from_nothing']} no state yet"
    )
    made, within = result["points"], result["within"]
    return [
        holds(f"{what}: cuts, after which nothing durable was lost", f"{points}", f"{made}", made >= points, values=result),
        reported(f"{what}: cuts inside a commit", f"{within}", note=text),
    ]


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows: list[Row] = []
    with placed(fresh(setting.work / "power"), run=options.run) as place:
        for number, what in enumerate(RUNS):
            points = options.points // len(RUNS) + (number < options.points % len(RUNS))
            rows += judged(what, cut(setting, options, place, what, points), points)
    settings = {
        "points": options.points,
        "steps": options.steps,
        "seed": options.seed,
        "model": place.model.name,
        "run": options.run,
    }
    return setting.conclude(named(f"prove_power-{options.seed}", options.run), rows, settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
