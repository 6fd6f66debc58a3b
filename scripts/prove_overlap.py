#!/usr/bin/env python3
"""Shows that a GPU never waits, as far as a machine without one can: an RTX 4090, drives and memory, all paced.

A tiny model runs through the real executor, plan, arena, store, daemon and update threads, on an emulated device. Bytes and
FLOPs have the same ratios as those of Llama-3-8B's or 70B's blocks on `rtx4090,2xgen4,128GiB`. All times are longer by one
factor, so that a busy processor keeps up (scripts/proof/paced.py).

    ratios      the planner's own choice at 8B- and 70B-like ratios: a bound over the measured step (of 8B all its 32 blocks, of
                70B 12 of its 80, 20 minutes each; of six, a step's ends would be a sixth). The bound is the busiest resource;
                with clipping, where no update may begin before the norm is known, the busiest one before the head and the
                compute after it
    placements  twelve drawn by a seed: homes, clipping, kept outputs, sweeps, micro-batches: simulated beside measured
    mixed       few tokens, no clipping, most states in RAM and the rest on the ssd: simulated beside measured
    delays      200 runs whose transfers, copies and updates are late by random times: losses and weights bitwise equal to
                those of a run without delays

No GPU takes part. These figures do not include what a real one adds (launches, kernels, its driver).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from engine.comparing import unequal
from engine.families import llama
from engine.rig import HARDWARE, Rig, Shape, Subject
from proof.paced import Clockwork, PacedCopies, PacedDaemon, RandomDelays, RealTime
from proof.verdicts import Progress, Row, at_least, at_most, conclude, holds, plain_parser, spread

from fuyou_cli.engine import head, passes
from fuyou_cli.engine.devices.base import PIECE
from fuyou_cli.engine.visits import backpropagate
from fuyou_cli.machine.described import described
from fuyou_cli.planner.bound import lower_bound
from fuyou_cli.planner.boundary_layout import kept_bytes
from fuyou_cli.planner.costs import FLOPS_PER_BYTE, Costs
from fuyou_cli.planner.ledgers import Record
from fuyou_cli.planner.place import least_memory
from fuyou_cli.planner.place import plan as plan_of
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import fastest
from fuyou_cli.planner.simulate import sharing_of, simulate
from fuyou_cli.spec.hardware import STORE_RATES, HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan, Tier
from fuyou_cli.swap.daemon import SwapDaemon
from tests.emulated import EmulatedDevice

HIDDEN, INTERMEDIATE, HEAD_ROWS, BLOCKS = 128, 384, 1024, 6
REAL_TOKENS = 2048  # of a micro-batch
MACHINE, BOTH_WAYS = "rtx4090,2xgen4,128GiB", 0.85  # of a copy's rate while the other direction copies: assumed
SPARE_RAM, SPARE_ON_DEVICE = 110 << 30, 16 << 30  # of the real machine, beside what streaming an 8B or 70B model takes
RESTING = 14  # bytes of weights, states and gradients per parameter
THREADS = {"update_threads": 4, "chunks": 9}
DELAYED_STEPS = 3
PARTS = ("ratios", "placements", "mixed", "delays")
IN_RAM, MIXED_MICRO_BATCHES = 0.9, 8  # share of what states take
TIERS: tuple[Tier, Tier] = ("ssd", "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Describes a model whose blocks the tiny ones stand for."""

    name: str
    parameters: int  # of a block
    blocks: int
    tokens: int  # of the tiny model's micro-batch, so that its boundary stands to its weights as the real one's
    deep: int  # blocks of the tiny model whose share of the bound is measured: of few, a step's ends are a large part


SIZES = (
    Size(name="8B", parameters=218_112_000, blocks=32, tokens=64, deep=32),
    Size(name="70B", parameters=855_654_400, blocks=80, tokens=32, deep=12),
)


def arguments() -> argparse.Namespace:
    made = plain_parser(__doc__)
    made.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    names = [size.name for size in SIZES]
    made.add_argument("--sizes", nargs="+", choices=names, default=names, help="of the ratios (default: all)")
    made.add_argument("--slower", type=float, default=8.0, help="times longer than on the 4090 (default: 8)")
    made.add_argument("--dram", type=float, default=0.0, help="GB/s of the 4090's host memory (default: no limit)")
    made.add_argument("--blocks", type=int, help="of the tiny model (default: 6; for the ratios 32 of 8B's, 12 of 70B's)")
    made.add_argument("--steps", type=int, default=3, help="measured, after two")
    made.add_argument("--placements", type=int, default=12)
    made.add_argument("--delays", type=int, default=200)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--work", type=Path, help="folder for progress (default: temporary)")
    return made.parse_args()


# ---- the scaled machine ----------------------------------------------------------------------------------------------


