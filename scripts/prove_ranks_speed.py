#!/usr/bin/env python3
"""Measures an adapter's step by two ranks of one core each, a ring and replicas, beside one rank held to one core.

    python scripts/prove_ranks_speed.py --work DIR [--turns 3]     five minutes on two idle cores

A step has eight micro-batches. The runs take turns: one rank, ring, replicas, again and again. A turn's figure is the median of
its steps behind the first one; what is compared are the medians of turns. Memory, drives and caches are shared by both cores.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import NOISE_CORES, RANK, child_environment
from proof.boxes import RANKED
from proof.setting import Lost, Setting, fresh, parser, recipe_in, run_script
from proof.verdicts import Row, holds, missing, reported, say, unless_noisy

from fuyou_cli.machine.measure.timing import BackgroundLoad
from fuyou_cli.training.run_log import read_log

PARTS, RANKS = 8, 2  # micro-batches of a step
FASTER = 1.6  # times one rank
WARM = 1  # steps that do not count
LONGEST = 600.0  # seconds of a run
WAYS: dict[str, tuple[int, dict[str, object]]] = {  # ranks, and keys of the recipe's `train`
    "one rank": (1, {}),
    "ring": (RANKS, {"parallel": "ring"}),
    "replicas": (RANKS, {"parallel": "replicas", "lanes": PARTS}),
}


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.set_defaults(shape="20m")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--length", type=int, default=256, help="tokens of a row; a micro-batch is one row")
    return options.parse_args()


@dataclass(frozen=True, slots=True)
class Case:
    rows: int
    steps: int
    clip: float = 1.0


def step_of(setting: Setting, options: argparse.Namespace, way: str, turn: int) -> dict[str, Any]:
    """Runs a few steps by ranks with a core each. Returns the seconds of each, and what the run says of its waits."""
    count, train = WAYS[way]
    folder = fresh(setting.work / "ranks-speed" / way.replace(" ", "-"))
    out = folder / "out"
    out.mkdir()
    recipe = recipe_in(
        out, setting.model(), setting.work / "rows", Case(PARTS, options.steps), options.length, entry=setting.entry,
        commit_every="auto", offload={"dir": str(folder / "store"), "device": "cpu", "measure": False},
        train={"micro_batch_size": 1, "threads": 1, **train}, adapter={"r": RANK}, precision={"compute": "float32"},
        export={"at_end": False},
    ).rename(folder / "recipe.yaml")  # fmt: skip
    others = BackgroundLoad()
    run_ranks(recipe, count)
    cores = others.cores()
    events = read_log(out / "log.jsonl")
    steps = [event for event in events if event["event"] == "step"][WARM:]
    seconds = [step["seconds"] for step in steps]
    say(f"{way}, turn {turn}: {statistics.median(seconds):.3f} s")
    return {"seconds": seconds, "stalls": steps[-1]["stalls"], "others_cores": cores, "noisy": cores > NOISE_CORES}


def run_ranks(recipe: Path, count: int) -> None:
    """Runs so many ranks of a recipe, each on a core of its own. Raises Lost unless all end well."""
    cores = sorted(os.sched_getaffinity(0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", "fuyou_cli", "finetune", str(recipe)]
    began = []
    for rank in range(count):
        values = (str(rank), str(count), str(rank), "127.0.0.1", str(port))
        place = dict(zip(RANKED, values, strict=True)) if count > 1 else {}
        with (recipe.parent / f"{rank}.txt").open("wb") as file:
            began.append(
                subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=child_environment() | place,
                    preexec_fn=partial(os.sched_setaffinity, 0, {cores[rank]}),
                )
            )
    try:
        codes = [child.wait(LONGEST) for child in began]
    finally:
        for child in began:
            child.kill()
            child.wait()
    if any(codes):
        raise Lost(f"exit codes {codes}:\n{(recipe.parent / '0.txt').read_text(encoding='utf-8', errors='replace')[-2000:]}")


def rows_of(setting: Setting, options: argparse.Namespace) -> list[Row]:
    turns: dict[str, list[float]] = {way: [] for way in WAYS}
    stalls: dict[str, dict[str, float]] = {}
    results: list[dict[str, Any]] = []
    for turn in range(options.turns):
        for way in WAYS:
            key = f"{way}, {options.length} tokens, {options.steps} steps, turn {turn}"
            result = setting.measure(key, partial(step_of, setting, options, way, turn))
            turns[way].append(statistics.median(result["seconds"]))
            stalls[way] = result["stalls"]
            results.append(result)
    one = statistics.median(turns["one rank"])
    rows = [reported("one rank on one core", in_words(turns["one rank"]), values={"turns": turns["one rank"]})]
    for way in ("ring", "replicas"):
        factor = one / statistics.median(turns[way])
        waits = ", ".join(f"{seconds:.2f} s for {cause}" for cause, seconds in stalls[way].items() if seconds > 0.01)
        what, measured = f"{RANKS} ranks of one core each, {way}", f"{factor:.2f}x: {in_words(turns[way])}"
        note = f"the first rank's last step waited {waits or 'for nothing'}"
        values = {"turns": turns[way], "stalls": stalls[way]}
        row = holds(what, f"at least {FASTER}x one rank", measured, factor >= FASTER, note=note, values=values)
        rows.append(unless_noisy(row, results))
    return rows


def in_words(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s a step ({min(seconds):.3f} to {max(seconds):.3f})"


def prove(setting: Setting, options: argparse.Namespace) -> int:
    settings = {**setting.described(), **{name: getattr(options, name) for name in ("turns", "steps", "length")}}
    if len(os.sched_getaffinity(0)) < RANKS:
        rows = [missing("two ranks", f"{RANKS} cores", "this machine lets one be used")]
    else:
        rows = rows_of(setting, options)
    return setting.conclude(f"prove_ranks_speed-{setting.shape}", rows, settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
