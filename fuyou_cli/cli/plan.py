"""`fuyou plan`: what a run would do and need. Nothing is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .console import result_console, status_console, write_json, write_status

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe


def run_plan(loaded: LoadedRecipe, *, dry_run: bool, json_output: bool, verbose: bool) -> None:
    from fuyou_cli.training.prepare import prepare, run_directories

    from .machine import hardware_for
    from .render.plan import plan_json, show_plan
    from .render.transfer import Transfers

    directory = run_directories(loaded.recipe)[0]
    with Transfers(status_console()) as transfers:
        prepared = prepare(
            loaded.recipe,
            probe=lambda device: hardware_for(directory, device=device, measured=not dry_run),
            planning_only=True,
            say=write_status,
            progress=transfers,
        )
    if json_output:
        write_json(plan_json(prepared.plan, prepared.model, prepared.hardware))
        return
    show_plan(
        result_console(),
        prepared.plan,
        prepared.model,
        prepared.hardware,
        verbose=verbose,
        command=f"fuyou finetune {loaded.path}",
    )
