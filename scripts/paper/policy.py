"""The paper's policy on the paper's machine, step by step, by the simulator that plans runs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import cache

from transformers import GPT2Config

from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.skeleton import build
from fuyou_cli.planner.place import Candidate, made_of
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.simulate import Timeline, simulate
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Numerics

from . import given
from .given import Published

MEDIAN, WORST = 0.10, 0.25  # asked of the errors
CLOSE = 1e-3  # of a rate that is fitted
BATCHES = 8  # the paper's come in multiples of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published step and its prediction. Seconds."""

    published: Published
    predicted: float
    busiest: str
    moved: float  # bytes per parameter

    @property
    def error(self) -> float:
        return self.predicted / self.published.seconds - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduced:
    """Every row, and what n drives do that read and write at once, bytes/s in all."""

    rows: tuple[Row, ...]
    rates: dict[int, float]

    @property
    def errors(self) -> list[float]:
        """Of the rows that nothing was fitted on."""
        return self.errors_but("")

    def errors_but(self, model: str) -> list[float]:
        """The same without a model's."""
        rows = [row for row in self.rows if row.published.role == "predicted" and row.published.model != model]
        return [abs(row.error) for row in rows]

    @property
    def median(self) -> float:
        return statistics.median(self.errors)

    @property
    def worst(self) -> float:
        return max(self.errors)

    @property
    def holds(self) -> bool:
        return self.median <= MEDIAN and self.worst <= WORST


def machine(drives: int, mixed: float) -> HardwareProfile:
    """The testbed with so many drives, which move `mixed` bytes/s in all while they read and write."""
    moved = given.STEP_BYTES
    written = moved - moved_in()
    # Nobody says what fewer than all drives do when they only read; in proportion would be less than both at once.
    alone = max(mixed, given.ALL_DRIVES_RATE * drives / given.ALL_DRIVES)
    return HardwareProfile(
        device="cuda", device_name="RTX 4090", device_memory=0, cores=given.CORES, ram_total=int(given.RAM),
        ram_available=int(given.RAM), process_bytes=0, disk_free=int(drives * given.DRIVE_CAPACITY),
        matmul_flops=given.GPU_FLOPS, store_read=alone, store_write=alone, store_read_mixed=mixed * moved_in() / moved,
        store_write_mixed=mixed * written / moved, adamw=((1, given.CHANNELS * given.CHANNEL_RATE),), h2d=given.PCIE,
        d2h=given.PCIE, measured="described",
    )  # fmt: skip


def moved_in() -> int:
    """Bytes read per parameter and step: weights in forward and backward, states once."""
    return 2 * given.WEIGHT_BYTES + given.state_bytes()


def config_of(name: str) -> GPT2Config:
    layers, heads, width = given.SHAPES[name]
    config = GPT2Config(n_layer=layers, n_head=heads, n_embd=width, vocab_size=given.VOCABULARY, n_positions=given.LENGTH)
    for dropout in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(config, dropout, 0.0)
    return config


@cache
def specification(name: str, rows: int) -> ModelSpec:
    """Micro-batches of so many rows; all of a block is computed again, also what its backward does not look at."""
    anatomy = dissect(build(config_of(name), dtype="bfloat16", attention="sdpa"))
    model = inspect(anatomy, dtype="bfloat16", micro_batch_size=rows, max_seq_len=given.LENGTH, head_chunk_tokens=0)
    return replace(model, stages=tuple(replace(stage, unneeded=()) for stage in model.stages))


def paper_step(name: str, batch: int, hardware: HardwareProfile) -> Timeline:
    """One step under the paper's policy."""
    model = specification(name, batch)
    asked = PlanRequest(
        numerics=Numerics(
            compute_dtype="bfloat16", accumulate_dtype="bfloat16", batch_size=batch, micro_batch_size=batch,
            max_seq_len=given.LENGTH, head_chunk_tokens=0, torch_threads=hardware.cores, seed=0,
        ),
        model_name=name, device="cuda", clip_grad_norm=None, cpu_budget=hardware.ram_available, weights="ssd", states="ssd",
        boundaries="cpu", kept=((),) * len(model.stages),
    )  # fmt: skip
    plan = made_of(model, hardware, asked, Candidate(lookahead=given.IN_FLIGHT, gradient_slots=given.IN_FLIGHT))
    assert plan is not None, (name, batch)
    return simulate(model, hardware, plan, plan_schedule(model, plan), state_bytes=given.state_bytes(), batch_on_device=True)


def fitted_rates() -> dict[int, float]:
    """For every count of drives the rate that makes the fitted row as long as published. Looks at no other row."""
    return {row.drives: _fitted(row) for row in given.PUBLISHED if row.role == "fitted"}


def _fitted(row: Published) -> float:
    """To be found around all bytes over the whole step: drives wait for compute during a part of it."""
    least = given.STEP_BYTES * given.size_of(row.model) / row.seconds
    low, high = least / 2, least * 2
    while high - low > CLOSE * low:
        rate = (low + high) / 2
        slow = paper_step(row.model, row.batch, machine(row.drives, rate)).step_seconds > row.seconds
        low, high = (rate, high) if slow else (low, rate)
    return (low + high) / 2


def reproduced() -> Reproduced:
    rates = fitted_rates()
    rows = []
    for row in given.PUBLISHED:
        step = paper_step(row.model, row.batch, machine(row.drives, rates[row.drives]))
        busiest = max(step.in_use, key=lambda resource: step.in_use[resource])
        moved = (step.read + step.written) / specification(row.model, row.batch).stored_parameters
        rows.append(Row(published=row, predicted=step.step_seconds, busiest=busiest, moved=moved))
    return Reproduced(rows=tuple(rows), rates=rates)


# ---- the batch of 135B ---------------------------------------------------------------------------------------------------


def batches_of_135b() -> range:
    """What it may have been: 135B is wider than 70B, whose batch is the larger end, and narrower than 175B, whose largest is
    the smaller one."""
    largest = {name: max(row.batch for row in given.PUBLISHED if row.model == name) for name in ("70B", "175B")}
    return range(largest["175B"], largest["70B"] + 1, BATCHES)


def one_drive_row() -> Published:
    (row,) = (row for row in given.PUBLISHED if row.role == "gives the batch")
    return row


def one_drive_batch(rates: dict[int, float]) -> float:
    """Sequences per step at 135B that its one-drive row implies: one drive is all that counts there, and moves all of a
    step's bytes at its fitted rate whatever the batch is."""
    row = one_drive_row()
    return row.figure * given.STEP_BYTES * given.size_of(row.model) / rates[row.drives] / given.LENGTH


def at_batch(batch: int, rates: dict[int, float]) -> list[float]:
    """Errors of all of 135B's rows, had its batch been another."""
    rows = [replace(row, batch=batch) for row in given.PUBLISHED if row.model == "135B"]
    steps = [paper_step(row.model, batch, machine(row.drives, rates[row.drives])) for row in rows]
    return [step.step_seconds / row.seconds - 1 for step, row in zip(steps, rows, strict=True)]
