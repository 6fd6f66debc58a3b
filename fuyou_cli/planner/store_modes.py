"""Chooses what makes a step durable: other extents for everything (`in_place`), or its gradients and spare places (`redo`).

In place costs no traffic and twice the disk. Redo has everything once: the gradients of a step go to the ssd, which they do
with clipping anyway, and a crash updates again what had not been updated.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import PlanError
from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan, StoreMode
from .placement_context import PlacementContext
from .plan_request import PlanRequest
from .sustained_rates import Choose, planned_for


def at_rest(model: ModelSpec, request: PlanRequest, mode: StoreMode) -> int:
    """Returns bytes of the store that survive a run, the gradients of redo among them."""
    return PlacementContext(model, replace(request, store_mode=mode)).durable_size


def redone(request: PlanRequest) -> PlanRequest:
    """Returns the same run with one extent of everything and its gradients on the ssd."""
    every = 1 if request.commit_every == "auto" else request.commit_every
    return replace(request, store_mode="redo", gradients="ssd", device_states=(), commit_every=every)


def with_fitting_mode(model: ModelSpec, request: PlanRequest, disk: int) -> PlanRequest:
    """Chooses redo where the recipe allows it and `disk` (bytes) has room for its extents alone; else leaves in place."""
    if not _may_be_redone(model, request, disk) or at_rest(model, request, "in_place") <= disk:
        return request
    return redone(request)


def planned_with_room(choose: Choose, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, *, steps: int) -> Plan:
    """Returns the plan of a run of `steps` in the store mode that its disks have room for. Only a plan knows what a step
    stores in addition to the extents (gradients and boundaries). If no in-place plan fits with these, the redo plan is used
    if it fits. The last call of `choose` is for the plan returned."""
    disk = request.disk(hardware)
    plan = planned_for(choose, model, hardware, with_fitting_mode(model, request, disk), steps=steps)
    if plan.store_mode == "redo" or plan.store_size <= disk or not _may_be_redone(model, request, disk):
        return plan
    try:
        other = planned_for(choose, model, hardware, redone(request), steps=steps)
    except PlanError:
        other = plan
    return other if other.store_size <= disk else planned_for(choose, model, hardware, request, steps=steps)


def _may_be_redone(model: ModelSpec, request: PlanRequest, disk: int) -> bool:
    is_free = request.gradients != "cpu" and request.states != "gpu"  # whose gradients never leave the device
    return request.may_redo and not request.is_swept and is_free and at_rest(model, request, "redo") <= disk
