#!/usr/bin/env python3
"""Measures speed beside PyTorch in memory, beside the bound of disk and processor, and beside DeepSpeed on that disk.

    sudo python scripts/prove_speed.py compute ssd deepspeed --work DIR --data gsm8k/train.jsonl --peers bench/
    the 1.1b shape: 40 GB in DIR and 21 GiB of memory free for `compute`, hours in all; the same command continues
    to try the script itself: compute ssd --shape 50m --turns 1 --data FILE

compute: 8,192 tokens per step in 2 GiB beside plain PyTorch with everything in memory; 350m if 1.1b does not fit. A mixture
(--shape moe) is compared with the faster of transformers' ways to compute experts. ssd: 512
tokens per step, the disk held at 0.6 + 0.6 GB/s or as --disk says (fio's concurrent mix shows it), beside the larger of the
disk's time and compute alone plus the CPU-seconds of updates and I/O. deepspeed: its NVMe offload on the same disk. If it
cannot run, the ratio to a recorded figure or a floor is reported, which shows nothing.

--run lora (or qlora): an adapter inside a memory group of its budget, beside peft in memory; the bound is then that of reading
frozen weights. --run int8: `ssd` also runs float32 states and compares the steps.

Our runs are planned for the machine as `fuyou bench RECIPE` measures it once, under the same limits; the script ends with an
error if others keep it from that. Sides take turns (ABAB). A turn is one warm-up (beside the bound also two, see SETTLED) and
`--measured` steps in a new process. Each of our runs must stay within its budget, by its own memory samples. The bars are for
clipping off; the same is reported with clipping (--clipping off leaves that out). A run of either side during which others were
busy says so and is not kept: the same command measures it again.

--checkout DIR: `compute` and `ssd` compare this checkout with another one instead, whose C extension is built: the same runs,
planned for the same machine, one after the other. A step of this one may take SLOWER more than a step of the other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from proof.both_sides import (
    KEYS,
    NOISE_CORES,
    RANK,
    THREADS,
    Case,
    InMemory,
    in_memory_run,
    limited,
    on_measured_machine,
    our_run,
    started,
    write_recipe,
)
from proof.materials import LENGTH, rows_folder
from proof.setting import RunFailed, Setting, fresh, parser, run_script, size
from proof.tiny_runs import ask_for_run, named
from proof.verdicts import Row, at_least, at_most, digest, missing, reported, say, spread, unless_noisy, unless_recorded, worst

from fuyou_cli.core import probe
from fuyou_cli.core.units import GiB, gb, gib
from fuyou_cli.machine.measure.timing import BackgroundLoad

PARTS = ("compute", "ssd", "deepspeed")
RATIO_IN_MEMORY, OF_BOUND, OF_BOUND_FROZEN, OF_FLOAT32_STATES = 0.93, 1.12, 1.10, 0.62
FASTER = {(1, 2 * GiB): 2.4, (1, 8 * GiB): 5.0, (16, 2 * GiB): 1.3}  # (rows per step, budget) -> times DeepSpeed's
PARAMETERS = {
    "1m": 1e6, "20m": 21e6, "50m": 49e6, "125m": 127e6, "350m": 348e6, "1.1b": 1.1e9, "moe-tiny": 1e6, "moe-120m": 118e6,
    "moe-8": 0.86e9, "moe": 1.07e9,
}  # fmt: skip
EXPERTS = ("eager", "grouped_mm")  # of a mixture in memory: the faster counts
FALL_BACK = {"1.1b": "350m", "moe": "moe-8"}
TRAINED_BYTES, FROZEN_BYTES = 18, 2  # of a parameter in memory: weights, gradients, masters and moments; or weights alone
RATES = (600_000_000, 600_000_000)
RATE_SHOWN = 0.97  # of the held rate that fio must get for the bound to mean anything
CLIPPED_WARM_UP = 2  # steps: the second runs the first update, whose moments are zero and not read
# Steps before one moves the bytes of all later ones: the first updates read no moments, and the second step does what of
# them the first left undone, so that it reads less and its bound is lower (1.1b in 2 GiB: 12.6 of 13.6 GB).
SETTLED = 2
SLOWER = 0.03  # of a step, beside another checkout: medians of as few steps differ by as much
SAME_LOSS = 2e-3  # relative, of the first step: the same rows and weights, bf16 on both sides


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("parts", nargs="+", choices=PARTS)
    options.add_argument("--turns", type=int, default=2, help="of each side")
    options.add_argument("--measured", type=int, default=2, help="steps of a turn after the warm-up")
    ask_for_run(options, KEYS)
    options.add_argument("--clipping", choices=("off", "both"), default="both")
    options.add_argument("--rows", type=int, default=16, help="of 512 tokens, in a step of `compute`")
    options.add_argument("--keep-activations", action="store_true", help="the other side of `compute` recomputes nothing")
    options.add_argument("--checkout", type=Path, help="the other side of `compute` and `ssd` is this checkout's")
    options.add_argument("--disk", type=size, help="bytes/s that it is held at, read and written (default: 0.6GB)")
    options.add_argument("--budget", type=size, help="of our side (default: 1 GiB for adapters, else 2 GiB)")
    asked = options.parse_args()
    if asked.run != "full" and "deepspeed" in asked.parts:
        options.error("--run: DeepSpeed's side trains everything, with float32 states")
    if asked.checkout and not (asked.checkout / "fuyou_cli").is_dir():
        options.error(f"--checkout: there is no fuyou_cli in {asked.checkout}")
    asked.adapter = asked.run in ("lora", "qlora")
    if asked.disk and "deepspeed" in asked.parts:
        options.error("--disk: DeepSpeed's recorded figures are of 0.6 GB/s")
    asked.rates = (asked.disk, asked.disk) if asked.disk else RATES
    asked.budget = asked.budget or (GiB if asked.adapter else 2 * GiB)
    return asked


# ---- figures -------------------------------------------------------------------------------------------------------


def measured_steps(results: list[dict[str, Any]], *, tail: bool) -> list[dict[str, Any]]:
    """Returns the steps after the warm-up, without the last one if it is there only so that the others have a next."""
    return [step for result in results for step in result["steps"][result["warm_up"] : -1 if tail else None]]


def quiet(results: list[dict[str, Any]]) -> str:
    busiest = max((result.get("others_cores", 0.0) for result in results), default=0.0)
    return f"others used up to {busiest:.2f} cores"


def memory_row(what: str, results: list[dict[str, Any]]) -> Row:
    """Compares the largest sample of our own memory with the budget, warm-up and last step included."""
    budget = results[0]["plan"]["budget"]
    peaks = [max(step["ram_peak"] for step in result["steps"]) for result in results]
    note = f"the largest that each run sampled of its own memory: {', '.join(gib(peak) for peak in peaks)}"
    values = {"peaks": peaks, "budget": budget}
    return at_most(f"{what}: peak memory, GiB", max(peaks) / GiB, budget / GiB, note=note, values=values)


def median_of(steps: list[dict[str, Any]], name: str) -> float:
    return statistics.median(step[name] for step in steps)


# ---- beside another checkout -----------------------------------------------------------------------------------------


def beside_checkout(setting: Setting, options: argparse.Namespace, part: str) -> list[Row]:
    """Runs the part's case here and by the other checkout, in turns."""
    rows: list[Row] = []
    for clip in clippings(options):
        here, there = [], []
        for turn in range(options.turns):
            if part == "ssd":
                case = ssd_case(setting, options, turn=turn, clip=clip, warm_up=SETTLED)
            else:
                case = compute_case(setting, options, setting.shape, clip, turn)
            case = on_measured_machine(setting, case)
            here.append(our_run(setting, case))
            there.append(our_run(setting, replace(case, checkout=str(options.checkout.resolve()))))
        what = f"{setting.shape}, {case.rows * LENGTH:,} tokens a step in {gib(options.budget)}, {part}"
        what += f", clipping {'off' if clip is None else 'on'}: step here / there"
        sides = [[step["seconds"] for step in measured_steps(side, tail=part == "ssd")] for side in (here, there)]
        ratio = statistics.median(sides[0]) / statistics.median(sides[1])
        losses = [[step["loss"] for result in side for step in result["steps"]] for side in (here, there)]
        note = f"steps {spread(sides[0])} s here, {spread(sides[1])} s there; {quiet([*here, *there])}"
        note += f"; losses {'equal' if losses[0] == losses[1] else 'differ'}"
        row = at_most(what, ratio, 1 + SLOWER, note=note, values={"here": sides[0], "there": sides[1]})
        rows.append(unless_noisy(row, [*here, *there]))
    return rows


