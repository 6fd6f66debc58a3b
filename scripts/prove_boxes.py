#!/usr/bin/env python3
"""Trains one model on two boxes of this machine: the same end by three commands, within memory, over slow links and a cut one.

    sudo python scripts/prove_boxes.py --work DIR
    a quarter of an hour on two cores; to try the script itself: --shape 1m --rows 8 --steps 6

A box is a network namespace with a host name and a memory group of its own; a pair of veth interfaces, held at a rate by
`tc tbf`, is the link. One process, `--nproc 2` and torchrun on both boxes must end with the same states and losses, to the last
bit, each rank in a group of exactly its budget. A link that is cut must end both ranks within `train.peer_timeout`, each with
an error that names the other's rank and host. Steps over links of 0.5 and 1.3 of what is needed are measured. Without root one
line says so.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import child_environment
from proof.boxes import BOXES, Ended, Link, ranks, two_boxes, wait
from proof.control_groups import LimitsUnavailable
from proof.materials import LENGTH
from proof.setting import Lost, Setting, fresh, lost_row, parser, recipe_in, run_script, size
from proof.verdicts import Row, holds, missing, reported, say
from prove_ranks_run import ending

from fuyou_cli.core.units import GiB, gib
from fuyou_cli.training.run_log import read_log

TIMEOUT, ENDS = 6, 5.0  # seconds of train.peer_timeout, and beyond it
LONGEST = 900.0  # seconds of a run
WARM = 2  # steps that do not count
RATES = (0.5, 1.3)  # of what the link needs


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.set_defaults(shape="20m")
    options.add_argument("--rows", type=int, default=16, help="of a step, in micro-batches of 2")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--budget", type=size, default=1 * GiB, help="of each box")
    return options.parse_args()


@dataclass(frozen=True, slots=True)
class Case:
    rows: int
    steps: int
    clip: float = 1.0


class Runs:
    """Writes recipes that differ by a few keys, and runs them."""

    def __init__(self, setting: Setting, options: argparse.Namespace) -> None:
        self._setting, self.options = setting, options
        self.folder = fresh(setting.work / "boxes")

    def recipe(self, name: str, *, budget: int, steps: int | None = None) -> Path:
        out = self.folder / name / "out"
        out.mkdir(parents=True)
        offload = {
            "dir": str(self.folder / name / "store"), "device": "cpu", "max_memory": {"cpu": budget}, "measure": False,
            "weights": "ssd", "optimizer_states": "ssd",
        }  # fmt: skip
        path = recipe_in(
            out, self._setting.model(), self.folder / "rows", Case(self.options.rows, steps or self.options.steps), LENGTH,
            entry=self._setting.entry, commit_every="auto", offload=offload,
            train={"micro_batch_size": 2, "threads": 1, "peer_timeout": f"{TIMEOUT}s"},
            export={"at_end": False},
        )  # fmt: skip
        return path.rename(out.parent / "recipe.yaml")

    def alone(self, recipe: Path, *words: str) -> None:
        command = [sys.executable, "-P", "-m", "fuyou_cli", "finetune", str(recipe), *words]
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Lost(f"{' '.join(words) or 'one process'}: exit code {done.returncode}\n{done.stdout}{done.stderr}")

    def on_boxes(self, recipe: Path, *, torchrun: bool = False) -> list[Ended]:
        with ranks(["finetune", str(recipe)], recipe.parent, memory=self.options.budget, torchrun=torchrun) as began:
            ends = wait(began, LONGEST)
        if ends is None:
            raise Lost(f"{recipe}: the ranks still run after {LONGEST:g} s")
        for number, end in enumerate(ends):
            if end.code != 0:
                raise Lost(f"{recipe}: rank {number} ended with {end.code}, {end.killed} killed for memory\n{end.text}")
        return ends


def events(recipe: Path, event: str) -> list[dict[str, Any]]:
    path = recipe.parent / "out" / "log.jsonl"
    return [line for line in read_log(path) if line["event"] == event] if path.exists() else []


def seconds_of(recipe: Path) -> float:
    return statistics.median(step["seconds"] for step in events(recipe, "step")[WARM:])


def alike(runs: Runs) -> dict[str, Any]:
    """Trains by all three commands. Returns how many tensors are alike, and the time of a step on the boxes."""
    budget, endings = runs.options.budget, {}
    for name, words in (("one process", ()), ("--nproc 2", ("--nproc", "2"))):
        recipe = runs.recipe(name.replace(" ", "-"), budget=2 * budget)
        runs.alone(recipe, *words)
        endings[name] = ending(recipe)
        say(f"{name}: {seconds_of(recipe):.3f} s a step")
    recipe = runs.recipe("torchrun", budget=budget)
    runs.on_boxes(recipe, torchrun=True)
    endings["torchrun"] = ending(recipe)
    first = endings["one process"]
    unlike = [f"{name} of {which}" for which, one in endings.items() for name in first if one[name] != first[name]]
    if unlike:
        raise Lost(f"not those of one process: {', '.join(unlike)}")
    if not first["sums"] or len(first["losses"]) != runs.options.steps:
        raise Lost(f"{len(first['sums'])} tensors and {len(first['losses'])} losses are no run")
    return {"tensors": len(first["sums"]), "seconds": seconds_of(recipe)}


def over(runs: Runs, link: Link, rate: float | None) -> dict[str, Any]:
    """Trains over a link of `rate` bytes a second; None: a free one. Returns the time of a step, the bytes that passed, and
    what each rank took of memory, which no launcher shares."""
    link.hold(rate)
    recipe, before = runs.recipe("link" if rate is None else f"link-{rate:.0f}", budget=runs.options.budget), link.sent()
    try:
        ends = runs.on_boxes(recipe)
        (plan,) = events(recipe, "plan")
        return {
            "seconds": seconds_of(recipe), "bytes": (link.sent() - before) / runs.options.steps,
            "peaks": [end.peak for end in ends], "killed": sum(end.killed for end in ends),
            "predicted": plan["predicted_cpu_peak"],
        }  # fmt: skip
    finally:
        link.hold(None)


def cut(runs: Runs, link: Link) -> dict[str, Any]:
    """Cuts the link within a step. Returns the seconds that both ranks took to end."""
    recipe = runs.recipe("cut", budget=runs.options.budget, steps=100_000)
    with ranks(["finetune", str(recipe)], recipe.parent, memory=runs.options.budget) as began:
        until = time.monotonic() + LONGEST
        while len(events(recipe, "step")) < WARM and time.monotonic() < until and not any(rank.is_over() for rank in began):
            time.sleep(0.05)
        link.cut()
        cut_at, ends = time.monotonic(), wait(began, TIMEOUT + ENDS)
        took = time.monotonic() - cut_at
        link.hold(None)
        if ends is None:
            raise Lost(f"a rank still runs {TIMEOUT + ENDS:g} s after the link was cut")
    for number, end in enumerate(ends):
        other = 1 - number
        log = recipe.parent / "out" / "ranks" / f"{number}.log"
        text = end.text + (log.read_text(encoding="utf-8") if log.exists() else "")
        named = f"rank {other} on {BOXES[other].name}" in text or (other == 0 and BOXES[0].address in text)
        if end.code != 1 or not named:
            raise Lost(f"rank {number} ended with {end.code} and should name rank {other} on {BOXES[other].name}:\n{text}")
    return {"seconds": took}


def proven(runs: Runs, link: Link, setting: Setting) -> list[Row]:
    what, asked = "one process, --nproc 2, and torchrun on two boxes", "equal bits"
    free = setting.attempt("three commands", lambda: alike(runs))
    if free.get("failed"):
        return [lost_row(what, asked, free)]
    rows = [holds(what, asked, f"{free['tensors']} tensors and every loss", True, values=free)]
    result = setting.attempt("link cut", lambda: cut(runs, link))
    what, asked = "the link cut within a step", f"both end in {TIMEOUT:g} + {ENDS:g} s, and name rank and host"
    rows.append(
        lost_row(what, asked, result) if result.get("failed") else holds(what, asked, f"{result['seconds']:.1f} s", True)
    )
    return rows + over_rows(runs, link, setting)


def memory_row(runs: Runs, free: dict[str, Any]) -> Row:
    budget, peaks = runs.options.budget, free["peaks"]
    ok = free["killed"] == 0 and max(peaks) <= budget and peaks[0] <= free["predicted"]
    note = f"of the first rank predicted {gib(free['predicted'])}"
    measured = " and ".join(map(gib, peaks))
    return holds(f"each rank in a group of {gib(budget)}", "not killed, within its plan", measured, ok, note=note)


def over_rows(runs: Runs, link: Link, setting: Setting) -> list[Row]:
    free = setting.measure("free link", lambda: over(runs, link, None))
    needed = free["bytes"] / free["seconds"]
    note = f"{free['bytes'] / 1e6:.2f} MB a step the busier way, which needs {needed / 1e6:.2f} MB/s"
    rows = [memory_row(runs, free), reported("a step over a free link", f"{free['seconds']:.3f} s", note=note, values=free)]
    for share in RATES:
        result = setting.measure(f"link of {share:g}", partial(over, runs, link, share * needed))
        rows.append(reported(f"a step over a link of {share:g} of that", f"{result['seconds']:.3f} s", values=result))
    return rows


def prove(setting: Setting, options: argparse.Namespace) -> int:
    settings = {**setting.described(), "rows": options.rows, "steps": options.steps, "budget": options.budget}
    try:
        with two_boxes() as link:
            rows = proven(Runs(setting, options), link, setting)
    except LimitsUnavailable as error:
        rows = [missing("two boxes", "network namespaces, memory groups", str(error))]
    return setting.conclude(f"prove_boxes-{setting.shape}", rows, settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
