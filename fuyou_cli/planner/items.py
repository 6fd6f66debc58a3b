"""What may rest in RAM instead of on the ssd: tensors one by one and those that share slots, with what they take and save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ..core.units import align_up
from ..spec.model import ITEM_SIZE, STATE_SIZES, StageSpec
from ..spec.plan import StagePlan
from .ground import Ground
from .memory import ARENA_UNIT, Homes, Layout
from .wishes import Wishes

KINDS = ("weights", "boundaries", "gradients", "states")  # fields of `Homes`


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Tensors of one kind, of one stage or of all that share slots, which may rest in RAM instead of on the ssd."""

    kind: str
    stages: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes of RAM, per stage
    freed: int  # bytes of slots that nobody needs once all of them rest in RAM
    saved: float  # bytes of traffic per step

    @property
    def order(self) -> tuple[float, int, int, int]:
        """The most traffic saved per byte of RAM first. Stages of one kind are taken spread out over the step, so that what
        stays on the ssd is spread out too."""
        size = sum(self.sizes) - self.freed
        per_byte = self.saved / size if size > 0 else float("inf")
        return (-per_byte, KINDS.index(self.kind), spread(self.stages[0]), len(self.stages))


@cache
def spread(stage: int) -> int:
    return int(f"{stage:016b}"[::-1], 2)


def traffic_items(ground: Ground, wishes: Wishes, homes: Homes, spans: Layout) -> list[Item]:
    """What may move to RAM."""
    single = [
        item
        for stage in ground.model.stages
        if stage.params
        for item in _items_of(ground, wishes, homes, spans.stages[stage.index], stage)
    ]
    return [*single, *_together(single, homes, spans)]


def _items_of(ground: Ground, wishes: Wishes, homes: Homes, plan: StagePlan, stage: StageSpec) -> Iterator[Item]:
    model, index, params = ground.model, stage.index, stage.params
    item, gradient = ITEM_SIZE[model.compute_dtype], ITEM_SIZE[wishes.numerics.accumulate_dtype]
    states = STATE_SIZES[model.compute_dtype]
    rests = int(plan.deferred) + int(model.has_two_users(index))
    boundary = ground.boundary_size(index, homes.kept[index])
    uses = 2 if stage.kind in ("block", "norm") else 1  # in forward and in backward; what is visited twice in a row is kept
    # Where the planner says when to commit the order is that of frequent commits; choices that put states first have the other.
    every = 1 if wishes.commit_every == "auto" else wishes.commit_every
    spared = 1.0 - (1.0 / every if every else 0.0)  # writes: commits have theirs from RAM as well
    options: tuple[tuple[str, tuple[int, ...], float, bool], ...] = (
        ("weights", (item * params,), (uses + spared) * item * params, wishes.weights is None),
        ("boundaries", (boundary,), 2.0 * boundary, wishes.boundaries is None),
        ("gradients", (gradient * params,), 2.0 * rests * gradient * params, wishes.gradients is None),
        ("states", tuple(size * params for size in states), (1.0 + spared) * sum(states) * params, wishes.states is None),
    )
    for kind, sizes, saved, free in options:
        if free and saved:
            size = sum(align_up(size, ARENA_UNIT) for size in sizes)
            yield Item(kind=kind, stages=(index,), sizes=(size,), freed=0, saved=saved)


def _together(single: list[Item], homes: Homes, spans: Layout) -> Iterator[Item]:
    """All stages that share slots: once the last of them rests in RAM, the slots are not needed. Of a few large stages (an
    embedding and a head) that is as much as they take at home."""
    shared: dict[tuple[str, int], list[Item]] = {}
    for item in single:
        stage = spans.stages[item.stages[0]]
        if item.kind in ("weights", "gradients") and getattr(homes, item.kind)[stage.stage] == "ssd":
            shared.setdefault((item.kind, stage.slot_class), []).append(item)
        elif item.kind == "boundaries":
            shared.setdefault((item.kind, 0), []).append(item)
    for (kind, number), items in sorted(shared.items()):
        members = [stage for stage in spans.stages if stage.slot_class == number and stage.momentum_at.size]
        slots = {
            "weights": spans.slot_classes[number].weight_slots,
            "gradients": spans.slot_classes[number].gradient_slots if len(items) == len(members) else (),
            "boundaries": spans.boundary_slots,
        }[kind]
        if slots:
            yield Item(
                kind=kind,
                stages=tuple(item.stages[0] for item in items),
                sizes=tuple(item.sizes[0] for item in items),
                freed=sum(align_up(span.size, ARENA_UNIT) for span in slots),
                saved=sum(item.saved for item in items),
            )
