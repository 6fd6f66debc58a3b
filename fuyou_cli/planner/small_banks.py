"""Tells whether all that updates touch is little beside the frozen weights, as an adapter is. Then it rests in RAM.

Such banks get homes of their own: weights, gradients and states rest in RAM while the frozen weights of the same stages are
read from the ssd, and nothing is written but commits."""

from __future__ import annotations

from ..spec.model import ModelSpec, StageSpec
from ..spec.plan import Tier
from .plan_request import PlanRequest

_SHARE = 1 / 8  # of the RAM budget, at most


def rest_in_ram(model: ModelSpec, request: PlanRequest) -> bool:
    """Tells whether trained banks rest in RAM with their gradients and states, if the recipe lets the states."""
    if request.states not in (None, "cpu") or request.store_mode == "redo" or not model.frozen_parameters:
        return False
    dtype = request.numerics.accumulate_dtype
    touched = sum(s.trained_weight_bytes + s.state_bytes + s.gradient_bytes(dtype) for s in model.stages)
    return touched <= _SHARE * request.cpu_budget


def has_home(stage: StageSpec, weights: Tier, states: Tier) -> bool:
    """Tells whether the stage's trained bank has a home of its own, if trained banks rest in RAM."""
    return weights == "ssd" and states == "cpu" and stage.trained > 0 and stage.frozen_weight_bytes > 0
