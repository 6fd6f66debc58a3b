"""Sums up the memory that a plan takes: of the process in each phase of a run, and of a device with memory of its own.

Spans of the arena come from `layout`. Here is what compute allocates beside them, and the one table of what takes how much in
which tier (`memory_lines`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from ..core.errors import UsageError
from ..core.process import held
from ..core.units import MiB, align_up, gib
from ..spec.hardware import HardwareProfile
from ..spec.model import ITEM_SIZE, ModelSpec, StageSpec
from ..spec.plan import MemoryLine, Numerics, Plan, Span, StagePlan, Tier, lengths_up_to
from .boundary_layout import Kept, device_boundaries, device_bytes, every_operator, kept_bytes
from .device import (
    UPDATE_CHUNK,
    UPDATE_SCRATCH,
    WEIGHTS_ON_DEVICE,
    decode_scratch,
    decoded_at_once,
    looked_up_bytes,
    square_lanes,
)
from .layout import (
    ARENA_UNIT,
    DEVICE_UNIT,
    SUMMED,
    Layout,
    SpanAllocator,
    batch_boundary,
    batch_slots,
    micro_boundary,
    need_rest,
    range_sums,
    ring_boundaries,
)
from .plan_request import PlanRequest

_CHOICE = 2  # bytes per kept choice of an expert
# Of a cut head on the device: target, maximum, sum, the target's logit, and a new copy of one of these.
HEAD_BYTES_PER_TOKEN = 8 + 4 * 4
HEAD_STEP_BYTES_PER_TOKEN = 8 + 4  # for all sweeps: targets, and losses, which are summed at the end
_RANGE_SHARE = 1 / 16  # of a memory
# Memory on top of the warm libraries: kernels for other shapes and their workspaces, the log, the display, batches, and what
# the operating system holds for the process. Measured: scripts/results/TRIED.md.
BASE_SLACK = 24 * MiB


# What oneDNN keeps of a product in bfloat16 on a CPU, for each shape it has had, and torch of attention, for each length.
# Measured: scripts/results/TRIED.md.
PRODUCT_CODE = 720 << 10
ATTENTION_CODE = 3400 << 10
MOST_PRODUCTS = 1024  # oneDNN forgets older ones

# What a stage takes in the heap is known to about these shares of it. A visit passes the peak of one like it by CREEP at most.
# Where no visit gives pages back, the heap grows by DRIFT beyond what is charged. Measured: scripts/results/TRIED.md.
CREEP, DRIFT = 0.25, 0.35
READ_BACK = 32 * MiB  # of the arena, through which a saved state is read and compared with its sums
# Pieces of a checkpoint on their way to a stage's weights, 4 Mi elements at once. Most is taken where float32 becomes int8:
# 16 MiB as read, 16 in the dtype of compute, 8 in float16 and 16 in float32 again.
LOADING_PIECES = 64 * MiB
_CHOSEN = "of every token, from forward to backward"


# ---- RAM ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeMemory:
    """The most bytes that compute allocates on the host, outside the arena."""

    whole_batch: int
    stage: int

    @property
    def total(self) -> int:
        return self.whole_batch + self.stage


def compute_memory(model: ModelSpec, request: PlanRequest) -> ComputeMemory:
    """Returns the most bytes that compute allocates on the host, outside the arena.

    It counts two boundaries of a sweep's rows (in and out, or their gradients), a third if the norm is measured first, and what
    the model's own forward holds between stages. A separate device has such boundaries in the arena, or all of this in its own
    memory. On device cpu it also counts the stage that needs most. A cut head has the last hidden state, its gradient in
    float32 and at the end in the compute dtype, and maximum, sum and target of every token. Ranges of experts hold one more
    boundary, what they are sent, and sums in float32. A rank of several holds `ring_boundaries` more.
    """
    numerics, step_tokens = request.group, request.numerics.tokens
    tokens = numerics.tokens
    boundary, hidden = batch_boundary(model, request), SUMMED * model.hidden_size * tokens
    between, sums = model.choreography_bytes_per_token * tokens, range_sums(model, request)
    if request.device != "cpu":
        boundary, hidden, between = 0, 0, 0 if request.batch_on_device else max(0, between - boundary)
        sums = 0
    if numerics.batch_size <= numerics.micro_batch_size:  # else they have their own mapping (engine/context.py)
        boundary, hidden = held(boundary), held(hidden)
    whole = held(between)
    if model.head_is_cut:  # the model's own forward has ended by then
        # Losses of every token, summed at the end in the order of one sweep.
        losses = 4 * step_tokens if request.is_swept else 0
        seen = 12 * tokens * (1 + 2 * model.head_is_shared)  # here, and what comes for this visit and the next
        whole = max(whole, hidden + held(seen) + losses)
    boundaries = 2 + bool(request.norm_first) + model.has_ranges + ring_boundaries(model)
    whole += boundaries * boundary + sums + 64 * step_tokens
    stage = max(stage.backward_peak + balance_bytes(stage, numerics) for stage in model.stages) + lane_bytes(model, numerics)
    return ComputeMemory(whole_batch=whole, stage=0 if request.device == "cuda" else stage)


def free_pages(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes, beyond `compute_memory`, with which one block's visit may leave the heap's pages as they are for the
    next. Without them, each visit gives its pages back to the system and faults them in again (`training/step_meter.py`)."""
    if not request.free_pages or request.device != "cpu":
        return 0
    compute = compute_memory(model, request)
    block = max((stage.backward_peak for stage in model.stages if stage.kind == "block"), default=0)
    wanted = compute.whole_batch + int((1 + DRIFT) * block + CREEP * compute.total)
    return align_up(max(0, wanted - compute.total), ARENA_UNIT)


