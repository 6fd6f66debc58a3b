"""Gives out every span of the arena and of the store. The run uses the same spans, so sums over them are the plan's peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..core.units import MiB, align_up
from ..spec.model import ITEM_SIZE, PAGE, STATE_NAMES, ModelSpec, StageSpec
from ..spec.plan import ExtentPair, IoPlan, SlotClass, Span, StagePlan, Tier
from .boundary_layout import Kept, filled_boundary, outputs_size, planned_boundary
from .device import COPY_ALIGN
from .plan_request import PlanRequest, has_home, rest_in_ram

STORE_UNIT = 4096  # bytes: O_DIRECT moves no less
ARENA_UNIT = 2 * MiB  # bytes: hugepages round up to this
DEVICE_UNIT = 512  # bytes: a device's allocator rounds up to this
SUMMED = ITEM_SIZE["float32"]  # bytes per value that a cut head, or a range of experts, sums
# Bytes that are read one after the other in the time of asking for one row: 22 us of the launching thread, measured, at 3 GB/s.
ROW_COST = 64 << 10
_STAGING_SLOTS = 4  # one is filled, one is checksummed, one is written, one waits
_STAGING_PIECE = 4 << 20  # bytes of a slot at most


@dataclass(slots=True)
class SpanAllocator:
    """Gives out spans one after the other."""

    unit: int
    used: int = 0

    def take(self, size: int) -> Span:
        span = Span(offset=self.used, size=size)
        self.used += align_up(size, self.unit)
        return span

    def take_if(self, wanted: bool, size: int) -> Span | None:
        return self.take(size) if wanted and size else None


@dataclass(frozen=True, kw_only=True, slots=True)
class AtRest:
    """What survives a run, for one stage: spans within a place of its pair, and its frozen weights."""

    pair: ExtentPair
    frozen: Span | None  # of the store: written once; None also where they are read from the checkpoint's files
    weights: Span
    remainder: Span | None  # only with bfloat16 weights
    momentum: Span
    variance: Span | None  # of AdamW


class SharedSizes:
    """What all layouts of one model and batch share, computed once because a search makes hundreds of them: slot classes, what
    survives a run, sizes."""

    def __init__(self, model: ModelSpec, request: PlanRequest) -> None:
        self.model, self.numerics = model, request.group
        self.classes = _classes(model)
        self.trained_in_ram = rest_in_ram(model, request)  # what updates touch
        room = SpanAllocator(STORE_UNIT)
        self.at_rest = _at_rest(room, model)
        self.durable_size = room.used  # bytes of the store that survive a run
        # By stage: bytes of its states, in the order of `STATE_NAMES`, and of its gradients.
        self.state_sizes = tuple(tuple(map(stage.state_size, STATE_NAMES)) for stage in model.stages)
        self.gradient_sizes = tuple(stage.gradient_bytes(self.numerics.accumulate_dtype) for stage in model.stages)
        self.looked_up = most_read(model, request)
        self.has_two_users = tuple(model.has_two_users(stage.index) for stage in model.stages)
        # By stage, a number for what its boundary depends on beside the kept outputs. Equal blocks share their operators.
        numbers: dict[tuple[int, bool, bool], int] = {}
        about = ((id(stage.operators), stage.keeps_input, stage.expert_range is None) for stage in model.stages)
        self.alike = [numbers.setdefault(key, len(numbers)) for key in about]
        self._boundaries: dict[tuple[int, tuple[int, ...]], int] = {}
        self._outputs: dict[tuple[int, tuple[int, ...]], int] = {}

    def boundary_size(self, stage: int, kept: tuple[int, ...]) -> int:
        """Returns the bytes of a stage's boundary for a sweep's rows, with its outputs; 0 for a stage without a boundary."""
        key = (self.alike[stage], kept)
        if key not in self._boundaries:
            has_one = self.model.stages[stage].keeps_input
            self._boundaries[key] = planned_boundary(self.model, self.numerics, stage, kept).size if has_one else 0
        return self._boundaries[key]

    def outputs_size(self, stage: int, kept: tuple[int, ...]) -> int:
        """Returns the bytes of a stage's kept outputs in the record of one micro-batch."""
        key = (self.alike[stage], kept)
        if key not in self._outputs:
            self._outputs[key] = outputs_size(self.model.stages[stage], kept)
        return self._outputs[key]

    def filled_size(self, stage: int, outputs: int) -> int:
        """Returns what `boundary_size` does, for kept outputs that take `outputs` bytes in the record of one micro-batch."""
        return filled_boundary(self.model, self.numerics, outputs) if self.model.stages[stage].keeps_input else 0


