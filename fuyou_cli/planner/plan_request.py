"""Defines what a plan is asked for: the recipe's placement and batch keys as numbers, without the recipe's types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..spec.hardware import HardwareProfile
from ..spec.plan import Numerics, Plan, StoreMode, Tier
from .boundary_layout import Kept

WearPolicy = Literal["spare", "balanced", "ignore"]

MOST_UPDATE_THREADS = 64  # that the daemon can have
NEARLY_BEST = 0.9  # of AdamW's best rate: more threads than that takes only wait for memory
_CHUNKS_ON_THE_WAY = 5  # being read or written while every update thread has one


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a plan is asked for. `None` leaves the choice to the planner. Sizes are bytes."""

    numerics: Numerics
    model_name: str
    device: str
    clip_grad_norm: float | None
    cpu_budget: int  # the whole process
    gpu_budget: int | None = None  # of the device; None: not looked at
    batch_on_device: bool | None = None  # whether stages hand on there what they compute of the whole batch
    ssd_budget: int | None = None  # of the store; None: the disk that is free
    device_states: tuple[int, ...] | None = None  # stages that rest on the device, states and gradients too
    weights: Tier | None = None
    states: Tier | None = None
    gradients: Tier | None = None
    boundaries: Tier | None = None
    kept: Kept | Literal["all", "none"] | None = None  # operators whose outputs rest with the boundary, per stage
    # Operators whose outputs stay on the device: "room" for as many as it has room for. None leaves that to the planner where
    # `kept` does as well; else none.
    kept_there: Kept | Literal["room"] | None = None
    lookahead: int | None = None
    defer: float | None = None  # share of the parameters updated in the next forward, 0 to 1; clipping defers all
    io_backend: str = "auto"
    read_depth: int = 16
    write_depth: int = 16
    block_size: int = 1 << 20
    stripe: int = 4 << 20
    update_threads: int = 1
    chunk_params: int = 1 << 19
    scratch_size: int = 0  # of the daemon's chunks, from the native library
    export_item: int = 2  # bytes per exported weight
    sustained: bool = False  # the run writes past the drives' fast regions
    commit_every: int | Literal["auto"] | None = None  # steps between commits; None: where the run ends alone
    store_mode: StoreMode = "in_place"
    may_redo: bool = False  # the other mode, where this one has no room
    keep: int = 1  # committed states that are there whole at any time, where stages have places of their own
    wear: WearPolicy = "ignore"  # what drives are spent for (`sparing`)
    sweeps: int | None = None  # of a step over the model, which divide its micro-batches

    @property
    def group(self) -> Numerics:
        """Returns the numerics of one sweep."""
        return self.numerics.of_sweep(self.sweeps or 1)

    @property
    def is_swept(self) -> bool:
        """Returns whether the step has several sweeps, so that gradients rest between them."""
        return (self.sweeps or 1) > 1

    @property
    def asked_interval(self) -> int | None:
        """Returns the steps between commits. None also if the planner chooses them, which it does last of all."""
        return None if self.commit_every == "auto" else self.commit_every

    def disk(self, hardware: HardwareProfile) -> int:
        """Returns the bytes that the store may take."""
        return hardware.disk_free if self.ssd_budget is None else self.ssd_budget

    def has_room_for(self, plan: Plan, hardware: HardwareProfile) -> bool:
        """Returns whether the disk and the device have room. RAM was checked when the plan was placed."""
        on_device = self.gpu_budget is None or plan.predicted.gpu_peak <= self.gpu_budget
        return on_device and plan.store_size <= self.disk(hardware)


def update_threads_for(hardware: HardwareProfile, *, device: str, torch_threads: int) -> int:
    """Returns the fewest threads that bring AdamW near its best rate, of the cores that compute leaves: beside a GPU all but
    the one that feeds it, otherwise those that torch does not use, or one that shares them. The result of a run is the same
    with any number."""
    left = hardware.cores - (1 if device == "cuda" else torch_threads)
    rates = [(threads, rate) for threads, rate in hardware.adamw if threads <= min(left, MOST_UPDATE_THREADS)]
    best = max((rate for _, rate in rates), default=0.0)
    return next((threads for threads, rate in rates if rate >= NEARLY_BEST * best), 1)


def update_chunks_for(threads: int) -> int:
    """Returns chunks that the daemon's scratch holds, so that reading, computing and writing overlap."""
    return threads + _CHUNKS_ON_THE_WAY
