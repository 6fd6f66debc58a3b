#!/usr/bin/env python3
"""Trains a small model with float32, bfloat16 and int8 optimizer states on the same rows, and compares the losses.

    python scripts/prove_states.py --data tinyshakespeare/input.txt --work DIR [--shape 20m --compute bfloat16]
    the 1m shape: ten minutes of one core; to try the script itself: --steps 20

All but `optimizer.state_dtype` is the same: seed, order of rows, clipping 1.0. Masters are exact in either dtype, so this
computes in what the processor is faster in. The loss of a run is the mean over the last tenth of its steps. Runs that differ in
rounding alone drift apart, so with several `--seeds` (each orders the rows anew) the mean difference is judged.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import Case, our_run
from proof.common_recipe import SEED
from proof.setting import Setting, parser, run_script
from proof.verdicts import Row, holds

from fuyou_cli.core.units import GiB

MOST = 0.005  # by which a loss may differ
STATES = ("float32", "int8", "bfloat16")


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--length", type=int, default=64, help="tokens per row, 4 rows a step")
    options.add_argument("--states", nargs="+", choices=STATES[1:], default=STATES[1:], help="compared with float32 states")
    options.add_argument("--seeds", type=int, nargs="+", default=[SEED], help="of the order of rows")
    options.add_argument("--compute", choices=("float32", "bfloat16"), default="float32")
    options.set_defaults(shape="1m")
    asked = options.parse_args()
    if len(set(asked.seeds)) < len(asked.seeds):
        options.error("--seeds: one is given twice")
    return asked


def losses(setting: Setting, options: argparse.Namespace, states: str, seed: int) -> list[float]:
    """Returns the loss of every step."""
    keys = (f"optimizer.state_dtype={states}", "optimizer.lr=1e-3", f"dataset.max_seq_len={options.length}", "train.threads=1")
    keys += (f"seed={seed}",) if seed != SEED else ()
    case = Case(
        shape=setting.shape, budget=2 * GiB, steps=options.steps, rows=4, micro=4, clip=1.0, overrides=keys, commit_every=None,
        compute=options.compute,
    )  # fmt: skip
    return [step["loss"] for step in our_run(setting, case)["steps"]]


def prove(setting: Setting, options: argparse.Namespace) -> int:
    last = max(1, options.steps // 10)
    rows: list[Row] = []
    for states in options.states:
        apart, told, values = list[float](), list[str](), dict[str, object]()
        for seed in options.seeds:
            plain, found = (losses(setting, options, each, seed) for each in (STATES[0], states))
            ours, theirs = fmean(found[-last:]), fmean(plain[-last:])
            apart.append(ours / theirs - 1)
            told.append(f"{apart[-1]:+.3%} ({ours:.4f} beside {theirs:.4f}, from {found[0]:.2f})")
            values[f"seed {seed}"] = {"every_50th": found[49::50], "float32": plain[49::50]}
        what = f"{states} states: loss of steps {options.steps - last + 1} to {options.steps} beside float32 states"
        mean = fmean(apart)
        text = told[0] if len(told) == 1 else f"{mean:+.3%}, mean of {len(told)} seeds"
        note = "" if len(told) == 1 else ", ".join(told)
        rows.append(holds(what, f"within {MOST:.1%}", text, abs(mean) <= MOST, note=note, values=values))
    settings = {**setting.described(), "steps": options.steps, "length": options.length, "rows": 4, "compute": options.compute}
    settings["seeds"] = options.seeds
    return setting.conclude(f"prove_states-{setting.shape}", rows, settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
