"""Runs `fuyou plan`: shows what a run needs, and whether it fits.

Trains nothing, but measures a machine that was never measured. Plans any causal language model from its config.json alone, even
one that cannot be trained yet. A described machine replaces this one completely.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fuyou_cli.advice.facts import facts_of, with_evaluation
from fuyou_cli.advice.planning import Outcome, Replanner, changes_that_help, command_of, plan_recipe, ways_to_be_faster
from fuyou_cli.advice.room import check_export, check_output, room_of
from fuyou_cli.core.errors import PlanError
from fuyou_cli.machine.described import described
from fuyou_cli.training.length import counted_evaluation

from .console import result_console, status_console, write_json, write_status
from .error_screen import like_ctrl_c
from .render.plan_screen import plan_json, show_plan
from .render.progress import TransferDisplay

if TYPE_CHECKING:
    from fuyou_cli.advice.facts import RunFacts
    from fuyou_cli.advice.planning import Outcome
    from fuyou_cli.recipe.load import LoadedRecipe


@like_ctrl_c()  # so that a process that tokenises ends too
def run_plan(
    loaded: LoadedRecipe,
    *,
    dry_run: bool = False,
    hardware: str | None = None,
    json_output: bool = False,
    verbose: bool = False,
    ranks: int = 1,
) -> bool:
    """Plans, and returns whether the run fits. `hardware` describes a machine; without it, this one is planned for. `ranks`: of
    the run, whose plans are others. Raises PlanError if there is no plan (with --json also printed on stdout)."""
    notes = _Notes()
    if ranks > 1:
        notes(f"note: this plan is of one process. Each of {ranks} has its own, for its blocks: finetune shows the first one's")
    if hardware is None:
        check_output(loaded.recipe)
    try:
        outcome = _planned(loaded, hardware, notes, measured=not dry_run)
    except PlanError as error:
        notes.write()
        if json_output:
            write_json({"fits": False, "problems": [error.message], "help": error.hint, "plan": None})
        raise
    if hardware is None:
        check_export(loaded.recipe, outcome.prepared.model_dir)  # before any output: a refused export does not fit
    options = [*([] if hardware is None else ["--hardware", hardware]), *["--dry-run"] * dry_run]
    facts = _facts(loaded, options, outcome, described=hardware is not None, counted=not dry_run)
    facts = replace(facts, notes=tuple(notes.kept))

    if json_output:
        notes.write()
        write_json(plan_json(facts))
    else:
        show_plan(result_console(), facts, verbose=verbose)
    return not outcome.problems


class _Notes:
    """Collects planning's messages: keeps notes for the end of the screen, and prints progress at once."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    def __call__(self, text: str) -> None:
        kind, colon, message = text.partition(": ")
        if colon and kind in ("note", "warning"):
            self.kept.append(message if kind == "note" else text)
        else:
            write_status(text)

    def write(self) -> None:
        """Writes the notes to stderr, if no screen of a plan shows them."""
        for note in self.kept:
            write_status(note if note.startswith("warning: ") else f"note: {note}")


def _planned(loaded: LoadedRecipe, hardware: str | None, notes: _Notes, *, measured: bool) -> Outcome:
    with TransferDisplay(status_console()) as progress:
        machine = None if hardware is None else described(hardware)
        planned = plan_recipe(loaded, machine, measure=measured, count=measured, say=notes, progress=progress)
    return Outcome(changes=(), prepared=planned, room=room_of(planned, described=machine is not None))


def _facts(loaded: LoadedRecipe, options: list[str], outcome: Outcome, *, described: bool, counted: bool) -> RunFacts:
    """Collects what is known about the plan, and plans again to find alternatives. `options` of the command decide a plan;
    `counted`: the rows to evaluate are read."""
    prepared = outcome.prepared
    facts = facts_of(prepared, outcome.room, described=described, command=command_of(loaded))
    tokenizer_dir = prepared.tokenizer_dir
    facts = with_evaluation(facts, prepared, counted_evaluation(prepared.recipe, tokenizer_dir) if counted else None)
    elsewise = Replanner(loaded=loaded, prepared=prepared, described=described)
    if outcome.passes():
        faster = ways_to_be_faster(elsewise)
        added = faster[0].overrides if faster else ()
        again = command_of(loaded, "plan", changes=added, options=options) if faster else ""
        facts = replace(facts, faster=faster, faster_command=again)
    else:
        changes = tuple(changes_that_help(elsewise, fits=not outcome.problems))
        facts = replace(facts, changes=changes, tried=elsewise.plans)
    return facts