# ---- compute-bound -------------------------------------------------------------------------------------------------


def compute(setting: Setting, options: argparse.Namespace) -> list[Row]:
    shape, note = shape_for_memory(setting.shape, FROZEN_BYTES if options.adapter else TRAINED_BYTES)
    rows: list[Row] = []
    for clip in clippings(options):
        mine, theirs = [], []
        for turn in range(options.turns):
            case = compute_case(setting, options, shape, clip, turn)
            mine.append(our_run(setting, on_measured_machine(setting, case)))
            peers = [
                InMemory(
                    shape=shape, rows=case.rows, micro=case.micro, steps=1 + options.measured, turn=turn, clip=clip,
                    rank=RANK if options.adapter else 0, experts=experts, checkpointing=not options.keep_activations,
                )
                for experts in (EXPERTS if shape.startswith("moe") else ("",))
            ]  # fmt: skip
            theirs.append([in_memory_run(setting, peer, rows_from=shared_rows(setting, case)) for peer in peers])
        fastest = min(zip(*theirs, strict=True), key=lambda one: median_of(measured_steps(one, tail=False), "seconds"))
        rows += compute_rows(shape, clip, mine, list(fastest), note, tokens=options.rows * LENGTH)
    return rows


def compute_case(setting: Setting, options: argparse.Namespace, shape: str, clip: float | None, turn: int) -> Case:
    warm_up = 1 if clip is None else CLIPPED_WARM_UP
    return Case(
        shape=shape, budget=options.budget, steps=warm_up + options.measured, warm_up=warm_up, micro=setting.micro,
        rows=options.rows, clip=clip, turn=turn, timed=True, **limits(options),
    )  # fmt: skip


