"""Says how much memory and disk a run may use, why its plan does not fit, and how much it wears the drives. Writes nothing."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.checkpoint.writer import refuse_foreign
from fuyou_cli.core import disk
from fuyou_cli.core.disk import FileSystem, Wanted, existing, file_systems, store_files, taken
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.paths import folder
from fuyou_cli.core.units import gb, gib
from fuyou_cli.planner.memory import phase_peaks
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.search import SearchResult, timed
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.length import loaded, saved_where_it_stops
from fuyou_cli.training.numerics import gpu_limit
from fuyou_cli.training.prepare import DiskShare, Planned, Resolved, StoreDisks, best_copies, best_folder
from fuyou_cli.training.state.store_folders import STORE_FILE

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe

CLEARLY = 1.05  # tolerance for free RAM, which changes; the limits of a machine or control group have none


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Holds limits in bytes. None means no limit."""

    gpu: int | None
    ssd: int | None  # offload.max_memory.ssd, for the store
    store: int  # bytes that the store may use on its disks: free or already its own, and allowed
    disks: tuple[FileSystem, ...]  # disks for store and export
    ram: int | None = None  # RAM that this process can use now, whatever its budget
    ram_total: int | None = None  # RAM of the machine or its control group
    pinnable: int | None = None  # host memory that the GPU's driver allows to pin
    pinnable_why: str = ""


def room_of(prepared: Planned, *, described: bool = False) -> Room:
    """Returns the limits of this machine and its disks, or of a described one's empty drives."""
    recipe, hardware, disks = prepared.recipe, prepared.hardware, prepared.disks
    return Room(
        gpu=gpu_limit(recipe, hardware),
        ssd=None if disks is None else disks.limit(recipe),
        store=prepared.request.disk(hardware),
        ram=hardware.ram_available,
        ram_total=hardware.ram_total,
        pinnable=hardware.pinnable or None,
        pinnable_why=hardware.pinnable_why,
        disks=(_described_drives(prepared),) if described else _disks(prepared),
    )


def disks_of(resolved: Resolved) -> StoreDisks:
    """Returns the room on the disks under the run's store: free, or already the store's. Ranks on one box share it out."""
    directories = resolved.directories
    systems = [existing(directory).stat().st_dev for directory in directories]
    exported = existing(export_folder(resolved.recipe, resolved.model_dir)).stat().st_dev
    files = [(system, taken(directory / STORE_FILE)) for directory, system in zip(directories, systems, strict=True)]
    ranks, exports_here = 1, True
    if (peers := resolved.peers) is not None:
        exports_here = peers.boxes[peers.rank] == peers.boxes[0]
        ranks, files = peers.local_count, [file for files in peers.gather_on_box("store files", files) for file in files]
    shares = []
    for directory, system in zip(directories, systems, strict=True):
        held = [size for on, size in files if on == system]
        free = disk.free_space(directory) + sum(held)
        shares.append(DiskShare(free=free, files=len(held), has_export=exports_here and system == exported))
    places = {system: existing(directory) for system, directory in zip(systems, directories, strict=True)}
    total = sum(shutil.disk_usage(place).total for place in places.values())
    return StoreDisks(shares=tuple(shares), total=total, ranks=ranks)


def described_disks(hardware: HardwareProfile) -> StoreDisks:
    """Treats a described machine's drives as one disk, which the export uses too."""
    total = sum(drive.capacity for drive in hardware.drives) or hardware.disk_free
    return StoreDisks(shares=(DiskShare(free=hardware.disk_free, files=1, has_export=True),), total=total)


def _disks(prepared: Planned) -> tuple[FileSystem, ...]:
    plan = prepared.plan
    files = store_files([directory / STORE_FILE for directory in prepared.directories], plan.store_size)
    if prepared.recipe.export.at_end:
        model = export_folder(prepared.recipe, prepared.model_dir)
        files.append(Wanted(what="the exported model", path=model, size=prepared.export_bytes))
    if prepared.recipe.eval.keep_best:  # a new copy is written beside the old one
        best = best_folder(prepared.recipe, prepared.model_dir)
        new = prepared.export_bytes * best_copies(prepared.recipe)
        files.append(Wanted(what="the best weights and new ones beside them", path=best, size=new))
    return tuple(file_systems(files))


