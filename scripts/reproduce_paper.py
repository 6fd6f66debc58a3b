#!/usr/bin/env python3
"""The paper on paper: its steps predicted from its hardware, then fuyou's own plans on the same machines.

    python scripts/reproduce_paper.py [--json FILE]
    needs no GPU, no drives and no data; a few minutes on two cores

Part 1 takes the hardware of "Ratel: Optimizing Holistic Data Movement to Fine-tune 100B Model on a Consumer GPU" (ICDE
2025; first published as Fuyou, arXiv 2403.06504) and its policy: the whole batch in the GPU's memory, weights and states on
the drives, 30 bytes per parameter and step, gradients in RAM, nothing deferred, no states kept in RAM. The simulator that
plans runs predicts each published step. Four constants, named below; the rate of n drives while reading and writing at
once is fitted on the 13B rows of batch 32 alone, which are marked and left out of the errors.

Part 2 is what `fuyou plan` chooses on the same machines, tokens per second side by side. All of part 2 is predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table
from transformers import GPT2Config

from fuyou_cli.cli.profile import described
from fuyou_cli.core.units import GiB
from fuyou_cli.engine.describe import describe
from fuyou_cli.planner.choice import Choice
from fuyou_cli.planner.place import made_of
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import fastest
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.planner.wishes import Wishes, update_chunks_for, update_threads_for
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import Dtype, ModelSpec
from fuyou_cli.spec.plan import Numerics, Plan
from fuyou_cli.swap.kernels import scratch_size
from fuyou_cli.training.prepare import CHUNK_PARAMS

# ---- the constants -----------------------------------------------------------------------------------------------------
GPU_FLOPS = 162e12  # 1: what its decoder blocks reach on the 4090, counted as it counts (8 per parameter and token)
FITTED_BATCH = 32  # 2: on these rows of 13B the rate of n drives while they read and write is fitted
STATE_BYTES = 12  # 3: its states per parameter, read and written: float32 master and two moments
IN_FLIGHT = (3, 8)  # 4: stages of weights ahead, gradients on their way: its FIFO of 3 blocks, its 8 optimizer buffers

LENGTH = 1024
VOCABULARY = 50257
SHAPES = {  # layers, heads, width
    "13B": (40, 40, 5120), "30B": (48, 56, 7168), "70B": (80, 64, 8192), "135B": (88, 88, 11264), "175B": (96, 96, 12288),
}  # fmt: skip
# Published: model, sequences per step, drives, tokens per second.
PUBLISHED = (
    ("13B", 8, 12, 411), ("13B", 16, 12, 811), ("13B", 32, 12, 1376), ("13B", 64, 12, 1498), ("13B", 128, 12, 1479),
    *(("13B", 32, n, tflops) for n, tflops in ((1, 37.5), (2, 64.3), (3, 81.1), (6, 121.7))),
    *(("13B", 48, n, tflops) for n, tflops in ((1, 53.1), (2, 89.7), (3, 121.7), (6, 146.3), (12, 153.9))),
    *(("13B", 64, n, tflops) for n, tflops in ((1, 70.3), (2, 111.7), (3, 136.3), (6, 151.5))),
    ("70B", 32, 12, 263), ("135B", 24, 12, 94), ("175B", 8, 12, 37.6), ("175B", 16, 12, 62.1),
)  # fmt: skip
PARAMETERS_13B = 12.9e9  # as its TFLOPS count them: 143.1 TFLOPS are 1376 tokens per second
MEDIAN, WORST = 0.10, 0.25
DEVICE_SHARE = 0.92  # of the GPU's memory: the rest is its context's


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published step and its prediction. Seconds."""

    model: str
    batch: int
    drives: int
    published: float
    predicted: float
    fitted: bool
    busy: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def published_seconds(model: str, batch: int, drives: int, figure: float) -> float:
    """Rows of the table of drives are published as TFLOPS, the others as tokens per second."""
    tokens = batch * LENGTH
    if figure < 200 and model == "13B":
        return 8 * PARAMETERS_13B * tokens / (figure * 1e12)
    return tokens / figure


