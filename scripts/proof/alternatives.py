#!/usr/bin/env python3
"""Makes the plan that the planner chooses for a recipe, and ten that it could have chosen, as candidates to run.

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fuyou_cli.advice.planning import Replanner, plan_recipe
from fuyou_cli.cli.console import write_status
from fuyou_cli.core.errors import PlanError
from fuyou_cli.planner.bound import lower_bound
from fuyou_cli.planner.commit_interval import timed_plan
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.place import Candidate, made_of
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import family
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.prepare import Planned

ALL, AMONG = 10, 30
DRAWN = 5
ON_SSD = tuple(f"offload.{key}=ssd" for key in ("weights", "gradients", "optimizer_states", "boundaries"))
RECOMPUTED = ("offload.activations=recompute",)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedPlan:
    """Holds a plan under its name, and the changes that make its recipe."""

    name: str
    prepared: Planned
    candidate: Candidate
    overrides: tuple[str, ...] = ()

    @property
    def does(self) -> object:
        """Returns what two plans that do the same have in common."""
        return alike(self.prepared.plan)

    def as_record(self) -> dict[str, object]:
        numerics, seconds = self.prepared.plan.numerics, self.prepared.plan.predicted.step_seconds
        return {
            "name": self.name, "overrides": list(self.overrides), "plan": json.dumps(asdict(self.candidate)),
            "seconds": seconds, "micro": numerics.micro_batch_size, "choice": str(self.candidate),
        }  # fmt: skip


def alike(plan: Plan) -> object:
    return plan.stages, plan.slot_classes, plan.boundary_slots, plan.lookahead, plan.numerics


def named_plans(recipe: Path, seed: int) -> list[NamedPlan]:
    """Returns the chosen plan and the others, the chosen one first."""
    loaded = load_recipe(recipe, [])
    prepared = plan_recipe(loaded, say=write_status)
    assert prepared.found is not None
    best = NamedPlan(name="chosen", prepared=prepared, candidate=prepared.found.best.candidate)
    found = [best]
    elsewise = Replanner(loaded=loaded, prepared=prepared, described=False)
    plans = [
        changed(elsewise, "all on the ssd", ON_SSD),
        placed(best, replace(best.candidate, defer=False), "no update deferred"),
        *micro_batches(elsewise, best),
        changed(elsewise, "recompute all", RECOMPUTED),
    ]
    for named in filter(None, plans):
        add(found, named)
    drawn = 0
    for named in near_the_bound(best, random.Random(seed)):
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
    outcome = elsewise.with_keys(overrides)
    if outcome is None or outcome.problems or outcome.prepared.found is None:
        return None
    candidate = outcome.prepared.found.best.candidate
    return NamedPlan(name=name, prepared=outcome.prepared, candidate=candidate, overrides=overrides)


def micro_batches(elsewise: Replanner, best: NamedPlan) -> Iterator[NamedPlan | None]:
    size, batch = (getattr(best.prepared.plan.numerics, key) for key in ("micro_batch_size", "batch_size"))
    for name, other in (("half the micro-batch", size // 2), ("double the micro-batch", size * 2)):
        if other and batch % other == 0:
            yield changed(elsewise, name, (f"train.micro_batch_size={other}",))


def placed(best: NamedPlan, candidate: Candidate, name: str) -> NamedPlan | None:
    prepared, request = best.prepared, best.prepared.request
    plan = made_of(prepared.model, prepared.hardware, request, candidate)
    if plan is None or not request.has_room_for(plan, prepared.hardware):
        return None
    step = timed_plan(prepared.model, prepared.hardware, plan, chosen=request.commit_every == "auto")
    return NamedPlan(name=name, prepared=replace(prepared, plan=step), candidate=candidate)


def near_the_bound(best: NamedPlan, draw: random.Random) -> list[NamedPlan]:
    """Lists the 30 fitting candidates with the lowest bounds, each plan once, in an order drawn."""
    prepared, request = best.prepared, best.prepared.request
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
    made = (placed(best, candidate, f"drawn: {candidate}") for candidate in nearest)
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
    given.out.write_text(json.dumps([named.as_record() for named in found]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
