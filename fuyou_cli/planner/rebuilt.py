"""A plan built again from its homes alone: what a plan file is compared with before it is run."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from ..core.errors import UsageError
from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan, StagePlan, Tier
from ..spec.plan_file import Pipeline
from .assemble import assemble
from .boundary_layout import every_operator
from .commit_interval import timed_plan
from .defer import deferrals
from .memory import Homes
from .wishes import Wishes

MOST_SLOTS = 1024  # gradient slots or visits ahead: far beyond what any choice has


def rebuilt(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, plan: Plan, pipeline: Pipeline) -> Plan:
    """The plan of the planner for the homes, lookahead and pipeline that `plan` has; nothing else of it is used.

    Raises UsageError where a home is none that the planner could have chosen, naming its key."""
    asked = replace(wishes, defer=pipeline.defer) if wishes.clip_grad_norm is None else wishes
    if len(plan.stages) != len(model.stages):
        raise UsageError(f"plan.stages: {len(plan.stages)} of them, the model has {len(model.stages)}")
    if not 0 <= pipeline.defer <= 1:
        raise UsageError("pipeline.defer: a share from 0 to 1 is wanted")
    if plan.lookahead != pipeline.lookahead:
        raise UsageError(f"plan.lookahead: {pipeline.lookahead} is wanted as in `pipeline`, not {plan.lookahead}")
    for key, value in (("gradient_slots", pipeline.gradient_slots), ("lookahead", pipeline.lookahead)):
        if not 1 <= value <= MOST_SLOTS:
            raise UsageError(f"pipeline.{key}: 1 to {MOST_SLOTS} are wanted, not {value}")
    _check_homes(model, asked, plan.stages)
    homes = Homes(
        weights=tuple(stage.weights for stage in plan.stages),
        states=tuple(stage.states for stage in plan.stages),
        gradients=tuple(stage.gradients for stage in plan.stages),
        boundaries=tuple(stage.boundary for stage in plan.stages),
        kept=tuple(stage.kept for stage in plan.stages),
    )
    found = assemble(model, hardware, asked, homes, lookahead=plan.lookahead, gradient_slots=pipeline.gradient_slots)
    return timed_plan(model, hardware, found, chosen=wishes.commit_every == "auto")


def _check_homes(model: ModelSpec, wishes: Wishes, stages: tuple[StagePlan, ...]) -> None:
    """Each on a tier that the planner gives such a tensor; what a stage does not have is where the planner puts it."""
    deferred, operators = deferrals(model, wishes), every_operator(model)
    for index, (spec, stage) in enumerate(zip(model.stages, stages, strict=True)):
        rests = spec.params > 0 and (deferred[index] or model.has_two_users(index))
        keeps = spec.kind in ("block", "norm")
        free: dict[str, tuple[Tier | None, bool, Tier]] = {  # the recipe's pin, whether it moves, where it is if not
            "weights": (wishes.weights, spec.params > 0, wishes.weights or "ssd"),
            "states": (wishes.states, spec.params > 0, wishes.states or "ssd"),
            "gradients": (wishes.gradients, rests, _gradients(model, wishes, deferred, index)),
            "boundary": (wishes.boundaries, keeps, "cpu"),
        }
        for key, (pin, moves, usual) in free.items():
            allowed: set[Tier] = {pin} if pin is not None and moves else {"cpu", "ssd"} if moves else {usual}
            if key == "weights" and moves and pin is None and wishes.device != "cpu":
                allowed.add("gpu")
            if getattr(stage, key) not in allowed:
                wanted = " or ".join(sorted(allowed))
                raise UsageError(f"plan.stages[{index}].{key}: {wanted} is wanted, not {getattr(stage, key)}")
        if stage.stage != index:
            raise UsageError(f"plan.stages[{index}].stage: {index} is wanted, not {stage.stage}")
        if list(stage.kept) != sorted(set(stage.kept)) or not set(stage.kept) <= set(operators[index]):
            raise UsageError(f"plan.stages[{index}].kept: operators of the stage in order are wanted, each once")


def _gradients(model: ModelSpec, wishes: Wishes, deferred: tuple[bool, ...], index: int) -> Tier:
    """Where the gradients of a stage count that has none to rest."""
    return (wishes.gradients or "ssd") if deferred[index] or model.has_two_users(index) else "cpu"


def difference(one: Any, other: Any, where: str = "plan") -> str | None:
    """The key of the first field in which two plans differ; None where they are the same."""
    if one == other:
        return None
    if is_dataclass(one) and type(one) is type(other):
        for field in fields(one):
            if found := difference(getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}"):
                return found
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            if found := difference(left, right, f"{where}[{index}]"):
                return found
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            if one.get(key) != other.get(key):
                return f"{where}.{key}"
    return where
