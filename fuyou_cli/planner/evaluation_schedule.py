"""Lists an evaluation as visits in order: forward through all stages, and the logits of the head or of each of its pieces.

Nothing is kept for backward, no gradient is summed. An update that waits for the next forward runs before the first visit of
its stage here, as it would in a step.
"""

from __future__ import annotations

from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .schedule import Pass, Schedule, Traffic, Visit, fetched_bytes


def evaluation_schedule(model: ModelSpec, plan: Plan) -> Schedule:
    """Returns one pass over the model, for as many rows as one sweep of a step."""
    visits = tuple(_visit(model, plan, index, stage.index) for index, stage in enumerate(model.stages))
    owners = (visit.owner for visit in visits if visit.fetch and visit.owner is not None)
    read = sum(fetched_bytes(model, plan.stages[owner]) for owner in owners)
    return Schedule(visits=visits, traffic=Traffic(read={"weights": read}, written={}))


def _visit(model: ModelSpec, plan: Plan, index: int, stage: int) -> Visit:
    owner, is_head = model.owner(stage), model.stages[stage].kind == "head"
    phase: Pass = "logits" if is_head else "forward"
    streamed = plan.stages[owner].weights == "ssd" and model.stages[owner].params > 0
    looks_up = model.stages[stage].kind == "embedding"
    waits = _stays_for_head(model, plan, owner)
    return Visit(
        index=index, phase=phase, stage=stage, owner=owner,
        fetch=streamed and not (waits and is_head), keep=streamed and waits and not is_head,
        update="before" if plan.stages[owner].deferred and not (is_head and owner != stage) else "none",
        stash=False, take=False, sum_gradients=False, rest=False, resume=False,
        flops=0.0 if looks_up else model.stages[stage].forward_flops * plan.group.micro_batches,
    )  # fmt: skip


def _stays_for_head(model: ModelSpec, plan: Plan, owner: int) -> bool:
    """Tells whether a tied embedding stays in its slot until the head: where no other stage needs a slot of that class."""
    if not model.tied_head or model.head_is_cut or owner != 0:
        return False
    number = plan.stages[owner].slot_class
    others = (stage.stage for stage in plan.stages if stage.slot_class == number and stage.stage != owner)
    return not any(plan.stages[stage].weights == "ssd" and model.stages[stage].params for stage in others)