def _classes(model: ModelSpec) -> tuple[int, ...]:
    """Returns a slot class per stage. Stages within a factor of two of the largest of a class share it. Class 0 has the largest
    stages."""
    by_size = sorted(range(len(model.stages)), key=lambda i: (-model.stages[i].weight_bytes, i))
    classes = [0] * len(model.stages)
    largest, current = 0, -1
    for index in by_size:
        size = model.stages[index].weight_bytes
        if current < 0 or 2 * size < largest:
            current, largest = current + 1, size
        classes[index] = current
    return tuple(classes)


def _at_rest(room: SpanAllocator, model: ModelSpec) -> tuple[AtRest, ...]:
    """Takes two places for what one update of each stage writes, then room for frozen weights."""
    pairs, within = list[ExtentPair](), list[list[Span]]()
    for stage in model.stages:
        place = SpanAllocator(STORE_UNIT)
        within.append([place.take(size) for size in (stage.trained_weight_bytes, *map(stage.state_size, STATE_NAMES))])
        pairs.append(ExtentPair(offset=room.take(2 * place.used).offset, size=place.used))
    return tuple(
        AtRest(
            pair=pair,
            frozen=room.take_if(True, stage.imported_bytes),
            weights=weights,
            remainder=remainder if remainder.size else None,
            momentum=momentum,
            variance=variance if variance.size else None,
        )
        for stage, pair, (weights, remainder, momentum, variance) in zip(model.stages, pairs, within, strict=True)
    )


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
    """Every span of arena and store."""

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


def layout(shared: SharedSizes, request: PlanRequest, homes: Homes, *, lookahead: int, gradient_slots: int) -> Layout:
    """Returns every span of arena and store for this placement."""
    model = shared.model
    arena = SpanAllocator(ARENA_UNIT)
    # What survives a run comes first and depends only on the model. So a resumed run may place everything else differently.
    transient = SpanAllocator(STORE_UNIT, used=shared.durable_size)
    boundaries = [shared.boundary_size(index, kept) for index, kept in enumerate(homes.kept)]
    resting = [request.defers or request.is_swept or has_two for has_two in shared.has_two_users]
    slot_classes = tuple(
        _slot_class(arena, shared, request, homes, number, resting, lookahead=lookahead, gradient_slots=gradient_slots)
        for number in range(max(shared.classes) + 1)
    )
    on_ssd = sum(tier == "ssd" for tier in homes.boundaries)
    slots = min(lookahead + 2, on_ssd + 1) if on_ssd else 0
    largest = max((boundaries[i] for i, tier in enumerate(homes.boundaries) if tier == "ssd"), default=0)
    boundary_slots = tuple(arena.take(largest) for _ in range(slots))
    up = _upload_slots(arena, model, request)
    batches = batch_slots(SpanAllocator(DEVICE_UNIT) if request.batch_on_device else arena, model, request)
    staging = _staging_slots(arena, model, homes.states)
    decoded = arena.take_if(request.device == "cpu", model.decoded_bytes)
    scratch = arena.take(request.scratch_size)
    # Many small homes lie closely together.
    at_rest = SpanAllocator(STORE_UNIT, used=arena.used) if shared.trained_in_ram else arena
    place = partial(_stage, at_rest, transient, shared, request, homes, is_far=lookahead < len(model.stages))
    stages = tuple(map(place, range(len(model.stages)), boundaries, resting))
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


