"""What all placements of one model and batch have in common, found once: a search makes hundreds."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.units import align_up
from ..spec.model import ITEM_SIZE, ModelSpec
from ..spec.plan import Numerics, Span
from .boundary_layout import planned_boundary

STORE_UNIT = 4096


@dataclass(slots=True)
class Room:
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
class Extents:
    """Of one stage: what survives a run, each in two places of the store that take turns."""

    weights: tuple[Span, Span]
    remainder: tuple[Span, Span] | None  # in bfloat16
    momentum: tuple[Span, Span]
    variance: tuple[Span, Span]


class Ground:
    """Slot classes, the extents that survive a run, the sizes of boundaries, the number of parameters."""

    def __init__(self, model: ModelSpec, numerics: Numerics) -> None:
        self.model, self.numerics = model, numerics
        self.classes = _classes(model)
        room = Room(STORE_UNIT)
        self.extents = tuple(_extents(room, model, stage.params) for stage in model.stages)
        self.durable_size = room.used  # bytes
        self.parameters = model.parameters
        self._boundaries: dict[tuple[int, tuple[int, ...]], int] = {}

    def boundary_size(self, stage: int, kept: tuple[int, ...]) -> int:
        """A stage's boundary of the whole step's batch, with the outputs that rest with it; 0 for a stage without. Bytes."""
        if self.model.stages[stage].kind not in ("block", "norm"):
            return 0
        key = (stage, kept)
        if key not in self._boundaries:
            self._boundaries[key] = planned_boundary(self.model, self.numerics, stage, kept).size
        return self._boundaries[key]


def _classes(model: ModelSpec) -> tuple[int, ...]:
    """A slot class per stage: stages within a factor of two of a class's largest share its slots. Class 0 is the largest."""
    by_size = sorted(range(len(model.stages)), key=lambda i: (-model.stages[i].params, i))
    classes = [0] * len(model.stages)
    largest, current = 0, -1
    for index in by_size:
        params = model.stages[index].params
        if current < 0 or 2 * params < largest:
            current, largest = current + 1, params
        classes[index] = current
    return tuple(classes)


def _extents(room: Room, model: ModelSpec, params: int) -> Extents:
    def pair(size: int) -> tuple[Span, Span]:
        return room.take(size * params), room.take(size * params)

    return Extents(
        weights=pair(ITEM_SIZE[model.compute_dtype]),
        remainder=pair(2) if model.compute_dtype == "bfloat16" else None,
        momentum=pair(4),
        variance=pair(4),
    )