def scaled(size: Size, subject: Subject, slower: float, *, dram: float = 0.0) -> HardwareProfile:
    """Returns the machine with rates for the tiny model's bytes and FLOPs. `slower` is for the smallest model; larger blocks
    take longer by themselves."""
    machine = described(MACHINE).lasting()
    slower *= SIZES[0].parameters / size.parameters
    block = next(stage for stage in subject.spec.stages if stage.kind == "block")
    smaller = block.params / size.parameters / slower
    rates = {name: getattr(machine, name) * smaller for name in (*STORE_RATES, "h2d", "d2h")}
    both = {f"{way}_mixed": rates[way] * BOTH_WAYS for way in ("h2d", "d2h")}
    return replace(
        machine, **rates, **both, adamw=tuple((threads, rate * smaller) for threads, rate in machine.adamw), cores=16,
        matmul_flops=machine.matmul_flops * smaller * size.tokens / REAL_TOKENS, dram=dram * 1e9 * smaller,
        device_memory_rate=machine.matmul_flops * smaller / FLOPS_PER_BYTE, process_bytes=0,
    )  # fmt: skip


def subject_of(size: Size, blocks: int, micro_batches: int) -> Subject:
    config = llama(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=blocks, num_attention_heads=4,
        vocab_size=HEAD_ROWS,
    )  # fmt: skip
    return Subject(config, Shape(dtype="bfloat16", batch=micro_batches, micro=1, tokens=size.tokens))


