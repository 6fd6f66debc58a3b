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
from .lasting import Choose, planned_for
from .placement_context import PlacementContext
from .wishes import Wishes


def at_rest(model: ModelSpec, wishes: Wishes, mode: StoreMode) -> int:
    """Bytes of the store that survive a run, the gradients of redo among them."""
    return PlacementContext(model, replace(wishes, store_mode=mode)).durable_size


def redone(wishes: Wishes) -> Wishes:
    """The same run with one extent of everything and its gradients on the ssd."""
    every = 1 if wishes.commit_every == "auto" else wishes.commit_every
    return replace(wishes, store_mode="redo", gradients="ssd", commit_every=every)


def with_fitting_mode(model: ModelSpec, wishes: Wishes, disk: int) -> Wishes:
    """Chooses redo where the recipe allows it and `disk` (bytes) has room for its extents alone; else leaves in place."""
    if not _may_be_redone(model, wishes, disk) or at_rest(model, wishes, "in_place") <= disk:
        return wishes
    return redone(wishes)


def planned_with_room(choose: Choose, model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, *, steps: int) -> Plan:
    """The plan of a run of `steps` in the store that its disks have room for. What a step leaves there beside the extents, its
    gradients and boundaries, only a plan tells: where none of those in place fits with them, redo's is taken if it does.
    `choose` is last asked for the plan that it is."""
    disk = wishes.disk(hardware)
    plan = planned_for(choose, model, hardware, with_fitting_mode(model, wishes, disk), steps=steps)
    if plan.store_mode == "redo" or plan.store_size <= disk or not _may_be_redone(model, wishes, disk):
        return plan
    try:
        other = planned_for(choose, model, hardware, redone(wishes), steps=steps)
    except PlanError:
        other = plan
    return other if other.store_size <= disk else planned_for(choose, model, hardware, wishes, steps=steps)


def _may_be_redone(model: ModelSpec, wishes: Wishes, disk: int) -> bool:
    return wishes.may_redo and wishes.gradients != "cpu" and at_rest(model, wishes, "redo") <= disk
