"""A recipe prepared for a command: rates of this machine, and words and bars on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import probe
from .console import status_console, write_status

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.training.prepare import Prepared

    from .render.plan import RunFacts


def prepared_for(loaded: LoadedRecipe, **options: Any) -> Prepared:
    """`training.prepare.prepare` with its `options` (`planning_only`, `planned`)."""
    from fuyou_cli.training.prepare import prepare, run_directories

    from .machine import hardware_for
    from .render.transfer import Transfers

    directories = run_directories(loaded.recipe)
    with Transfers(status_console()) as transfers:
        return prepare(
            loaded.recipe,
            probe=lambda device: hardware_for(*directories, device=device),
            say=write_status,
            progress=transfers,
            **options,
        )


def facts_of(loaded: LoadedRecipe, prepared: Prepared) -> RunFacts:
    """What the plan's screen says beside the plan."""
    from fuyou_cli.swap.kernels import has_io_uring

    from .render.plan import RunFacts

    return RunFacts(
        steps=prepared.total_steps or None,
        io_uring=has_io_uring(),
        folder=probe.existing(prepared.directories[0].parent),
        command=f"fuyou finetune {loaded.path}",
        refusal=prepared.refusal,
    )
