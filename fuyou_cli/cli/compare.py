"""Why the plan is as it is: the same run with one knob of the planner turned, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from fuyou_cli.planner.choice import NONE_KEPT, Choice, Family, family
from fuyou_cli.planner.place import made_of
from fuyou_cli.planner.search import Found, timed
from fuyou_cli.planner.wishes import Wishes
from fuyou_cli.spec.plan import Plan

from .planning import alternative

if TYPE_CHECKING:
    from fuyou_cli.training.prepare import Prepared

MOST_ROWS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One choice. `plan` is None where it does not fit."""

    words: str
    choice: Choice
    plan: Plan | None
    slower: float  # than the best, as a share of its step


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    best: Row
    others: tuple[Row, ...]  # the nearest first, those that do not fit last
    left_out: int  # of such rows
    same: int  # knob values that give the very same plan
    looked_at: int  # choices that the search placed
    family: int  # choices there are
    complete: bool  # no choice of the family is faster


def comparison(prepared: Prepared, found: Found, wishes: Wishes) -> Comparison:
    """The best choice, then each other value of each knob with everything else as it is, simulated."""
    best, knobs = found.best, family(prepared.model, wishes)
    rows, same, seen = [], 0, [best.plan]
    for turned in _turned(knobs, best.choice):
        of_one: list[Row] = []
        for words, choice in turned:
            plan = _timed(prepared, wishes, choice)
            if plan is not None and any(_alike(plan, other) for other in seen):
                same += 1
                continue
            seen += [] if plan is None else [plan]
            slower = plan.predicted.step_seconds / prepared.plan.predicted.step_seconds - 1 if plan is not None else 0.0
            of_one.append(Row(words=words, choice=choice, plan=plan, slower=slower))
        rows.append(sorted(of_one, key=_order))
    # the nearest of every knob before the second of any
    taken = [row for together in zip_longest(*rows) for row in together if row is not None]
    return Comparison(
        best=Row(words=in_words(knobs, best.choice), choice=best.choice, plan=prepared.plan, slower=0.0),
        others=tuple(sorted(taken[: MOST_ROWS - 1], key=_order)),
        left_out=len(taken[MOST_ROWS - 1 :]),
        same=same,
        looked_at=len(found.others) + 1,
        family=len(knobs),
        complete=found.complete,
    )


def _timed(prepared: Prepared, wishes: Wishes, choice: Choice) -> Plan | None:
    """None where the choice does not fit."""
    plan = made_of(prepared.model, prepared.hardware, wishes, choice)
    if plan is None:
        return None
    return timed(alternative(choice, plan), prepared.model, prepared.hardware)


def _order(row: Row) -> tuple[bool, float, Choice]:
    return row.plan is None, row.slower, row.choice


def _alike(one: Plan, other: Plan) -> bool:
    """Whether two plans do the same."""
    return (one.stages, one.slot_classes, one.boundary_slots, one.lookahead) == (
        other.stages, other.slot_classes, other.boundary_slots, other.lookahead,
    )  # fmt: skip


# ---- knobs -----------------------------------------------------------------------------------------------------------


def _turned(knobs: Family, best: Choice) -> list[list[tuple[str, Choice]]]:
    """By knob, every choice that differs from the best in it alone, with that knob's words."""
    pipelines = [
        (_pipeline(lookahead, slots), replace(best, lookahead=lookahead, gradient_slots=slots))
        for lookahead, slots in knobs.pipelines
        if (lookahead, slots) != (best.lookahead, best.gradient_slots)
    ]
    return [
        pipelines,
        [(_states(share), replace(best, states=share)) for share in knobs.states if share != best.states],
        [(_defer(share), replace(best, defer=share)) for share in knobs.defer if share != best.defer],
        [(_activations(share), replace(best, activations=share)) for share in knobs.activations if share != best.activations],
        [(_swap(share), replace(best, swap=share)) for share in knobs.swap if share != best.swap],
    ]


def in_words(knobs: Family, choice: Choice) -> str:
    """The whole choice; knobs with one value are left out."""
    parts = [_pipeline(choice.lookahead, choice.gradient_slots)]
    for values, value, words in (
        (knobs.states, choice.states, _states),
        (knobs.defer, choice.defer, _defer),
        (knobs.activations, choice.activations, _activations),
        (knobs.swap, choice.swap, _swap),
    ):
        if len(values) > 1:
            parts.append(words(value))
    return ", ".join(parts)


def _pipeline(lookahead: int, slots: int) -> str:
    return f"{lookahead} ahead, {slots} gradient slot{'s' * (slots != 1)}"


def _states(share: float) -> str:
    return f"{share:.0%} of spare RAM for states first" if share else "spare RAM for weights first"


def _defer(share: float) -> str:
    return f"{share:.1%} of the updates in forward".replace(".0%", "%") if share else "every update in backward"


def _activations(share: float) -> str:
    if share == NONE_KEPT:
        return "no outputs in RAM"
    return f"{share:.0%} of spare RAM for outputs first" if share else "outputs in what RAM is left"


def _swap(share: float) -> str:
    return f"{share:.0%} of the outputs to the ssd" if share else "no outputs to the ssd"
