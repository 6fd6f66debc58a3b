"""Weighs what makes a run faster that waits for its drives: smaller states and sums of gradients, larger batches, no clipping.

Each is planned for the same tokens. The order is that of tokens per second, not of what is easiest to name. Every one changes
the losses, which is said beside it (`planning.altered`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fuyou_cli.spec.plan import Plan

from .changes import INT8, SMALL_SUMS, may_have_smaller_states, may_have_smaller_sums, same_tokens
from .planning import WORTH, Outcome, Replanner, per_token, ranked

if TYPE_CHECKING:
    from fuyou_cli.training.prepare import Planned

_WAITS = 0.1  # share of a step that compute waits from which changes are planned
_LARGER = (4, 2)  # times the rows of a step; many more would be another training
_MOST = 64  # micro-batches of a larger batch; plans of more take many seconds
_SHOWN = 2


def ways_to_be_faster(elsewise: Replanner) -> tuple[Outcome, ...]:
    """Returns the two best kinds of change, best first; none for a run that hardly waits for drives, or that nothing makes
    clearly faster. Each is searched as the recipe with its overrides is, and so has the figures of that plan.

    The changes of a kind, and the kinds, are compared by quick plans with the choice of the plan that is there."""
    prepared = elsewise.prepared
    if prepared.manifest is not None or prepared.found is None or not waits_for_drives(prepared.plan):
        return ()  # a saved run keeps its numbers
    if prepared.refusal is not None or prepared.hardware.measured == "assumed":
        return ()
    best: list[Outcome] = []
    for kind in _kinds(prepared):
        planned = [one for keys in kind if (one := _quickly(elsewise, keys)) is not None]
        best += ranked(_worth(prepared.plan, planned))[:1]
    searched = (elsewise.with_keys(one.changes) for one in ranked(best)[:_SHOWN])
    return tuple(ranked(_worth(prepared.plan, [one for one in searched if one is not None])))


def waits_for_drives(plan: Plan) -> bool:
    """Tells whether the store, or the host's memory, makes a step longer. A plan that computes a backward twice, to measure the
    norm first, does so because they would."""
    predicted = plan.predicted
    waits = sum(predicted.stalls.values()) > _WAITS * predicted.step_seconds
    return waits or plan.norm_first or predicted.bottleneck.startswith(("ssd", "dram"))


def _worth(plan: Plan, outcomes: Iterable[Outcome]) -> list[Outcome]:
    most = WORTH * per_token(plan)
    return [one for one in outcomes if not one.problems and per_token(one.plan) <= most]


def _kinds(prepared: Planned) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yields the changes of each kind that the recipe allows."""
    recipe = prepared.recipe
    states, sums = may_have_smaller_states(prepared), may_have_smaller_sums(prepared)
    if states:
        yield ((INT8,), (INT8, SMALL_SUMS)) if sums else ((INT8,),)
    elif sums:
        yield ((SMALL_SUMS,),)
    numerics, by_epochs = prepared.plan.numerics, recipe.train.max_steps is None
    times = [one for one in _LARGER if one * numerics.micro_batches <= _MOST and (by_epochs or prepared.total_steps >= one)]
    yield same_tokens(prepared, [one * numerics.batch_size for one in times[:1]])
    yield (("train.clip_grad_norm=null",),) if recipe.train.clip_grad_norm is not None else ()


def _quickly(elsewise: Replanner, keys: tuple[str, ...]) -> Outcome | None:
    """Plans changed keys with the choice of the plan that is there, or as usual where that does not fit. More sweeps than one
    may be there only for what a change makes small, so one is tried as well."""
    found = elsewise.prepared.found
    assert found is not None
    same = replace(found.best.candidate, norm_first=False)
    placed = (elsewise.with_keys(keys, candidate) for candidate in dict.fromkeys((same, replace(same, sweeps=1))))
    fitting = [outcome for outcome in placed if outcome is not None]
    return min(fitting, key=lambda one: per_token(one.plan)) if fitting else elsewise.with_keys(keys, effort="usual")