def compute_rows(
    shape: str, clip: float | None, mine: list[dict], theirs: list[dict], note: str, *, tokens: int = 16 * LENGTH
) -> list[Row]:
    rates = [[step["batch_tokens"] / step["seconds"] for step in measured_steps(side, tail=False)] for side in (mine, theirs)]
    budget = mine[0]["plan"]["budget"]
    ratio = statistics.median(rates[0]) / statistics.median(rates[1])
    what = f"{shape}, {tokens:,} tokens a step in {gib(budget)}, clipping {'off' if clip is None else 'on'}"
    text = f"tokens/s: ours {spread(rates[0])}, in memory {spread(rates[1])}; {quiet([*mine, *theirs])}"
    text = f"{text}; {note}" if note else text
    values = {"ours": rates[0], "in_memory": rates[1], "peak_in_memory": theirs[0]["steps"][-1]["peak_resident"]}
    line = f"{what}: ours / in memory"
    memory = memory_row(f"{what}: ours", mine)
    if clip is not None:
        return [reported(line, f"{ratio:.3f}", note=text, values=values), memory]
    losses = [side[0]["steps"][0]["loss"] for side in (mine, theirs)]
    same = at_most(
        f"{shape}: first step's loss, relative difference",
        abs(losses[0] / losses[1] - 1),
        SAME_LOSS,
        note=f"same rows, same weights: ours {losses[0]:.5f}, in memory {losses[1]:.5f}",
    )
    row = at_least(line, ratio, RATIO_IN_MEMORY, note=text, values=values)
    return [unless_noisy(row, [*mine, *theirs]), memory, same]


def shape_for_memory(shape: str, item: int) -> tuple[str, str]:
    """Returns the shape that plain PyTorch can hold here, for both sides, and a note if it is a smaller one. item: bytes of a
    parameter; what is added is room for activations."""
    needed, free = item * int(PARAMETERS[shape]) + 3 * GiB // 2, probe.memory_available()
    if needed <= free or shape not in FALL_BACK:
        return shape, ""
    note = f"{shape} in memory needs {gib(needed)}, {gib(free)} are free: {FALL_BACK[shape]} on both sides"
    say(note)
    return FALL_BACK[shape], note


