"""A recipe prepared for a command: rates of this machine or of a described one, and words and bars on stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fuyou_cli.spec.hardware import HardwareProfile

from .console import status_console, write_status

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.training.prepare import Prepared

Say = Callable[[str], None]


def prepared_for(
    loaded: LoadedRecipe, *, measure: bool = False, calibrated: bool = False, say: Say = write_status, **options: Any
) -> Prepared:
    """`training.prepare.prepare` with its `options` (`planning_only`, `planned`, `choose`), on this machine. `measure`: where
    nobody has measured it yet, that is done first. `calibrated`: with rates as the latest run showed them."""
    from fuyou_cli.advice.room import store_room
    from fuyou_cli.machine.profile_store import hardware_for
    from fuyou_cli.training.prepare import prepare, run_directories

    from .probing import probe_once
    from .render.transfer import Transfers

    directories = run_directories(loaded.recipe)

    def look(device: str) -> HardwareProfile:
        if measure and loaded.recipe.offload.measure:
            probe_once(loaded, device)
        return hardware_for(*directories, device=device, say=write_status, calibrated=calibrated)

    with Transfers(status_console()) as transfers:
        return prepare(
            loaded.recipe,
            probe=look,
            say=say,
            progress=transfers,
            store_room=store_room,
            **options,
        )


def prepared_elsewhere(loaded: LoadedRecipe, hardware: HardwareProfile, *, say: Say = write_status, **options: Any) -> Prepared:
    """A plan for a described machine. Its device, memory and drives count, and nothing of this one does."""
    from fuyou_cli.advice.room import described_store_room
    from fuyou_cli.machine.described import on_described
    from fuyou_cli.training.prepare import prepare

    from .render.transfer import Transfers

    with Transfers(status_console()) as transfers:
        return prepare(
            on_described(loaded, hardware).recipe,
            probe=lambda device: hardware,
            say=say,
            progress=transfers,
            planning_only=True,
            elsewhere=True,
            store_room=described_store_room,
            **options,
        )


def command_of(loaded: LoadedRecipe, command: str = "finetune") -> str:
    """Return the command line that runs (or plans) the recipe as it is here."""
    import shlex

    return shlex.join(["fuyou", command, str(loaded.path), *loaded.overrides])