@cache
def specification(name: str, rows: int) -> ModelSpec:
    layers, heads, width = SHAPES[name]
    config = GPT2Config(n_layer=layers, n_head=heads, n_embd=width, vocab_size=VOCABULARY, n_positions=LENGTH)
    for dropout in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(config, dropout, 0.0)
    return describe(config, dtype="bfloat16", micro_batch_size=rows, max_seq_len=LENGTH, head_chunk_tokens=2048).model


def machine(drives: int, mixed: float | None = None, *, ram: int = 768) -> HardwareProfile:
    """Its testbed: an RTX 4090, `drives` D7-P5510, PCIe at 21 GB/s. `mixed` bytes/s while reading and writing, in all."""
    found = replace(described(f"rtx4090,{drives}xp5510,{ram}GiB"), matmul_flops=GPU_FLOPS)
    if mixed is None:
        return found
    read = (4 + STATE_BYTES) / (4 + STATE_BYTES + 2 + STATE_BYTES)  # 16 read, 14 written
    return replace(found, store_read_mixed=mixed * read, store_write_mixed=mixed * (1 - read))


def numerics(batch: int, micro: int, sums: Dtype) -> Numerics:
    return Numerics(
        compute_dtype="bfloat16", accumulate_dtype="bfloat16" if micro == batch else sums, batch_size=batch,
        micro_batch_size=micro, max_seq_len=LENGTH, head_chunk_tokens=2048, torch_threads=16, seed=0,
    )  # fmt: skip


def wishes(hardware: HardwareProfile, batch: int, micro: int, ram: int, *, sums: Dtype = "float32", **pins: object) -> Wishes:
    asked = numerics(batch, micro, sums)
    threads = update_threads_for(hardware, device="cuda", torch_threads=asked.torch_threads)
    return Wishes(
        numerics=asked, model_name="paper", device="cuda", clip_grad_norm=None, cpu_budget=ram, update_threads=threads,
        scratch_size=scratch_size(CHUNK_PARAMS, update_chunks_for(threads)), **pins,
    )  # type: ignore[arg-type] # fmt: skip


def paper_step(name: str, batch: int, hardware: HardwareProfile) -> tuple[float, dict[str, float]]:
    """Seconds of one step under the paper's policy, which computes all of a block again."""
    model = specification(name, batch)
    model = replace(model, stages=tuple(replace(stage, unneeded=()) for stage in model.stages))
    pinned = wishes(
        hardware, batch, batch, 1 << 50, weights="ssd", states="ssd", boundaries="cpu", kept=((),) * len(model.stages)
    )
    plan = made_of(model, hardware, pinned, Choice(lookahead=IN_FLIGHT[0], gradient_slots=IN_FLIGHT[1]))
    assert plan is not None
    step = simulate(model, hardware, plan, plan_schedule(model, plan), state_bytes=STATE_BYTES)
    return step.step_seconds, step.in_use


def fitted_rate(drives: int, seconds: float) -> float:
    """The rate in all at which `drives` make the 13B step of the fitted batch as long as published."""
    low, high = 1e9, 60e9
    for _ in range(30):
        rate = (low + high) / 2
        slow = paper_step("13B", FITTED_BATCH, machine(drives, rate))[0] > seconds
        low, high = (rate, high) if slow else (low, rate)
    return (low + high) / 2


def reproduced() -> tuple[list[Row], dict[int, float]]:
    rows = [(name, batch, drives, published_seconds(name, batch, drives, figure)) for name, batch, drives, figure in PUBLISHED]
    rates = {
        drives: fitted_rate(drives, seconds) for name, batch, drives, seconds in rows if (name, batch) == ("13B", FITTED_BATCH)
    }
    found = []
    for name, batch, drives, seconds in rows:
        predicted, busy = paper_step(name, batch, machine(drives, rates[drives]))
        fitted = (name, batch) == ("13B", FITTED_BATCH)
        found.append(
            Row(model=name, batch=batch, drives=drives, published=seconds, predicted=predicted, fitted=fitted, busy=busy)
        )
    return found, rates


