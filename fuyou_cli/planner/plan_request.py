"""Defines `PlanRequest`, the recipe's placement and batch keys as numbers, and what follows from it alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec, StageSpec
from ..spec.plan import Numerics, Plan, Tier, TypicalStep
from .boundary_layout import Kept

WearPolicy = Literal["spare", "ignore"]

MOST_UPDATE_THREADS = 64  # update threads that the daemon can have
NEARLY_BEST = 0.9  # share of AdamW's best rate that is enough: more threads would only wait for memory
WORTH_WRITING = 0.05  # share of the step that writing trained banks to the ssd in every step has to save
_TRAINED_SHARE = 1 / 8  # of the RAM budget, at most: what updates touch then rests there
_LITTLE_TRAINED = 1 / 64  # of the RAM budget; so little room takes nothing from a step
_CHUNKS_ON_THE_WAY = 5  # chunks being read or written while every update thread has one


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a plan must fulfil. `None` leaves the choice to the planner. Sizes are bytes."""

    numerics: Numerics
    model_name: str
    device: str
    clip_grad_norm: float | None
    cpu_budget: int  # of the whole process
    gpu_budget: int | None = None  # of the device's memory; None: not known
    batch_on_device: bool | None = None  # whether tensors of the whole batch stay on the device between stages
    ssd_budget: int | None = None  # of the store; None: all free disk space
    device_states: tuple[int, ...] | None = None  # stages that rest on the device, with states and gradients
    weights: Tier | None = None
    states: Tier | None = None
    gradients: Tier | None = None
    boundaries: Tier | None = None
    kept: Kept | Literal["all", "none"] | None = None  # operators whose outputs rest with the boundary, per stage
    # Operators whose outputs stay on the device; "room" means as many as fit. None leaves it to the planner if `kept` is None
    # as well, otherwise it means none.
    kept_there: Kept | Literal["room"] | None = None
    lookahead: int | None = None
    defer: bool | None = None  # whether updates wait for the next forward where the norm does not make them wait
    io_backend: str = "auto"
    read_depth: int = 16
    write_depth: int = 16
    block_size: int = 1 << 20
    stripe: int = 4 << 20
    update_threads: int = 1
    chunk_params: int = 1 << 19
    scratch_size: int = 0  # of the daemon's chunks; the native library says how large
    export_item: int = 2  # bytes per exported weight
    exports_trained: bool = False  # an adapter is exported, so frozen weights are not
    sustained: bool = False  # the run writes past the drives' fast regions
    commit_every: int | Literal["auto"] | None = None  # steps between commits; None: only at the end of the run
    wear: WearPolicy = "ignore"  # when a plan may write more to the drives (`search`)
    # Whether a first backward measures the norm, so that updates run beside the second (`search.may_measure_first`).
    norm_first: bool | None = None
    sweeps: int | None = None  # sweeps per step; they divide its micro-batches
    typical: TypicalStep | None = None  # what steps hold; None: rows of `max_seq_len` tokens
    free_pages: bool = False  # a block finds its pages in the heap as the one before left them (`memory.free_pages`)
    code_bytes: int = 0  # of RAM, that libraries take for products of other shapes than the largest micro-batch's
    # Whether trained banks beside frozen ones rest in RAM before anything else does (`rest_in_ram`).
    trained_in_ram: bool | None = None

    @property
    def group(self) -> Numerics:
        """Returns the numerics of one sweep."""
        return self.numerics.of_sweep(self.sweeps or 1)

    @property
    def defers(self) -> bool:
        """Tells whether every stage's gradients go to their home, and its update runs in the next forward, before the stage is
        used: the gradient norm must be known first, or the store has less to do then. The results are the same."""
        return (self.clip_grad_norm is not None and not self.norm_first) or bool(self.defer)

    @property
    def is_swept(self) -> bool:
        """Whether the step has several sweeps, so that gradients rest between them."""
        return (self.sweeps or 1) > 1

    @property
    def asked_interval(self) -> int | None:
        """Returns the steps between commits. It is None also if the planner chooses them, because it does so last."""
        return None if self.commit_every == "auto" else self.commit_every

    def disk(self, hardware: HardwareProfile) -> int:
        """Returns the bytes that the store may take."""
        return hardware.disk_free if self.ssd_budget is None else self.ssd_budget

    def has_room_for(self, plan: Plan, hardware: HardwareProfile) -> bool:
        """Whether the disk and the device have room. RAM was checked when the plan was placed."""
        on_device = self.gpu_budget is None or plan.predicted.gpu_peak <= self.gpu_budget
        return on_device and plan.store_size <= self.disk(hardware)


