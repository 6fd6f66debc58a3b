#!/usr/bin/env python3
"""Compares plans with runs: time, memory and bytes of a step, on combinations drawn by a seed.

    python scripts/prove_plan.py --seed 7 --work DIR --data gsm8k/train.jsonl
    12 combinations up to 1.1b: 60 GB in DIR, an hour and a half on two quiet cores; the same command continues
    to try the script itself: --shapes 50m --combinations 2

Every combination is a model (50M to 1.1B), a dtype, a budget between 2 and 8 GiB, everything on the ssd or mixed, clipping on
or off, and a disk held at 0.3, 0.6 or 0.9 GB/s each way. `fuyou bench RECIPE` makes the profile first, under the same limits;
earlier profiles are not used. If the machine was faster or slower during the run than during the bench (scripts/proof/watch.py
looks), both are done again. A combination without such a try is not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import Case, counted, our_run
from proof.setting import SHAPES, Setting, parser, run_script, spread_evenly
from proof.verdicts import Row, at_most, holds, unless_noisy

from fuyou_cli.core.units import GiB, gib

RATES = (300_000_000, 600_000_000, 900_000_000)
BUDGETS = (2, 3, 4, 6, 8)  # GiB
ROWS = (2, 4, 8, 16)  # of 512 tokens
LEAST = {("1.1b", "float32"): 4, ("350m", "float32"): 2}  # GiB that a run needs: more than the smallest budget
STEPS, WARM_UP = 7, 3  # until updates that wait have moved what all later steps move (training/reporting.settling_steps)
MEDIAN, WORST, TIGHTNESS, BYTES = 0.10, 0.20, 1.05, 0.01


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--combinations", type=int, default=12)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=["50m", "125m", "350m", "1.1b"])
    return options.parse_args()


def drawn(seed: int, count: int, shapes: list[str]) -> list[Case]:
    """Draws the combinations of a seed. Each value comes about equally often."""
    values = (shapes, ["bfloat16", "bfloat16", "float32"], BUDGETS, [True, False], [None, 1.0], RATES, ROWS)
    columns = spread_evenly(random.Random(seed), count, *values)
    cases = []
    for number, (shape, dtype, budget, on_ssd, clip, rate, rows) in enumerate(zip(*columns, strict=True)):
        budget = max(budget, LEAST.get((shape, dtype), 0)) * GiB
        cases.append(
            Case(
                shape=shape, budget=budget, steps=STEPS, rows=rows, micro=min(2, rows), clip=clip, all_on_ssd=on_ssd,
                compute=dtype, profiled=True, throttle=(rate, rate), watch_memory=True, turn=number, warm_up=WARM_UP,
                timed=True, paced=True,
            )
        )  # fmt: skip
    return cases


def compared(case: Case, result: dict) -> tuple[float, list[Row]]:
    """Returns the error of the time, and a line for each prediction."""
    plan, steps = result["plan"], result["steps"][WARM_UP:-1]  # the last has no next to fetch for
    seconds = statistics.median(step["seconds"] for step in steps)
    spread = max(step["seconds"] for step in steps) / min(step["seconds"] for step in steps)
    error = plan["predicted_step_seconds"] / seconds - 1
    what = (
        f"{case.turn + 1}: {case.shape} {case.compute}, {gib(case.budget)}, {case.rows} rows, "
        f"{'all on ssd' if case.all_on_ssd else 'mixed'}, {'clipped' if case.clip else 'unclipped'}, "
        f"{case.throttle[0] / 1e9:g} GB/s"
    )
    note = f"{seconds:.2f} s (spread {spread:.2f}x), predicted {plan['predicted_step_seconds']:.2f} s; {plan.get('choice', '')}"
    values = {
        "seconds": [step["seconds"] for step in steps],
        "plan": {key: value for key, value in plan.items() if key != "export"},  # no paths of the machine
        "stalls": steps[-1]["stalls"],
        "busy": steps[-1]["busy"],
        "machine": result["machine"],
    }
    time = unless_noisy(at_most(f"{what}: error of the step's time", abs(error), WORST, note=note, values=values), [result])
    measured, predicted = result["peak"]["total"], plan["predicted_cpu_peak"]
    memory = holds(
        f"{what}: memory", f"measured <= predicted <= {TIGHTNESS:g}x", f"{gib(measured)}, predicted {gib(predicted)}",
        measured <= predicted <= TIGHTNESS * measured, note=f"{predicted / measured:.3f}x",
    )  # fmt: skip
    by = counted(result)
    planned, moved = by["plan"], by["daemon"]
    off = max(abs(m - p) / p if p else float(m > 0) for m, p in zip(moved, planned, strict=True))
    traffic = at_most(f"{what}: error of the store's bytes", off, BYTES, note=f"{moved[0] / 1e9:.2f} + {moved[1] / 1e9:.2f} GB")
    return error, [time, memory, traffic]


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows: list[Row] = []
    errors: list[float] = []
    for case in drawn(options.seed, options.combinations, options.shapes):
        result = our_run(setting, case)
        if result.get("failed"):
            rows.append(holds(f"{case.key}", "runs", "failed", False, note=str(result["failed"])))
            continue
        error, lines = compared(case, result)
        errors += [error] * (not result["noisy"])
        rows += lines
    if errors:
        median = statistics.median(abs(error) for error in errors)
        rows.append(at_most(f"median error of the time over {len(errors)} combinations", median, MEDIAN))
    settings = {"seed": options.seed, "combinations": options.combinations, "shapes": options.shapes, "text": setting.text_name}
    return setting.conclude(f"prove_plan-{options.seed}", rows, settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
