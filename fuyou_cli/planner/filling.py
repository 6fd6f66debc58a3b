"""Filling RAM: tensors and outputs of operators move there while there is room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..core.units import align_up
from ..spec.model import ModelSpec, OperatorSpec
from .ground import Ground
from .items import Item, spread
from .memory import ARENA_UNIT, Homes
from .wishes import Wishes

_LOADED = ("weights", "states")
_HUGE_PAGES = 1 + 1 / 512  # page tables of the arena
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """An operator's outputs of the whole batch."""

    stage: int
    operator: OperatorSpec
    size: int

    @property
    def order(self) -> tuple[float, int, int, int]:
        return (-self.operator.flops / max(1, self.operator.bytes), spread(self.stage), self.stage, self.operator.index)


def outputs_of(model: ModelSpec, wishes: Wishes) -> list[Output]:
    """The most FLOPs saved per byte first."""
    found = [
        Output(stage=stage.index, operator=operator, size=operator.bytes * wishes.numerics.micro_batches)
        for stage in model.stages
        for operator in stage.operators
    ]
    return sorted(found, key=lambda output: output.order)


@dataclass(slots=True)
class Filling:
    """Moves tensors to RAM while there is room. `before` holds the homes before each move, to take moves back."""

    ground: Ground
    wishes: Wishes
    homes: Homes
    spare: int
    spare_loading: int  # while a checkpoint is read straight to the homes of weights and states
    before: list[Homes] = field(default_factory=list)

    @classmethod
    def of(cls, ground: Ground, wishes: Wishes, homes: Homes, peaks: dict[str, int]) -> Filling:
        """From homes that take `peaks`."""
        return cls(
            ground=ground,
            wishes=wishes,
            homes=homes,
            spare=int((wishes.cpu_budget - peaks["train"]) / _HUGE_PAGES),
            spare_loading=wishes.cpu_budget - peaks["load"],
        )

    def settle(self, items: Sequence[Item], *, share: float = 1.0) -> None:
        """Tensors, in their order, as far as they fit in `share` of what is spare."""
        limit = self.spare - int(self.spare * share)  # what is to be left
        for item in items:
            tiers = getattr(self.homes, item.kind)
            left = [place for place, stage in enumerate(item.stages) if tiers[stage] == "ssd"]
            homes = sum(item.sizes[place] for place in left)
            size, loaded = homes - item.freed, homes if item.kind in _LOADED else 0
            if not left or self.spare - size < limit or loaded > self.spare_loading:
                continue
            self.spare_loading -= loaded
            for place in left:
                tiers = with_value(tiers, item.stages[place], "cpu")
            self._take(size, replace(self.homes, **{item.kind: tiers}))

    def keep(self, outputs: list[Output], *, share: float) -> None:
        """Outputs of operators, in their order, within `share` of what is spare; the boundary they rest with comes along."""
        limit = self.spare - int(self.spare * share)  # what is to be left
        for output in outputs:
            kept = self.homes.kept[output.stage]
            if output.operator.index in kept:
                continue
            taken = tuple(sorted((*kept, output.operator.index)))
            at_home = self.homes.boundaries[output.stage] == "cpu"
            if not at_home and self.wishes.boundaries is not None:
                continue
            size = self._size(output.stage, taken) - (self._size(output.stage, kept) if at_home else 0)
            if self.spare - size < limit:
                continue
            kept_with = with_value(self.homes.kept, output.stage, taken)
            boundaries = self.homes.boundaries if at_home else with_value(self.homes.boundaries, output.stage, "cpu")
            self._take(size, replace(self.homes, kept=kept_with, boundaries=boundaries))

    def _size(self, stage: int, kept: tuple[int, ...]) -> int:
        """Bytes of RAM that the stage's boundary takes with these outputs."""
        return align_up(self.ground.boundary_size(stage, kept), ARENA_UNIT)

    def _take(self, size: int, homes: Homes) -> None:
        self.before.append(self.homes)
        self.homes, self.spare = homes, self.spare - size


def with_value(values: tuple[_Value, ...], index: int, value: _Value) -> tuple[_Value, ...]:
    return (*values[:index], value, *values[index + 1 :])
