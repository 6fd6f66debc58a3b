#!/usr/bin/env python3
"""Compares bytes per step, counted by the daemon and by the kernel, with the plan and with what a parameter may take.

    python scripts/prove_traffic.py --work DIR --data gsm8k/train.jsonl
    the 1.1b shape: 40 GB in DIR, about 15 minutes on two cores; the same command continues
    to try the script itself: --shape 50m --data FILE (a minute or two)

The kernel's bytes are /proc/PID/io of the run, read from outside, from the end of loading to the run's end. The daemon's are
its own counters over the same time, which the run logs at its end, so that nothing in flight at a step's end is left out. Three
known differences from a normal step are taken out: the first update reads no states (they are zero and were never written);
with clipping the last update follows no forward and fetches its weights; what rests in RAM is written once, when the run is
saved.

The settings: all on ssd in one sweep, with and without clipping, and as planned for `--budget`. A parameter takes 26 bytes of a
full run, and at most 14.8 with int8 states (--run int8); a frozen one of an adapter's run (--run lora, qlora) at most 4.1, and
1.2 in nf4, beside the adapter, which these runs commit in every step: the row says what that adds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import KEYS, Case, counted, our_run
from proof.materials import LENGTH
from proof.setting import NO_PEERS, Setting, parser, run_script, size
from proof.tiny_runs import ask_for_run, named
from proof.verdicts import Row, at_most, holds, missing, reported

from fuyou_cli.core.units import GiB, gb, gib

WITHIN = 0.004
BESIDE = 0.001  # bytes per parameter that the kernel may see beside the store's: the log, manifests, what it pages in
# Weights twice, remainder and moments read; weights, remainder and moments written. Of an adapter's run: weights twice.
BYTES_PER_PARAMETER = {"full": 26, "int8": 14.8, "lora": 4.1, "qlora": 1.2}
ADAPTER = ("offload.optimizer_states=auto", "offload.gradients=auto")  # it is small: it rests where the plan says
GRADIENT_ITEM = 4  # summed over micro-batches in float32


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=4, help="of a run, at least 4")
    options.add_argument("--budget", type=size, default=2 * GiB)
    options.add_argument("--rows", type=int, default=8, help="of 512 tokens a step, more than --micro")
    ask_for_run(options, KEYS)
    return options.parse_args()


def beside_plan(what: str, result: dict, bytes_by: dict[str, tuple[float, float]]) -> list[Row]:
    """Checks that the daemon's and the kernel's bytes are within `WITHIN` of the plan's."""
    rows = []
    for who in ("daemon", "kernel"):
        for column, direction in enumerate(("read", "written")):
            planned, measured = bytes_by["plan"][column], bytes_by[who][column]
            line = f"{what}: {direction}, by the {who}"
            beside = BESIDE * result["plan"]["parameters"] if who == "kernel" else 0
            if planned == 0:
                rows.append(holds(line, "nothing", gb(measured), measured <= beside))
                continue
            off = measured / planned - 1
            text = f"{gb(measured)} ({off:+.3%})"
            values = {"planned": planned, "measured": measured}
            is_within = abs(off) <= WITHIN or 0 < measured - planned <= beside
            asked = f"within {WITHIN:.1%} of {gb(planned)}" + (f" or {gb(beside)} above" if beside else "")
            rows.append(holds(line, asked, text, is_within, values=values))
    return rows


def committed(plan: dict[str, Any]) -> int:
    """Returns the bytes of weights and states that a step writes."""
    return sum(plan["predicted_written_by"].get(kind, 0) for kind in ("weights", "states"))


def per_parameter(
    setting: Setting, what: str, case: Case, bytes_by: dict[str, tuple[float, float]], plan: dict[str, Any], run: str
) -> Row:
    """Checks the bytes with all on ssd: per parameter, plus twice the boundaries, with clipping twice the gradients, and an
    adapter's commit."""
    config = json.loads((setting.model() / "config.json").read_text())
    tokens = case.rows * LENGTH
    n = plan["parameters"]
    # Inputs of the blocks and of the final norm rest between forward and backward, two bytes an element.
    boundaries = (config["num_hidden_layers"] + 1) * tokens * config["hidden_size"] * 2
    gradients = n * GRADIENT_ITEM if case.clip is not None and run in ("full", "int8") else 0
    adapter = committed(plan) if run in ("lora", "qlora") else 0
    measured = sum(bytes_by["daemon"])
    per = (measured - 2 * (boundaries + gradients) - adapter) / n
    note = f"{gb(measured)} a step, {gb(2 * boundaries)} of it boundaries"
    note += f", {gb(2 * gradients)} gradients until the norm is known" if gradients else ""
    note += f", {gb(adapter)} the adapter's commit: {adapter / n:.3f} a parameter" if adapter else ""
    values = {"bytes": measured, "parameters": n, "boundaries": boundaries, "gradients": gradients, "adapter": adapter}
    line = f"{what}: bytes per parameter beside what rests"
    return at_most(line, round(per, 3), BYTES_PER_PARAMETER[run], note=note, values=values)


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows: list[Row] = []
    resting = ADAPTER if options.run in ("lora", "qlora") else ()
    one_sweep = f"train.sweep_tokens={options.rows * LENGTH}"  # each further one reads weights again
    for clip in (None, 1.0):
        clipping = "clipping on" if clip is not None else "clipping off"
        for all_on_ssd in (True, False):
            case = Case(
                shape=setting.shape, budget=options.budget, steps=max(4, options.steps), rows=options.rows, micro=setting.micro,
                clip=clip, all_on_ssd=all_on_ssd, watch_counters=True,
                overrides=(*KEYS[options.run], *resting, *([one_sweep] if all_on_ssd else [])),
                commit_every=1 if resting else "auto",  # a plan's step has its share of a commit, which so few may never reach
            )  # fmt: skip
            what = f"{clipping}, {'all on ssd' if all_on_ssd else gib(options.budget)}"
            result = our_run(setting, case)
            if not any(result["kernel_whole"]):
                rows.append(missing(what, "bytes", "/proc/PID/io of the run could not be read"))
                continue
            bytes_by = counted(result)
            rows += beside_plan(what, result, bytes_by)
            if all_on_ssd:
                rows.append(per_parameter(setting, what, case, bytes_by, result["plan"], options.run))
            read_by, written_by = result["plan"]["predicted_read_by"], result["plan"]["predicted_written_by"]
            text = "; ".join(f"{kind} {gb(read_by.get(kind, 0))} + {gb(written_by.get(kind, 0))}" for kind in sorted(read_by))
            rows.append(reported(f"{what}: the plan's bytes, read + written", "see below", note=text))
    settings = {**setting.described(), "budget": options.budget, "steps": options.steps, "rows": options.rows}
    name = named(f"prove_traffic-{setting.shape}", options.run)
    return setting.conclude(name, rows, settings, NO_PEERS if options.peers else [])


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