def code_bytes(model: ModelSpec, numerics: Numerics, *, widths: int, trains: bool = True) -> int:
    """Returns the bytes of code that libraries keep on a CPU, beyond that for one width of micro-batches, if these have up to
    so many `widths`. `trains`: backward has products of its own."""
    if numerics.compute_dtype != "bfloat16":
        return 0
    shapes = {
        (tensor.shape, trains and not tensor.frozen)
        for stage in model.stages
        for tensor in stage.tensors
        if len(tensor.shape) == 2 and stage.kind != "embedding"
    }
    if model.tied_head:
        shapes.add(((model.vocab_size, model.hidden_size), trains))
    products = sum(1 + trains + trained for _, trained in shapes) * (widths - 1)
    lengths = lengths_up_to(numerics.max_seq_len, numerics.document_step) if numerics.document_step else widths
    return min(products, MOST_PRODUCTS) * PRODUCT_CODE + (lengths - 1) * ATTENTION_CODE


def lane_bytes(model: ModelSpec, numerics: Numerics) -> int:
    """Returns the bytes of the sums of a stage's gradients that lanes hold beside the one under way, and of slices of other
    replicas' sums."""
    if numerics.lanes == 1:
        return 0
    largest = max(stage.gradient_bytes(numerics.accumulate_dtype) for stage in model.stages)
    return held((numerics.lanes.bit_length() + 1) * largest)


def kept_choices(stage: StageSpec, group: Numerics) -> int:
    """Returns how many choices of experts a stage keeps from forward to backward, for all rows of a sweep."""
    return stage.choices * group.micro_batches * group.micro_batch_tokens