# ---- part 2 --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """What fuyou would do on a machine of the paper's kind. All predicted."""

    model: str
    machine: str
    batch: int
    micro: int
    paper_tokens: float | None  # per second, published
    tokens: float
    rate: float  # of the device's, counted alike: 8 per parameter and token with all recomputed
    seconds: float
    written: int
    steps_to_rating: float | None
    plan: str


def our_step(name: str, batch: int, hardware: HardwareProfile, ram: int) -> tuple[Plan, ModelSpec] | None:
    """The fastest plan over the micro-batches that the GPU's memory holds; gradients are summed in float32 where that fits,
    else in bfloat16, as the paper's are."""
    device = int(hardware.device_memory * DEVICE_SHARE)
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for sums in dtypes:
        best: tuple[Plan, ModelSpec] | None = None
        for micro in (size for size in (1, 2, 4, 8, 16, 32) if size <= batch and batch % size == 0):
            model = specification(name, micro)
            plan = fastest(model, hardware, wishes(hardware, batch, micro, ram, sums=sums, gpu_budget=device))
            if plan.predicted.gpu_peak > device:
                break
            if best is None or plan.predicted.step_seconds < best[0].predicted.step_seconds:
                best = plan, model
        if best is not None:
            return best
    return None


def ours(name: str, batch: int, label: str, hardware: HardwareProfile, ram: int, paper: float | None) -> Ours | None:
    found = our_step(name, batch, hardware, ram)
    if found is None:
        return None
    plan, model = found
    step, tokens = plan.predicted.step_seconds, batch * LENGTH
    rated = sum(drive.rated_bytes for drive in hardware.drives)
    written = plan.predicted.written_per_step
    states = sum(stage.states == "cpu" for stage in plan.stages) / len(plan.stages)
    item = plan.numerics.accumulate_dtype
    deferred = sum(stage.deferred for stage in plan.stages) / len(plan.stages)
    kept = sum(len(stage.kept) for stage in plan.stages) / max(1, sum(len(stage.operators) for stage in model.stages))
    return Ours(
        model=name, machine=label, batch=batch, micro=plan.numerics.micro_batch_size, paper_tokens=paper,
        tokens=tokens / step, rate=8 * model.parameters * tokens / step / GPU_FLOPS, seconds=step, written=written,
        steps_to_rating=rated / written if rated and written else None,
        plan=f"states in RAM {states:.0%}, deferred {deferred:.0%}, outputs kept {kept:.0%}, sums in {item}",
    )  # fmt: skip


def our_rows(rates: dict[int, float], console: Console) -> list[Ours]:
    """Every published row, then the cases that the paper could not do."""
    found: list[Ours | None] = []
    for name, batch, drives, figure in PUBLISHED:
        paper = batch * LENGTH / published_seconds(name, batch, drives, figure)
        console.print(f"planning {name}, {batch} sequences, {drives} drives", style="dim")
        found.append(ours(name, batch, f"4090, {drives} P5510, 768 GiB", machine(drives, rates[drives]), 750 * GiB, paper))
    found.append(ours("175B", 32, "4090, 12 P5510, 256 GiB", machine(12, rates[12], ram=256), 250 * GiB, 62.1))
    for name in ("13B", "70B"):
        for ram in (64, 128):
            hardware = replace(described(f"rtx4090,2xgen4,{ram}GiB"), matmul_flops=GPU_FLOPS)
            for batch in (32, 64, 128, 256):
                console.print(f"planning {name}, {batch} sequences, two consumer drives, {ram} GiB", style="dim")
                found.append(ours(name, batch, f"4090, 2 Gen4, {ram} GiB", hardware, int(0.95 * ram * GiB), None))
    return [row for row in found if row is not None]


