"""Plans changed recipes for the model and machine of a planned run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import FuyouError
from fuyou_cli.machine.described import on_described
from fuyou_cli.planner.candidate import Candidate
from fuyou_cli.planner.search_state import Alternative
from fuyou_cli.planner.sustained_rates import Choose
from fuyou_cli.spec.plan import Plan

from .room import Room, plan_problems, room_of
from .wear import Wear, wear_of, writes_of

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.training.prepared import Planned


def alternative(candidate: Candidate, plan: Plan) -> Alternative:
    """Wraps a plan that did not come from a search."""
    return Alternative(candidate=candidate, plan=plan, bound=0.0, estimate=0.0, timeline=None)


WORTH = 0.95  # of the time of a token; other losses for less are not worth it
_NEARLY = 0.9  # the same for a great change of the result in place of a small one
_RANKS = {  # small changes of a run's result to great ones
    "precision.grad_accum": 1, "optimizer.state_dtype": 2, "train.batch_size": 4, "train.clip_grad_norm": 8,
}  # fmt: skip


def per_token(plan: Plan) -> float:
    """Returns the seconds that a token takes, by which steps of unlike size are compared."""
    return plan.predicted.step_seconds / plan.step_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Holds what a run of a recipe, changed or not, would be like."""

    changes: tuple[str, ...]  # key=value
    prepared: Planned
    room: Room
    pinned: tuple[str, ...] = ()  # key=value of settings that the changes alone would have chosen again

    @property
    def overrides(self) -> tuple[str, ...]:
        """Returns the overrides that give exactly this plan."""
        return (*self.changes, *self.pinned)

    @property
    def plan(self) -> Plan:
        return self.prepared.plan

    @property
    def problems(self) -> list[str]:
        return plan_problems(self.plan, self.room)

    @property
    def tokens(self) -> int:
        return self.plan.step_tokens

    def wear(self, times: float = 1.0) -> Wear | None:
        """Returns the wear of the run, or of one `times` as long. Returns None if the data decides its length."""
        prepared, resumed = self.prepared, self.prepared.manifest is not None
        if not prepared.total_steps:
            return None
        return wear_of(prepared.hardware, writes_of(self.plan, self.room, steps=times * prepared.steps_left, resumed=resumed))

    def passes(self, times: float = 1.0) -> bool:
        """Tells whether the run fits, and wears the drives little enough if it is `times` as long."""
        wear = self.wear(times)
        return not self.problems and (wear is None or wear.accepted)


def ranked(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Sorts by the time of a token. Of those that are about as fast, that which changes the run least goes first."""
    left, found = sorted(outcomes, key=lambda one: (per_token(one.plan), one.changes)), list[Outcome]()
    while left:
        near = [one for one in left if _NEARLY * per_token(one.plan) <= per_token(left[0].plan)]
        found.append(min(near, key=lambda one: _rank(one.changes)))
        left.remove(found[-1])
    return found


def altered(outcome: Outcome, before: Plan) -> tuple[str, ...]:
    """Says in words what a change alters of the run's result. Empty: every loss stays the same."""
    now, was = outcome.plan.numerics, before.numerics
    words = {
        "optimizer.state_dtype": "states rounded to int8",
        "precision.grad_accum": "gradients summed in bfloat16",
        "train.batch_size": f"{now.batch_size:,} rows a step instead of {was.batch_size:,}",
        "train.clip_grad_norm": "no clipping",
        "dataset.max_seq_len": f"rows of {now.max_seq_len:,} tokens",
    }
    keys = [change.split("=")[0] for change in outcome.changes]
    said = [words[key] for key in keys if key in words]
    others = any(key.startswith(("train.", "dataset.", "precision.", "optimizer.")) for key in keys if key not in words)
    return tuple(said or (["other last bits"] if others else []))


def _rank(changes: Iterable[str]) -> int:
    return sum(_RANKS.get(change.split("=")[0], 0) for change in changes)


@dataclass(slots=True)
class Replanner:
    """Plans changed recipes for the machine and model of a run that is already planned."""

    loaded: LoadedRecipe
    prepared: Planned
    described: bool
    plans: int = field(default=0)  # made so far

    def with_keys(self, changes: Sequence[str], *, choose: Choose | None = None) -> Outcome | None:
        """Plans the recipe with these `key=value`, with the same micro-batch unless they change it. Returns None if the recipe
        does not allow them, the model refuses them, or nothing fits."""
        from fuyou_cli.recipe.load import load_recipe
        from fuyou_cli.training.plan_step import replan

        try:
            loaded = load_recipe(self.loaded.path, [*self.loaded.overrides, *changes])
            if self.described:
                loaded = on_described(loaded, self.prepared.hardware)
            self.plans += 1
            prepared = replan(self.prepared, loaded.recipe, choose=choose)
        except FuyouError:
            return None
        room = room_of(prepared, described=self.described)
        automatic = loaded.recipe.train.micro_batch_size == "auto"
        pinned = (f"train.micro_batch_size={prepared.plan.numerics.micro_batch_size}",) if automatic else ()
        return Outcome(changes=tuple(changes), prepared=prepared, room=room, pinned=pinned)
