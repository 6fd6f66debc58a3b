"""`fuyou plan`: what a run would do and need. Nothing is run, measured or written.

Planned is any causal language model, of which config.json is enough; one that cannot be trained yet says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import PlanError

from .console import result_console, write_json, write_result
from .prepared import prepared_for
from .room import Room, check_export, check_output, plan_problems, room_of

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.training.prepare import Prepared


def run_plan(loaded: LoadedRecipe, *, json_output: bool = False, verbose: bool = False, show_config: bool = False) -> bool:
    """True when the run fits. Raises PlanError where there is no plan at all; as JSON that is said on stdout as well."""
    from .validate import config_of, config_text

    extra: dict[str, Any] = {"config": config_of(loaded)} if show_config else {}
    if show_config and not json_output:
        write_result(config_text(loaded))
    try:
        prepared = prepared_for(loaded, planning_only=True)
    except PlanError as error:
        if json_output:
            write_json({"fits": False, "problems": [error.message], "help": error.hint, "plan": None, **extra})
        raise
    room = room_of(prepared)
    if json_output:
        from .render.plan import plan_json

        shown = plan_json(prepared.plan, prepared.model, prepared.hardware, room, refusal=prepared.refusal)
        write_json({**shown, **extra})
    else:
        _show(loaded, prepared, room, verbose=verbose)
    check_output(loaded.recipe)
    check_export(loaded.recipe, prepared.model_dir)
    return not plan_problems(prepared.plan, room)


def _show(loaded: LoadedRecipe, prepared: Prepared, room: Room, *, verbose: bool) -> None:
    from .prepared import facts_of
    from .render.plan import show_plan

    show_plan(
        result_console(),
        prepared.plan,
        prepared.model,
        prepared.hardware,
        room,
        verbose=verbose,
        facts=facts_of(loaded, prepared),
    )
