"""Fills the device's spare memory with whole stages. Their weights, gradients and states rest there and are updated there."""

from __future__ import annotations

from dataclasses import replace

from ..spec.model import ModelSpec
from .boundary_layout import device_bytes
from .device import stages_at_turn
from .device_homes import gradients_would_rest, update_scratch
from .device_memory import most_needed
from .greedy_fill import spread
from .plan_request import PlanRequest

SHARES = (0.0, 0.5, 1.0)  # shares of the device's spare memory
TURN = -1.0  # another value of `Candidate.there`: only stages at the turn of a step, whose updates nothing else hides


def may_fill(model: ModelSpec, request: PlanRequest) -> bool:
    """Tells whether the planner chooses which stages rest on the device, and has room for one of them."""
    asked = (request.weights, request.states, request.gradients, request.device_states)
    if request.device == "cpu" or request.gpu_budget is None or any(asked):
        return False
    if request.kept_there == "room":  # the recipe wants all spare memory for outputs
        return False
    return bool(request.device_states is None and stages_filling(model, request, 1.0))


def stages_filling(model: ModelSpec, request: PlanRequest, share: float) -> tuple[int, ...]:
    """Returns the stages that fill `share` of the device's spare memory. Blocks and the head come first: their weights are
    needed twice in a step, an embedding's once. Stages of one kind are spread over the step, as they are for RAM. If all stages
    fit, all are taken: then weights and sums need no other memory.

    `TURN` takes embeddings and the first block, as far as they fit. Their gradients come last, and the next forward needs them
    first. On the host, compute waits while they come down, are updated and go up."""
    every = [stage.index for stage in model.stages if stage.params]
    if share == 0 or request.gpu_budget is None or not model.layout.on_device or model.quantisation is not None:
        return ()
    outputs = device_bytes(model, request.group, request.kept_there) if isinstance(request.kept_there, tuple) else 0
    everything = replace(request, device_states=tuple(every))
    if share >= 1 and most_needed(model, everything).total + outputs <= request.gpu_budget:
        return tuple(every)
    left = abs(share) * (request.gpu_budget - outputs - most_needed(model, replace(request, device_states=())).total)
    left -= update_scratch(max(model.stages[stage].trained for stage in every))
    rest, chosen = gradients_would_rest(model, request), list[int]()
    for stage in stages_at_turn(model) if share == TURN else _by_traffic(model, every):
        spec = model.stages[stage]
        size = spec.weight_bytes + spec.state_bytes + spec.gradient_bytes(request.numerics.accumulate_dtype) * rest[stage]
        if size <= left:
            chosen.append(stage)
            left -= size
    return tuple(sorted(chosen))


def _by_traffic(model: ModelSpec, every: list[int]) -> list[int]:
    return sorted(every, key=lambda stage: (model.stages[stage].kind == "embedding", spread(stage)))
