#!/usr/bin/env python3
"""Trains one model on two boxes of this machine: the same end by three commands, within memory, over slow links and a cut one.

    sudo python scripts/prove_boxes.py --work DIR
    a quarter of an hour on two cores; to try the script itself: --shape 1m --rows 8 --steps 6

A box is a network namespace with a host name, a memory group and cores of its own; a pair of veth interfaces, held at a rate
by `tc tbf`, is the link. One process, `--nproc 2` and torchrun on both boxes must end with the same states and losses, to the
last bit. A link that is cut must end both ranks within `train.peer_timeout`, each with an error that names the other's rank and
host. Over links of 0.5 and 1.3 of what is needed a step must take what the run itself predicts, by rates that `fuyou bench` has
measured on the boxes, and each box stay within its rank's own plan from the start to the exported model, in a group of exactly
its budget. Without root one line says so. `links` leaves bits and the cut out.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import NOISE_CORES, child_environment
from proof.boxes import BOXES, Ended, Link, Rank, ranks, two_boxes, wait
from proof.control_groups import LimitsUnavailable
from proof.materials import LENGTH
from proof.setting import Lost, Setting, fresh, lost_row, parser, recipe_in, run_script, size
from proof.verdicts import Row, holds, missing, say, unless_noisy
from prove_ranks_run import ending

from fuyou_cli.core.units import GiB, gib
from fuyou_cli.machine.measure.timing import BackgroundLoad
from fuyou_cli.training.run_log import read_log

TIMEOUT, ENDS = 6, 5.0  # seconds of train.peer_timeout, and beyond it
LONGEST = 900.0  # seconds of a run
PACED_RANK = Path(__file__).parent / "proof" / "paced_rank.py"
PARTS = 4  # micro-batches of a step
WARM = 1  # steps that do not count
RATES = (0.5, 1.3)  # of what the link needs
NEAR = 0.1  # share of a step by which its prediction may be off


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.set_defaults(shape="20m")
    options.add_argument("parts", nargs="*", metavar="bits|links", default=["bits", "links"])
    options.add_argument("--rows", type=int, default=8, help=f"of a step, in {PARTS} micro-batches")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--length", type=int, default=LENGTH, help="tokens of a row")
    options.add_argument("--paced", type=float, metavar="FLOPS", help="on processors of so many FLOP/s (proof/paced_rank.py)")
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
        self._kept, self._are_measured = self.folder / "kept", False

    def recipe(
        self,
        name: str,
        *,
        budget: int,
        steps: int | None = None,
        home: str = "ssd",
        exports: bool = False,
    ) -> Path:
        out = self.folder / name / "out"
        out.mkdir(parents=True)
        offload = {
            "dir": str(self.folder / name / "store"), "device": "cpu", "max_memory": {"cpu": budget}, "measure": False,
            "weights": home, "optimizer_states": home, "activations": "recompute",
        }  # fmt: skip
        path = recipe_in(
            out, self._setting.model(), self.folder / "rows", Case(self.options.rows, steps or self.options.steps),
            self.options.length,
            entry=self._setting.entry, commit_every="auto", offload=offload,
            train={"micro_batch_size": self.options.rows // PARTS, "threads": 1, "peer_timeout": f"{TIMEOUT}s"},
            precision={"compute": "float32"},  # without AVX-512 bfloat16 is slow
            export={"at_end": exports},
        )  # fmt: skip
        return path.rename(out.parent / "recipe.yaml")

    def alone(self, recipe: Path, *words: str) -> None:
        command = [sys.executable, "-P", "-m", "fuyou_cli", "finetune", str(recipe), *words]
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Lost(f"{' '.join(words) or 'one process'}: exit code {done.returncode}\n{done.stdout}{done.stderr}")

    def measure_boxes(self) -> None:
        """Measures both boxes, at once, as they compute at once. Ranks that measured would be counted with what that takes, and
        would measure again each time: each box finds the machine busy with the other."""
        if self._are_measured:
            return
        recipe = self.recipe("bench", budget=self.options.budget)
        with ranks(["bench", str(recipe)], recipe.parent, kept=self._kept) as began:
            ended(began, recipe)
        self._are_measured = True

    def on_boxes(self, recipe: Path, *, torchrun: bool = False, paced: float | None = None) -> list[Ended]:
        words, program = ["finetune", str(recipe)], ("-m", "fuyou_cli")
        if paced is not None:
            words, program = [f"{paced:g}", str(recipe)], (str(PACED_RANK),)
        options = {"memory": self.options.budget, "torchrun": torchrun, "kept": self._kept, "program": program}
        with ranks(words, recipe.parent, **options) as began:
            return ended(began, recipe)


def ended(began: Sequence[Rank], recipe: Path) -> list[Ended]:
    """Waits for both boxes. Raises Lost unless both end well."""
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
        recipe = runs.recipe(name.replace(" ", "-"), budget=2 * budget, exports=True)
        runs.alone(recipe, *words)
        endings[name] = ending(recipe)
        say(f"{name}: {seconds_of(recipe):.3f} s a step")
    recipe = runs.recipe("torchrun", budget=budget, exports=True)
    runs.on_boxes(recipe, torchrun=True)
    endings["torchrun"] = ending(recipe)
    first = endings["one process"]
    unlike = [f"{name} of {which}" for which, one in endings.items() for name in first if one[name] != first[name]]
    if unlike:
        raise Lost(f"not those of one process: {', '.join(unlike)}")
    if not first["sums"] or not first["export"] or len(first["losses"]) != runs.options.steps:
        raise Lost(f"{len(first['sums'])} tensors, {len(first['export'])} files and {len(first['losses'])} losses are no run")
    return {"tensors": len(first["sums"]), "seconds": seconds_of(recipe)}


def over(runs: Runs, link: Link, rate: float | None) -> dict[str, Any]:
    """Trains over a link of `rate` bytes a second; None: a free one. Returns the time of a step, its bytes that passed the
    busier way, and what each rank took of memory, which no launcher shares, each beside its plan."""
    name = "link" if rate is None else f"link-{rate:.0f}"
    paced = runs.options.paced
    if paced is None:
        runs.measure_boxes()
    recipe = runs.recipe(name, budget=runs.options.budget, home="auto", exports=True)
    link.hold(rate)
    before, others = link.sent(), BackgroundLoad()
    try:
        ends = runs.on_boxes(recipe, paced=paced)
        cores = others.cores()
        (plan,), (end,), steps = events(recipe, "plan"), events(recipe, "end"), events(recipe, "step")[WARM:]
        return {
            "seconds": seconds_of(recipe), "predicted": plan["predicted_step_seconds"], "network": plan["network"],
            "each": [step["seconds"] for step in steps], "stalls": steps[-1]["stalls"],
            "bytes": (link.sent() - before) / runs.options.steps,
            "peaks": [end.peak for end in ends], "killed": sum(end.killed for end in ends),
            "planned": [rank["ram_planned"] for rank in end["ranks"]], "others_cores": cores,
            "noisy": cores > NOISE_CORES,
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


def bits_rows(runs: Runs, link: Link, setting: Setting) -> list[Row]:
    what, asked = "one process, --nproc 2, and torchrun on two boxes", "equal bits"
    free = setting.attempt("three commands", lambda: alike(runs))
    if free.get("failed"):
        return [lost_row(what, asked, free)]
    rows = [holds(what, asked, f"{free['tensors']} tensors, every loss and the export", True, values=free)]
    result = setting.attempt("link cut", lambda: cut(runs, link))
    what, asked = "the link cut within a step", f"both end in {TIMEOUT:g} + {ENDS:g} s, and name rank and host"
    rows.append(
        lost_row(what, asked, result) if result.get("failed") else holds(what, asked, f"{result['seconds']:.1f} s", True)
    )
    return rows


def memory_row(runs: Runs, results: list[dict[str, Any]]) -> Row:
    """Compares what each box held, with all its processes, with its rank's own plan."""
    budget = runs.options.budget
    each = [pair for result in results for pair in zip(result["peaks"], result["planned"], strict=True)]
    ok = all(peak <= plan <= budget for peak, plan in each) and not any(result["killed"] for result in results)
    peaks, planned = ("; ".join(" and ".join(map(gib, result[name])) for result in results) for name in ("peaks", "planned"))
    what, asked = f"each rank in a group of {gib(budget)}", "not killed, within its own plan"
    return holds(what, asked, peaks, ok, note=f"planned {planned}")


