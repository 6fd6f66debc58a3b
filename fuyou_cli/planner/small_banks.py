"""Tells whether all that updates touch is little beside the frozen weights, as an adapter is. Then it rests in RAM.

Such banks get homes of their own: weights, gradients and states rest in RAM while the frozen weights of the same stages are
read from the ssd, and nothing is written but commits."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ..spec.model import ModelSpec, StageSpec
from ..spec.plan import Tier
from .plan_request import PlanRequest

_SHARE = 1 / 8  # of the RAM budget, at most
_LITTLE = 1 / 64  # of the RAM budget; so little room takes nothing from a step
WORTH = 0.05  # share of the step that writing trained banks to the ssd in every step has to save


def rest_in_ram(model: ModelSpec, request: PlanRequest) -> bool:
    """Tells whether trained banks rest in RAM with their gradients and states, if the recipe lets the states."""
    if request.trained_in_ram is not None and _may_rest(model, request):
        return request.trained_in_ram
    return _may_rest(model, request) and _touched(model, request) <= _SHARE * request.cpu_budget


def ways_to_rest(model: ModelSpec, request: PlanRequest) -> tuple[PlanRequest, ...]:
    """Returns the requests to choose from: where banks that may rest in RAM are not very little, what they take there may be
    worth more to boundaries or outputs, or too much for the run to fit. The one preferred comes first."""
    if request.trained_in_ram is not None or not rest_in_ram(model, request):
        return (request,)
    there, elsewhere = (replace(request, trained_in_ram=rests) for rests in (True, False))
    return (there,) if _touched(model, request) <= _LITTLE * request.cpu_budget else (there, elsewhere)


def least_budget_to_rest(model: ModelSpec, request: PlanRequest) -> int | None:
    """Returns the bytes of RAM from which on trained banks may rest there; None: they never do."""
    return ceil(_touched(model, request) / _SHARE) if _may_rest(model, request) else None


def _may_rest(model: ModelSpec, request: PlanRequest) -> bool:
    return request.states in (None, "cpu") and model.frozen_parameters > 0


def _touched(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes that updates touch."""
    dtype = request.numerics.accumulate_dtype
    return sum(s.trained_weight_bytes + s.state_bytes + s.gradient_bytes(dtype) for s in model.stages)


def has_home(stage: StageSpec, weights: Tier, states: Tier) -> bool:
    """Tells whether the stage's trained bank has a home of its own, if trained banks rest in RAM."""
    return weights == "ssd" and states == "cpu" and stage.trained > 0 and stage.frozen_weight_bytes > 0
