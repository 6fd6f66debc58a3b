"""What a recipe goes on from: for a run, which is refused where that cannot be, and for a plan, which says so and is made for
a new run then. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import FuyouError
from ...spec.hardware import HardwareProfile
from ..numerics import numerics_of
from .manifest import Manifest
from .saved import check_same_mode, find_saved

if TYPE_CHECKING:
    from ...engine.anatomy import Anatomy
    from ...recipe.schema import Recipe

Say = Callable[[str], None]


def saved_state(
    recipe: Recipe, directories: tuple[Path, ...], *, must: bool, here: bool, say: Say
) -> tuple[tuple[Path, ...], Manifest | None]:
    """The folders of the run, and what of it was saved there; nothing where the plan is not for `here`. Raises FuyouError
    where that is in the way of a run that `must` go on."""
    try:
        manifest = find_saved(recipe.checkpoint.resume, directories, say=say) if here else None
        if manifest is not None:
            checkpoint = recipe.checkpoint
            every = checkpoint.snapshot_every_steps if checkpoint.mode == "snapshot" else checkpoint.commit_every_steps
            asked = 1 if every == "auto" else every  # of redo; any other store takes any interval
            check_same_mode(manifest, checkpoint.mode, keep_last=checkpoint.keep_last, commit_every=asked)
    except FuyouError as error:
        if must:
            raise
        say(_refused(error))
        return directories, None
    if manifest is not None and recipe.checkpoint.resume != "auto":  # a run named by its folder goes on in that folder
        directories = tuple(Path(file).parent for file in manifest.files)
    return directories, manifest


def planned_from(
    recipe: Recipe, anatomy: Anatomy, hardware: HardwareProfile, manifest: Manifest | None, *, say: Say
) -> Manifest | None:
    """The saved state that a plan goes on from: None where a run of the recipe could not."""
    try:
        numerics_of(recipe, anatomy, hardware, manifest)
    except FuyouError as error:
        say(_refused(error))
        return None
    return manifest


def _refused(error: FuyouError) -> str:
    hint = f" ({error.hint})" if error.hint else ""
    return f"note: {error.message}: a run would be refused{hint}; planned as a new one"


def steps_left(total: int, manifest: Manifest | None) -> int:
    """Of so many in all (0: not known), those that no earlier process has done."""
    return max(0, total - (manifest.step if manifest is not None else 0))