def _described_drives(prepared: Planned) -> FileSystem:
    plan, hardware = prepared.plan, prepared.hardware
    export = plan.predicted.export_bytes * (prepared.recipe.export.at_end + best_copies(prepared.recipe))
    return FileSystem(
        folders=(Path(hardware.name or "the described drives"),),
        what=("the store", "the exported model") if export else ("the store",),
        wanted=plan.store_size + export,
        held=0,
        free=hardware.disk_free,
        device=0,
    )


def export_folder(recipe: Recipe, model_dir: Path) -> Path:
    """Returns `model` or `adapter` below the output directory, never the folder the run started from."""
    out = Path(recipe.output_dir).expanduser() / ("model" if recipe.adapter is None else "adapter")
    return out.with_name(f"{out.name}-finetuned") if out.resolve() == model_dir.resolve() else out


def check_output(recipe: Recipe) -> None:
    """Raises UsageError unless `output_dir` is a writable folder or can become one."""
    out = folder(recipe.output_dir, key="output_dir")
    parent = existing(out)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"output_dir: cannot write to {parent}", hint="choose another output_dir, or change its permissions")
    for name in ("log.jsonl", "timeline.svg"):
        path = out / name
        # Writing to a pipe that nobody reads would wait forever.
        if path.is_symlink() or (path.exists() and not path.is_file()):
            kind = "a folder" if path.is_dir() and not path.is_symlink() else "not a regular file"
            raise UsageError(f"output_dir: {path} is {kind}", hint="move it away, or choose another output_dir")


def check_export(recipe: Recipe, model_dir: Path) -> None:
    """Raises UsageError if the export at the end, or the best weights, would replace something that is not ours."""
    folders = [(export_folder(recipe, model_dir), "export.at_end")] if recipe.export.at_end else []
    if recipe.eval.keep_best:
        folders.append((best_folder(recipe, model_dir), "eval.keep_best"))
    for place, key in folders:
        try:
            refuse_foreign(place)
        except UsageError as error:
            hint = f"move it away, choose another output_dir, or set {key}=false"
            raise UsageError(f"output_dir: {error.message}", hint=hint) from error


def plan_problems(plan: Plan, room: Room) -> list[str]:
    """Says why the plan does not fit, one sentence each. Empty if it fits."""
    predicted, problems = plan.predicted, []
    over = {phase: peak for phase, peak in phase_peaks(plan).items() if peak > plan.cpu_budget}
    if over:
        worst, *others = sorted(over, key=lambda phase: -over[phase])
        needs = f"{worst} needs {gib(over[worst])} of RAM, {gib(over[worst] - plan.cpu_budget)} more than its budget"
        problems.append(needs + (f" (also over it: {', '.join(others)})" if others else ""))
    ram = f"the run needs {gib(predicted.cpu_peak)} of RAM,"
    allowed = min(predicted.cpu_peak, plan.cpu_budget)  # above the budget, the budget is what is too small
    if room.ram_total is not None and allowed > room.ram_total:
        problems.append(f"{ram} the machine or its control group has {gib(room.ram_total)}: lower offload.max_memory.cpu")
    elif room.ram is not None and allowed > CLEARLY * room.ram:
        problems.append(f"{ram} {gib(room.ram)} are free: lower offload.max_memory.cpu, or free some RAM")
    if plan.device == "cuda" and room.pinnable is not None and min(plan.arena_size, plan.cpu_budget) > room.pinnable:
        problems.append(
            f"the run pins {gib(plan.arena_size)} of RAM for the GPU, the driver allows {gib(room.pinnable)} "
            f"({room.pinnable_why}): lower offload.max_memory.cpu"
        )
    if room.gpu is not None and predicted.gpu_peak > room.gpu:
        problems.append(
            f"the step needs {gib(predicted.gpu_peak)} of GPU memory, offload.max_memory.gpu leaves {gib(room.gpu)}"
        )
    if room.ssd is not None and predicted.ssd_bytes > room.ssd:
        problems.append(f"the store needs {gb(predicted.ssd_bytes)}, offload.max_memory.ssd allows {gb(room.ssd)}")
    return problems + [disk.problem for disk in room.disks if disk.problem]


