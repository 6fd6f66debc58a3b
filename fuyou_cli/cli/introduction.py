"""What `fuyou finetune` says before it trains: the plan as soon as there is one, before anything is downloaded or tokenised;
then a sample of the data, and of the plan what has changed since."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.advice.facts import RunFacts, facts_of
from fuyou_cli.advice.room import check_export, plan_problems, room_of
from fuyou_cli.advice.wear import spared_of
from fuyou_cli.core.errors import PlanError
from fuyou_cli.core.units import gib
from fuyou_cli.planner.lasting import Choose
from fuyou_cli.planner.search import Found, search, timed
from fuyou_cli.planner.wishes import Wishes
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .console import status_console, write_status
from .prepared import command_of

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.training.prepare import Prepared


@dataclass(slots=True)
class Introduction:
    """Of one run. `given` chooses the plan, where that is no search's business."""

    loaded: LoadedRecipe
    given: Choose | None = None
    _search: tuple[Found, Wishes] | None = None  # the latest one
    _shown: Prepared | None = None

    def choose(self, model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Plan:
        """The best plan, what was seen on the way to it remembered."""
        if self.given is not None:
            return self.given(model, hardware, wishes)
        found = search(model, hardware, wishes)
        self._search = found, wishes
        return timed(found.best, model, hardware, wishes)

    def planned(self, prepared: Prepared) -> None:
        """Shows the plan, and ends there where it does not fit. A saved run has fetched what it needs, and may be refused for
        that yet: its plan is shown once it is not."""
        self._refuse_unfit(prepared)
        if prepared.manifest is None:
            self._show(prepared)

    def ready(self, prepared: Prepared) -> None:
        """The same for what is run, then one decoded sample with its mask."""
        from .render.sample import show_sample

        self._refuse_unfit(prepared)
        if self._shown is None or not _alike(self._shown.plan, prepared.plan):
            self._show(prepared)
        else:
            if self._shown.total_steps != prepared.total_steps:  # the data decided
                self._show_length(prepared)
            _say_growth(self._shown.plan, prepared.plan)
        assert prepared.rows is not None
        summary = prepared.rows.summary
        formats = ", ".join(f"{Path(path).name}: {name}" for path, name in summary.formats)
        write_status(
            f"data: {_some(summary.samples, 'sample')} ({formats}) in {_some(summary.rows, 'row')}, "
            f"{_some(summary.tokens, 'token')}, {summary.label_tokens:,} learnt from; {summary.truncated:,} truncated, "
            f"{summary.split:,} split, {summary.dropped:,} dropped, "
            f"{_some(summary.without_loss, 'row')} without a label left out"
        )
        show_sample(status_console(), summary.preview)
        if prepared.manifest is not None:
            write_status(f"resuming after step {prepared.manifest.step}: weights, states, schedule and data position")

    @property
    def changes(self) -> str:
        """Where changes that help are found: each is planned, which takes a while, and none is named that was not."""
        return f"`{command_of(self.loaded, 'plan')}` plans the smallest changes that help"

    def _refuse_unfit(self, prepared: Prepared) -> None:
        """Shows a plan that does not fit, and ends there: before weights are fetched, and again with rows and all."""
        check_export(prepared.recipe, prepared.model_dir)
        if problems := plan_problems(prepared.plan, room_of(prepared)):
            self._show(prepared)
            raise PlanError("the run does not fit: " + "; ".join(problems), hint=self.changes)

    def _show(self, prepared: Prepared) -> None:
        from .render.plan_screen import show_plan

        self._shown = prepared
        spared = None
        if self._search is not None:
            spared = spared_of(self._search[0], prepared.plan, prepared.model, prepared.hardware, self._search[1])
        show_plan(status_console(), replace(self._facts(prepared), spared=spared), verbose=False)

    def _show_length(self, prepared: Prepared) -> None:
        from .render.plan_screen import show_length

        show_length(status_console(), self._facts(prepared))

    def _facts(self, prepared: Prepared) -> RunFacts:
        return replace(facts_of(prepared, room_of(prepared)), advice=self.changes)


def _alike(one: Plan, other: Plan) -> bool:
    """Whether they do the same, whatever the process had grown to by then."""
    same: dict[str, Any] = {"memory": (), "predicted": other.predicted, "cpu_budget": other.cpu_budget}
    return replace(one, **same) == replace(other, memory=())


def _say_growth(shown: Plan, plan: Plan) -> None:
    """The peak that the run is held to and compared with, where another one was shown."""
    before, now = gib(shown.predicted.cpu_peak), gib(plan.predicted.cpu_peak)
    if before != now:
        write_status(f"RAM: a peak of {now} with the data at hand, of {gib(plan.cpu_budget)}; without it {before}, as above")


def _some(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
