"""Where limits of the recipe end a run before its last step, by the plan's figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuyou_cli.core.units import format_time
from fuyou_cli.planner.lasting import FastRegion
from fuyou_cli.recipe.fields import format_size
from fuyou_cli.spec.plan import Plan

if TYPE_CHECKING:
    from fuyou_cli.training.prepare import Prepared


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The run stops after `step`. `limit`: the recipe's key and its value; `again`: how it goes on."""

    limit: str
    step: int
    again: str


def endings(prepared: Prepared, region: FastRegion | None) -> tuple[Ending, ...]:
    """Of this process, from where the run stands; loading is not counted. None where the run's last step comes first."""
    steps = prepared.total_steps
    return tuple(ending for ending in _found(prepared, region) if not steps or ending.step < steps)


def _found(prepared: Prepared, region: FastRegion | None) -> Iterator[Ending]:
    from fuyou_cli.training.run_limits import loaded, steps_within_writes

    plan, recipe, saved = prepared.plan, prepared.recipe, prepared.manifest
    done = saved.step if saved is not None else 0
    seconds, most = recipe.train.max_time, recipe.offload.ssd_write_limit
    if seconds is not None and plan.predicted.step_seconds > 0:
        within = steps_within(seconds, plan, region)
        again = "the same command goes on, for as long again"
        yield Ending(limit=f"train.max_time={format_time(seconds)}", step=done + within, again=again)
    if most is not None and plan.predicted.written_per_step:
        left = most - (saved.written_total if saved is not None else loaded(plan))
        limit = f"offload.ssd_write_limit={format_size(most)}"
        yield Ending(limit=limit, step=done + steps_within_writes(plan, left, done=done), again="a higher one goes on")


def steps_within(seconds: float, plan: Plan, region: FastRegion | None) -> int:
    """Whole steps that a run takes in so long; drives that slow down are fast for the first ones."""
    if region is None or not plan.sustained:
        return int(seconds / plan.predicted.step_seconds)
    fast = region.steps * region.first
    return int(seconds / region.first if seconds <= fast else region.steps + (seconds - fast) / region.later)
