"""Plans a recipe without a run, on this machine or on a described one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuyou_cli.machine.described import on_described
from fuyou_cli.machine.first_measurement import measure_once
from fuyou_cli.machine.probe import IN_MEMORY, mount_of, process_bytes
from fuyou_cli.machine.profile import core_count
from fuyou_cli.machine.profile_store import hardware_for
from fuyou_cli.planner.sustained_rates import Choose
from fuyou_cli.recipe.load import LoadedRecipe
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.training.length import Epoch, epoch_of, sampled_epoch
from fuyou_cli.training.plan_request_of import StoreDisks
from fuyou_cli.training.plan_step import layers_of, plan
from fuyou_cli.training.prepared import Inspected, Planned
from fuyou_cli.training.steps import inspect, resolve, run_directories, unheard

from .room import described_disks, disks_of

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]


def planned_here(
    loaded: LoadedRecipe,
    *,
    measure: bool = False,
    calibrated: bool = False,
    count: bool = False,
    choose: Choose | None = None,
    say: Say,
    progress: Progress = unheard,
) -> Planned:
    """Plans for this machine, without a run. `measure` and `calibrated` are those of `machine_here`; `count` counts the rows
    of an epoch in the data."""
    inspected = _inspected(loaded, here=True, say=say, progress=progress)
    warn_of_memory(loaded, say)
    hardware, disks = machine_here(loaded, inspected, say=say, measure=measure, calibrated=calibrated)
    return plan(inspected, hardware, disks, epoch=epoch_to_plan(inspected, say) if count else None, choose=choose, say=say)


def planned_elsewhere(
    loaded: LoadedRecipe,
    hardware: HardwareProfile,
    *,
    count: bool = False,
    choose: Choose | None = None,
    say: Say,
    progress: Progress = unheard,
) -> Planned:
    """Plans for a described machine. Only its device, memory and drives count."""
    inspected = _inspected(on_described(loaded, hardware), here=False, say=say, progress=progress)
    epoch = epoch_to_plan(inspected, say) if count else None
    return plan(inspected, hardware, described_disks(hardware), epoch=epoch, choose=choose, say=say)


def warn_of_memory(loaded: LoadedRecipe, say: Say) -> None:
    """Says which folder of the store is no drive but memory."""
    for folder in run_directories(loaded.recipe):
        if (mount := mount_of(folder)) is not None and mount.kind in IN_MEMORY:
            say(
                f"warning: {folder} is memory ({mount.kind}), not a drive: the store takes memory that a plan counts as free, "
                "and is lost at the next reboot; offload.dir names another folder"
            )


def machine_here(
    loaded: LoadedRecipe, inspected: Inspected, *, say: Say, measure: bool = False, calibrated: bool = False
) -> tuple[HardwareProfile, StoreDisks]:
    """Looks at this machine as it is now. `measure` measures a new machine first. `calibrated` uses the rates that the last
    run showed."""
    if measure and loaded.recipe.offload.measure:
        measure_once(loaded, inspected.device, layers=_layers(inspected), say=say)
    directories = run_directories(loaded.recipe)
    unloaded = inspected.known.unloaded_bytes
    hardware = hardware_for(*directories, device=inspected.device, say=say, calibrated=calibrated, unloaded=unloaded)
    return hardware, disks_of(inspected.resolved)


def _layers(inspected: Inspected) -> str:
    """Identifies the layers to time for this recipe. Empty for a model that cannot be trained: none of its are computed."""
    if inspected.known.facts.refusal:
        return ""
    return layers_of(inspected.recipe, inspected.resolved.model_dir, cores=core_count())


def command_of(
    loaded: LoadedRecipe, command: str = "finetune", *, changes: Sequence[str] = (), options: Sequence[str] = ()
) -> str:
    """Returns the command line that runs (or plans) this recipe with its overrides, and with `changes` in place of those of the
    same keys."""
    import shlex

    changed = {change.split("=")[0] for change in changes}
    kept = [one for one in loaded.overrides if one.split("=")[0] not in changed]
    return shlex.join(["fuyou", command, str(loaded.path), *kept, *changes, *options])


def _inspected(loaded: LoadedRecipe, *, here: bool, say: Say, progress: Progress) -> Inspected:

    resolved = resolve(loaded.recipe, to_run=False, here=here, say=say, progress=progress)
    return inspect(resolved, say=say, process=process_bytes if here else None)


def epoch_to_plan(inspected: Inspected, say: Say) -> Epoch | None:
    """Looks at the rows, which say how many steps an epoch has and how long a step is."""
    look = epoch_of if inspected.recipe.train.max_steps is None else sampled_epoch
    return look(inspected.recipe, inspected.resolved.tokenizer_dir, say)
