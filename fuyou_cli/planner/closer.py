"""What else could be in RAM than what choices come to, looked at where a model has few tensors (`picks`).

Three steps: on from the fastest choice by the home of one tensor or of two, as long as that makes the step shorter; then the
sets of tensors that save most traffic, beside every pipeline, share of deferred updates and swapped outputs that choices have;
and on from the fastest of several pipelines as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice

from ..spec.plan import Plan
from .choice import NONE_PICKED, Choice, Family
from .looking import Alternative, Looking

_BARE, _PICKS = 24, 128  # of choices without their tensors, and of the sets that are placed with each
_MOST_IN_VAIN = 64  # simulations of such sets in a row that find nothing better
_STARTS = 3  # pipelines


def look_closer(looking: Looking, choices: Family) -> None:
    """Simulates what may be better than the best, which there must be, and makes it the best where it is."""
    best = _best(looking)
    if not looking.placing.is_small(best.choice):
        return
    _climb(looking, best)
    if _is_in_ram(best.plan):  # then sets are no question of what fits
        return
    in_vain = 0
    for found in _likeliest_first(looking, _sets(looking, choices)):
        if in_vain == _MOST_IN_VAIN:
            break
        in_vain = in_vain + 1 if _faster(looking, found, _best(looking)) is None else 0
    for start in _starts(looking):
        _climb(looking, start)


def _best(looking: Looking) -> Alternative:
    assert looking.best is not None
    return looking.best


def _climb(looking: Looking, start: Alternative) -> None:
    """To what is faster and differs in little, and on from there."""
    at: Alternative | None = start
    while at is not None:
        near = looking.placed_anew(looking.placing.near(at.choice, at.plan, looking.pipelines))
        at = next(filter(None, (_faster(looking, found, at) for found in _likeliest_first(looking, near))), None)


def _faster(looking: Looking, found: Alternative, than: Alternative) -> Alternative | None:
    """It, simulated, if it is."""
    if found.bound >= than.seconds:
        return None
    simulated = looking.simulated(found)
    looking.pool[id(found.plan)] = simulated
    if simulated.seconds < _best(looking).seconds:
        looking.best = simulated
    return simulated if simulated.seconds < than.seconds else None


def _likeliest_first(looking: Looking, candidates: Iterable[Alternative]) -> list[Alternative]:
    """Of what seems equal that first which moves less."""
    expected = looking.expectation()

    def order(found: Alternative) -> tuple[float, int, Choice]:
        predicted = found.plan.predicted
        return expected(found), predicted.read_per_step + predicted.written_per_step, found.choice

    return sorted(candidates, key=order)


def _sets(looking: Looking, choices: Family) -> Iterator[Alternative]:
    """Those of tensors that save most traffic, with what choices have beside tensors in RAM."""
    for choice in islice(_bare(looking, choices), _BARE):
        yield from looking.placed_anew(islice(looking.placing.picks(choice), _PICKS))


def _bare(looking: Looking, choices: Family) -> Iterator[Choice]:
    """Choices without the tensors that they move to RAM: of the fastest first, of what does not fit without any there last."""
    known = sorted(looking.pool.values(), key=lambda found: (found.seconds, found.choice))
    bare = (
        replace(choice, states=0.0, activations=min(choice.activations, 0.0), picked=NONE_PICKED)
        for choice in chain((found.choice for found in known), choices)
    )
    yield from dict.fromkeys(bare)


def _starts(looking: Looking) -> list[Alternative]:
    """The fastest of every pipeline, the fastest of those first."""
    fastest: dict[object, Alternative] = {}
    simulated = (found for found in looking.pool.values() if found.timeline is not None)
    for found in sorted(simulated, key=lambda found: (found.seconds, found.choice)):
        fastest.setdefault((found.choice.lookahead, found.choice.gradient_slots), found)
    return list(fastest.values())[:_STARTS]


def _is_in_ram(plan: Plan) -> bool:
    homes = ((stage.weights, stage.states, stage.gradients, stage.boundary) for stage in plan.stages)
    return all("ssd" not in tiers for tiers in homes)
