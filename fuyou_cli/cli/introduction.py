"""Does what `fuyou finetune` does before training, and shows it: the plan before anything is downloaded or tokenised, then
what the data changed in the plan, and a sample of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.advice.facts import RunFacts, facts_of, with_evaluation
from fuyou_cli.advice.planning import command_of, machine_here, warn_of_memory
from fuyou_cli.advice.room import check_export, plan_problems, room_of
from fuyou_cli.core.errors import PlanError

from .console import status_console, write_status

if TYPE_CHECKING:
    from fuyou_cli.data.rows import DataSummary
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.training.prepared import Planned, Ready


def made_ready(loaded: LoadedRecipe, *, measure: bool, accept_changes: bool = False) -> Ready:
    """Takes every step from the recipe to a run. A saved run's plan is shown only when nothing can refuse the run any more.
    Raises UsageError or PlanError."""
    from fuyou_cli.core.probe import process_bytes
    from fuyou_cli.training.length import sampled_epoch
    from fuyou_cli.training.plan_step import plan, plan_downloaded, settle
    from fuyou_cli.training.state.recipe_changes import in_words
    from fuyou_cli.training.steps import fetch, inspect, resolve, tokenise

    from .render.transfer import Transfers

    say = write_status
    try:
        with Transfers(status_console()) as progress:
            inspected = inspect(resolve(loaded.recipe, say=say, progress=progress), say=say, process=process_bytes)
            warn_of_memory(loaded, say)
            machine = machine_here(loaded, inspected, say=say, measure=measure)
            is_new = inspected.resolved.manifest is None
            epoch = sampled_epoch(inspected.recipe, inspected.resolved.tokenizer_dir, say) if is_new else None
            planned = plan(inspected, *machine, epoch=epoch, say=say)
            _refuse_unfit(loaded, planned)
            if planned.manifest is None:
                _show(loaded, planned)
            fetched = plan_downloaded(fetch(planned, say=say, progress=progress), *machine, say=say)
            tokenised = tokenise(fetched, say=say, accept_changes=accept_changes)
        ready = settle(tokenised, *machine_here(loaded, inspected, say=say))
        _refuse_unfit(loaded, ready.planned)
    except PlanError as error:
        error.hint = error.hint or _advice(loaded)
        raise
    evaluated = [len(rows) for rows in ready.evaluated.values()]
    if planned.manifest is None:
        _show_changes(loaded, planned, ready.planned, evaluated)
    else:
        _show(loaded, ready.planned, evaluated)
    _show_data(tokenised.rows.summary)
    if planned.manifest is not None:
        write_status(f"resuming after step {planned.manifest.step}: weights, states, schedule and data position")
        if ready.changes:
            write_status(f"changed: {in_words(ready.changes)}")
    return ready


def _advice(loaded: LoadedRecipe) -> str:
    """Names the command that searches for changes that help. It plans each change, which takes a while."""
    return f"`{command_of(loaded, 'plan')}` finds the smallest changes that help"


def _refuse_unfit(loaded: LoadedRecipe, planned: Planned) -> None:
    """Shows a plan that does not fit, and raises."""
    check_export(planned.recipe, planned.model_dir)
    if problems := plan_problems(planned.plan, room_of(planned)):
        _show(loaded, planned)
        raise PlanError("the run does not fit: " + "; ".join(problems))


def _show(loaded: LoadedRecipe, planned: Planned, evaluated: Sequence[int] | None = None) -> None:
    """Shows the plan. `evaluated`: rows of each set to evaluate, once they are known."""
    from .render.plan_screen import show_plan

    show_plan(status_console(), _facts(loaded, planned, evaluated), verbose=False)


def _facts(loaded: LoadedRecipe, planned: Planned, evaluated: Sequence[int] | None) -> RunFacts:
    facts = with_evaluation(facts_of(planned, room_of(planned)), planned, evaluated)
    return replace(facts, advice=_advice(loaded))


def _show_changes(loaded: LoadedRecipe, shown: Planned, now: Planned, evaluated: Sequence[int]) -> None:
    """Says what differs from the plan shown before, without the process's own growth, and what the number of steps decides."""
    from .render.plan_screen import show_changed, show_length

    same: dict[str, Any] = {"memory": (), "predicted": now.plan.predicted, "cpu_budget": now.plan.cpu_budget}
    if replace(shown.plan, **same) != replace(now.plan, memory=()):
        show_changed(status_console(), shown.plan, now.plan)
    if shown.total_steps != now.total_steps:  # the data decides it
        show_length(status_console(), _facts(loaded, now, evaluated))


def _show_data(summary: DataSummary) -> None:
    """Prints the numbers of samples, rows and tokens, and one decoded sample with its mask."""
    from .render.sample import show_sample
    from .render.theme import some

    formats = ", ".join(f"{Path(path).name}: {name}" for path, name in summary.formats)
    data = "the first part of the data" if summary.streamed else "data"
    write_status(
        f"{data}: {some(summary.samples, 'sample')} ({formats}) in {some(summary.rows, 'row')}, "
        f"{some(summary.tokens, 'token')}, {summary.label_tokens:,} with loss; {summary.truncated:,} truncated, "
        f"{summary.split:,} split, {summary.dropped:,} dropped, {some(summary.without_loss, 'row')} without loss skipped"
    )
    show_sample(status_console(), summary.preview)
