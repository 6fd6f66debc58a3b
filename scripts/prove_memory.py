#!/usr/bin/env python3
"""Trains a model larger than memory: import, load, training and export inside a memory cgroup, beside what was predicted.

    sudo python scripts/prove_memory.py --work DIR --data gsm8k/train.jsonl
    the 1.1b shape: 40 GB in DIR, about an hour on two cores; the same command continues
    to try the script itself: --shape 50m --steps 2 --budgets 768MiB 1GiB --data FILE (a minute or two)

The run with the first budget trains `--steps` steps of 8,192 tokens with clipping 1.0 and exports; the others train three. Each
runs in a memory cgroup of exactly its budget. Memory is the RssAnon of all its processes, sampled every 20 ms, plus what the
kernel holds for them. The prediction is what that run wrote into its log before its first step.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import Case, our_run
from proof.setting import NO_PEERS, Setting, parser, run_script, size
from proof.verdicts import REPORTED, Row, first_line, holds, missing, reported

from fuyou_cli.core.units import GiB, gib

SHORT_STEPS = 3
TIGHTNESS = 1.10  # predicted at most this times measured
SMALL = ("50m", 3 * GiB, 12 * GiB)  # shape, a budget that holds everything, and four times that
UNTOUCHED = 1.02


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--budgets", type=size, nargs="+", default=[2 * GiB, 3 * GiB, 4 * GiB, 6 * GiB])
    options.add_argument("--steps", type=int, default=10, help="of the first budget's run")
    options.add_argument("--skip-small", action="store_true", help="without the small model with more than it needs")
    return options.parse_args()


def whole_job(case: Case, result: dict) -> Row:
    """Does everything in one group of exactly the budget; nothing may be killed."""
    what = f"{case.shape}: import, load, {case.steps} steps, export inside {gib(case.budget)}"
    asked = f"not killed, {case.steps} steps, exported"
    if not result["enforced"]:
        return missing(what, asked, f"no limit could be set: {result['not_enforced_because']}")
    done = len(result["steps"])
    exported = result["exported_parameters"] or 0
    parameters = result["plan"].get("parameters", 0)
    ok = not result.get("failed") and result["killed"] == 0 and done == case.steps and exported == parameters > 0
    losses = [step["loss"] for step in result["steps"]]
    note = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, " if losses else ""
    note += f"{result['seconds']:.0f} s in all; weights and states alone are {gib(12 * parameters)}"
    if result.get("failed"):
        note = str(result["failed"]).replace("\n", "\n    ")
    measured = f"exit {result['exit']}, {result['killed']} killed, {done} steps, {exported:,} parameters exported"
    values = {"losses": losses, "peak_with_files": result["peak_with_files"], "limit": case.limit}
    return holds(what, asked, measured, ok, note=note, values=values)


def predicted_rows(case: Case, result: dict) -> list[Row]:
    """Checks measured <= predicted <= 1.10 x measured."""
    what = f"{case.shape} at {gib(case.budget)}, {case.steps} steps"
    asked = f"measured <= predicted <= {TIGHTNESS:g} x measured"
    predicted = result["plan"].get("predicted_cpu_peak")
    if predicted is None:
        return [holds(what, asked, "no plan in the log", False, note=first_line(result.get("failed", "")))]
    peak = result["peak"]
    measured = peak["total"]
    phases = ", ".join(f"{name} {gib(value)}" for name, value in result["peak_by_phase"].items())
    note = (
        f"peak while {peak['phase']}ing, {peak['processes']} process(es): {gib(peak['anonymous'])} anonymous + "
        f"{gib(peak['kernel'])} kernel; by phase: {phases}; {result['samples']} samples"
    )
    if result.get("failed"):
        note = f"{first_line(result['failed'])}; {note}"
    ok = measured <= predicted <= TIGHTNESS * measured and not result.get("failed")
    text = f"{gib(measured)}, predicted {gib(predicted)} ({predicted / max(measured, 1):.3f}x)"
    values = {
        "measured": measured, "predicted": predicted, "budget": case.budget, "arena": result["plan"].get("arena"), "peak": peak,
        "peak_by_phase": result["peak_by_phase"], "step_seconds": [step["seconds"] for step in result["steps"]],
    }  # fmt: skip
    return [holds(what, asked, text, ok, note=note, values=values)]


def untouched_rows(setting: Setting) -> list[Row]:
    """Runs a small model with all the memory it can use, and with four times that."""
    shape, enough, huge = SMALL
    peaks, rows = [], []
    for budget in (enough, huge):
        case = Case(shape=shape, budget=budget, steps=SHORT_STEPS, rows=4, micro=2, clip=1.0, watch_memory=True)
        result = our_run(setting, case)
        # How tight the prediction is, is asked of the large model; of this one, that it does not grow.
        rows += [replace(row, asked="-", verdict=REPORTED) for row in predicted_rows(case, result)]
        peaks.append(result["peak"]["total"])
    what = f"{shape}: {gib(huge)} instead of {gib(enough)} (budget that buys nothing)"
    ratio = peaks[1] / max(peaks[0], 1)
    ok = 0 < ratio <= UNTOUCHED and peaks[1] < huge / 2
    text = f"{ratio:.3f}x ({gib(peaks[0])} -> {gib(peaks[1])})"
    return [*rows, holds(what, f"peak <= {UNTOUCHED:g}x", text, ok, values={"peaks": peaks})]


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows: list[Row] = []
    for number, budget in enumerate(options.budgets):
        case = Case(
            shape=setting.shape, budget=budget, micro=setting.micro, clip=1.0, export=number == 0, limit=budget,
            watch_memory=True, steps=options.steps if number == 0 else min(options.steps, SHORT_STEPS),
        )  # fmt: skip
        result = our_run(setting, case)
        if number == 0:
            rows.append(whole_job(case, result))
        rows += predicted_rows(case, result)
        if result["steps"]:
            seconds = result["steps"][-1]["seconds"]
            rows.append(reported(f"{setting.shape} at {gib(budget)}: step", f"{seconds:.1f} s"))
    if not options.skip_small:
        rows += untouched_rows(setting)
    settings = {**setting.described(), "budgets": options.budgets, "steps": options.steps}
    return setting.conclude(f"prove_memory-{setting.shape}", rows, settings, NO_PEERS if options.peers else [])


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
