"""What a plan's screen says beyond the plan itself: what the search saw, and what other recipes would be like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import FuyouError, PlanError
from fuyou_cli.machine.described import on_described
from fuyou_cli.planner.choice import Choice
from fuyou_cli.planner.lasting import Choose
from fuyou_cli.planner.looking import Alternative
from fuyou_cli.planner.place import least_memory, made_of
from fuyou_cli.planner.place import plan as first_that_fits
from fuyou_cli.planner.search import Found, fastest, search, timed
from fuyou_cli.planner.wishes import Wishes
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .room import Room, plan_problems, room_of
from .wear import Spared, Wear, spared_of, wear_of, writes_of

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.prepare import Prepared


@dataclass(slots=True)
class Planning:
    """Chooses a plan as a run does, and remembers what it chose from. Where nothing fits the budget, the plan is the one that
    needs least, and says so by its peak."""

    wishes: Wishes | None = None
    found: Found | None = None
    too_small: PlanError | None = None

    def __call__(self, model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Plan:
        self.wishes, self.too_small = wishes, None
        try:
            self.found = search(model, hardware, wishes)
        except PlanError as error:
            self.too_small = error
            self.found = search(model, hardware, replace(wishes, cpu_budget=least_memory(model, hardware, wishes)))
        return replace(timed(self.found.best, model, hardware, wishes), cpu_budget=wishes.cpu_budget)

    def spared(self, prepared: Prepared) -> Spared | None:
        """What its latest plan, which is that of `prepared`, does not write for the drives' sake."""
        if self.found is None or self.wishes is None or self.too_small is not None:
            return None
        return spared_of(self.found, prepared.plan, prepared.model, prepared.hardware, self.wishes)


def as_chosen_before(choice: Choice) -> Choose:
    """Chooses the same point of the planner's family without a search, the tensors placed anew; where it does not fit, the
    first that does."""

    def choose(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Plan:
        plan = made_of(model, hardware, wishes, choice) or first_that_fits(model, hardware, wishes)
        return timed(alternative(choice, plan), model, hardware, wishes)

    return choose


def alternative(choice: Choice, plan: Plan) -> Alternative:
    """A plan that no search came to."""
    return Alternative(choice=choice, plan=plan, bound=0.0, estimate=0.0, timeline=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a recipe would be like, changed or not."""

    changes: tuple[str, ...]  # key=value
    prepared: Prepared
    room: Room
    pinned: tuple[str, ...] = ()  # key=value of what a recipe with the changes alone would have chosen anew

    @property
    def overrides(self) -> tuple[str, ...]:
        """What gives this very plan behind the command."""
        return (*self.changes, *self.pinned)

    @property
    def plan(self) -> Plan:
        return self.prepared.plan

    @property
    def problems(self) -> list[str]:
        return plan_problems(self.plan, self.room)

    def wear(self, times: float = 1.0) -> Wear | None:
        """Of the run, or of one so many times as long."""
        prepared, resumed = self.prepared, self.prepared.manifest is not None
        if not prepared.total_steps:
            return None
        writes = writes_of(self.plan, self.room, steps=times * prepared.steps_left, resumed=resumed)
        return wear_of(prepared.hardware, writes)

    @property
    def passes(self) -> bool:
        return self.passes_for(1.0)

    def passes_for(self, times: float) -> bool:
        """Whether it fits, and a run so many times as long wears the drives little enough."""
        wear = self.wear(times)
        return not self.problems and (wear is None or wear.accepted)

    @property
    def tokens(self) -> int:
        return self.plan.numerics.batch_size * self.plan.numerics.max_seq_len


@dataclass(slots=True)
class Elsewise:
    """Plans changed recipes for the machine and model of one that is planned already."""

    loaded: LoadedRecipe
    prepared: Prepared
    described: bool
    plans: int = field(default=0)  # made so far

    def with_keys(self, changes: Sequence[str], *, choose: Choose = fastest) -> Outcome | None:
        """The recipe with these `key=value`, its rows computed as many at once as before unless they say otherwise; None
        where the recipe does not allow them, the model refuses them or nothing fits."""
        from fuyou_cli.recipe.load import load_recipe

        try:
            loaded = load_recipe(self.loaded.path, [*self.loaded.overrides, *changes])
            if self.described:
                loaded = on_described(loaded, self.prepared.hardware)
            outcome = self.with_recipe(loaded.recipe, tuple(changes), choose=choose)
        except FuyouError:
            return None
        automatic = loaded.recipe.train.micro_batch_size == "auto"
        pinned = (f"train.micro_batch_size={outcome.plan.numerics.micro_batch_size}",) if automatic else ()
        return replace(outcome, pinned=pinned)

    def with_recipe(self, recipe: Recipe, changes: tuple[str, ...] = (), *, choose: Choose = fastest) -> Outcome:
        """Raises PlanError where nothing fits, UsageError where the model refuses it."""
        from fuyou_cli.training.replan import replanned

        self.plans += 1
        prepared = replanned(self.prepared, recipe, choose=choose)
        return Outcome(changes=changes, prepared=prepared, room=room_of(prepared, described=self.described))
