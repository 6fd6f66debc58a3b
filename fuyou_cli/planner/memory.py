"""How much memory a placement takes: slots, homes, what compute allocates, and the process itself.

`layout` is the single place where spans are handed out, for the arena and for the store; what it hands out is what the
run uses, so the sums here are the plan's peaks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.heap import held
from ..core.units import MiB, align_up
from ..spec.model import ITEM_SIZE, ModelSpec
from ..spec.plan import IoPlan, SlotClass, Span, StagePlan, Tier
from .boundary_layout import Kept, planned_boundary
from .defer import deferrals
from .wishes import Wishes

ARENA_UNIT = 2 * MiB  # hugepages round what is touched to this
STORE_UNIT = 4096
COPY_ALIGN = 64  # of tensors that cross together
HEAD_BYTES_PER_TOKEN = 8 + 4 * 4  # of a cut head on the device: target, maximum, sum, the target's logit, one of them anew
# What comes on top of the libraries once they are warm: kernels for other shapes and their workspaces, the log, the display,
# batches, and what the kernel holds for the process. Measured: CHANGELOG.md.
BASE_SLACK = 24 * MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class Homes:
    """Where each stage's tensors rest: one tier per stage and kind. `kept`: operators whose outputs rest with the
    boundary."""

    weights: tuple[Tier, ...]
    states: tuple[Tier, ...]
    gradients: tuple[Tier, ...]
    boundaries: tuple[Tier, ...]
    kept: Kept


@dataclass(slots=True)
class _Room:
    """Hands out spans one after the other."""

    unit: int
    used: int = 0

    def take(self, size: int) -> Span:
        span = Span(offset=self.used, size=size)
        self.used += align_up(size, self.unit)
        return span

    def take_if(self, wanted: bool, size: int) -> Span | None:
        return self.take(size) if wanted and size else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    stages: tuple[StagePlan, ...]
    slot_classes: tuple[SlotClass, ...]
    boundary_slots: tuple[Span, ...]
    upload_slots: tuple[Span, ...]
    download_slots: tuple[Span, ...]
    io: IoPlan
    arena_size: int
    store_size: int


def boundary_size(model: ModelSpec, wishes: Wishes, homes: Homes, stage: int) -> int:
    """A stage's boundary of the whole step's batch, with the outputs that rest with it; 0 for a stage without."""
    if model.stages[stage].kind not in ("block", "norm"):
        return 0
    return planned_boundary(model, wishes.numerics, stage, homes.kept[stage]).size


def classes_of(model: ModelSpec) -> list[int]:
    """A slot class per stage: stages within a factor of two of a class's largest share its slots. Class 0 is the largest."""
    by_size = sorted(range(len(model.stages)), key=lambda i: (-model.stages[i].params, i))
    classes = [0] * len(model.stages)
    largest, current = 0, -1
    for index in by_size:
        params = model.stages[index].params
        if current < 0 or 2 * params < largest:
            current, largest = current + 1, params
        classes[index] = current
    return classes


def layout(model: ModelSpec, wishes: Wishes, homes: Homes, *, lookahead: int, gradient_slots: int) -> Layout:
    """Every span of arena and store for this placement."""
    arena = _Room(ARENA_UNIT)
    # What survives a run comes first and depends on the model alone: a resumed run may place everything else anew.
    durable = _Room(STORE_UNIT)
    transient = _Room(STORE_UNIT, used=durable_size(model))
    classes = classes_of(model)
    deferred = deferrals(model, wishes)
    slot_classes = tuple(
        _slot_class(arena, model, wishes, homes, deferred, classes, number, lookahead=lookahead, gradient_slots=gradient_slots)
        for number in range(max(classes) + 1)
    )
    on_ssd = sum(tier == "ssd" for tier in homes.boundaries)
    slots = min(lookahead + 2, on_ssd + 1) if on_ssd else 0
    passing = (boundary_size(model, wishes, homes, i) for i, tier in enumerate(homes.boundaries) if tier == "ssd")
    largest = max(passing, default=0)
    boundary_slots = tuple(arena.take(largest) for _ in range(slots))
    up, down = _crossing_slots(arena, model, wishes)
    scratch = arena.take(wishes.scratch_size)
    stages = tuple(
        _stage(arena, durable, transient, model, wishes, homes, index, classes[index], deferred=deferred[index])
        for index in range(len(model.stages))
    )
    return Layout(
        stages=stages,
        slot_classes=slot_classes,
        boundary_slots=boundary_slots,
        upload_slots=up,
        download_slots=down,
        io=IoPlan(
            backend=wishes.io_backend,  # type: ignore[arg-type]
            read_depth=wishes.read_depth,
            write_depth=wishes.write_depth,
            block_size=wishes.block_size,
            stripe=wishes.stripe,
            update_threads=wishes.update_threads,
            chunk_params=wishes.chunk_params,
            scratch=scratch,
        ),
        arena_size=arena.used,
        store_size=align_up(transient.used, wishes.stripe),
    )


def micro_boundary(model: ModelSpec, wishes: Wishes) -> int:
    """Bytes of one micro-batch's boundary."""
    return model.boundary_bytes_per_token * wishes.numerics.micro_batch_size * wishes.numerics.max_seq_len