WORN = 0.3  # share of a drive's rated writes; fuyou warns about a run that writes more


@dataclass(frozen=True, kw_only=True, slots=True)
class Writes:
    """Holds the bytes that a run writes to the drives of its store."""

    loading: int
    steps: int
    saving: int  # saving at the end, beside the updates
    export: int  # 0 if the model goes to other drives

    @property
    def total(self) -> int:
        return self.loading + self.steps + self.saving + self.export


def writes_of(plan: Plan, room: Room, *, steps: float, resumed: bool = False) -> Writes:
    """Returns the writes of this many steps to the run's end. A `resumed` run loads nothing."""
    shares_drives = any({"the store", "the exported model"} <= set(disk.what) for disk in room.disks)
    return Writes(
        loading=0 if resumed else loaded(plan),
        steps=round(steps * plan.predicted.written_per_step),
        saving=saved_where_it_stops(plan) if steps else 0,
        export=plan.predicted.export_bytes if shares_drives else 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWear:
    """Holds shares of the drives' rated writes."""

    run: float  # what the run uses of the drive with the lowest rating
    rated: int  # bytes of that drive
    before: float  # what the most worn drive has written, before the run and after it
    after: float

    @property
    def accepted(self) -> bool:
        """Tells whether the run uses little enough and wears out no drive. A drive worn out before does not count."""
        return self.run <= WORN and not self.before < 1 < self.after


def wear_of(hardware: HardwareProfile, writes: Writes | None) -> RunWear | None:
    """Returns the wear of writes spread evenly over the drives. Returns None if the writes or all ratings are unknown."""
    rated = [drive for drive in hardware.drives if drive.rated_bytes]
    if writes is None or not rated:
        return None
    each = writes.total / len(hardware.drives)
    least = min(drive.rated_bytes for drive in rated)
    worst = max(rated, key=lambda drive: (drive.used_bytes + each) / drive.rated_bytes)
    return RunWear(
        run=each / least,
        rated=least,
        before=worst.used_bytes / worst.rated_bytes,
        after=(worst.used_bytes + each) / worst.rated_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spared:
    """Holds what `offload.wear` avoids writing, and what that writing would have gained."""

    instead: str  # what happens instead, in words
    per_step: int  # bytes
    faster: float  # extra time of this plan, as a share of the fastest plan's step


def spared_of(
    result: SearchResult, plan: Plan, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest
) -> Spared | None:
    """Compares `plan`, made from a search's result, with the fastest plan. Returns None if they are the same or it is no
    faster."""
    if result.fastest is result.best:
        return None
    fastest, chosen = timed(result.fastest, model, hardware, request, costs=result.costs).predicted, plan.predicted
    faster, more = chosen.step_seconds / fastest.step_seconds - 1, fastest.written_per_step - chosen.written_per_step
    if faster <= 0 or more <= 0:
        return None
    most = max(sorted(fastest.written_by), key=lambda kind: fastest.written_by[kind] - chosen.written_by.get(kind, 0))
    swaps = _swapped(result.fastest.plan) > _swapped(plan)
    instead = "outputs are recomputed instead of swapped" if swaps else f"{most} stay in RAM"
    return Spared(instead=instead, per_step=more, faster=faster)


def _swapped(plan: Plan) -> int:
    """Counts the operators, over all stages, whose outputs go to the ssd."""
    return sum(len(stage.kept) for stage in plan.stages if stage.boundary == "ssd")
