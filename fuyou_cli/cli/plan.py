"""`fuyou plan`: what a run would do and need. Nothing is run; a machine that was never measured is, once and quickly.

Planned is any causal language model, of which config.json is enough; one that cannot be trained yet says so. A described
machine stands in for this one in everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.advice.room import check_export, check_output, room_of
from fuyou_cli.core.errors import PlanError, UsageError

from .console import result_console, write_document, write_json, write_status

if TYPE_CHECKING:
    from fuyou_cli.advice.facts import RunFacts
    from fuyou_cli.advice.planning import Elsewise, Outcome, Planning
    from fuyou_cli.planner.timeline import Timeline
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.training.prepare import Prepared


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Of the command. `hardware` describes a machine; `out` is where the plan goes as a file."""

    json_output: bool = False
    verbose: bool = False
    show_config: bool = False
    dry_run: bool = False
    calibrated: bool = False
    compare: bool = False
    hardware: str | None = None
    out: Path | None = None


def run_plan(loaded: LoadedRecipe, options: PlanOptions) -> bool:
    """True when the run fits. Raises PlanError where there is no plan at all (as JSON that is said on stdout as well), and
    UsageError for options that exclude each other."""
    from fuyou_cli.advice.plan_files import check_target
    from fuyou_cli.advice.planning import Planning

    from .validate import config_of, config_text

    if options.calibrated and options.hardware is not None:
        raise UsageError(
            "--calibrated takes the rates that runs on this machine showed, --hardware describes another: give one of them"
        )
    if options.out is not None:
        check_target(options.out)
    extra: dict[str, Any] = {"config": config_of(loaded)} if options.show_config else {}
    if options.show_config and not options.json_output:
        write_document(config_text(loaded))
    planning, notes = Planning(), _Notes()
    if options.hardware is None:
        check_output(loaded.recipe)
    try:
        outcome = _planned(loaded, options, planning, notes)
    except PlanError as error:
        notes.write()
        if options.json_output:
            write_json({"fits": False, "problems": [error.message], "help": error.hint, "plan": None, **extra})
        raise
    if options.hardware is None:
        check_export(loaded.recipe, outcome.prepared.model_dir)  # before a word is said: what is refused does not fit
    facts = replace(_facts(loaded, options, outcome, planning), notes=tuple(notes.kept))
    if options.json_output:
        notes.write()
    _show(options, outcome, facts, extra)
    if options.out is not None:
        _write(options.out, outcome, planning)
    return not outcome.problems


class _Notes:
    """What planning says: notes are kept for the end of the screen, whatever is under way is told at once."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    def __call__(self, text: str) -> None:
        kind, colon, rest = text.partition(": ")
        if colon and kind in ("note", "warning"):
            self.kept.append(rest if kind == "note" else text)
        else:
            write_status(text)

    def write(self) -> None:
        """To stderr, where there is no screen of a plan."""
        for note in self.kept:
            write_status(note if note.startswith("warning: ") else f"note: {note}")


def _planned(loaded: LoadedRecipe, options: PlanOptions, planning: Planning, say: Callable[[str], None]) -> Outcome:
    from fuyou_cli.advice.planning import Outcome
    from fuyou_cli.training.length import counted_rows, steps_of
    from fuyou_cli.training.replan import replanned

    from .prepared import prepared_elsewhere, prepared_for

    if options.hardware is not None:
        from fuyou_cli.machine.described import described

        prepared = prepared_elsewhere(loaded, described(options.hardware), choose=planning, say=say)
    else:
        prepared = prepared_for(
            loaded, measure=not options.dry_run, calibrated=options.calibrated, planning_only=True, choose=planning, say=say
        )
    if not options.dry_run and not prepared.total_steps:  # epochs: the data says how long they are
        rows = counted_rows(prepared.recipe, prepared.tokenizer_dir, say)
        prepared = replace(prepared, epoch_rows=rows, total_steps=steps_of(prepared.recipe, rows))
        if prepared.steps_left and prepared.plan.sustained:  # as of a long run, which it may not be
            prepared = replanned(prepared, prepared.recipe, choose=planning)
    return Outcome(changes=(), prepared=prepared, room=room_of(prepared, described=options.hardware is not None))


def _facts(loaded: LoadedRecipe, options: PlanOptions, outcome: Outcome, planning: Planning) -> RunFacts:
    """What is found by planning again: other batches, other choices, other recipes."""
    from fuyou_cli.advice.break_even import break_even
    from fuyou_cli.advice.changes import changes_that_help
    from fuyou_cli.advice.compare import comparison
    from fuyou_cli.advice.planning import Elsewise

    from .prepared import facts_of

    described = options.hardware is not None
    facts = facts_of(loaded, outcome.prepared, described=described)
    if options.verbose or options.json_output:
        facts = replace(facts, step=_step_with_memory(outcome.prepared))
    elsewise: Elsewise = Elsewise(loaded=loaded, prepared=outcome.prepared, described=described)
    facts = replace(facts, spared=planning.spared(outcome.prepared))
    if not outcome.problems and planning.found is not None:
        facts = replace(facts, even=break_even(elsewise, planning.found.best.choice))
    if not outcome.passes:
        begin = elsewise.plans
        changes = tuple(changes_that_help(elsewise, fits=not outcome.problems))
        facts = replace(facts, changes=changes, tried=elsewise.plans - begin)
    if options.compare and planning.too_small is None and planning.found is not None and planning.wishes is not None:
        facts = replace(facts, compared=comparison(elsewise, planning.found, planning.wishes))
    return facts


def _step_with_memory(prepared: Prepared) -> Timeline:
    from fuyou_cli.planner.schedule import plan_schedule
    from fuyou_cli.planner.simulate import simulate

    model, plan = prepared.model, prepared.plan
    return simulate(model, prepared.hardware, plan, plan_schedule(model, plan), memory=True)


def _show(options: PlanOptions, outcome: Outcome, facts: RunFacts, extra: dict[str, Any]) -> None:
    prepared = outcome.prepared
    if options.json_output:
        from .render.plan_json import plan_json

        shown = plan_json(prepared.plan, prepared.model, prepared.hardware, outcome.room, facts=facts)
        write_json({**shown, **extra})
    else:
        from .render.plan import show_plan

        show_plan(
            result_console(),
            prepared.plan,
            prepared.model,
            prepared.hardware,
            outcome.room,
            verbose=options.verbose,
            facts=facts,
        )


def _write(path: Path, outcome: Outcome, planning: Planning) -> None:
    from fuyou_cli.advice.plan_files import write_plan

    if outcome.problems:
        write_status(f"plan: {path} is not written, the run does not fit")
        return
    assert planning.found is not None
    write_plan(path, outcome.prepared, planning.found.best.choice)
    write_status(f"plan: {path} (fuyou finetune RECIPE --plan {path} runs it)")