def shared_rows(setting: Setting, case: Case) -> Callable[[], Path]:
    """Returns what finds the rows our side trains on, or makes them."""
    return lambda: rows_folder(write_recipe(setting, case))


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the kind of runs asks of a case. An adapter's runs are inside a memory group of exactly their budget."""
    return {"overrides": KEYS[options.run], "limit": options.budget if options.adapter else None}


def clippings(options: argparse.Namespace) -> list[float | None]:
    return [None] if options.clipping == "off" else [None, 1.0]


# ---- ssd-bound -----------------------------------------------------------------------------------------------------


def ssd_case(setting: Setting, options: argparse.Namespace, *, turn: int, **changed: Any) -> Case:
    """Returns our case on the held disk at one row a step. It has one more step than counts, so that each has a next to fetch
    for."""
    warm_up = changed.get("warm_up", 1 if changed.get("clip") is None else CLIPPED_WARM_UP)
    base: dict[str, Any] = {"budget": options.budget, "rows": 1, "micro": 1, "warm_up": warm_up}
    base["steps"] = warm_up + options.measured + 1
    return Case(shape=setting.shape, throttle=options.rates, turn=turn, timed=True, **(limits(options) | base | changed))


def compute_alone(setting: Setting, options: argparse.Namespace, case: Case, **changed: Any) -> dict[str, Any]:
    alone = InMemory(
        shape=case.shape, rows=case.rows, micro=case.micro, steps=1 + options.measured, turn=case.turn, compute_alone=True,
        rank=RANK if options.adapter else 0, **changed,
    )  # fmt: skip
    return in_memory_run(setting, alone, rows_from=shared_rows(setting, case))


def ssd(setting: Setting, options: argparse.Namespace) -> list[Row]:
    mixes, alone, whole, runs = [], [], [], {clip: [] for clip in clippings(options)}
    for turn in range(options.turns):
        mixes.append(mix(setting, options.rates, turn=turn))
        alone.append(compute_alone(setting, options, ssd_case(setting, options, turn=turn)))
        for clip, kept in runs.items():
            kept.append(on_held_disk(setting, options, turn=turn, clip=clip))
        if options.run == "int8":  # the same with float32 states
            whole.append(on_held_disk(setting, options, turn=turn, overrides=()))
    rows = [mix_row(mixes, options.rates)]
    if whole:
        rows.append(small_states_row(setting.shape, runs[None], whole))
    for clip, results in runs.items():
        budget = results[0]["plan"]["budget"]
        what = f"{setting.shape}, 512 tokens a step in {gib(budget)}, clipping {'off' if clip is None else 'on'}"
        bar = None if clip is not None else OF_BOUND_FROZEN if options.adapter else OF_BOUND
        rows += [bound_row(f"{what}: step / bound", results, alone, bar, options.rates), memory_row(what, results)]
        sooner = [result | {"warm_up": 1, "steps": result["steps"][:-1]} for result in results]
        rows.append(bound_row(f"{what}: the same after one warm-up", sooner, alone, bar, options.rates))
    return rows


def on_held_disk(setting: Setting, options: argparse.Namespace, **changed: Any) -> dict[str, Any]:
    return our_run(setting, on_measured_machine(setting, ssd_case(setting, options, warm_up=SETTLED, **changed)))


def small_states_row(shape: str, small: list[dict[str, Any]], whole: list[dict[str, Any]]) -> Row:
    """Compares a step's time with int8 states with that of float32 states."""
    ours, theirs = ([step["seconds"] for step in measured_steps(side, tail=True)] for side in (small, whole))
    note = f"steps {spread(ours)} s with int8 states, {spread(theirs)} s with float32 states; {quiet([*small, *whole])}"
    ratio = statistics.median(ours) / statistics.median(theirs)
    row = at_most(f"{shape}, 512 tokens a step: int8 states / float32 states", ratio, OF_FLOAT32_STATES, note=note,
                  values={"int8": ours, "float32": theirs})  # fmt: skip
    return unless_noisy(row, [*small, *whole])


