#!/usr/bin/env python3
"""Trains a small model with float32, bfloat16 and int8 optimizer states on the same rows, and compares the losses.

    python scripts/prove_states.py --data tinyshakespeare/input.txt --work DIR [--shape 20m --compute bfloat16]
    the 1m shape: ten minutes of one core; to try the script itself: --steps 20
    python scripts/prove_states.py --data FILE --work DIR --shape 20m --compute bfloat16 --device cuda --rows 32 --length 128
    on a GPU: more rows a step, so that runs which drift apart end nearer to each other

All but `optimizer.state_dtype` is the same: seed, order of rows, clipping 1.0. Masters are exact in either dtype, so this
computes in what the processor is faster in. The loss of a run is the mean over the last tenth of its steps. With several
`--seeds` (each orders the rows anew) the mean difference is judged: one seed tells no more than half a percent. The learning
rate warms up and then falls along a cosine, as by default; at a constant rate runs end further apart.

Runs that differ in rounding alone drift apart, too. So each seed also has a run with float32 states and micro-batches half as
large: the same step but for the order of its sums. How far it is from the first stands beside every verdict, and moves none.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import Case, our_run
from proof.setting import SEED, Setting, parser, run_script
from proof.verdicts import Row, holds, reported

from fuyou_cli.core.units import GiB

MOST = 0.005  # by which a loss may differ
WARMUP = 0.03  # share of the steps, as by default
STATES = ("float32", "int8", "bfloat16")


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--length", type=int, default=64, help="tokens per row")
    options.add_argument("--rows", type=int, default=4, help="a step, in one micro-batch")
    options.add_argument("--schedule", choices=("cosine", "constant"), default="cosine", help="of the learning rate")
    options.add_argument("--device", choices=("cpu", "emulated", "cuda"), default="cpu")
    options.add_argument("--states", nargs="+", choices=STATES[1:], default=STATES[1:], help="compared with float32 states")
    options.add_argument("--seeds", type=int, nargs="+", default=[SEED], help="of the order of rows")
    options.add_argument("--compute", choices=("float32", "bfloat16"), default="float32")
    options.set_defaults(shape="1m")
    asked = options.parse_args()
    if len(set(asked.seeds)) < len(asked.seeds):
        options.error("--seeds: one is given twice")
    if asked.rows < 2 or asked.rows % 2:
        options.error("--rows: must be even, because half of them are a micro-batch once")
    return asked


def losses(setting: Setting, options: argparse.Namespace, states: str, seed: int, *, pieces: int = 1) -> list[float]:
    """Returns the loss of every step, computed in so many micro-batches."""
    keys = (f"optimizer.state_dtype={states}", "optimizer.lr=1e-3", f"dataset.max_seq_len={options.length}", "train.threads=1")
    keys += (f"offload.device={options.device}", f"lr_scheduler.name={options.schedule}")
    keys += (f"lr_scheduler.warmup_steps={int(WARMUP * options.steps)}",) if options.schedule == "cosine" else ()
    keys += (f"seed={seed}",) if seed != SEED else ()
    case = Case(
        shape=setting.shape, budget=2 * GiB, steps=options.steps, rows=options.rows, micro=options.rows // pieces, clip=1.0,
        overrides=keys, commit_every=None, compute=options.compute,
    )  # fmt: skip
    return [step["loss"] for step in our_run(setting, case)["steps"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """Says how far runs of some kind are from those with float32 states, seed by seed."""

    shares: list[float]
    told: list[str]
    values: dict[str, object]

    @property
    def mean(self) -> float:
        return fmean(self.shares)

    @property
    def text(self) -> str:
        return self.told[0] if len(self.told) == 1 else f"{self.mean:+.3%}, mean of {len(self.told)} seeds"

    @property
    def note(self) -> str:
        return "" if len(self.told) == 1 else ", ".join(self.told)


def apart(setting: Setting, options: argparse.Namespace, states: str, *, pieces: int = 1) -> Apart:
    last, shares, told, values = last_of(options), list[float](), list[str](), dict[str, object]()
    for seed in options.seeds:
        plain, found = losses(setting, options, STATES[0], seed), losses(setting, options, states, seed, pieces=pieces)
        ours, theirs = fmean(found[-last:]), fmean(plain[-last:])
        shares.append(ours / theirs - 1)
        told.append(f"{shares[-1]:+.3%} ({ours:.4f} beside {theirs:.4f}, from {found[0]:.2f})")
        values[f"seed {seed}"] = {"every_50th": found[49::50], "float32": plain[49::50]}
    return Apart(shares=shares, told=told, values=values)


def last_of(options: argparse.Namespace) -> int:
    """Returns the steps at the end of a run whose losses count."""
    return max(1, int(options.steps) // 10)


def prove(setting: Setting, options: argparse.Namespace) -> int:
    noise = apart(setting, options, STATES[0], pieces=2)
    largest = f"{max(map(abs, noise.shares)):.3%}"
    steps = f"loss of steps {options.steps - last_of(options) + 1} to {options.steps}"
    rows: list[Row] = []
    for states in options.states:
        found = apart(setting, options, states)
        note = "; ".join(filter(None, [found.note, f"runs that differ in rounding alone: {largest} at most"]))
        what, within = f"{states} states: {steps} beside float32 states", abs(found.mean) <= MOST
        rows.append(holds(what, f"within {MOST:.1%}", found.text, within, note=note, values=found.values))
    what = f"float32 states, micro-batches of {options.rows // 2} rows: {steps} beside those of {options.rows}"
    rows.append(reported(what, noise.text, note=noise.note, values=noise.values))
    asked = {key: getattr(options, key) for key in ("steps", "rows", "length", "schedule", "compute", "device", "seeds")}
    return setting.conclude(f"prove_states-{setting.shape}", rows, {**setting.described(), **asked})


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