def update_threads_for(hardware: HardwareProfile, *, device: str, torch_threads: int) -> int:
    """Returns the fewest threads that bring AdamW near its best rate. It takes them from the cores that compute leaves: beside
    a GPU, all but the one that feeds it; otherwise those that torch does not use, or one shared with torch. The results of a
    run do not depend on their number."""
    left = hardware.cores - (1 if device == "cuda" else torch_threads)
    rates = [(threads, rate) for threads, rate in hardware.adamw if threads <= min(left, MOST_UPDATE_THREADS)]
    best = max((rate for _, rate in rates), default=0.0)
    return next((threads for threads, rate in rates if rate >= NEARLY_BEST * best), 1)


def update_chunks_for(threads: int) -> int:
    """Returns how many chunks the daemon's scratch holds, so that reading, computing and writing overlap."""
    return threads + _CHUNKS_ON_THE_WAY


# ---- small trained banks -------------------------------------------------------------------------------------------------
#
# Where all that updates touch is little beside the frozen weights, as an adapter is, it rests in RAM. Such banks get homes of
# their own: weights, gradients and states rest in RAM while the frozen weights of the same stages are read from the ssd, and
# nothing is written but commits.


def rest_in_ram(model: ModelSpec, request: PlanRequest) -> bool:
    """Whether trained banks rest in RAM with their gradients and states, if the recipe lets the states."""
    if request.trained_in_ram is not None and _may_rest(model, request):
        return request.trained_in_ram
    return _may_rest(model, request) and _touched(model, request) <= _TRAINED_SHARE * request.cpu_budget


def ways_to_rest(model: ModelSpec, request: PlanRequest) -> tuple[PlanRequest, ...]:
    """Returns the requests to choose from: where banks that may rest in RAM are not very little, what they take there may be
    worth more to boundaries or outputs, or too much for the run to fit. The one preferred comes first."""
    if request.trained_in_ram is not None or not rest_in_ram(model, request):
        return (request,)
    in_ram, elsewhere = (replace(request, trained_in_ram=rests) for rests in (True, False))
    return (in_ram,) if _touched(model, request) <= _LITTLE_TRAINED * request.cpu_budget else (in_ram, elsewhere)


def least_budget_to_rest(model: ModelSpec, request: PlanRequest) -> int | None:
    """Returns the bytes of RAM from which on trained banks may rest there; None: they never do."""
    return ceil(_touched(model, request) / _TRAINED_SHARE) if _may_rest(model, request) else None


def _may_rest(model: ModelSpec, request: PlanRequest) -> bool:
    return request.states in (None, "cpu") and model.frozen_parameters > 0


def _touched(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes that updates touch."""
    dtype = request.numerics.accumulate_dtype
    return sum(s.trained_weight_bytes + s.state_bytes + s.gradient_bytes(dtype) for s in model.stages)


def has_home(stage: StageSpec, weights: Tier, states: Tier) -> bool:
    """Whether the stage's trained bank has a home of its own, if trained banks rest in RAM."""
    return weights == "ssd" and states == "cpu" and stage.trained > 0 and stage.frozen_weight_bytes > 0
