#!/usr/bin/env python3
"""Kills runs, loads and exports again and again: they end like those that nobody killed.

    python scripts/prove_crashes.py --work DIR
    200 kills of each kind, one to two hours on two cores; the same command continues where it was
    to try the script itself: --kills 8; only kinds whose names begin so: --kinds io_uring
    runs that train an adapter, have int8 states or train a mixture: --run lora, qlora, int8, moe, moe-lora

A run of 60 tiny steps (`--steps`) commits every step. It is killed (SIGKILL) at random moments between its first byte in the
store and its end. Most kills wait until the log shows the next commit or update. The same command continues the run, and it is
killed again.

After each kill the newest manifest must be at least as new as the last one whose folder had been flushed by then, according to
a log of the process's calls. Each run that comes to its end must have the states, losses and export of a run nobody killed, to
the last bit. None may find its newest state damaged. Of each kind of run at least three kills in four must fall between a
commit's or an update's first write and the flush of the folder that names it. Loads are killed until step 0 is committed,
exports from their first file to their end.

The log does not see the I/O of io_uring. Runs with it are killed at moments drawn in the same way. What was committed is then
what the manifest on the disk says just before the kill, and every extent that is named after the kill must be as it was
written.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import crashes
from proof.crashes import VARIANTS, Tally, is_unseen, why_not
from proof.setting import Setting, fresh, lost_row, parser, run_script
from proof.tiny_runs import Place, ask_for_run, named, placed
from proof.verdicts import Row, holds, missing, reported

WITHIN = 0.75  # of the kills, inside a commit or an update
EACH = 10  # kills of one run
AT_ONCE = 50  # kills that are kept together
LOADS, EXPORTS = "loads", "exports"
KINDS = (*VARIANTS, LOADS, EXPORTS)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=200, help="of each kind")
    options.add_argument("--steps", type=int, default=crashes.STEPS, help="of each run")
    options.add_argument("--kinds", nargs="+", default=[""], help="only those whose names begin so")
    options.add_argument("--seed", type=int, default=1)
    ask_for_run(options)
    return options.parse_args()


def killed(setting: Setting, options: argparse.Namespace, place: Place, what: str) -> dict[str, Any]:
    """Makes the kills of one kind, some at a time."""
    steps = options.steps
    whole = cache(lambda: crashes.reference(place, name, VARIANTS[what], steps=steps))  # only where something is left to do
    name = f"run{KINDS.index(what)}"

    def some(kills: int, seed: int) -> Tally:
        if what in (LOADS, EXPORTS):
            kill = crashes.kill_loads if what == LOADS else crashes.kill_exports
            return kill(place, kills=kills, seed=seed)
        return crashes.kill_runs(place, name, VARIANTS[what], whole(), kills=kills, each=EACH, seed=seed, steps=steps)

    title = named(f"{what}, {steps} steps, kills", options.run)
    return setting.in_parts(title, options.kills, AT_ONCE, options.seed, some, Tally(), longest="held")


def judged(what: str, result: dict[str, Any], *, kills: int) -> list[Row]:
    if result.get("failed"):
        return [lost_row(what, "nothing lost", result)]
    made, runs = result["kills"], result["runs"]
    rows = [
        holds(
            f"{what}: kills, after which nothing committed was lost", f"{kills}", f"{made}", made >= kills,
            note=f"{runs} whole runs compared, all bitwise as one nobody killed", values=result,
        ),
    ]  # fmt: skip
    return rows if what in (LOADS, EXPORTS) else [*rows, _judged_within(what, result)]


def _judged_within(what: str, result: dict[str, Any]) -> Row:
    made, within = result["kills"], result["within"]
    measured = f"{within} ({within / made:.0%})" if made else "none"
    if not is_unseen(VARIANTS[what]):
        least = math.ceil(WITHIN * made)
        return holds(f"{what}: kills inside a commit or an update", f">= {least} of {made}", measured, within >= least > 0)
    note = f"a killed run's store was locked for {result['held']:.3f} s more at most"
    return reported(f"{what}: kills known to be inside an update, the state before being written over", measured, note=note)


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows: list[Row] = []
    asked = [what for what in KINDS if what.startswith(tuple(options.kinds))]
    with placed(fresh(setting.work / "crashes"), run=options.run) as place:
        for what in asked:
            if refusal := why_not(VARIANTS.get(what, {}), place.run):
                rows.append(missing(what, f"{options.kills} kills", refusal))
                continue
            rows += judged(what, killed(setting, options, place, what), kills=options.kills)
    settings = {"kills": options.kills, "kinds": asked, "seed": options.seed, "each": EACH, "steps": options.steps}
    name = named(f"prove_crashes-{options.seed}", options.run) + ("" if len(asked) == len(KINDS) else "-some")
    return setting.conclude(name, rows, {**settings, "model": place.model.name, "run": options.run})


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
