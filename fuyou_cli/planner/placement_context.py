"""Computes once what all placements of one model and batch share, because a search makes hundreds of placements."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.units import align_up
from ..spec.model import STATE_NAMES, ModelSpec, StageSpec
from ..spec.plan import ExtentPair, Span
from .boundary_layout import filled_boundary, outputs_size, planned_boundary
from .looked_up import most_read
from .plan_request import PlanRequest
from .small_banks import rest_in_ram

STORE_UNIT = 4096


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
    """Describes what survives a run, for one stage: spans within a place of its pair, and its frozen weights."""

    pair: ExtentPair
    frozen: Span | None  # of the store: written once; None also where they are read from the checkpoint's files
    weights: Span
    remainder: Span | None  # only with bfloat16 weights
    momentum: Span
    variance: Span | None  # of AdamW


class PlacementContext:
    """Holds slot classes, what survives a run, the sizes of boundaries."""

    def __init__(self, model: ModelSpec, request: PlanRequest) -> None:
        self.model, self.numerics = model, request.group
        self.classes = _classes(model)
        self.trained_in_ram = rest_in_ram(model, request)  # what updates touch
        room = SpanAllocator(STORE_UNIT)
        pairs = [_extent_pair(room, stage) for stage in model.stages]
        self.at_rest = tuple(_at_rest(room, stage, pair) for stage, pair in zip(model.stages, pairs, strict=True))
        self.durable_size = room.used  # bytes of the store that survive a run
        # By stage: bytes of its states, in the order of `STATE_NAMES`, and of its gradients.
        self.state_sizes = tuple(tuple(map(stage.state_size, STATE_NAMES)) for stage in model.stages)
        self.gradient_sizes = tuple(stage.gradient_bytes(self.numerics.accumulate_dtype) for stage in model.stages)
        self.looked_up = most_read(model, request)
        self.has_two_users = tuple(model.has_two_users(stage.index) for stage in model.stages)
        # By stage, a number for what its boundary depends on beside the kept outputs. Equal blocks share their operators.
        numbers: dict[tuple[int, bool, bool], int] = {}
        about = ((id(stage.operators), stage.keeps_input, stage.expert_range is None) for stage in model.stages)
        self.alike = [numbers.setdefault(one, len(numbers)) for one in about]
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


def _extent_pair(room: SpanAllocator, stage: StageSpec) -> ExtentPair:
    """Takes two places for what one update of a stage writes."""
    place = SpanAllocator(STORE_UNIT)
    for size in (stage.trained_weight_bytes, *map(stage.state_size, STATE_NAMES)):
        place.take(size)
    return ExtentPair(offset=room.take(2 * place.used).offset, size=place.used)


def _at_rest(room: SpanAllocator, stage: StageSpec, pair: ExtentPair) -> AtRest:
    place = SpanAllocator(STORE_UNIT)
    weights = place.take(stage.trained_weight_bytes)
    return AtRest(
        pair=pair,
        frozen=room.take_if(True, stage.imported_bytes),
        weights=weights,
        remainder=place.take_if(True, stage.state_size("remainder")),
        momentum=place.take(stage.state_size("momentum")),
        variance=place.take_if(True, stage.state_size("variance")),
    )