def routing_bytes(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes of the choices that all mixtures keep, where they compute (`engine/routing`)."""
    return _CHOICE * sum(kept_choices(stage, request.group) for stage in model.stages if stage.goes_back)


def balance_bytes(stage: StageSpec, numerics: Numerics) -> int:
    """Returns the bytes that the auxiliary loss takes beside a stage's peaks: probabilities of a micro-batch's tokens, their
    copies in float32, and the chosen experts."""
    if not numerics.router_aux_loss:
        return 0
    return numerics.micro_batch_tokens * (3 * SUMMED * stage.experts + 3 * 8 * stage.choices)


def range_sizes(model: ModelSpec, request: PlanRequest) -> list[int]:
    """Returns how many experts of a block may be in one stage, if all of them are too many, the most first: halves, down to
    where a range takes so little of each memory that a smaller one changes nothing."""
    mixtures = [stage for stage in model.stages if stage.experts and stage.expert_range is None]
    largest = max(mixtures, key=lambda stage: stage.params, default=None)
    if largest is None:
        return []
    routed = [tensor for tensor in largest.tensors if tensor.routed]
    item, summed = ITEM_SIZE[model.compute_dtype], ITEM_SIZE[request.numerics.accumulate_dtype]
    expert_bytes = sum(tensor.numel * (item + (0 if tensor.frozen else summed)) for tensor in routed)  # by all experts
    most = request.cpu_budget if request.gpu_budget is None else min(request.cpu_budget, request.gpu_budget)
    sizes, size = list[int](), largest.experts
    while size > 1 and expert_bytes * size > _RANGE_SHARE * most * largest.experts:
        size = -(-size // 2)
        if WEIGHTS_ON_DEVICE * expert_bytes * size <= most * largest.experts:
            sizes.append(size)
    return sizes


def outside_arena(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, arena_size: int) -> dict[str, int]:
    """Returns, by line of the table, the anonymous and kernel bytes that a training process takes beside its arena."""
    return {
        "compute": compute_memory(model, request).total,
        "chosen experts": routing_bytes(model, request) if request.device == "cpu" else 0,
        "free pages": free_pages(model, request),
        "compiled products": request.code_bytes,
        "process": hardware.process_bytes + BASE_SLACK + arena_size // 512,  # with the arena's page tables
    }


def host_peaks(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, spans: Layout) -> dict[str, int]:
    """Returns, by phase, the most anonymous and kernel bytes that the process takes."""
    largest_slot = max((slots.weight_size for slots in spans.slot_classes), default=0)
    load = hardware.process_bytes + BASE_SLACK + _loaded(spans.stages) + 2 * largest_slot + LOADING_PIECES
    train = spans.arena_size + sum(outside_arena(model, hardware, request, spans.arena_size).values())
    return {"load": load, "train": train, "export": train}


def _loaded(stages: Iterable[StagePlan]) -> int:
    """Returns the bytes of the homes that a checkpoint or a store is read into."""
    return sum(
        span.size
        for stage in stages
        for span in (stage.weights_ram, stage.trained_ram, stage.remainder_ram, stage.momentum_ram, stage.variance_ram)
        if span is not None
    )


def phase_peaks(plan: Plan) -> dict[str, int]:
    """Returns phase -> bytes of RAM at most, in the order of a run.

    Saving has all of the arena; resuming reads everything through a window of it, then what rests in RAM into its place.
    """
    peaks = dict(plan.predicted.cpu_peaks)
    computing = sum(line.size for line in plan.memory if line.what == "compute" and line.tier == "cpu")
    process = sum(line.size for line in plan.memory if line.what == "process")
    arena, homes = plan.arena_size, _loaded(plan.stages)
    around = {
        "save": max(process, peaks.get("train", 0) - computing),
        "resume": process + homes + min(READ_BACK, max(0, arena - homes)),
    }
    order = ("load", "train", "save", "resume", "export")
    by_phase = {**peaks, **around}
    return {name: by_phase[name] for name in (*order, *by_phase) if name in by_phase}


# ---- a device's own memory -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """The most bytes that a plan takes of the device's memory."""

    homes: int = 0  # weights that rest there; if updates run in RAM, a copy is there too
    turns: int = 0  # spans for the weights of all other stages, used in turn
    decoded: int = 0  # quantised weights of the stage that computes, and memory to decode them in
    sums: int = 0  # spans in which gradients are summed (`summing_spans`), and the lanes of their squares
    states: int = 0  # states of stages that are updated there
    gradients: int = 0  # gradients of these stages that rest
    scratch: int = 0  # memory in which their updates are computed
    outputs: int = 0  # outputs of operators for all rows of a sweep, from forward to backward
    boundaries: int = 0  # inputs of stages for all rows of a sweep, from forward to backward
    routing: int = 0  # experts that tokens were sent to, for all rows of a sweep, from forward to backward
    # Whole-batch tensors between stages, if the batch stays there, and what the model's own forward makes of them.
    batch: int = 0
    compute: int = 0  # the pass that needs most for one micro-batch, with copies for its neighbours, and values for every token

    @property
    def total(self) -> int:
        updated = self.states + self.gradients + self.scratch
        weights = self.homes + self.turns + self.decoded
        return weights + self.sums + updated + self.outputs + self.boundaries + self.routing + self.batch + self.compute


def device_memory(model: ModelSpec, request: PlanRequest, stages: tuple[StagePlan, ...]) -> DeviceMemory:
    """Returns the device memory that these stages take, by kind."""
    memory = _memory(
        model,
        request,
        {stage.stage for stage in stages if stage.weights == "gpu"},
        tuple(stage.kept for stage in stages),
        updated={stage.stage for stage in stages if stage.updated_on_device},
        resting={stage.stage for stage in stages if gradients_rest(model, stage, request.sweeps or 1)},
    )
    return replace(memory, outputs=device_bytes(model, request.group, tuple(stage.kept_there for stage in stages)))


def _memory(
    model: ModelSpec, request: PlanRequest, at_home: Iterable[int], every_kept: Kept, *, updated: set[int], resting: set[int]
) -> DeviceMemory:
    """Sums up the memory without outputs that stay there. `at_home`: stages whose weights rest there; `every_kept`: the
    operators of each stage whose outputs rest with its boundary; `updated`: stages that are updated there; `resting`: those of
    them whose gradients rest."""
    if request.device == "cpu":
        return DeviceMemory()
    dtype = request.numerics.accumulate_dtype
    gradients = [stage.gradient_bytes(dtype) for stage in model.stages]
    decoded, lanes = _of_model(_Same(model))
    sums = summing_spans(model, resting, request.sweeps or 1) * max(
        (size for stage, size in enumerate(gradients) if stage not in resting), default=0
    )
    targets = HEAD_BYTES_PER_TOKEN * request.group.tokens if model.head_is_cut else 0
    if request.is_swept and model.head_is_cut:  # targets and losses of the whole step
        targets += HEAD_STEP_BYTES_PER_TOKEN * request.numerics.tokens
    targets += looked_up_bytes(model, request.numerics)
    if any(stage.choices for stage in model.stages):  # which tokens of the step are no padding
        targets += request.numerics.tokens
    # Boundaries rest there where the recipe says so, all of them.
    boundaries = [stage.index for stage in model.stages if stage.keeps_input and request.boundaries == "gpu"]
    batch = 0
    if request.batch_on_device:
        batch_slots(room := SpanAllocator(DEVICE_UNIT), model, request)
        batch = room.used + model.choreography_bytes_per_token * request.group.tokens
    return DeviceMemory(
        homes=sum(model.stages[stage].weight_bytes for stage in at_home),
        turns=WEIGHTS_ON_DEVICE * max((stage.weight_bytes for stage in model.stages if stage.index not in at_home), default=0),
        decoded=decoded,
        sums=sums + 8 * lanes + lane_bytes(model, request.group),
        states=sum(model.stages[stage].state_bytes for stage in updated),
        gradients=sum(gradients[stage] for stage in updated & resting),
        scratch=update_scratch(max((model.stages[stage].trained for stage in updated), default=0)),
        boundaries=device_boundaries(model, request.group, boundaries)[1],
        routing=routing_bytes(model, request),
        batch=batch,
        compute=targets + max(map(partial(_pass_peak, model, request), model.stages, every_kept)),
    )


class _Same:
    """Stands for a model in a cache, where the model itself is compared and not what is in it."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.model is other.model


@lru_cache(maxsize=4)
def _of_model(same: _Same) -> tuple[int, int]:
    """Returns the bytes in which quantised weights are decoded, and the lanes for the squares of its largest tensor."""
    model = same.model
    lanes = square_lanes(max(tensor.numel for stage in model.stages for tensor in stage.tensors))
    return model.decoded_bytes + decode_scratch(decoded_at_once(model)), lanes


def with_batch(model: ModelSpec, request: PlanRequest) -> PlanRequest:
    """Decides whether the batch stays on the device. It stays if it fits beside spans for weights, sums, and the pass that
    needs most, whatever that pass keeps. Nothing else on the device saves more copies per byte. If the device's memory is not
    known, the batch does not stay. It always stays if boundaries rest there, and never where other ranks need it."""
    if model.owners:
        if request.boundaries == "gpu":
            hint = "leave offload.activations to the planner, or start one rank"
            raise UsageError("with several ranks no inputs of blocks rest in a GPU's memory", hint=hint)
        return replace(request, batch_on_device=False)
    if request.batch_on_device is not None or request.device == "cpu":
        return request
    staying = replace(request, batch_on_device=True)
    if request.boundaries == "gpu":
        return staying
    if request.gpu_budget is None:
        return request
    fits = most_needed(model, staying).total <= request.gpu_budget
    return staying if fits else replace(request, batch_on_device=False)


def most_needed(model: ModelSpec, request: PlanRequest) -> DeviceMemory:
    """Returns the memory that a plan needs on the device at most, without what it may leave out. It is enough for any outputs
    that are kept with boundaries."""
    at_home = range(len(model.stages)) if request.weights == "gpu" else ()
    every_kept = request.kept if isinstance(request.kept, tuple) else every_operator(model)
    if request.kept == "none":
        every_kept = ((),) * len(model.stages)
    updated, sums_rest = stages_on_device(model, request), need_rest(model, request)
    resting = {stage for stage in updated if sums_rest[stage]}
    return _memory(model, request, {*at_home, *updated}, every_kept, updated=updated, resting=resting)


def bytes_left(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes of the device that a plan may fill, whatever it keeps in RAM. It is 0 on device cpu, whose memory is
    RAM, and for a device whose memory is not known."""
    if request.device == "cpu" or request.gpu_budget is None:
        return 0
    return max(0, request.gpu_budget - most_needed(model, request).total)


def _pass_peak(model: ModelSpec, request: PlanRequest, spec: StageSpec, outputs: tuple[int, ...]) -> int:
    """Returns the most bytes that a pass of one micro-batch needs: what it allocates itself, and what is copied for its
    neighbours at the same time.

    In backward, the next micro-batch's boundary, gradient and kept outputs arrive, and the gradient of the one before leaves.
    In forward, this input (which the stage does not allocate) and the next input are there, and the input, output and kept
    outputs of the one before leave. A cut head has the sums of all three, and the inputs of this one and the next. So have
    ranges of experts, and the block before them. If the batch stays on the device, only kept boundaries and outputs are copied.
    """
    single = request.group.batch_size <= request.numerics.micro_batch_size
    kept, boundary, balance = kept_bytes(spec, outputs), micro_boundary(model, request), balance_bytes(spec, request.numerics)
    if request.batch_on_device:
        arriving = (1 if single else 2) * boundary * spec.keeps_input
        # One more set of kept outputs than micro-batches that compute: a set is freed only after its copies end.
        return balance + max(
            spec.backward_peak + arriving + kept * (1 if single else 2), spec.forward_peak + kept * (1 if single else 2)
        )
    if spec.kind == "head" and model.head_is_cut:
        sums = SUMMED * model.hidden_size * request.numerics.micro_batch_tokens
        return spec.backward_peak + 2 * boundary + sums * (1 if single else 3)
    if spec.expert_range is not None or model.ranges(spec.index):
        balance += boundary + 2 * range_sums(model, request) // request.group.micro_batches
    if single:
        return balance + max(spec.backward_peak, spec.forward_peak + kept) + boundary
    return balance + max(spec.backward_peak + 3 * boundary + kept, spec.forward_peak + 4 * boundary + 2 * kept)


def update_scratch(largest: int) -> int:
    """Returns the bytes of the device in which updates are computed. `largest`: parameters of the largest stage that is updated
    there."""
    return 4 * UPDATE_SCRATCH * min(largest, UPDATE_CHUNK)


def gradients_rest(model: ModelSpec, stage: StagePlan, sweeps: int) -> bool:
    """Whether the stage's gradients need a home on the device."""
    return stage.updated_on_device and (stage.deferred or model.has_two_users(stage.stage) or sweeps > 1)


def summing_spans(model: ModelSpec, resting: set[int], sweeps: int) -> int:
    """Returns how many spans sum gradients that do not rest on the device. Stages use two in turn. A tied head that is not cut
    holds one more. With several sweeps one more is uploaded for the next visit."""
    stays = model.tied_head and not model.head_is_cut and 0 not in resting
    return 2 + int(stays) + int(sweeps > 1)


def stages_on_device(model: ModelSpec, request: PlanRequest) -> set[int]:
    """Returns the stages that the request puts on the device."""
    if request.device_states is not None:
        return {stage for stage in request.device_states if model.stages[stage].params}
    return {stage.index for stage in model.stages if stage.params} if request.states == "gpu" else set()


# ---- the table ---------------------------------------------------------------------------------------------------------


def memory_lines(
    model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, spans: Layout, device: DeviceMemory
) -> tuple[MemoryLine, ...]:
    """Lists what each kind takes in each tier. Weights with a home on a device are in RAM as well, where updates write them."""
    stages, often = spans.stages, 2  # extents of what is updated
    weights, states = model.stored_weight_bytes, model.stored_state_bytes
    frozen = sum(stage.frozen_weight_bytes for stage in model.stages)
    imported = sum(stage.imported_bytes for stage in model.stages)
    once = ", frozen ones once" if imported else ", frozen ones in the model's files" if frozen else ""
    weights_in_ram = _total(span for stage in stages for span in (stage.weights_ram, stage.trained_ram))
    states_in_ram = sum(model.stages[stage.stage].state_bytes for stage in stages if stage.states == "cpu")
    gradients = sum(stage.gradient_bytes(request.numerics.accumulate_dtype) for stage in model.stages)
    updates = _gradients_policy(model, request)
    kept, in_turns = _total(stage.boundary_ram for stage in stages), sum(map(_in_turns, stages))
    written = _total(stage.boundary_extent for stage in stages)
    in_ram, on_ssd = _boundaries_policies(model, spans, in_turns)
    crossing = (*spans.upload_slots, *(() if request.batch_on_device else spans.batch_slots))
    outside = outside_arena(model, hardware, request, spans.arena_size)
    weight_slots = _total(span for slots in spans.slot_classes for span in slots.weight_slots)
    gradient_slots = _total(span for slots in spans.slot_classes for span in slots.gradient_slots)
    lines: tuple[tuple[str, Tier, int, int, str], ...] = (  # what, tier, bytes, bytes of all of it anywhere (0: only here), why
        ("weights", "cpu", weights_in_ram + weight_slots, weights, "home and slots"),
        ("weights", "ssd", often * (weights - frozen) + imported, weights, "two extents" + once),
        ("optimizer states", "cpu", states_in_ram, states, "home"),
        ("optimizer states", "ssd", often * states, states, "two extents"),
        ("gradients", "cpu", gradient_slots + _total(stage.gradients_ram for stage in stages), gradients, updates),
        ("gradients", "ssd", _total(stage.gradients_extent for stage in stages), gradients, updates),
        ("boundaries", "cpu", kept - in_turns + _total(spans.boundary_slots), kept + written, in_ram),
        ("boundaries", "ssd", written, kept + written, on_ssd),
        ("decoded weights", "cpu", _total((spans.decoded,)), 0, "of the block that computes"),
        ("staging", "cpu", _total(spans.staging_slots), 0, "commits of what rests on the GPU"),
        ("crossing", "cpu", _total(crossing), 0, "the batch between stages, to and from the device"),
        ("compute", "cpu", outside["compute"], 0, "activations of one micro-batch"),
        ("chosen experts", "cpu", outside["chosen experts"], 0, _CHOSEN),
        ("free pages", "cpu", outside["free pages"], 0, "of the heap, from one block to the next"),
        ("compiled products", "cpu", outside["compiled products"], 0, "of libraries, for micro-batches of other widths"),
        ("update chunks", "cpu", spans.io.scratch.size, 0, "read, update, write"),
        ("process", "cpu", outside["process"], 0, "Python, torch, threads"),
        ("weights", "gpu", device.homes + device.turns, weights, "on the GPU home and two turns"),
        ("decoded weights", "gpu", device.decoded, 0, "of the block that computes"),
        ("optimizer states", "gpu", device.states, states, "home, updated there"),
        ("gradients", "gpu", device.sums + device.gradients, gradients, "sums on the GPU"),
        (
            "kept graphs" if model.compiled else "kept outputs", "gpu",
            device.outputs, 0, "from forward to backward, never copied",
        ),
        ("chosen experts", "gpu", device.routing, 0, _CHOSEN),
        ("boundaries", "gpu", device.boundaries, device.boundaries, "from forward to backward, never copied"),
        ("crossing", "gpu", device.batch, 0, "the batch between stages, on the device"),
        ("update chunks", "gpu", device.scratch, 0, "AdamW on the GPU"),
        ("compute", "gpu", device.compute, 0, "a micro-batch and its neighbours"),
    )  # fmt: skip
    return tuple(
        MemoryLine(what=what, tier=tier, size=size, total=total, policy=why) for what, tier, size, total, why in lines if size
    )


def _total(spans: Iterable[Span | None]) -> int:
    return sum(span.size for span in spans if span is not None)


def _in_turns(stage: StagePlan) -> int:
    """Returns the bytes of a boundary that lie where its stage's gradients will rest."""
    if not stage.takes_turns:
        return 0
    assert stage.boundary_ram is not None and stage.gradients_ram is not None
    return min(stage.boundary_ram.size, stage.gradients_ram.size)


def _boundaries_policies(model: ModelSpec, spans: Layout, in_turns: int) -> tuple[str, str]:
    """Returns what is beside boundaries in RAM and on the ssd. `in_turns`: bytes that lie where gradients will."""
    swapped = any(stage.kept for stage in spans.stages)
    policies = ("with kept outputs", "with kept outputs") if swapped else ("recompute the rest", "recompute")
    graphs = [stage.kept_there for stage in spans.stages if model.stages[stage.stage].operators]
    if model.compiled and graphs and all(graphs):
        policies = ("beside kept graphs", "beside kept graphs")
    return (f"{policies[0]}, {gib(in_turns)} more in the place of gradients",) * 2 if in_turns else policies


def _gradients_policy(model: ModelSpec, request: PlanRequest) -> str:
    if request.clip_grad_norm is not None and not request.norm_first:
        policy = "rest until the norm is known" + ", and between sweeps" * request.is_swept
    elif request.is_swept:
        policy = f"rest between {request.sweeps} sweeps" + ", and until the next forward" * request.defers
    else:
        policy = "rest until the next forward" if request.defers else "updated at once"
    tied = any(model.has_two_users(stage.index) for stage in model.stages)
    return policy + "; tied pieces rest from head to embedding" * tied