def step_row(what: str, result: dict[str, Any], note: str = "") -> Row:
    """Compares a step with the one that the run has predicted of itself."""
    seconds, predicted, network = result["seconds"], result["predicted"], result["network"]
    spread = f"{min(result['each']):.3f} to {max(result['each']):.3f}"
    off, link = seconds / predicted - 1, f"link measured {network['link'] / 1e6:.2f} MB/s, {1e3 * network['latency']:.2f} ms"
    measured = f"{seconds:.3f} s ({spread}), predicted {predicted:.3f} s: {100 * off:+.1f} %"
    row = holds(what, f"predicted within {100 * NEAR:.0f} %", measured, abs(off) <= NEAR, note=f"{note}{link}", values=result)
    return unless_noisy(row, [result])


def over_rows(runs: Runs, link: Link, setting: Setting) -> list[Row]:
    options = runs.options
    about = f"{options.rows} x {options.length} tokens, {'paced' if options.paced else 'as it is'}"
    free = setting.attempt(f"free link, {about}", lambda: over(runs, link, None))
    if free.get("failed"):
        return [lost_row("a step over a free link", "both end well", free)]
    needed = free["bytes"] / free["seconds"]
    note = f"{free['bytes'] / 1e6:.2f} MB a step the busier way, which needs {needed / 1e6:.2f} MB/s; "
    rows, results = [step_row("a step over a free link", free, note)], [free]
    for share in RATES:
        what = f"a step over a link of {share:g} of that"
        result = setting.attempt(f"link of {share:g}, {about}", partial(over, runs, link, share * needed))
        if result.get("failed"):
            rows.append(lost_row(what, "both end well", result))
            continue
        results.append(result)
        rows.append(step_row(what, result))
    return [memory_row(runs, results), *rows]


def prove(setting: Setting, options: argparse.Namespace) -> int:
    own = {name: getattr(options, name) for name in ("parts", "rows", "length", "steps", "budget", "paced")}
    settings = {**setting.described(), **own}
    try:
        with two_boxes() as link:
            runs, rows = Runs(setting, options), list[Row]()
            if "bits" in options.parts:
                rows += bits_rows(runs, link, setting)
            if "links" in options.parts:
                rows += over_rows(runs, link, setting)
    except LimitsUnavailable as error:
        rows = [missing("two boxes", "network namespaces, memory groups", str(error))]
    return setting.conclude(f"prove_boxes-{setting.shape}", rows, settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
