#!/usr/bin/env python3
"""Makes the plan that the planner chooses for a recipe, and ten that it could have chosen, as texts of plan files.

    python scripts/proof/alternatives.py --recipe recipe.yaml --seed 7 --out plans.json

Five are drawn by the seed from the 30 that fit and have the best closed-form bounds (the seed also decides among equal bounds).
The others are the best with everything on the ssd, with no update deferred, with half and with double the micro-batch, and with
everything recomputed. One that equals the chosen plan, or that does not fit, is replaced by another of the 30.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fuyou_cli.advice.plan_files import write_plan
from fuyou_cli.advice.planned import planned_here
from fuyou_cli.advice.planning import Replanner, alternative
from fuyou_cli.cli.console import write_status
from fuyou_cli.core.errors import PlanError
from fuyou_cli.core.units import MiB
from fuyou_cli.planner.bound import lower_bound
from fuyou_cli.planner.candidate import Candidate, family
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.place import made_of
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import SearchResult, search, timed
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.prepared import Planned

ALL, AMONG = 10, 30
DRAWN = 5
# Left free by every plan alike: the process that runs it is larger than the one that made it.
MARGIN = 64 * MiB
ON_SSD = tuple(f"offload.{key}=ssd" for key in ("weights", "gradients", "optimizer_states", "boundaries"))
RECOMPUTED = ("offload.activations=recompute",)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedPlan:
    """Holds a plan under its name, and the changes that make its recipe."""

    name: str
    prepared: Planned
    request: PlanRequest
    candidate: Candidate
    overrides: tuple[str, ...] = ()

    @property
    def does(self) -> object:
        """Returns what two plans that do the same have in common."""
        return alike(self.prepared.plan)

    def written(self, folder: Path) -> dict[str, object]:
        path = folder / "plan.json"
        write_plan(path, self.prepared, self.request, self.candidate)
        seconds = self.prepared.plan.predicted.step_seconds
        return {
            "name": self.name, "overrides": list(self.overrides), "plan": path.read_text(encoding="utf-8"), "seconds": seconds,
            "micro": self.prepared.plan.numerics.micro_batch_size, "choice": str(self.candidate),
        }  # fmt: skip


def alike(plan: Plan) -> object:
    return plan.stages, plan.slot_classes, plan.boundary_slots, plan.lookahead, plan.numerics


class Roomy:
    """Holds the planner's choice in a little less memory than there is, and what it was chosen from."""

    request: PlanRequest | None = None
    found: SearchResult | None = None

    def __call__(self, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
        self.request = replace(request, cpu_budget=request.cpu_budget - MARGIN)
        self.found = search(model, hardware, self.request)
        return timed(self.found.best, model, hardware, self.request)


def named_plans(recipe: Path, seed: int) -> list[NamedPlan]:
    """Returns the chosen plan and the others, the chosen one first."""
    loaded = load_recipe(recipe, [])
    planning = Roomy()
    prepared = planned_here(loaded, choose=planning, say=write_status)
    assert planning.found is not None and planning.request is not None
    best = NamedPlan(name="chosen", prepared=prepared, request=planning.request, candidate=planning.found.best.candidate)
    found = [best]
    elsewise = Replanner(loaded=loaded, prepared=prepared, described=False)
    plans = [
        changed(elsewise, "all on the ssd", ON_SSD),
        undeferred(best, planning.request),
        *micro_batches(elsewise, best),
        changed(elsewise, "recompute all", RECOMPUTED),
    ]
    for named in filter(None, plans):
        add(found, named)
    drawn = 0
    for named in near_the_bound(best, planning.request, random.Random(seed)):
        if drawn >= DRAWN and len(found) > ALL:
            break
        drawn += add(found, named)
    return found


def add(found: list[NamedPlan], named: NamedPlan) -> bool:
    """Adds the plan unless an equal one is there. Tells whether it did."""
    if any(named.does == other.does for other in found):
        return False
    found.append(named)
    return True


def changed(elsewise: Replanner, name: str, overrides: tuple[str, ...]) -> NamedPlan | None:
    planning = Roomy()
    outcome = elsewise.with_keys(overrides, choose=planning)
    if outcome is None or outcome.problems or planning.found is None or planning.request is None:
        return None
    candidate = planning.found.best.candidate
    return NamedPlan(name=name, prepared=outcome.prepared, request=planning.request, candidate=candidate, overrides=overrides)


def micro_batches(elsewise: Replanner, best: NamedPlan) -> Iterator[NamedPlan | None]:
    size, batch = (getattr(best.prepared.plan.numerics, key) for key in ("micro_batch_size", "batch_size"))
    for name, other in (("half the micro-batch", size // 2), ("double the micro-batch", size * 2)):
        if other and batch % other == 0:
            yield changed(elsewise, name, (f"train.micro_batch_size={other}",))


def undeferred(best: NamedPlan, request: PlanRequest) -> NamedPlan | None:
    return placed(best, request, replace(best.candidate, defer=0.0), "no update deferred")


def placed(best: NamedPlan, request: PlanRequest, candidate: Candidate, name: str) -> NamedPlan | None:
    prepared = best.prepared
    plan = made_of(prepared.model, prepared.hardware, request, candidate)
    if plan is None or not request.has_room_for(plan, prepared.hardware):
        return None
    step = timed(alternative(candidate, plan), prepared.model, prepared.hardware, request)
    return NamedPlan(name=name, prepared=replace(prepared, plan=step), request=request, candidate=candidate)


def near_the_bound(best: NamedPlan, request: PlanRequest, draw: random.Random) -> list[NamedPlan]:
    """Lists the 30 fitting candidates with the lowest bounds, each plan once, in an order drawn."""
    prepared = best.prepared
    candidates = list(family(prepared.model, request))
    draw.shuffle(candidates)
    bounds, seen = [], {alike(prepared.plan)}
    for candidate in candidates:
        plan = made_of(prepared.model, prepared.hardware, request, candidate)
        if plan is None or not request.has_room_for(plan, prepared.hardware) or alike(plan) in seen:
            continue
        seen.add(alike(plan))
        costs = Costs.of(prepared.model, prepared.hardware, plan)
        bounds.append((lower_bound(costs, plan_schedule(prepared.model, plan), plan), candidate))
    nearest = [candidate for _, candidate in sorted(bounds, key=lambda pair: pair[0])[:AMONG]]
    draw.shuffle(nearest)
    made = (placed(best, request, candidate, f"drawn: {candidate}") for candidate in nearest)
    return [named for named in made if named is not None]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--recipe", type=Path, required=True)
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    try:
        found = named_plans(given.recipe, given.seed)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as folder:
        texts = [named.written(Path(folder)) for named in found]
    given.out.write_text(json.dumps(texts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
