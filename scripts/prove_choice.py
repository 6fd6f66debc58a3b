#!/usr/bin/env python3
"""Measures the chosen plan and ten others: is there a faster one?

    sudo python scripts/prove_choice.py --seed 7 --work DIR --data gsm8k/train.jsonl
    4 combinations up to 350m: 30 GB in DIR, two to three hours on two quiet cores; the same command continues
    to try the script itself: --shapes 50m --combinations 1 --turns 1

A combination is a model of at most 350M, a dtype, a budget that does not hold all of it, clipping, and a disk held at 0.3, 0.6
or 0.9 GB/s each way. `fuyou bench RECIPE` measures the machine under these limits. Then the planner's plan and ten others are
made (scripts/proof/alternatives.py says which).

First each plan runs once; the chosen one runs before, between and after five others. Then the two fastest others run again
`--turns` times, with the chosen plan before and after each. One turn is not enough: of ten equal plans one would seem the
fastest by chance, and the machine's speed changes. The result is the chosen plan's time over that of the run between its two,
as the median of all turns.

A plan is run as its candidate (scripts/proof/forced_plan.py): a run places it again in the memory that its own process leaves.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import Case, child_environment, kept_profiles, limited, our_run, profile, write_recipe
from proof.setting import RunFailed, Setting, parser, run_script, spread_evenly
from proof.verdicts import ROOT, Row, at_most, holds, reported, say, unless_noisy

from fuyou_cli.core.units import MiB, gib

RATES = (300_000_000, 600_000_000, 900_000_000)
BUDGETS = {"50m": (768, 1024), "125m": (1280, 1792), "350m": (2048, 3072)}  # MiB: part of it must stay on the ssd
FLOAT32 = 1.5  # times the budget
ROWS = (4, 8)  # of 512 tokens
STEPS, WARM_UP = 6, 3  # until updates that wait have moved what all later steps move (training/reporting.settling_steps)
NEAR = 1.05
OTHERS = 10
PARTS = 2  # the others' first runs, the chosen plan's between them
FINALISTS = 2


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--combinations", type=int, default=4)
    options.add_argument("--turns", type=int, default=3, help="of the fastest others, beside the chosen plan")
    options.add_argument("--shapes", nargs="+", choices=list(BUDGETS), default=["50m", "125m", "350m"])
    return options.parse_args()


def drawn(seed: int, count: int, shapes: list[str]) -> list[Case]:
    """Draws the combinations of a seed. Every shape comes about equally often; one in four is float32, one clips."""
    draw = random.Random(seed)
    columns = spread_evenly(draw, count, shapes, ["bfloat16"] * 3 + ["float32"], [None, None, None, 1.0], RATES)
    cases = []
    for shape, dtype, clip, rate in zip(*columns, strict=True):
        budget = int(draw.choice(BUDGETS[shape]) * (FLOAT32 if dtype == "float32" else 1)) * MiB
        cases.append(
            Case(
                shape=shape, budget=budget, steps=STEPS, rows=draw.choice(ROWS), micro=None, clip=clip, compute=dtype,
                throttle=(rate, rate), warm_up=WARM_UP, timed=True, paced=True,
            )
        )  # fmt: skip
    return cases


def alternatives(setting: Setting, case: Case, seed: int) -> tuple[list[dict[str, Any]], Case]:
    """Returns the plans of a case, the chosen one first, and the case on the machine as it was measured for them."""

    def once() -> dict[str, Any]:
        recipe, out = write_recipe(setting, case), setting.work / "alternatives.json"
        script = ROOT / "scripts" / "proof" / "alternatives.py"
        command = [sys.executable, str(script), "--recipe", str(recipe), "--seed", str(seed), "--out", str(out)]
        with limited(setting.work, memory=None, throttle=case.throttle) as (held, _):
            measured = profile(setting, recipe, held, case)
            kept = kept_profiles(measured)
        environment = child_environment() | measured
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RunFailed(f"{case.key}: no plans: {done.stderr.strip()}")
        return {"plans": json.loads(out.read_text(encoding="utf-8")), "profiles": kept}

    found = setting.measure(f"plans of seed {seed}, {case.key}", once)
    return found["plans"], replace(case, profiles=found["profiles"])


class Runs:
    """Runs the plans of a case. The chosen one is number 0."""

    def __init__(self, setting: Setting, case: Case, plans: list[dict[str, Any]]) -> None:
        self._setting, self._case, self._plans = setting, case, plans
        self.results: list[list[dict[str, Any]]] = [[] for _ in plans]

    def run(self, number: int) -> float:
        """Runs the plan once more. Returns seconds of a step."""
        plan, done = self._plans[number], self.results[number]
        micro = f"train.micro_batch_size={plan['micro']}"
        its = replace(self._case, plan=plan["plan"], overrides=(*plan["overrides"], micro), turn=len(done))
        done.append(our_run(self._setting, its))
        return statistics.median(seconds_of(done[-1:]))

    def first(self) -> list[int]:
        """Runs every plan once. Orders the others by the work that the machine could have done meanwhile, the fastest first."""
        others = list(range(1, len(self._plans)))
        for part in range(PARTS):
            self.run(0)
            for number in others[part::PARTS]:
                self.run(number)
        self.run(0)
        return sorted(others, key=lambda number: self._work(self.results[number][0]))

    def _work(self, result: dict[str, Any]) -> float:
        if not result["speed"]:
            raise RunFailed("nobody looked at the machine's speed during a run: its steps are too short")
        return statistics.median(seconds_of([result])) * result["speed"]

    def ratios(self, finalists: list[int], turns: int) -> dict[int, list[float]]:
        """Returns, for each of them and every turn, the chosen plan's seconds before and after it over its own."""
        found: dict[int, list[float]] = {number: [] for number in finalists}
        before = self.run(0)
        for _ in range(turns):
            for number in finalists:
                other, after = self.run(number), self.run(0)
                found[number].append((before + after) / 2 / other)
                before = after
        return found