def mix_row(mixes: list[dict[str, Any]], rates: tuple[int, int]) -> Row:
    what = "fio, one reader and one writer on the held disk, GB/s"
    asked = f">= {RATE_SHOWN:g} of {rates[0] / 1e9:g} + {rates[1] / 1e9:g}"
    absent = next((one["absent"] for one in mixes if "absent" in one), "")
    if absent:
        return missing(what, asked, absent)
    read, write = (statistics.median(one[side] for one in mixes) for side in ("read", "write"))
    lowest = min(read / rates[0], write / rates[1])
    return at_least(what, lowest, RATE_SHOWN, note=f"{read / 1e9:.3f} + {write / 1e9:.3f} GB/s", values={"mixes": mixes})


def bound_row(what: str, results: list[dict], alone: list[dict], bar: float | None, rates: tuple[int, int]) -> Row:
    """Compares a step's time with the larger of what the disk and the processor need at least. Nothing is judged without a
    bar."""
    steps = measured_steps(results, tail=True)
    seconds = median_of(steps, "seconds")
    reading, writing = median_of(steps, "read_bytes") / rates[0], median_of(steps, "written_bytes") / rates[1]
    only = median_of(measured_steps(alone, tail=False), "seconds")
    work = statistics.median(step["update_cpu_seconds"] + step["io_cpu_seconds"] for step in steps)
    bound = max(reading, writing, only + work)
    note = (
        f"step {spread([step['seconds'] for step in steps])} s; bound {bound:.2f} s = max(read "
        f"{gb(median_of(steps, 'read_bytes'))}: {reading:.2f}, write {gb(median_of(steps, 'written_bytes'))}: "
        f"{writing:.2f}, compute alone {only:.2f} + update and I/O {work:.2f}); {quiet([*results, *alone])}"
    )
    values = {
        "seconds": [step["seconds"] for step in steps], "reading": reading, "writing": writing, "compute_alone": only,
        "update_and_io": work, "stalls": steps[-1]["stalls"], "busy": steps[-1]["busy"],
    }  # fmt: skip
    if bar is None:
        return reported(what, f"{seconds / bound:.3f}", note=note, values=values)
    return unless_noisy(at_most(what, seconds / bound, bar, note=note, values=values), [*results, *alone])


# ---- DeepSpeed -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Holds DeepSpeed's seconds per step and where they are from."""

    seconds: float | None
    source: str
    runs: Sequence[dict[str, Any]] = ()  # measured now; none: recorded, or a floor that favours it


