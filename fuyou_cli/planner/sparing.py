"""Decides when a plan may write more to the drives (`offload.wear`): only if the time it saves is worth it.

A plan *spends* drives if it writes more than it must. Both are measured against plans that keep no outputs and fill RAM in the
usual order:

- it writes more bytes of boundaries (with the outputs that rest with them) than the plan of the same pipeline. Boundaries that
  do not fit in RAM are necessary. Swapped outputs are not, and neither are boundaries whose place in RAM outputs or states
  took;
- or it writes over `ALIKE` more bytes in all than the plan of the smallest pipeline.

`spare` takes the fastest plan that does not spend, if it is at most `WORTH` slower than the fastest of all. Otherwise spending
is worth it. Then it looks at plans that are at most `WORTH` slower than the fastest of all and at least `WORTH` faster than
every plan that does not spend. Of these it takes the one that writes least, or one that writes no more boundaries than that one
and has the smallest product of time and bytes.

`ignore` takes the fastest plan. `spare` never writes more than it. `refinement` compares in the same ways.

Drives with unknown endurance are spared like others. Steps are compared at the rates that the run is planned for
(`run_planner`). If the planner chooses the commit interval, bytes and seconds are compared with the search's estimate of
it.
"""

from __future__ import annotations

from dataclasses import replace

from ..spec.plan import Plan
from .candidate import Candidate, Family
from .place import Placing
from .plan_request import WearPolicy
from .search_state import Alternative, SearchState, asked_for

WORTH = 0.05  # share of the step that spending drives has to save
ALIKE = 0.05  # share of the bytes that must be written; so little more does not count


class Sparing:
    """Tells which plans of a family spend drives, compared with the fastest of the family."""

    def __init__(self, placing: Placing, candidates: Family, fastest: Alternative) -> None:
        self.family = replace(candidates, swap=candidates.swap[:1])  # candidates that do not spend
        self._placing, self._fastest = placing, fastest
        self._bare: dict[tuple[int, int], Plan | None] = {}

    def spends(self, candidate: Candidate, plan: Plan) -> bool:
        """Tells whether a plan writes more than it must."""
        alike = self._without_outputs(candidate.lookahead, candidate.gradient_slots)
        least = self._without_outputs(*self._smallest)
        boundaries, written = plan.predicted.written_by["boundaries"], plan.predicted.written_per_step
        if alike is not None and boundaries > alike.predicted.written_by["boundaries"]:
            return True
        return least is not None and written > least.predicted.written_per_step * (1 + ALIKE)

    def allows(self, candidate: Candidate, plan: Plan) -> bool:
        """Tells whether a plan neither spends drives nor writes more than the fastest."""
        most = self._fastest.plan.predicted.written_per_step
        return plan.predicted.written_per_step <= most and not self.spends(candidate, plan)

    @property
    def _smallest(self) -> tuple[int, int]:
        return self.family.pipelines[0]

    def _without_outputs(self, lookahead: int, slots: int) -> Plan | None:
        """Returns the plan without kept outputs. It is None if that does not fit; then no plan with this pipeline fits."""
        pipeline = (lookahead, slots)
        if pipeline not in self._bare:
            found = self._placing.placed(self.family.bare(pipeline))
            self._bare[pipeline] = None if found is None else found.plan
        return self._bare[pipeline]


def spared(every: SearchState, frugal: SearchState) -> Alternative:
    """Returns the plan for `spare`, from a search of all plans and one of the plans that do not spend."""
    assert every.best is not None
    fastest, limit = every.cheapest(), every.best.seconds * (1 + WORTH)
    if frugal.best is not None:
        if frugal.best.seconds <= limit:
            return frugal.cheapest(at_most=limit)
        limit = min(limit, frugal.best.seconds / (1 + WORTH))
    seen = (fastest, *_no_more_written(every.simulated_within(limit), fastest))
    least = min(seen, key=asked_for)
    allowed = (found for found in seen if _boundaries(found) <= _boundaries(least))
    return min(allowed, key=lambda found: (seconds_and_bytes(found), asked_for(found)))


def _boundaries(found: Alternative) -> int:
    return found.plan.predicted.written_by["boundaries"]


def seconds_and_bytes(found: Alternative) -> float:
    """Returns the product of a step's seconds and of what it writes: how `spare` compares plans near the fastest."""
    return found.seconds * max(1, found.plan.predicted.written_per_step)


def cost(found: Alternative, policy: WearPolicy) -> float:
    """Returns what `offload.wear` compares plans by that are about as fast."""
    return seconds_and_bytes(found) if policy == "spare" else found.seconds


def _no_more_written(seen: list[Alternative], fastest: Alternative) -> list[Alternative]:
    most = fastest.plan.predicted.written_per_step
    return [found for found in seen if found.plan.predicted.written_per_step <= most]
