"""Chooses the stages whose updates wait for the next forward: all if the gradient norm must be known first and no backward of
its own measures it, else a share.

A stage that is not deferred is updated as soon as its gradients are complete. The gradients of a deferred stage go to their
home, and its update runs in the next forward, before the stage is used. The results are the same. Deferring moves work to a
time when the store has less to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..spec.model import ModelSpec
from .plan_request import PlanRequest


def deferrals(model: ModelSpec, request: PlanRequest) -> tuple[bool, ...]:
    """Tells, per stage, whether its update waits for the next forward. It is False while the planner still has to choose."""
    waits = request.clip_grad_norm is not None and not request.norm_first
    return deferred_stages(model, 1.0 if waits else request.defer or 0.0)


def deferred_stages(model: ModelSpec, share: float) -> tuple[bool, ...]:
    """Returns stages that hold `share` (0 to 1) of the parameters, to within half of the largest stage. A share of 1 returns
    all stages.

    The stages are evenly spread. A deferred update runs at most `lookahead` visits before its stage is used. An update that is
    not deferred holds slots until it is done. So neither can move far. If every n-th stage is deferred, each stretch of forward
    and of backward has the same work for the store beside the same compute. If the first stages were taken together, the start
    of forward would be as heavy as backward was, and the store would idle during the rest of forward.

    The embedding is deferred last. Its backward ends the step and its forward begins the next one. Deferring does not move its
    update in time, and its gradients would have to go to their home and back.
    """
    stages = model.stages
    if not 0.0 < share < 1.0:
        return (share >= 1.0,) * len(stages)
    params = [stage.trained for stage in stages]
    embeddings = [stage.index for stage in reversed(stages) if stage.kind == "embedding"]
    others = [stage.index for stage in stages if stage.kind != "embedding"]
    wanted = share * sum(params)
    chosen = _spread(others, params, wanted)
    chosen |= _spread(embeddings, params, wanted - sum(params[index] for index in others))
    return tuple(index in chosen for index in range(len(stages)))


def _spread(indexes: Sequence[int], params: Sequence[int], wanted: float) -> set[int]:
    """Returns those of `indexes` that hold about `wanted` parameters, evenly spread. An index is taken if the sum so far is too
    small by half of it or more."""
    total = sum(params[index] for index in indexes)
    chosen: set[int] = set()
    passed = taken = 0
    for index in indexes:
        passed += params[index]
        if taken + params[index] / 2 < wanted * passed / max(1, total):
            chosen.add(index)
            taken += params[index]
    return chosen
