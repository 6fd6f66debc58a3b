"""Computes how much memory a placement takes: slots, homes, what compute allocates, and the process itself.

Only `layout` gives out spans, for the arena and for the store. The run uses the same spans, so the sums here are the plan's
peaks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from ..core.heap import held
from ..core.units import MiB, align_up
from ..spec.micro_batch import lengths_up_to
from ..spec.model import ITEM_SIZE, ModelSpec, StageSpec
from ..spec.plan import IoPlan, Numerics, SlotClass, Span, StagePlan, Tier
from .boundary_layout import Kept
from .defer import deferrals
from .device import WEIGHTS_ON_DEVICE
from .device_homes import staging_slots
from .placement_context import STORE_UNIT, PlacementContext, SpanAllocator
from .plan_request import PlanRequest
from .small_banks import has_home

ARENA_UNIT = 2 * MiB  # bytes: hugepages round up to this
DEVICE_UNIT = 512  # bytes: a device's allocator rounds up to this
COPY_ALIGN = 64  # bytes: alignment of tensors that are copied together
_SUM = ITEM_SIZE["float32"]  # bytes per value that a cut head sums, or a router's probabilities
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Homes:
    """Tells where each stage's tensors rest. `kept`: operators whose outputs rest with the boundary; `kept_there`: operators
    whose outputs stay on the device."""

    weights: tuple[Tier, ...]
    states: tuple[Tier, ...]
    gradients: tuple[Tier, ...]
    boundaries: tuple[Tier, ...]
    kept: Kept
    kept_there: Kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Holds every span of arena and store."""

    stages: tuple[StagePlan, ...]
    slot_classes: tuple[SlotClass, ...]
    boundary_slots: tuple[Span, ...]
    upload_slots: tuple[Span, ...]
    batch_slots: tuple[Span, ...]
    staging_slots: tuple[Span, ...]
    decoded: Span | None
    io: IoPlan
    arena_size: int
    store_size: int


def layout(context: PlacementContext, request: PlanRequest, homes: Homes, *, lookahead: int, gradient_slots: int) -> Layout:
    """Returns every span of arena and store for this placement."""
    model = context.model
    arena = SpanAllocator(ARENA_UNIT)
    # What survives a run comes first and depends only on the model. So a resumed run may place everything else differently.
    transient = SpanAllocator(STORE_UNIT, used=context.durable_size)
    classes = context.classes
    boundaries = [context.boundary_size(index, kept) for index, kept in enumerate(homes.kept)]
    deferred = deferrals(model, request)
    slot_classes = tuple(
        _slot_class(arena, model, request, homes, deferred, classes, number, lookahead=lookahead, gradient_slots=gradient_slots)
        for number in range(max(classes) + 1)
    )
    on_ssd = sum(tier == "ssd" for tier in homes.boundaries)
    slots = min(lookahead + 2, on_ssd + 1) if on_ssd else 0
    largest = max((boundaries[i] for i, tier in enumerate(homes.boundaries) if tier == "ssd"), default=0)
    boundary_slots = tuple(arena.take(largest) for _ in range(slots))
    up = _upload_slots(arena, model, request)
    batches = batch_slots(SpanAllocator(DEVICE_UNIT) if request.batch_on_device else arena, model, request)
    staging = staging_slots(arena, model, homes.states)
    decoded = arena.take_if(request.device == "cpu", model.decoded_bytes)
    scratch = arena.take(request.scratch_size)
    # Many small homes lie closely together.
    at_rest = SpanAllocator(STORE_UNIT, used=arena.used) if context.trained_in_ram else arena
    place = partial(_stage, at_rest, transient, context, request, homes, is_far=lookahead < len(model.stages))
    stages = tuple(place(index, boundary=boundaries[index], deferred=deferred[index]) for index in range(len(model.stages)))
    arena.used = align_up(at_rest.used, ARENA_UNIT)
    return Layout(
        stages=stages,
        slot_classes=slot_classes,
        boundary_slots=boundary_slots,
        upload_slots=up,
        batch_slots=batches,
        staging_slots=staging,
        decoded=decoded,
        io=IoPlan(
            backend=request.io_backend,  # type: ignore[arg-type]
            read_depth=request.read_depth,
            write_depth=request.write_depth,
            block_size=request.block_size,
            stripe=request.stripe,
            update_threads=request.update_threads,
            chunk_params=request.chunk_params,
            scratch=scratch,
        ),
        arena_size=arena.used,
        store_size=align_up(transient.used, request.stripe),
    )


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