def seconds_of(results: list[dict[str, Any]]) -> list[float]:
    """Returns the seconds of steps without a run's last one, which fetches for no next step."""
    return [step["seconds"] for result in results for step in result["steps"][WARM_UP:-1]]


def case_rows(setting: Setting, number: int, case: Case, seed: int, turns: int) -> list[Row]:
    plans, case = alternatives(setting, case, seed)
    what = (
        f"{number}: {case.shape} {case.compute}, {gib(case.budget)}, {case.rows} rows, "
        f"{'clipped' if case.clip else 'unclipped'}, {case.throttle[0] / 1e9:g} GB/s"
    )
    enough = holds(f"{what}: others", f">= {OTHERS}", str(len(plans) - 1), len(plans) > OTHERS)
    if len(plans) == 1:
        return [enough]
    runs = Runs(setting, case, plans)
    finalists = runs.first()[:FINALISTS]
    ratios = runs.ratios(finalists, turns)
    rows = [
        reported(
            f"{what}: {plan['name']}", f"{statistics.median(seconds_of(results)):.2f} s",
            note=f"{min(seconds_of(results)):.2f}..{max(seconds_of(results)):.2f}, predicted {plan['seconds']:.2f}, "
            f"micro-batch {plan['micro']}, {len(results)} runs",
        )
        for plan, results in zip(plans, runs.results, strict=True)
    ]  # fmt: skip
    best = max(finalists, key=lambda number: statistics.median(ratios[number]))
    values = {
        "ratios": {plans[number]["name"]: found for number, found in ratios.items()},
        "seconds": [seconds_of(results) for results in runs.results],
        "speeds": [[result["speed"] for result in results] for results in runs.results],
        "plans": [{**plan, "plan": ""} for plan in plans],
    }
    shown = "; ".join(f"{plans[number]['name']} {_range(found)}" for number, found in ratios.items())
    row = at_most(f"{what}: chosen / best", statistics.median(ratios[best]), NEAR, note=shown, values=values)
    return [*rows, enough, unless_noisy(row, [result for results in runs.results for result in results])]


def _range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows: list[Row] = []
    for number, case in enumerate(drawn(options.seed, options.combinations, options.shapes), start=1):
        found = case_rows(setting, number, case, options.seed, options.turns)
        say(f"{found[-1].what}: {found[-1].measured}")
        rows += found
    settings = {"seed": options.seed, "combinations": options.combinations, "turns": options.turns, "text": setting.text_name}
    return setting.conclude(f"prove_choice-{options.seed}", rows, settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
