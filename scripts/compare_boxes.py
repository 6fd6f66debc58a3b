#!/usr/bin/env python3
"""Trains one model on two boxes of this machine with fuyou, and with DeepSpeed's ZeRO-3 in memory, over the same link.

    sudo PYTHON scripts/compare_boxes.py --work DIR [--rate 10e6] [--shape 20m] [--rows 4] [--length 64]

PYTHON has fuyou's libraries and DeepSpeed. A box is a network namespace with a core and a memory group of its own
(proof/boxes.py). Both sides train everything in float32, with as many rows of as many tokens in a step, on one thread a rank;
they take turns. DeepSpeed computes a box's rows at once, fuyou in micro-batches of one. Seconds and bytes are of the steps
behind the first one; memory is a box's peak, with all that its processes hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.boxes import BOXES, Link, Rank, ranks, two_boxes
from proof.control_groups import LimitsUnavailable
from proof.setting import Lost, Setting, fresh, parser, recipe_in, run_script
from proof.verdicts import Row, missing, reported
from prove_boxes import Case, events

from fuyou_cli.core.units import gib

LOOP = Path(__file__).parent / "proof" / "deepspeed_loop.py"
LONGEST = 900.0  # seconds of a run
LOOK = 0.05  # seconds


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.set_defaults(shape="20m")
    options.add_argument("--rows", type=int, default=4, help="of a step, on both boxes together")
    options.add_argument("--length", type=int, default=64, help="tokens of a row")
    options.add_argument("--rate", type=float, default=10e6, help="of the link, bytes a second each way")
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--turns", type=int, default=2)
    return options.parse_args()


def watched(began: Sequence[Rank], link: Link, seconds: Callable[[], list[float]]) -> dict[str, Any]:
    """Waits for both ranks. `seconds`: of the steps so far. Raises Lost unless both end well."""
    first, until = 0, time.monotonic() + LONGEST
    while not all([rank.is_over() for rank in began]):
        first = first or (link.sent() if seconds() else 0)
        if time.monotonic() > until:
            raise Lost(f"a rank still runs after {LONGEST:g} s")
        time.sleep(LOOK)
    ends, each = [rank.ended() for rank in began], seconds()[1:]
    if any(end.code for end in ends) or not each:
        raise Lost("\n".join(f"rank {number} ended with {end.code}: {end.text[-1500:]}" for number, end in enumerate(ends)))
    return {"each": each, "bytes": (link.sent() - first) / len(each), "peaks": [end.peak for end in ends]}


def ours(setting: Setting, options: argparse.Namespace, link: Link) -> dict[str, Any]:
    folder = fresh(setting.work / "compare-ours")
    (folder / "out").mkdir()
    recipe = recipe_in(
        folder / "out", setting.model(), setting.work / "rows", Case(options.rows, options.steps), options.length,
        entry=setting.entry, commit_every="auto", offload={"dir": str(folder / "store"), "device": "cpu", "measure": False},
        train={"micro_batch_size": 1, "threads": 1}, precision={"compute": "float32"}, export={"at_end": False},
    ).rename(folder / "recipe.yaml")  # fmt: skip
    with ranks(["finetune", str(recipe)], folder) as began:
        return watched(began, link, lambda: [step["seconds"] for step in events(recipe, "step")])


def theirs(setting: Setting, options: argparse.Namespace, link: Link) -> dict[str, Any]:
    folder = fresh(setting.work / "compare-theirs")
    out = folder / "steps-{}.jsonl"
    words = [
        "--model", str(setting.model()), "--nvme", str(folder / "nvme"), "--out", str(out), "--last", str(options.steps),
        "--in-memory", "--torch-adam", "--threads", "1", "--dtype", "float32", "--rows", str(options.rows // len(BOXES)),
        "--length", str(options.length),
    ]  # fmt: skip
    first = Path(str(out).format(0))

    def seconds() -> list[float]:
        lines = first.read_text(encoding="utf-8").splitlines() if first.exists() else []
        return [step["seconds"] for step in map(json.loads, lines) if "step" in step]

    with ranks(words, folder, program=(str(LOOP),), names_interface=True) as began:
        return watched(began, link, seconds)


def rows_of(setting: Setting, options: argparse.Namespace, link: Link) -> list[Row]:
    link.hold(options.rate)
    sides = {"fuyou, a ring": ours, "DeepSpeed, ZeRO-3": theirs}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    about = f"{options.rows} x {options.length}, {options.rate:g} B/s"
    for turn in range(options.turns):
        for name, side in sides.items():
            result = setting.attempt(f"{name}, {about}, turn {turn}", partial(side, setting, options, link))
            turns[name].append(result)
    return [side_row(name, results) for name, results in turns.items()]


def side_row(name: str, results: list[dict[str, Any]]) -> Row:
    if failed := [result["failed"] for result in results if result.get("failed")]:
        return missing(name, "a step on two boxes", str(failed[0])[-1500:])
    each = [seconds for result in results for seconds in result["each"]]
    peaks = " and ".join(gib(max(peaks)) for peaks in zip(*(result["peaks"] for result in results), strict=True))
    sent = statistics.median(result["bytes"] for result in results)
    measured = f"{statistics.median(each):.2f} s ({min(each):.2f} to {max(each):.2f}), {sent / 1e6:.2f} MB a step, {peaks}"
    return reported(name, measured, values={"turns": results})


def prove(setting: Setting, options: argparse.Namespace) -> int:
    settings = {
        **setting.described(),
        **{name: getattr(options, name) for name in ("rows", "length", "rate", "steps", "turns")},
    }
    try:
        with two_boxes() as link:
            rows = rows_of(setting, options, link)
    except LimitsUnavailable as error:
        rows = [missing("two boxes", "network namespaces", str(error))]
    return setting.conclude(f"compare_boxes-{setting.shape}", rows, settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
