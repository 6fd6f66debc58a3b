"""Watches memory in use over a simulated step, tier by tier: of what the plan sets aside, how much holds something, and when.

A run takes all of its arena before the first step, so the plan's own lines are what the process needs. Here is what that is
good for: slots handed out, boundaries and gradients that exist, what the visit under way allocates. It never exceeds the lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from ..spec.model import ITEM_SIZE, ModelSpec
from ..spec.plan import Plan, Span, Tier
from .boundary_ledger import BoundaryLedger
from .device import DeviceSide
from .residency import Residency
from .schedule import Visit
from .timeline import Held

_STATES = ("remainder_ram", "momentum_ram", "variance_ram")
_Key = tuple[Tier, str]


class Occupancy:
    """Looks at a step's ledgers whenever time passes. `moments` holds what changed, the oldest first. `sums`: stages whose
    gradients are summed on a device with memory of its own, or on their way to the host."""

    def __init__(
        self,
        model: ModelSpec,
        plan: Plan,
        *,
        residency: Residency,
        boundaries: BoundaryLedger,
        device: DeviceSide | None,
        sums: AbstractSet[int],
    ) -> None:
        self.model, self.plan = model, plan
        self.moments: list[Held] = []
        self._residency, self._boundaries, self._device, self._sums = residency, boundaries, device, sums
        self._always = _always(model, plan)
        lines = {(line.tier, line.what): line.size for line in plan.memory}
        on_host = plan.device != "cuda"
        hungriest = max(stage.backward_peak for stage in model.stages) * on_host
        self._whole_batch = lines.get(("cpu", "compute"), 0) - hungriest
        self._on_host = on_host

    def look(self, now: float, visit: Visit | None) -> None:
        """What is held from `now` on. `visit`: the one that computes."""
        held = dict(self._always)
        for key, size in (*self._slots(), *self._gradients(), *self._kept(), *self._computing(visit), *self._on_device(visit)):
            held[key] = held.get(key, 0) + size
        if self.moments and self.moments[-1].held == held:
            return
        if self.moments and self.moments[-1].at == now:
            self.moments.pop()
        self.moments.append(Held(at=now, held=held))

    def _slots(self) -> Iterable[tuple[_Key, int]]:
        residency = self._residency
        free = zip(self.plan.slot_classes, residency.free_weights, residency.free_gradients, strict=True)
        for slots, weights, gradients in free:
            yield ("cpu", "weights"), slots.weight_size * (len(slots.weight_slots) - len(weights))
            yield ("cpu", "gradients"), slots.gradient_size * (len(slots.gradient_slots) - len(gradients))
        passing = len(self.plan.boundary_slots) - len(self._boundaries.free)
        yield ("cpu", "boundaries"), passing * max((span.size for span in self.plan.boundary_slots), default=0)
        if any(record.update is not None for record in residency.records):
            yield ("cpu", "update chunks"), self.plan.io.scratch.size

    def _gradients(self) -> Iterable[tuple[_Key, int]]:
        """At home: in RAM from the first of a sum on, on the ssd from when they go to rest, until the update has used them."""
        for stage in sorted(self._residency.with_gradients):
            plan = self.plan.stages[stage]
            yield ("cpu", "gradients"), _size(plan.gradients_ram)
            if self._residency.records[stage].gradients != "summed":
                yield ("ssd", "gradients"), _size(plan.gradients_extent)

    def _kept(self) -> Iterable[tuple[_Key, int]]:
        for stage in self._boundaries.kept:
            plan = self.plan.stages[stage]
            yield ("cpu", "boundaries"), _size(plan.boundary_ram)
            yield ("ssd", "boundaries"), _size(plan.boundary_extent)

    def _computing(self, visit: Visit | None) -> Iterable[tuple[_Key, int]]:
        yield ("cpu", "compute"), self._whole_batch + (self._peak(visit) if self._on_host else 0)

    def _on_device(self, visit: Visit | None) -> Iterable[tuple[_Key, int]]:
        if self._device is None:
            return
        params, item = [stage.params for stage in self.model.stages], ITEM_SIZE[self.model.compute_dtype]
        there = item * sum(params[stage] for stage in self._device.held)
        summed = ITEM_SIZE[self.plan.numerics.accumulate_dtype] * sum(params[stage] for stage in self._sums)
        yield from ((("gpu", "weights"), there), (("gpu", "gradients"), summed), (("gpu", "compute"), self._peak(visit)))

    def _peak(self, visit: Visit | None) -> int:
        """What a visit allocates at most."""
        if visit is None:
            return 0
        stage = self.model.stages[visit.stage]
        return stage.forward_peak if visit.phase in ("forward", "logits") else stage.backward_peak


def _always(model: ModelSpec, plan: Plan) -> dict[_Key, int]:
    """What is there all the time: homes in RAM, the extents of everything on the ssd, the process."""
    weights = sum(_size(stage.weights_ram) for stage in plan.stages)
    states = sum(_size(getattr(stage, name)) for stage in plan.stages for name in _STATES)
    held: dict[_Key, int] = {("cpu", "weights"): weights, ("cpu", "optimizer states"): states}
    for line in plan.memory:
        if (line.tier, line.what) in (("cpu", "process"), ("ssd", "weights"), ("ssd", "optimizer states")):
            held[line.tier, line.what] = line.size
    return held


def _size(span: Span | None) -> int:
    return 0 if span is None else span.size