class Paced:
    """Runs a model on the paced machine. The plan is made with the scaled machine's rates, for a GPU of its kind."""

    def __init__(
        self, subject: Subject, hardware: HardwareProfile, *, folder: Path, delays: RandomDelays | None = None
    ) -> None:
        self.subject, self.hardware, self.folder, self._delays = subject, hardware, folder, delays
        self.step_seconds = list[float]()

    @contextmanager
    def rig(self, *, piece: int = PIECE, planning: Any = plan_of, **options: Any) -> Iterator[Rig]:
        def planned(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
            self.model, self.plan = model, planning(model, hardware, request)
            self.costs = Costs.of(model, hardware, self.plan)
            self.clock: Clockwork = self._delays or RealTime(self.costs, sharing_of(hardware, self.plan, self.costs))
            return self.plan

        self.device = EmulatedDevice(pace=PacedCopies(lambda: self.clock), piece=piece)
        rig = Rig(
            self.subject, self.folder, device="cuda", opened=self.device, hardware=self.hardware, planning=planned,
            through=self._daemon, **options,
        )  # fmt: skip
        with rig, self._takes_its_time(rig):
            yield rig

    def _daemon(self, daemon: SwapDaemon) -> PacedDaemon:
        return PacedDaemon(daemon, self.clock, self.model, self.plan, self.costs)

    @contextmanager
    def _takes_its_time(self, rig: Rig) -> Iterator[None]:
        """Makes each micro-batch take its share of the planned time of its visit, inside the context."""
        executor, visits = rig.executor, rig.executor.visits
        update = visits.states.update

        def takes() -> None:
            visit = executor.visits.schedule.visits[executor.visits.lookahead.cursor]
            kept = kept_bytes(self.model.stages[visit.stage], self.plan.stages[visit.stage].given)
            self.device.takes(self.costs.compute_seconds(visit, kept) / self.costs.micro_batches)

        def timed(forward: Any) -> Any:
            def computed(*given: Any) -> torch.Tensor:
                y = forward(*given)
                takes()
                return y

            return computed

        def backward(*given: Any) -> None:
            backpropagate(*given)
            takes()

        def updated(record: Record, **how: Any) -> int:
            ticket = update(record, **how)
            self.device.takes(self.costs.device_update_seconds(self.plan.stages[record.stage]))
            return ticket

        for activations in executor.activations:
            activations.forward = timed(activations.forward)  # type: ignore[method-assign]
        visits.states.update = updated  # type: ignore[method-assign, assignment]
        passes.backpropagate = head.backpropagate = backward
        try:
            yield
        finally:
            passes.backpropagate = head.backpropagate = backpropagate

    def measure(self, steps: int, **options: Any) -> list[float]:
        """Returns the seconds of `steps` steps after two uncounted ones, each from the end of the step before to its own."""
        with self.rig(**options) as rig:
            ends = list[float]()
            for number, batch in enumerate(self.subject.batches(steps + 3), start=1):
                rig.step(*batch, number, last=number == steps + 3)
                ends.append(time.monotonic())
            rig.executor.drain()
            self.peak = self.device.peak_memory()
        return [end - begin for begin, end in pairwise(ends[1:-1])]

    def simulated(self) -> float:
        schedule = plan_schedule(self.model, self.plan)
        return simulate(self.model, self.hardware, self.plan, schedule, costs=self.costs, steps=4).step_seconds

    def bound(self) -> float:
        return lower_bound(self.costs, plan_schedule(self.model, self.plan), self.plan)


# ---- ratios ----------------------------------------------------------------------------------------------------------


def ratio_rows(options: argparse.Namespace, progress: Progress) -> list[Row]:
    rows = list[Row]()
    for size in (size for size in SIZES if size.name in options.sizes):
        for clip in (None, 1.0):
            key, blocks = f"{size.name}, clipping {'on' if clip else 'off'}", options.blocks or size.deep
            value = progress.measure(
                f"ratios {key} {blocks} {options.slower:g} {options.dram:g}", partial(at_ratio, size, clip, blocks, options)
            )
            note = f"step {spread(value['steps'])} s, bound {value['bound']:.2f} s, simulated {value['simulated']:.2f} s, "
            note += f"{value['busiest']} busy for {value['busy']:.2f} s"
            efficiency = value["bound"] / statistics.median(value["steps"])
            rows.append(at_least(f"{key}: bound over a step", efficiency, 0.95, note=note, values=value))
            rows.append(memory_row(key, value))
    return rows


def at_ratio(size: Size, clip: float | None, blocks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the planner's choice. Memory is the least for a run, and the share of everything else for which the real machine
    has room."""
    subject = subject_of(size, blocks, micro_batches=16)
    block = next(stage for stage in subject.spec.stages if stage.kind == "block")
    room = min(1.0, SPARE_RAM / (size.blocks * size.parameters * RESTING))
    depth = blocks * block.params / (size.blocks * size.parameters)

    def chosen(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
        def at(place: Tier) -> Plan:
            return plan_of(model, hardware, replace(request, weights=place, states=place, boundaries=place))

        least, most = least_memory(model, hardware, request), at("cpu").predicted.cpu_peak
        device = at("ssd").predicted.gpu_peak + int(SPARE_ON_DEVICE * depth)
        request = replace(request, cpu_budget=least + int(room * (most - least)), gpu_budget=device)
        return fastest(model, hardware, request)

    with tempfile.TemporaryDirectory() as folder:
        run = Paced(subject, scaled(size, subject, options.slower, dram=options.dram), folder=Path(folder))
        piece = int(PIECE * block.params / size.parameters)
        return found(run, run.measure(options.steps, clip=clip, home=None, planning=chosen, piece=piece, **THREADS))


def found(run: Paced, steps: list[float]) -> dict[str, Any]:
    busy = run.plan.predicted.seconds
    return {
        "steps": steps, "bound": run.bound(), "simulated": run.simulated(), "busiest": max(busy, key=lambda name: busy[name]),
        "busy": max(busy.values()), "peak": run.peak, "gpu_peak": run.plan.predicted.gpu_peak, "homes": homes(run.plan),
    }  # fmt: skip


def homes(plan: Plan) -> dict[str, int]:
    """Counts the stages at each place."""
    every = Counter(f"{what} {getattr(stage, what)}" for stage in plan.stages for what in ("weights", "states", "boundary"))
    return dict(every)


def memory_row(key: str, value: dict[str, Any]) -> Row:
    peak, planned = int(value["peak"]), int(value["gpu_peak"])
    return holds(f"{key}: device memory taken, bytes", f"<= {planned:,}", f"{peak:,}", peak <= planned)


# ---- placements ------------------------------------------------------------------------------------------------------


def drawn(number: int, seed: int) -> tuple[Size, int, dict[str, Any]]:
    """Draws a size, a number of micro-batches, and a placement."""
    draws = random.Random(f"{seed} {number}")
    sweeps, clip = draws.choice([1, 1, 2]), draws.choice([None, 1.0])
    outputs = draws.choice([{}, {"kept": "all"}, {"kept_there": "room"}]) if sweeps == 1 else {}
    placement = {
        "home": draws.choice(["cpu", "ssd"]), "states": draws.choice(["cpu", "ssd"]), "clip": clip, "sweeps": sweeps,
        "boundaries": draws.choice(["cpu", "ssd"]), "lookahead": draws.choice([1, 2, 3]), **outputs,
        "defer": None if clip else draws.choice([False, True]), "device_states": draws.choice([None, None, (1,), (1, 3)]),
        "batch_on_device": draws.choice([True, True, False]), "gpu_budget": 1 << 30,
    }  # fmt: skip
    return draws.choice(SIZES), draws.choice([4, 8, 16]), placement


def placement_rows(options: argparse.Namespace, progress: Progress) -> list[Row]:
    rows = list[Row]()
    for number in range(options.placements):
        size, micro_batches, placement = drawn(number, options.seed)
        words = ", ".join(f"{name} {value}" for name, value in placement.items() if value and name != "gpu_budget")
        key = f"{size.name}, {micro_batches} micro-batches, {words}"
        value = progress.measure(
            f"{key} {options.slower:g} {options.dram:g}", partial(placed, size, micro_batches, placement, options)
        )
        rows += [beside(key, value), memory_row(key, value)]
    return rows


def beside(key: str, value: dict[str, Any]) -> Row:
    note = f"step {spread(value['steps'])} s, simulated {value['simulated']:.2f} s, bound {value['bound']:.2f} s"
    off = abs(value["simulated"] / statistics.median(value["steps"]) - 1)
    return at_most(f"{key}: simulated beside measured", off, 0.05, note=note, values=value)


def placed(size: Size, micro_batches: int, placement: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    subject = subject_of(size, options.blocks or BLOCKS, micro_batches)
    block = next(stage for stage in subject.spec.stages if stage.kind == "block")
    with tempfile.TemporaryDirectory() as folder:
        run = Paced(subject, scaled(size, subject, options.slower, dram=options.dram), folder=Path(folder))
        piece = int(PIECE * block.params / size.parameters)
        return found(run, run.measure(options.steps, piece=piece, **THREADS, **placement))


# ---- mixed -----------------------------------------------------------------------------------------------------------


def mixed_rows(options: argparse.Namespace, progress: Progress) -> list[Row]:
    rows = list[Row]()
    for size in (size for size in SIZES if size.name in options.sizes):
        blocks = options.blocks or BLOCKS
        key = f"{size.name}, {MIXED_MICRO_BATCHES} micro-batches, room in RAM for {IN_RAM:.0%} of what states take"
        value = progress.measure(f"{key} {blocks} {options.slower:g} {options.dram:g}", partial(mixed, size, options))
        rows.append(beside(key, value))
    return rows


def mixed(size: Size, options: argparse.Namespace) -> dict[str, Any]:
    def chosen(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
        request = replace(request, weights="cpu", gradients="cpu", boundaries="cpu")
        none, every = (plan_of(model, hardware, replace(request, states=place)).predicted for place in TIERS)
        budget = none.cpu_peak + int(IN_RAM * (every.cpu_peak - none.cpu_peak))
        return fastest(model, hardware, replace(request, cpu_budget=budget, gpu_budget=none.gpu_peak))

    return placed(size, MIXED_MICRO_BATCHES, {"home": None, "clip": None, "planning": chosen, "gpu_budget": 1 << 30}, options)


# ---- delays ----------------------------------------------------------------------------------------------------------


def delay_rows(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """Compares each run, which has its own placement, with the run of the same numerics on device cpu."""
    delayed, unlike = Delayed(options.seed), list[str]()
    for number in range(options.delays):
        found = progress.measure(f"delays {options.seed} {number}", partial(delayed.run, number))
        unlike += [] if found["equal"] else [f"{number}: {found['placement']}"]
    what, equal = "runs with random delays: losses and weights bitwise as without a device", options.delays - len(unlike)
    return [holds(what, f"{options.delays}", f"{equal}", not unlike, values={"unlike": unlike})]


class Delayed:
    """Runs a small model whose transfers, copies and updates are late, and compares it with the same model without a
    device."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._subject = Subject(llama(num_hidden_layers=4), Shape(dtype="bfloat16", batch=4, micro=1))
        self._expected = {clip: reference(self._subject, clip) for clip in (None, 1.0)}

    def run(self, number: int) -> dict[str, Any]:
        _, _, placement = drawn(number, self._seed)
        delays = RandomDelays(self._seed + number, mean=random.Random(number).choice([2e-4, 1e-3, 4e-3]))
        with tempfile.TemporaryDirectory() as folder:
            run = Paced(self._subject, HARDWARE, folder=Path(folder), delays=delays)
            with run.rig(**THREADS, **placement) as rig:
                losses, weights, masters = rig.run(DELAYED_STEPS), rig.weights(), rig.masters()
        expected = self._expected[placement["clip"]]
        equal = losses == expected[0] and not unequal(weights, expected[1]) and not unequal(masters, expected[2])
        return {"equal": equal, "placement": str(placement)}


def reference(subject: Subject, clip: float | None) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as folder, Rig(subject, Path(folder), home="cpu", clip=clip) as rig:
        return rig.run(DELAYED_STEPS), rig.weights(), rig.masters()


def main() -> int:
    options = arguments()
    parts = {"ratios": ratio_rows, "placements": placement_rows, "mixed": mixed_rows, "delays": delay_rows}
    with tempfile.TemporaryDirectory() as temporary:
        progress = Progress((options.work or Path(temporary)) / "prove_overlap.jsonl")
        rows = [row for name in options.parts for row in parts[name](options, progress)]
    settings = {name: value for name, value in vars(options).items() if name not in ("results", "work")}
    return conclude("prove_overlap", rows, results=options.results, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