# ---- output --------------------------------------------------------------------------------------------------------------


def show_reproduced(console: Console, rows: list[Row], rates: dict[int, float]) -> bool:
    console.print("The paper, reproduced on paper: seconds per step, predicted by the simulator", style="bold")
    table = Table()
    for column in ("model", "batch", "drives", "published s", "predicted s", "error", "busiest"):
        table.add_column(column, justify="left" if column in ("model", "busiest") else "right")
    for row in rows:
        busiest = max(row.busy, key=lambda name: row.busy[name])
        error = "fitted" if row.fitted else f"{row.error:+.1%}"
        table.add_row(
            row.model, str(row.batch), str(row.drives), f"{row.published:.1f}", f"{row.predicted:.1f}", error, busiest
        )
    console.print(table)
    console.print(
        f"constants: GPU {GPU_FLOPS / 1e12:.0f} TFLOPS; states {STATE_BYTES} bytes per parameter; {IN_FLIGHT[0]} blocks of "
        f"weights ahead, {IN_FLIGHT[1]} of gradients; drives reading and writing (fitted, batch {FITTED_BATCH}): "
        + ", ".join(f"{drives}: {rate / 1e9:.1f} GB/s" for drives, rate in sorted(rates.items()))
    )
    errors = [abs(row.error) for row in rows if not row.fitted]
    median, worst = statistics.median(errors), max(errors)
    holds = median <= MEDIAN and worst <= WORST
    console.print(
        f"errors of {len(errors)} rows: median {median:.1%} (asked {MEDIAN:.0%}), worst {worst:.1%} (asked {WORST:.0%}): "
        + ("holds" if holds else "DOES NOT HOLD")
    )
    return holds


def show_ours(console: Console, rows: list[Ours]) -> bool:
    console.print("\nfuyou's own plans, predicted", style="bold")
    table = Table()
    left, right = ("model", "machine"), ("batch", "micro", "paper tok/s", "tok/s", "of the device", "s", "TB/step")
    for column in (*left, *right, "steps to rating", "plan"):
        table.add_column(column, justify="left" if column in (*left, "plan") else "right")
    for row in rows:
        paper = "" if row.paper_tokens is None else f"{row.paper_tokens:.0f}"
        steps = "" if row.steps_to_rating is None else f"{row.steps_to_rating:,.0f}"
        table.add_row(
            row.model, row.machine, str(row.batch), str(row.micro), paper, f"{row.tokens:.0f}", f"{row.rate:.0%}",
            f"{row.seconds:.1f}", f"{row.written / 1e12:.2f}", steps, row.plan,
        )  # fmt: skip
    console.print(table)
    large = next(row for row in rows if row.model == "175B" and row.batch == 32)
    holds = large.rate >= 0.85
    verdict = "holds" if holds else "DOES NOT HOLD"
    console.print(f"175B, 256 GiB, 12 drives, 32,768 tokens: {large.rate:.0%} of the device rate (asked 85 %): {verdict}")
    console.print(
        "device rate as the paper counts it, 8 per parameter and token: what is kept is not computed again, so 100 % and more"
    )
    slower = [row for row in rows if row.paper_tokens is not None and row.tokens < row.paper_tokens]
    console.print(f"rows where ours is slower: {len(slower)}" + "".join(f"\n  {row}" for row in slower))
    return holds


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="also write both tables there")
    options.add_argument("--paper-only", action="store_true", help="part 1 only")
    asked = options.parse_args()
    console, status = Console(width=150), Console(stderr=True)
    rows, rates = reproduced()
    holds = show_reproduced(console, rows, rates)
    planned = [] if asked.paper_only else our_rows(rates, status)
    if planned:
        holds = show_ours(console, planned) and holds
    if asked.json is not None:
        both = {"paper": [asdict(row) for row in rows], "ours": [asdict(row) for row in planned]}
        asked.json.write_text(json.dumps(both, indent=1) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