def micro_boundary(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes of one micro-batch's boundary."""
    return model.widest_bytes_per_token * request.numerics.micro_batch_tokens


def batch_boundary(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes of one boundary for all rows of a sweep."""
    return model.widest_bytes_per_token * request.group.tokens


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
    return numerics.micro_batch_tokens * (3 * _SUM * stage.experts + 3 * 8 * stage.choices)


def micro_sums(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes of one micro-batch's gradient of the last hidden state, which the pieces of a cut head sum in
    float32."""
    return _SUM * model.hidden_size * request.numerics.micro_batch_tokens


def _upload_slots(arena: SpanAllocator, model: ModelSpec, request: PlanRequest) -> tuple[Span, ...]:
    """Returns slots for uploads from memory that is not pinned. Copies beside compute need pinned memory. The arena is pinned,
    but ids, targets and what the model's own operators compute between stages are not. These pass through the slots: one is
    filled while the other is copied."""
    if request.device == "cpu" or request.batch_on_device:
        return ()
    numerics = request.group
    size = align_up(micro_boundary(model, request), COPY_ALIGN) + 8 * numerics.micro_batch_tokens
    return tuple(arena.take(size) for _ in range(min(2, numerics.micro_batches)))


def batch_slots(room: SpanAllocator, model: ModelSpec, request: PlanRequest) -> tuple[Span, ...]:
    """Returns slots for whole-batch tensors between stages, on a separate device or in the arena that it copies to and from.
    Input and output of a stage use two in turn, and the model's own forward holds the embedding's. A cut head sums in one of
    them if it is in float32, else in one larger slot. A step that measures the norm first needs the last hidden state twice.
    Ranges of experts hold what they are sent, and sum in a larger slot."""
    if request.device == "cpu":
        return ()
    boundaries = 3 + bool(request.norm_first) + model.has_ranges
    spans = [room.take(batch_boundary(model, request)) for _ in range(boundaries)]
    if model.has_ranges or (model.head_is_cut and model.compute_dtype != "float32"):
        spans.append(room.take(range_sums(model, request) or _SUM * model.hidden_size * request.group.tokens))
    return tuple(spans)


def range_sizes(model: ModelSpec, request: PlanRequest) -> list[int]:
    """Returns how many experts of a block may be in one stage, if all of them are too many, the most first: halves, down to
    where a range takes so little of each memory that a smaller one changes nothing."""
    mixtures = [stage for stage in model.stages if stage.experts and stage.expert_range is None]
    largest = max(mixtures, key=lambda stage: stage.params, default=None)
    if largest is None:
        return []
    routed = [tensor for tensor in largest.tensors if tensor.routed]
    item, summed = ITEM_SIZE[model.compute_dtype], ITEM_SIZE[request.numerics.accumulate_dtype]
    taken = sum(tensor.numel * (item + (0 if tensor.frozen else summed)) for tensor in routed)  # by all experts
    most = request.cpu_budget if request.gpu_budget is None else min(request.cpu_budget, request.gpu_budget)
    found, size = list[int](), largest.experts
    while size > 1 and taken * size > _RANGE_SHARE * most * largest.experts:
        size = -(-size // 2)
        if WEIGHTS_ON_DEVICE * taken * size <= most * largest.experts:
            found.append(size)
    return found


def range_sums(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes in which ranges of experts sum outputs, or gradients, of all rows of a sweep; 0: there are none."""
    each = max((stage.choices for stage in model.stages), default=0)
    return _SUM * (model.hidden_size + each) * request.group.tokens if model.has_ranges else 0


def _slot_class(
    arena: SpanAllocator,
    model: ModelSpec,
    request: PlanRequest,
    homes: Homes,
    deferred: tuple[bool, ...],
    classes: tuple[int, ...],
    number: int,
    *,
    lookahead: int,
    gradient_slots: int,
) -> SlotClass:
    """Counts and sizes the slots of a class.

    Weights: one slot computes, `lookahead` slots are being filled, and each update that runs after backward has one. A deferred
    update uses the slot of the visit that follows it. Gradients: one slot is being summed, the others are being updated or
    written. One more holds the gradients of a tied head that is not cut, through backward.
    """
    members = [i for i, c in enumerate(classes) if c == number and model.stages[i].params]
    updated = [i for i in members if model.stages[i].trained]
    weight_size = max((model.stages[i].weight_bytes for i in members), default=0)
    dtype = request.numerics.accumulate_dtype
    gradient_size = max((model.stages[i].gradient_bytes(dtype) for i in members), default=0)
    streamed = sum(homes.weights[i] == "ssd" for i in members)
    in_update = 0 if all(deferred[i] for i in updated) else gradient_slots - 1
    weights = min(streamed, 1 + lookahead + in_update)
    through_host = [i for i in updated if homes.states[i] != "gpu"]
    passing = sum(not rests(model, request, i, deferred[i]) or homes.gradients[i] == "ssd" for i in through_host)
    gradients = min(passing, gradient_slots)
    if model.tied_head and not model.head_is_cut and 0 in through_host and passing > gradients and gradients:
        gradients += 1
    return SlotClass(
        weight_size=weight_size,
        gradient_size=gradient_size,
        weight_slots=tuple(arena.take(weight_size) for _ in range(weights)),
        gradient_slots=tuple(arena.take(gradient_size) for _ in range(gradients)),
    )


def rests(model: ModelSpec, request: PlanRequest, stage: int, deferred: bool) -> bool:
    """Tells whether the stage's gradients, if it has any, need a home: until a deferred update, from a tied head's backward to
    the embedding's, or from sweep to sweep."""
    return deferred or model.has_two_users(stage) or request.is_swept


def may_take_turns(context: PlacementContext, request: PlanRequest, stage: int, deferred: bool) -> bool:
    """Tells whether a stage's boundary and its resting gradients may lie in the same memory: the boundary from forward to
    backward, the gradients from there to their deferred update, which ends before the next forward computes. A separate device
    fills a boundary while the stage computes, and sums gradients elsewhere; on device cpu both would be in the way. Sums that
    another visit or sweep resumes rest in forward too. Of adapters they are too small."""
    return (
        request.device != "cpu"
        and deferred
        and not request.is_swept
        and not context.has_two_users[stage]
        and not context.trained_in_ram
    )


def _resting(
    arena: SpanAllocator, context: PlacementContext, request: PlanRequest, homes: Homes, index: int, *, sizes: tuple[int, int],
    deferred: bool,
) -> tuple[Span | None, Span | None]:  # fmt: skip
    """Returns the homes in RAM of a stage's resting gradients and of its boundary, of these sizes (bytes)."""
    places = homes.gradients[index], homes.boundaries[index]
    gradients, boundary = (size if place == "cpu" else 0 for size, place in zip(sizes, places, strict=True))
    if not (gradients and boundary and may_take_turns(context, request, index, deferred)):
        return arena.take_if(True, gradients), arena.take_if(True, boundary)
    start = arena.take(max(gradients, boundary)).offset
    return Span(offset=start, size=gradients), Span(offset=start, size=boundary)


def _stage(
    arena: SpanAllocator,
    transient: SpanAllocator,
    context: PlacementContext,
    request: PlanRequest,
    homes: Homes,
    index: int,
    *,
    boundary: int,
    deferred: bool,
    is_far: bool,
) -> StagePlan:
    stage, at_rest = context.model.stages[index], context.at_rest[index]
    is_resting = deferred or context.has_two_users[index] or request.is_swept
    gradient_size, (remainder, momentum, variance) = context.gradient_sizes[index], context.state_sizes[index]
    weights_home, states_home = homes.weights[index], homes.states[index]
    in_ram = states_home == "cpu"
    sizes = (gradient_size if is_resting else 0, boundary)
    gradients_ram, boundary_ram = _resting(arena, context, request, homes, index, sizes=sizes, deferred=deferred)
    return StagePlan(
        stage=index,
        weights=weights_home,
        states=states_home,
        gradients=homes.gradients[index],
        boundary=homes.boundaries[index],
        slot_class=context.classes[index],
        deferred=deferred,
        pair=at_rest.pair,
        frozen_extent=at_rest.frozen,
        frozen_source=stage.source,
        weights_at=at_rest.weights,
        remainder_at=at_rest.remainder,
        momentum_at=at_rest.momentum,
        variance_at=at_rest.variance,
        gradients_extent=transient.take_if(is_resting and homes.gradients[index] == "ssd", gradient_size),
        boundary_extent=transient.take_if(homes.boundaries[index] == "ssd", boundary),
        weights_ram=arena.take_if(weights_home != "ssd" and states_home != "gpu", stage.weight_bytes),
        looked_up=context.looked_up[index] if is_far else 0,
        trained_ram=arena.take_if(
            context.trained_in_ram and has_home(stage, weights_home, states_home), stage.trained_weight_bytes
        ),
        remainder_ram=arena.take_if(in_ram, remainder),
        momentum_ram=arena.take_if(in_ram, momentum),
        variance_ram=arena.take_if(in_ram, variance),
        gradients_ram=gradients_ram,
        boundary_ram=boundary_ram,
        kept=homes.kept[index],
        kept_there=homes.kept_there[index],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeMemory:
    """Holds the most bytes that compute allocates on the host, outside the arena."""

    whole_batch: int
    stage: int
    name: str = field(default="")

    @property
    def total(self) -> int:
        return self.whole_batch + self.stage


def compute_memory(model: ModelSpec, request: PlanRequest) -> ComputeMemory:
    """Returns the most bytes that compute allocates on the host, outside the arena.

    It counts two boundaries of a sweep's rows (in and out, or their gradients), a third if the norm is measured first, and what
    the model's own forward holds between stages. A separate device has such boundaries in the arena, or all of this in its own
    memory. On device cpu it also counts the stage that needs most. A cut head has the last hidden state, its gradient in
    float32 and at the end in the compute dtype, and maximum, sum and target of every token. Ranges of experts hold one more
    boundary, what they are sent, and sums in float32.
    """
    numerics, step_tokens = request.group, request.numerics.tokens
    tokens = numerics.tokens
    boundary, hidden = batch_boundary(model, request), _SUM * model.hidden_size * tokens
    between, sums = model.choreography_bytes_per_token * tokens, range_sums(model, request)
    if request.device != "cpu":
        boundary, hidden, between = 0, 0, 0 if request.batch_on_device else max(0, between - boundary)
        sums = 0
    if numerics.batch_size <= numerics.micro_batch_size:  # else they have their own mapping (engine/host_memory.py)
        boundary, hidden = held(boundary), held(hidden)
    whole = held(between)
    if model.head_is_cut:  # the model's own forward has ended by then
        # Losses of every token, summed at the end in the order of one sweep.
        losses = 4 * step_tokens if request.is_swept else 0
        whole = max(whole, hidden + held(12 * tokens) + losses)
    whole += (2 + bool(request.norm_first) + model.has_ranges) * boundary + sums + 64 * step_tokens
    peaks = {stage.index: stage.backward_peak + balance_bytes(stage, numerics) for stage in model.stages}
    hungriest = max(model.stages, key=lambda stage: (peaks[stage.index], stage.index))
    stage = 0 if request.device == "cuda" else peaks[hungriest.index]
    return ComputeMemory(whole_batch=whole, stage=stage, name=hungriest.name)


def free_pages(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes, beyond `compute_memory`, with which one block's visit may leave the heap's pages as they are for the
    next. Without them, each visit gives its pages back to the system and faults them in again (`training/memory_watch.py`)."""
    if not request.free_pages or request.device != "cpu":
        return 0
    compute = compute_memory(model, request)
    block = max((stage.backward_peak for stage in model.stages if stage.kind == "block"), default=0)
    wanted = compute.whole_batch + int((1 + DRIFT) * block + CREEP * compute.total)
    return align_up(max(0, wanted - compute.total), ARENA_UNIT)