def micro_boundary(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes of one micro-batch's boundary."""
    return model.widest_bytes_per_token * request.numerics.micro_batch_tokens


def batch_boundary(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes of one boundary for all rows of a sweep."""
    return model.widest_bytes_per_token * request.group.tokens


def _upload_slots(arena: SpanAllocator, model: ModelSpec, request: PlanRequest) -> tuple[Span, ...]:
    """Returns slots for uploads from memory that is not pinned. Copies beside compute need pinned memory. The arena is pinned,
    but ids, targets and what the model's own operators compute between stages are not. These pass through the slots: one is
    filled while the other is copied."""
    if request.device == "cpu" or request.batch_on_device:
        return ()
    numerics = request.group
    size = align_up(micro_boundary(model, request), COPY_ALIGN) + 8 * numerics.micro_batch_tokens
    return tuple(arena.take(size) for _ in range(min(2, numerics.micro_batches)))


def ring_boundaries(model: ModelSpec) -> int:
    """Returns how many boundaries of all rows of a sweep one of several ranks holds beside those of its own visits: one that is
    received for the next visit while the last one's leaves (`engine/link`). A block's output is what the visit before left
    from, unless the last of its ranges sends it: then it is another one."""
    return 1 + model.has_ranges if model.owners else 0


def batch_slots(room: SpanAllocator, model: ModelSpec, request: PlanRequest) -> tuple[Span, ...]:
    """Returns slots for whole-batch tensors between stages, on a separate device or in the arena that it copies to and from.
    Input and output of a stage use two in turn, and the model's own forward holds the embedding's. A cut head sums in one of
    them if it is in float32, else in one larger slot. A step that measures the norm first needs the last hidden state twice.
    Ranges of experts hold what they are sent, and sum in a larger slot. A rank of several holds `ring_boundaries` more."""
    if request.device == "cpu":
        return ()
    boundaries = 3 + bool(request.norm_first) + model.has_ranges + ring_boundaries(model)
    spans = [room.take(batch_boundary(model, request)) for _ in range(boundaries)]
    if model.has_ranges or (model.head_is_cut and model.compute_dtype != "float32"):
        spans.append(room.take(range_sums(model, request) or SUMMED * model.hidden_size * request.group.tokens))
    return tuple(spans)


def range_sums(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes in which ranges of experts sum outputs, or gradients, of all rows of a sweep; 0: there are none."""
    each = max((stage.choices for stage in model.stages), default=0)
    return SUMMED * (model.hidden_size + each) * request.group.tokens if model.has_ranges else 0


def _staging_slots(arena: SpanAllocator, model: ModelSpec, states: tuple[Tier, ...]) -> tuple[Span, ...]:
    """Returns the slots through which states are copied to the host and back, by commits and outside of steps."""
    on_device = [stage.params for stage, tier in zip(model.stages, states, strict=True) if tier == "gpu"]
    if not any(on_device):
        return ()
    largest = align_up(4 * max(on_device), STORE_UNIT)  # bytes of momentum, or of variance
    return tuple(arena.take(min(_STAGING_PIECE, largest)) for _ in range(_STAGING_SLOTS))


def _slot_class(
    arena: SpanAllocator, shared: SharedSizes, request: PlanRequest, homes: Homes, number: int, resting: Sequence[bool], *,
    lookahead: int, gradient_slots: int,
) -> SlotClass:  # fmt: skip
    """Counts and sizes the slots of a class.

    Weights: one slot computes, `lookahead` slots are being filled, and each update that runs after backward has one. A deferred
    update uses the slot of the visit that follows it. Gradients: one slot is being summed, the others are being updated or
    written. One more holds the gradients of a tied head that is not cut, through backward.
    """
    model = shared.model
    members = [i for i, of_class in enumerate(shared.classes) if of_class == number and model.stages[i].params]
    updated = [i for i in members if model.stages[i].trained]
    weight_size = max((model.stages[i].weight_bytes for i in members), default=0)
    gradient_size = max((shared.gradient_sizes[i] for i in members), default=0)
    streamed = sum(homes.weights[i] == "ssd" for i in members)
    in_update = 0 if request.defers or not updated else gradient_slots - 1
    weights = min(streamed, 1 + lookahead + in_update)
    through_host = [i for i in updated if homes.states[i] != "gpu"]
    passing = sum(not resting[i] or homes.gradients[i] == "ssd" for i in through_host)
    gradients = min(passing, gradient_slots)
    if model.tied_head and not model.head_is_cut and 0 in through_host and passing > gradients and gradients:
        gradients += 1
    return SlotClass(
        weight_size=weight_size,
        gradient_size=gradient_size,
        weight_slots=tuple(arena.take(weight_size) for _ in range(weights)),
        gradient_slots=tuple(arena.take(gradient_size) for _ in range(gradients)),
    )


def need_rest(model: ModelSpec, request: PlanRequest) -> tuple[bool, ...]:
    """Tells, by stage, whether its gradients, if it has any, need a home: until a deferred update, from a tied head's backward
    to the embedding's, or from sweep to sweep."""
    every_sum = request.defers or request.is_swept
    return tuple(every_sum or model.has_two_users(stage.index) for stage in model.stages)


def may_take_turns(shared: SharedSizes, request: PlanRequest, stage: int) -> bool:
    """Whether a stage's boundary and its resting gradients may lie in the same memory: the boundary from forward to
    backward, the gradients from there to their deferred update, which ends before the next forward computes. A separate device
    fills a boundary while the stage computes, and sums gradients elsewhere; on device cpu both would be in the way. Sums that
    another visit or sweep resumes rest in forward too. Of adapters they are too small."""
    return (
        request.device != "cpu"
        and request.defers
        and not request.is_swept
        and not shared.has_two_users[stage]
        and not shared.trained_in_ram
    )


def _turns(
    arena: SpanAllocator, shared: SharedSizes, request: PlanRequest, homes: Homes, index: int, sizes: tuple[int, int]
) -> tuple[Span | None, Span | None]:  # fmt: skip
    """Returns the homes in RAM of a stage's resting gradients and of its boundary, of these sizes (bytes)."""
    places = homes.gradients[index], homes.boundaries[index]
    gradients, boundary = (size if place == "cpu" else 0 for size, place in zip(sizes, places, strict=True))
    if not (gradients and boundary and may_take_turns(shared, request, index)):
        return arena.take_if(True, gradients), arena.take_if(True, boundary)
    start = arena.take(max(gradients, boundary)).offset
    return Span(offset=start, size=gradients), Span(offset=start, size=boundary)


def _stage(
    arena: SpanAllocator, transient: SpanAllocator, shared: SharedSizes, request: PlanRequest, homes: Homes,
    index: int, boundary: int, resting: bool, *, is_far: bool,
) -> StagePlan:  # fmt: skip
    """Gives a stage its homes. `boundary`: bytes."""
    stage, at_rest = shared.model.stages[index], shared.at_rest[index]
    gradient_size, (remainder, momentum, variance) = shared.gradient_sizes[index], shared.state_sizes[index]
    weights_home, states_home = homes.weights[index], homes.states[index]
    in_ram = states_home == "cpu"
    sizes = (gradient_size if resting else 0, boundary)
    gradients_ram, boundary_ram = _turns(arena, shared, request, homes, index, sizes)
    return StagePlan(
        stage=index,
        weights=weights_home,
        states=states_home,
        gradients=homes.gradients[index],
        boundary=homes.boundaries[index],
        slot_class=shared.classes[index],
        deferred=request.defers,
        pair=at_rest.pair,
        frozen_extent=at_rest.frozen,
        frozen_source=stage.source,
        weights_at=at_rest.weights,
        remainder_at=at_rest.remainder,
        momentum_at=at_rest.momentum,
        variance_at=at_rest.variance,
        gradients_extent=transient.take_if(resting and homes.gradients[index] == "ssd", gradient_size),
        boundary_extent=transient.take_if(homes.boundaries[index] == "ssd", boundary),
        weights_ram=arena.take_if(weights_home != "ssd" and states_home != "gpu", stage.weight_bytes),
        looked_up=shared.looked_up[index] if is_far else 0,
        trained_ram=arena.take_if(
            shared.trained_in_ram and has_home(stage, weights_home, states_home), stage.trained_weight_bytes
        ),
        remainder_ram=arena.take_if(in_ram, remainder),
        momentum_ram=arena.take_if(in_ram, momentum),
        variance_ram=arena.take_if(in_ram, variance),
        gradients_ram=gradients_ram,
        boundary_ram=boundary_ram,
        kept=homes.kept[index],
        kept_there=homes.kept_there[index],
    )


# ---- rows of a frozen table of tokens --------------------------------------------------------------------------------------


def most_read(model: ModelSpec, request: PlanRequest) -> tuple[int, ...]:
    """Returns, by stage, the bytes that a visit reads of a frozen table at most: of the pages that hold the rows of the step's
    tokens. Returns 0 for all other stages, and for tables that are read whole: all of a table is read beside the step before,
    but rows are known only when their step begins, so they must take less than half the time.

    A step reads a row once. How many rows it looks up is known only when it begins, so a plan counts a row for every token, but
    no row twice. A cut table is taken to be looked up evenly: its pieces together never read more, but a single one may."""
    tables = [stage for stage in model.stages if stage.looked_up]
    most, rows = [0] * len(model.stages), sum(stage.tensors[0].shape[0] for stage in tables)
    if request.is_swept:  # every sweep looks up its own rows
        return tuple(most)
    tokens = min(request.numerics.tokens, rows)
    for stage in tables:
        share = -(-tokens * stage.tensors[0].shape[0] // rows)
        pages, whole = _row_pages(model, stage), sum(piece.size for piece in stage.source) or stage.weight_bytes
        most[stage.index] = share * pages if 2 * share * (pages + ROW_COST) <= whole else 0
    return tuple(most) if all(most[stage.index] for stage in tables) else (0,) * len(most)


def row_span(first: int, size: int, row: int) -> tuple[int, int]:
    """Returns begin and end of the pages that hold a row of `size` bytes, where row 0 begins at `first`."""
    begin = first + row * size
    return begin // PAGE * PAGE, align_up(begin + size, PAGE)


def _row_pages(model: ModelSpec, stage: StageSpec) -> int:
    """Returns the bytes of the pages that hold a row, wherever it is."""
    (table,), item = stage.tensors, ITEM_SIZE[model.compute_dtype]
    size = item * (table.numel // table.shape[0])
    is_whole = item * table.offset % PAGE == 0 and (size % PAGE == 0 or PAGE % size == 0)
    return align_up(size, PAGE) + (0 if is_whole else PAGE)