def deepspeed(setting: Setting, options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for batch in (1, 16):
        mine: dict[tuple[int, float | None], list[dict]] = {}
        theirs, why = [], ""
        for turn in range(options.turns):
            micro = min(batch, setting.micro)
            record, refused = deepspeed_run(setting, options.peers, rows=batch, micro=micro, throttle=options.rates, turn=turn)
            theirs += [record] if record else []
            why = why or refused
            for budget in [budget for rows_, budget in FASTER if rows_ == batch]:
                for clip in clippings(options):
                    case = ssd_case(setting, options, turn=turn, budget=budget, rows=batch, micro=micro, clip=clip)
                    mine.setdefault((budget, clip), []).append(our_run(setting, on_measured_machine(setting, case)))
        peer = peer_of(setting, options, batch, theirs, why)
        for (budget, clip), results in mine.items():
            clipping = "" if clip is None else ", ours with clipping"
            what = f"{setting.shape}, {batch * LENGTH:,} tokens a step, ours in {gib(budget)}{clipping}"
            row = faster_row(f"{what}: times DeepSpeed", FASTER[batch, budget], clip, results, peer)
            rows += [row, memory_row(what, results)]
    return rows


def peer_of(setting: Setting, options: argparse.Namespace, batch: int, theirs: list[dict], why: str) -> Peer:
    """Returns DeepSpeed's time: measured now, recorded, or a floor."""
    if theirs:
        peak = max(one["cg_peak_gib"] for one in theirs)
        text = f"DeepSpeed {theirs[0]['ds']} now: {spread([one['step_s'] for one in theirs])} s, {peak:.2f} GiB"
        return Peer(seconds=statistics.median(one["step_s"] for one in theirs), source=text, runs=theirs)
    if setting.shape != RECORDED["shape"]:
        return Peer(seconds=None, source=f"DeepSpeed not run ({why}), and the recorded figure is of {RECORDED['shape']}")
    if batch == 1:
        text = f"DeepSpeed recorded before ({why} now): {RECORDED['step_s']} s, {RECORDED['cg_peak_gib']} GiB"
        return Peer(seconds=float(RECORDED["step_s"]), source=text)
    case = ssd_case(setting, options, turn=0, rows=batch, micro=setting.micro)
    alone = compute_alone(setting, options, case, checkpointing=False)
    only = median_of(measured_steps([alone], tail=False), "seconds")
    floor = only + float(RECORDED["opt_s"])
    text = (
        f"DeepSpeed not run ({why}); no more than a floor of its step: {floor:.1f} s = forward and backward in memory "
        f"without recompute {only:.1f} + its recorded optimizer part {RECORDED['opt_s']}, its fetches taken as free"
    )
    return Peer(seconds=floor, source=text)


def faster_row(what: str, bar: float, clip: float | None, results: list[dict], peer: Peer) -> Row:
    """Compares their time with ours. It passes or fails only if both were measured now."""
    steps = [step["seconds"] for step in measured_steps(results, tail=True)]
    if peer.seconds is None:
        return missing(what, f">= {bar:g}", f"{peer.source}; ours {spread(steps)} s")
    ratio = peer.seconds / statistics.median(steps)
    note = f"ours {spread(steps)} s; {peer.source}; {quiet([*results, *peer.runs])}"
    tokens, budget = results[0]["steps"][0]["batch_tokens"], results[0]["plan"]["budget"]
    values = {"ours": steps, "deepspeed": peer.seconds, "budget": budget, "tokens": tokens}
    if clip is not None:
        return reported(what, f"{ratio:.3f}", note=note, values=values)
    row = unless_noisy(at_least(what, ratio, bar, note=note, values=values), [*results, *peer.runs])
    return unless_recorded(row, recorded=not peer.runs)


def prove(setting: Setting, options: argparse.Namespace) -> int:
    proofs = {"compute": compute, "ssd": ssd, "deepspeed": deepspeed}
    codes = []
    for part in [part for part in PARTS if part in options.parts]:
        compared = options.checkout is not None and part != "deepspeed"
        rows = beside_checkout(setting, options, part) if compared else proofs[part](setting, options)
        settings = {name: getattr(options, name) for name in ("turns", "measured", "budget", "run", "rates")}
        settings = {**setting.described(), **settings, "peers": options.peers is not None}
        notes = [] if options.peers else ["no --peers: DeepSpeed is not run"] if part == "deepspeed" else []
        name = f"prove_speed-{part}-{setting.shape}{'-beside' if compared else ''}"
        codes.append(setting.conclude(named(name, options.run), rows, settings, notes))
    return worst(codes)


# ---- what the held disk gives ----------------------------------------------------------------------------------------


FIO_SIZE = 1 << 30
FIO_SECONDS = 8
FIO = ["--output-format=json", "--thread", "--ioengine=io_uring", "--direct=1", "--bs=1M", "--iodepth=8"]


def mix(setting: Setting, throttle: tuple[int, int], *, turn: int) -> dict[str, Any]:
    """Returns bytes per second {read, write} of both at once under the throttle; `absent` if fio is not installed."""
    if shutil.which("fio") is None:
        return {"absent": "fio is not installed (apt-get install fio)"}
    key = f"fio mix, disk {throttle[0] / 1e9:g}+{throttle[1] / 1e9:g} GB/s, {FIO_SECONDS} s, turn {turn}"
    result = setting.measure(key, lambda: _mixed_by_fio(setting.work / "fio", throttle))
    if result.get("failed"):
        raise RunFailed(f"{key}: {result['failed']}")
    return result


def _mixed_by_fio(folder: Path, throttle: tuple[int, int]) -> dict[str, Any]:
    fresh(folder)
    try:
        fill = ["--name=fill", "--rw=write", f"--size={FIO_SIZE}"]
        for name in ("r", "w"):  # written before: a file's first pass is slower
            command = ["fio", *FIO, *fill, f"--filename={folder / name}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        timed = ["--time_based", f"--runtime={FIO_SECONDS}", f"--size={FIO_SIZE}"]
        jobs = ["--name=r", "--rw=read", f"--filename={folder / 'r'}", *timed]
        jobs += ["--name=w", "--rw=write", "--overwrite=1", f"--filename={folder / 'w'}", *timed]
        output = folder / "out.json"
        with (
            limited(folder, memory=None, throttle=throttle) as (held, _),
            output.open("wb") as file,
            started(["fio", *FIO, *jobs], held, file) as child,
        ):
            child.wait()
        text = output.read_text()
        if child.returncode != 0:
            return {"failed": text[-500:]}
        reader, writer = json.loads(text[text.index("{") :])["jobs"]
        return {"read": reader["read"]["bw_bytes"], "write": writer["write"]["bw_bytes"]}
    finally:
        fresh(folder)  # 2 GB


# ---- DeepSpeed's runs ------------------------------------------------------------------------------------------------


# Measured with ds_train.py on two cores, disk held at 0.6 + 0.6 GB/s, 1.1b shape, 512 tokens per step, no clipping.
RECORDED = {"step_s": 71.1, "opt_s": 55.2, "cg_peak_gib": 7.9, "shape": "1.1b", "tokens": LENGTH}


def deepspeed_run(
    setting: Setting, peers: Path | None, *, rows: int, micro: int, throttle: tuple[int, int], turn: int
) -> tuple[dict[str, Any], str]:
    """Returns (its record, ""), or ({}, why there is none)."""
    why = unusable(peers)
    if why:
        return {}, why
    assert peers is not None
    disk = f"disk {throttle[0] / 1e9:g}+{throttle[1] / 1e9:g} GB/s"
    loop = digest([peers / "ds_train.py"])  # no part of this checkout: its contents go into the key
    key = f"deepspeed {setting.shape}, {rows}x{LENGTH} by {micro}, {disk}, ds_train.py {loop}, turn {turn}"
    result = setting.measure(key, lambda: _deepspeed_run(setting, peers, rows=rows, micro=micro, throttle=throttle))
    if result.get("failed"):
        return {}, "ds_train.py failed: " + str(result["failed"]).splitlines()[-1]
    return result, ""


def unusable(peers: Path | None) -> str:
    """Says why DeepSpeed cannot run here. Returns an empty text if it seems to be able to."""
    if peers is None:
        return "no --peers"
    if not (peers / "ds_train.py").is_file():
        return "ds_train.py is not in --peers"
    probe = subprocess.run([sys.executable, "-c", "import deepspeed"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "DeepSpeed is not installed for this Python"


def _deepspeed_run(setting: Setting, peers: Path, *, rows: int, micro: int, throttle: tuple[int, int]) -> dict[str, Any]:
    """Makes one warm-up step and two measured steps. Its rows are random tokens, because it takes no others; the work is the
    same."""
    scratch = Path(os.environ.get("BENCH_DIR", setting.work / "peers"))
    scratch.mkdir(parents=True, exist_ok=True)
    out, output = setting.work / "ds.jsonl", setting.work / "ds.txt"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(peers / "ds_train.py"), "--size", setting.shape, "--offload", "nvme"]
    command += ["--batch", str(micro), "--accum", str(rows // micro), "--seq", str(LENGTH), "--warmup", "1"]
    command += ["--steps", "2", "--max-s", "1", "--threads", str(THREADS), "--out", str(out)]
    command += ["--nvme", str(setting.work / "ds_nvme")]
    others = BackgroundLoad()
    with (
        limited(setting.work, memory=None, throttle=throttle) as (held, _),
        output.open("wb") as file,
        started(command, held, file, BENCH_DIR=str(scratch)) as child,
    ):
        child.wait()
    cores = others.cores()
    records = read_records(out)
    if child.returncode != 0 or not records or "step_s" not in records[-1]:
        said = records[-1].get("error", "") if records else ""
        return {"failed": f"{output.read_text(errors='replace')[-1500:]}\nexit code {child.returncode} {said}".strip()}
    wanted = ("step_s", "step_min", "step_max", "fwd_s", "bwd_s", "opt_s", "cg_peak_gib", "peak_rss_gib")
    wanted += ("rd_gb_step", "wr_gb_step", "ds", "quiet_steps", "steps", "interference")
    noise = {"others_cores": cores, "noisy": cores > NOISE_CORES}
    return {name: records[-1].get(name) for name in wanted} | noise


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
