"""Runs `fuyou plan`: shows what a run needs, and whether it fits.

Trains nothing, but measures a machine that was never measured. Plans any causal language model from its config.json alone, even
one that cannot be trained yet. A described machine replaces this one completely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fuyou_cli.advice.room import check_export, check_output, room_of
from fuyou_cli.core.errors import PlanError

from .console import result_console, status_console, write_json, write_status

if TYPE_CHECKING:
    from fuyou_cli.advice.facts import RunFacts
    from fuyou_cli.advice.planning import Outcome
    from fuyou_cli.recipe.load import LoadedRecipe


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Holds the options of the command. `hardware` describes a machine."""

    json_output: bool = False
    verbose: bool = False
    dry_run: bool = False
    hardware: str | None = None


def run_plan(loaded: LoadedRecipe, options: PlanOptions) -> bool:
    """Plans, and returns whether the run fits. Raises PlanError if there is no plan (with --json also printed on stdout)."""
    notes = _Notes()
    if options.hardware is None:
        check_output(loaded.recipe)
    try:
        outcome = _planned(loaded, options, notes)
    except PlanError as error:
        notes.write()
        if options.json_output:
            write_json({"fits": False, "problems": [error.message], "help": error.hint, "plan": None})
        raise
    if options.hardware is None:
        check_export(loaded.recipe, outcome.prepared.model_dir)  # before any output: a refused export does not fit
    facts = replace(_facts(loaded, options, outcome), notes=tuple(notes.kept))
    if options.json_output:
        from .render.plan_screen import plan_json

        notes.write()
        write_json(plan_json(facts))
    else:
        from .render.plan_screen import show_plan

        show_plan(result_console(), facts, verbose=options.verbose)
    return not outcome.problems


class _Notes:
    """Collects planning's messages: keeps notes for the end of the screen, and prints progress at once."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    def __call__(self, text: str) -> None:
        kind, colon, rest = text.partition(": ")
        if colon and kind in ("note", "warning"):
            self.kept.append(rest if kind == "note" else text)
        else:
            write_status(text)

    def write(self) -> None:
        """Writes the notes to stderr, if no screen of a plan shows them."""
        for note in self.kept:
            write_status(note if note.startswith("warning: ") else f"note: {note}")


def _planned(loaded: LoadedRecipe, options: PlanOptions, notes: _Notes) -> Outcome:
    from fuyou_cli.advice.planning import Outcome, plan_recipe
    from fuyou_cli.machine.described import described

    from .render.progress import Transfers

    measured = not options.dry_run
    with Transfers(status_console()) as progress:
        machine = None if options.hardware is None else described(options.hardware)
        planned = plan_recipe(loaded, machine, measure=measured, count=measured, say=notes, progress=progress)
    return Outcome(changes=(), prepared=planned, room=room_of(planned, described=machine is not None))


def _facts(loaded: LoadedRecipe, options: PlanOptions, outcome: Outcome) -> RunFacts:
    """Collects what is known about the plan, and plans again to find alternatives."""
    from fuyou_cli.advice.facts import facts_of, with_evaluation
    from fuyou_cli.advice.planning import Replanner, changes_that_help, command_of, ways_to_be_faster
    from fuyou_cli.training.length import counted_evaluation

    prepared, described = outcome.prepared, options.hardware is not None
    facts = facts_of(prepared, outcome.room, described=described, command=command_of(loaded))
    tokenizer_dir = prepared.inspected.resolved.tokenizer_dir
    rows = None if options.dry_run else counted_evaluation(prepared.recipe, tokenizer_dir)
    facts = with_evaluation(facts, prepared, rows)
    elsewise = Replanner(loaded=loaded, prepared=prepared, described=described)
    if outcome.passes():
        faster = ways_to_be_faster(elsewise)
        added = faster[0].overrides if faster else ()
        again = command_of(loaded, "plan", changes=added, options=_options(options)) if faster else ""
        facts = replace(facts, faster=faster, faster_command=again)
    else:
        changes = tuple(changes_that_help(elsewise, fits=not outcome.problems))
        facts = replace(facts, changes=changes, tried=elsewise.plans)
    return facts


def _options(options: PlanOptions) -> list[str]:
    """Returns the options that decide a plan, as they were given."""
    given = [] if options.hardware is None else ["--hardware", options.hardware]
    return given + ["--dry-run"] * options.dry_run
