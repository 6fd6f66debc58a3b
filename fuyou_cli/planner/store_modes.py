"""Chooses how a step becomes durable: with other extents for everything (`in_place`), or with its gradients and spare places
(`redo`).

`in_place` costs no traffic, but twice the disk space. `redo` stores everything once. The gradients of a step go to the ssd, as
they do with clipping anyway, and after a crash the missing updates are repeated.

Also chooses where trained banks beside frozen ones rest.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import PlanError
from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan, StoreMode
from .placement_context import PlacementContext
from .plan_request import PlanRequest
from .small_banks import WORTH, ways_to_rest
from .sustained_rates import Choose, planned_for


def at_rest(model: ModelSpec, request: PlanRequest, mode: StoreMode) -> int:
    """Returns the bytes of the store that survive a run, with the gradients of redo."""
    return PlacementContext(model, replace(request, store_mode=mode)).durable_size


def redone(request: PlanRequest) -> PlanRequest:
    """Returns the same run with one extent of everything and its gradients on the ssd."""
    every = 1 if request.commit_every == "auto" else request.commit_every
    return replace(request, store_mode="redo", gradients="ssd", device_states=(), commit_every=every, norm_first=None)


def with_fitting_mode(model: ModelSpec, request: PlanRequest, disk: int) -> PlanRequest:
    """Chooses redo if the recipe allows it and `disk` (bytes) has room only for its extents. Otherwise keeps in_place."""
    if not _may_be_redone(model, request, disk) or at_rest(model, request, "in_place") <= disk:
        return request
    return redone(request)


def planned_with_room(choose: Choose, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, *, steps: int) -> Plan:
    """Returns the plan of a run of `steps` in the store mode that its disks have room for. Only a plan knows what a step stores
    in addition to the extents (gradients and boundaries). If no in_place plan fits with these, it returns the redo plan if that
    fits. The last call of `choose` is for the plan returned."""
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
    is_free = (
        request.gradients != "cpu" and request.states != "gpu" and not request.norm_first
    )  # with states on the device, gradients never leave it
    return request.may_redo and not request.is_swept and is_free and at_rest(model, request, "redo") <= disk


def rested(choose: Choose, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> tuple[PlanRequest, Plan]:
    """Plans with trained banks in RAM where they may rest there, and with them on the ssd if that saves time, or if nothing
    else fits. Returns the request that is planned, too. Raises PlanError if neither fits."""
    found = list[tuple[tuple[bool, float], PlanRequest, Plan]]()
    for way in (ways := ways_to_rest(model, request)):
        try:
            plan = choose(model, hardware, way)
        except PlanError:
            if way is ways[-1] and not found:
                raise
            continue
        fits = plan.predicted.cpu_peak <= plan.cpu_budget  # a plan that only says what it needs does not
        seconds = plan.predicted.step_seconds * (1 - WORTH if way is ways[0] else 1)
        found.append(((not fits, seconds if fits else float(plan.predicted.cpu_peak)), way, plan))
    _, way, plan = min(found, key=lambda one: one[0])
    return way, plan