def _crossing_slots(arena: _Room, model: ModelSpec, wishes: Wishes) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Copies that run beside compute need pinned memory. The arena is pinned; whole-batch tensors of the model's own forward
    are not. They pass through these, up (ids or targets may come along) and down: one is filled or emptied while the other
    is copied."""
    if wishes.device == "cpu":
        return (), ()
    numerics = wishes.numerics
    at_once = min(2, -(-numerics.batch_size // numerics.micro_batch_size))
    size = micro_boundary(model, wishes)
    ids = align_up(size, COPY_ALIGN) + 8 * numerics.micro_batch_size * numerics.max_seq_len
    return tuple(arena.take(ids) for _ in range(at_once)), tuple(arena.take(size) for _ in range(at_once))


def durable_size(model: ModelSpec) -> int:
    """Bytes of the two extents of weights and states of every stage."""
    item = ITEM_SIZE[model.compute_dtype]
    remainder = 2 if model.compute_dtype == "bfloat16" else 0
    return sum(2 * align_up(size * stage.params, STORE_UNIT) for stage in model.stages for size in (item, remainder, 4, 4))


def _slot_class(
    arena: _Room,
    model: ModelSpec,
    wishes: Wishes,
    homes: Homes,
    deferred: tuple[bool, ...],
    classes: list[int],
    number: int,
    *,
    lookahead: int,
    gradient_slots: int,
) -> SlotClass:
    """Weights: one computing, `lookahead` on their way, and one per update under way after backward; a deferred update has
    the slot of the visit it comes before. Gradients: one being summed, the others being updated or written; one more where
    the gradients of a tied head that is not cut stay through backward."""
    members = [i for i, c in enumerate(classes) if c == number and model.stages[i].params]
    largest = max((model.stages[i].params for i in members), default=0)
    weight_size = largest * ITEM_SIZE[model.compute_dtype]
    gradient_size = largest * ITEM_SIZE[wishes.numerics.accumulate_dtype]
    streamed = sum(homes.weights[i] == "ssd" for i in members)
    in_update = 0 if all(deferred[i] for i in members) else gradient_slots - 1
    weights = min(streamed, 1 + lookahead + in_update)
    passing = sum(not _rests(model, i, deferred[i]) or homes.gradients[i] == "ssd" for i in members)
    gradients = min(passing, gradient_slots)
    if model.tied_head and not model.head_is_cut and 0 in members and passing > gradients and gradients:
        gradients += 1
    return SlotClass(
        weight_size=weight_size,
        gradient_size=gradient_size,
        weight_slots=tuple(arena.take(weight_size) for _ in range(weights)),
        gradient_slots=tuple(arena.take(gradient_size) for _ in range(gradients)),
    )


def _rests(model: ModelSpec, stage: int, deferred: bool) -> bool:
    """Whether gradients of the stage need a home: until a deferred update, or from a tied head's backward to its own."""
    return deferred or model.has_two_users(stage)


def _stage(
    arena: _Room,
    durable: _Room,
    transient: _Room,
    model: ModelSpec,
    wishes: Wishes,
    homes: Homes,
    index: int,
    slot_class: int,
    *,
    deferred: bool,
) -> StagePlan:
    stage = model.stages[index]
    rests = _rests(model, index, deferred)
    bf16 = model.compute_dtype == "bfloat16"
    item = ITEM_SIZE[model.compute_dtype]
    gradient_size = stage.params * ITEM_SIZE[wishes.numerics.accumulate_dtype]
    weights_home, states_home = homes.weights[index], homes.states[index]
    boundary = boundary_size(model, wishes, homes, index)

    def pair(size: int) -> tuple[Span, Span]:
        return durable.take(size), durable.take(size)

    return StagePlan(
        stage=index,
        weights=weights_home,
        states=states_home,
        gradients=homes.gradients[index],
        boundary=homes.boundaries[index],
        slot_class=slot_class,
        deferred=deferred,
        weights_extents=pair(item * stage.params),
        remainder_extents=pair(2 * stage.params) if bf16 else None,
        momentum_extents=pair(4 * stage.params),
        variance_extents=pair(4 * stage.params),
        gradients_extent=transient.take_if(rests and homes.gradients[index] == "ssd", gradient_size),
        boundary_extent=transient.take_if(homes.boundaries[index] == "ssd", boundary),
        weights_ram=arena.take_if(weights_home != "ssd", item * stage.params),
        remainder_ram=arena.take_if(bf16 and states_home != "ssd", 2 * stage.params),
        momentum_ram=arena.take_if(states_home != "ssd", 4 * stage.params),
        variance_ram=arena.take_if(states_home != "ssd", 4 * stage.params),
        gradients_ram=arena.take_if(rests and homes.gradients[index] != "ssd", gradient_size),
        boundary_ram=arena.take_if(homes.boundaries[index] != "ssd", boundary),
        kept=homes.kept[index],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeMemory:
    """Bytes compute allocates at most, beside the arena, on the host."""

    whole_batch: int
    stage: int
    name: str = field(default="")

    @property
    def total(self) -> int:
        return self.whole_batch + self.stage


def compute_memory(model: ModelSpec, wishes: Wishes) -> ComputeMemory:
    """On device cpu: two whole-batch boundaries (in and out, or their gradients) and what the model's own forward holds
    between stages, with the hungriest stage; on a device with its own memory the stage's part is there. A cut head has the last
    hidden state, its gradient in float32 and at the end in the compute dtype, and maximum, sum and target of every token."""
    numerics = wishes.numerics
    tokens = numerics.batch_size * numerics.max_seq_len
    boundaries = 2 * held(model.boundary_bytes_per_token * tokens)
    whole = boundaries + held(model.choreography_bytes_per_token * tokens)
    if model.head_is_cut:  # the model's own forward is over by then
        whole = max(whole, boundaries + held(4 * model.hidden_size * tokens) + held(12 * tokens))
    whole += 64 * tokens
    hungriest = max(model.stages, key=lambda stage: (stage.backward_peak, stage.index))
    stage = 0 if wishes.device == "cuda" else hungriest.backward_peak
    return ComputeMemory(whole_batch=whole, stage=stage, name=hungriest.name)
