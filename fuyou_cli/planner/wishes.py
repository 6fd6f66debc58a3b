"""What a plan is asked for: the recipe's placement and batch keys, resolved to numbers, without the recipe's types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..spec.plan import Numerics, Tier
from .boundary_layout import Kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """`None` leaves a choice to the planner. Sizes are bytes."""

    numerics: Numerics
    model_name: str
    device: str
    clip_grad_norm: float | None
    cpu_budget: int  # the whole process
    gpu_budget: int | None = None  # of the device; None: not looked at
    weights: Tier | None = None
    states: Tier | None = None
    gradients: Tier | None = None
    boundaries: Tier | None = None
    kept: Kept | Literal["all", "none"] | None = None  # operators whose outputs are kept, per stage
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
