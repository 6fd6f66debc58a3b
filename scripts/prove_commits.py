#!/usr/bin/env python3
"""Measures what commits cost: a run that commits every step and one that commits nothing take turns on the same disk.

    sudo python scripts/prove_commits.py --work DIR --data gsm8k/train.jsonl
    the 1.1b shape with everything on the ssd: 60 GB in DIR, about an hour on two quiet cores; the same command continues
    to try the script itself: --shape 50m --turns 1

drive: everything rests on the ssd. It runs once with the disk as it is, and once with every flush 20 ms longer (proof/shim.h).
It compares a step's seconds, and what the kernel writes for the whole run with what the daemon does. The difference is
manifests, losses, and what the file system makes of them.

ram: the plan's own homes in 8 GiB, where a commit writes what rests in RAM. Three sides take turns: the defaults, no commits,
and a commit every second step. Each is planned for the machine as `fuyou bench` measured it on that disk. The third side shows
the cost of one commit. The default's interval is longer than its run here, so its share of such a commit is added.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import Case, on_measured_machine, our_run
from proof.materials import LENGTH
from proof.setting import RunFailed, Setting, parser, run_script, size
from proof.verdicts import Row, at_most, spread, unless_noisy, worst

from fuyou_cli.core.units import GiB, gb, gib

RATES = (600_000_000, 600_000_000)  # bytes/s each way
WARM_UP = 3  # steps until what waits has moved what all later steps move
SLOWER, MORE = 0.03, 0.001
IN_RAM, OF_NONE, OFTEN = 8 * GiB, 1.05, 2  # the budget of `ram`; a default step beside one without commits; steps


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("parts", nargs="*", choices=("drive", "ram"), default=["drive"])
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--measured", type=int, default=3, help="steps of a run that count")
    options.add_argument("--budget", type=size, default=2 * GiB)
    return options.parse_args()


def prove(setting: Setting, options: argparse.Namespace) -> int:
    parts = {"drive": drive, "ram": ram}
    settings = {**setting.described(), "turns": options.turns, "measured": options.measured, "budget": options.budget}
    codes = []
    for part in options.parts:
        name = f"prove_commits-{setting.shape}" + ("-ram" if part == "ram" else "")
        codes.append(setting.conclude(name, parts[part](setting, options), settings))
    return worst(codes)


# ---- states in RAM -------------------------------------------------------------------------------------------------


def ram(setting: Setting, options: argparse.Namespace) -> list[Row]:
    sides: dict[Any, list[dict[str, Any]]] = {"auto": [], None: [], OFTEN: []}
    for turn in range(options.turns):
        for every, runs in sides.items():
            runs.append(our_run(setting, on_measured_machine(setting, _in_ram(setting, options, turn, every))))
    interval = sides["auto"][0]["plan"]["commit_every"]
    if interval is not None and 1 < interval <= len(sides["auto"][0]["steps"]):
        raise RunFailed(
            f"the default commits every {interval} steps here, within its run: what one costs cannot be added to it"
        )
    seconds = {every: [step["seconds"] for run in runs for step in run["steps"][WARM_UP:-1]] for every, runs in sides.items()}
    typical = {every: statistics.median(_of_intervals(side, every)) for every, side in seconds.items()}
    one = max(0.0, OFTEN * (typical[OFTEN] - typical[None]))  # of one commit
    share = one / interval if interval not in (None, 1) else 0.0
    what = f"{setting.shape}, {LENGTH} tokens a step in {gib(IN_RAM)}, clipping off: a step by default / without commits"
    note = (
        f"default {spread(seconds['auto'])} s, without {spread(seconds[None])} s, every {OFTEN} steps "
        f"{spread(seconds[OFTEN])} s: a commit takes {one:.1f} s, planned every {interval} steps"
    )
    row = at_most(
        what, (typical["auto"] + share) / typical[None], OF_NONE, note=note, values={"seconds": list(seconds.items())}
    )
    return [unless_noisy(row, [run for runs in sides.values() for run in runs])]


def _of_intervals(steps: Sequence[float], every: int | str | None) -> list[float]:
    """Returns seconds of a step. For a side that commits within its run, these are the means from one commit to the next."""
    each = every if isinstance(every, int) else 1
    return [statistics.fmean(steps[at : at + each]) for at in range(0, len(steps), each)]


def _in_ram(setting: Setting, options: argparse.Namespace, turn: int, every: int | str | None) -> Case:
    counted = options.measured + options.measured % OFTEN  # whole intervals of the side that commits often
    return Case(
        shape=setting.shape, budget=IN_RAM, steps=WARM_UP + counted + 1, warm_up=WARM_UP, rows=1, micro=1, throttle=RATES,
        turn=turn, timed=True, commit_every=every,
    )  # fmt: skip


# ---- everything on the drive ---------------------------------------------------------------------------------------


def drive(setting: Setting, options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for late in (False, True):
        sides: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for turn in range(options.turns):
            for commits in (False, True):
                sides[commits].append(our_run(setting, _case(setting, options, turn, commits=commits, late=late)))
        rows += _compared(setting.shape, sides[True], sides[False], late=late)
    return rows


def _case(setting: Setting, options: argparse.Namespace, turn: int, *, commits: bool, late: bool) -> Case:
    """Returns a case with one row a step, so that a step waits for the store."""
    return Case(
        shape=setting.shape, budget=options.budget, steps=WARM_UP + options.measured + 1, warm_up=WARM_UP, rows=1, micro=1,
        all_on_ssd=True, throttle=RATES, turn=turn, timed=True, watch_counters=True, commit_every=1 if commits else None,
        late_flush=late,
    )  # fmt: skip


def _compared(shape: str, ours: list[dict[str, Any]], without: list[dict[str, Any]], *, late: bool) -> list[Row]:
    what = f"{shape}, everything on the ssd, {'flushes 20 ms late' if late else 'the disk as it is'}"
    seconds = [[step["seconds"] for run in side for step in run["steps"][WARM_UP:-1]] for side in (ours, without)]
    medians = [statistics.median(side) for side in seconds]
    note = "; ".join(
        f"{name} {statistics.median(side):.2f} s ({min(side):.2f}..{max(side):.2f}, {len(side)} steps)"
        for name, side in zip(("with commits", "without"), seconds, strict=True)
    )
    time = at_most(f"{what}: step time", medians[0] / medians[1] - 1, SLOWER, note=note, values={"seconds": seconds})
    beside = [statistics.median(_beside_daemon(run) for run in side) for side in (ours, without)]
    written = statistics.median(run["daemon_whole"][1] for run in ours)
    traffic = at_most(
        f"{what}: bytes written beside the states'", max(0.0, beside[0] - beside[1]) / written, MORE,
        note=f"{gb(int(max(0.0, beside[0] - beside[1])))} of {gb(int(written))}, in a whole run",
    )  # fmt: skip
    both = [*ours, *without]
    return [unless_noisy(time, both), traffic]


def _beside_daemon(run: dict[str, Any]) -> float:
    """Returns the bytes that the kernel wrote and the daemon did not."""
    return float(run["kernel_whole"][1] - run["daemon_whole"][1])


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
