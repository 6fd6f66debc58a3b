"""`fuyou bench`: measure this machine, print what was found, and keep it for the plans to come."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.paths import folder
from fuyou_cli.core.units import gb
from fuyou_cli.machine import drives, probe
from fuyou_cli.machine.background_load import BackgroundLoad, are_busy
from fuyou_cli.machine.measure.whole import BenchReport, device_named, measure
from fuyou_cli.machine.profile import assumed_hardware
from fuyou_cli.machine.profile_store import keep

from .console import confirm, result_console, status_console, write_status
from .render.bench_screen import bench_json, show_bench
from .signals import like_ctrl_c

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.recipe.schema import Recipe

Progress = Callable[[str], None]


@like_ctrl_c()  # so that its files go, however it is ended
def run_bench(
    directory: Path | None,
    *,
    quick: bool,
    json_output: bool,
    device: str | None = None,
    loaded: LoadedRecipe | None = None,
    sustained: bool = False,
    yes: bool = False,
    out: Console | None = None,
    err: Console | None = None,
) -> BenchReport | None:
    """Measures in `directory` (default: the recipe's store folders, as one striped store, else where stores go unless a
    recipe says, else here) and prints to `out`, as a table or as one JSON object. A recipe's own block and head are measured
    beside the rest.

    The profile is kept for the plans to come. What is being measured appears on `err`, on one line that is gone at the end,
    if that is a terminal. None when `sustained` writing was not agreed to: then nothing is measured.
    """
    out = out or result_console()
    err = err or status_console()
    recipe = loaded.recipe if loaded is not None else None
    places = _places(directory, recipe)
    if sustained and not _agreed(places, yes):
        return None
    chosen = device or _device_of(recipe)
    with err.status("starting", spinner="line") as status:
        report = _measured(
            places, recipe, quick=quick, device=chosen, sustained=sustained,
            progress=lambda what: status.update(f"measuring: {what}"),
        )  # fmt: skip
    report = replace(report, profile=keep(report.profile, *places, say=write_status))
    if json_output:
        out.file.write(json.dumps(bench_json(report), indent=2) + "\n")
    else:
        show_bench(out, report)
    return report


def _measured(
    places: tuple[Path, ...], recipe: Recipe | None, *, quick: bool, device: str, sustained: bool, progress: Progress
) -> BenchReport:
    """Measures everything that was asked for; what can be wrong with a recipe is found before anything is measured."""
    begin, others = time.monotonic(), BackgroundLoad()
    if recipe is None:
        report = measure(*places, quick=quick, device=device, progress=progress)
    else:
        report = _with_recipe(places, recipe, quick=quick, device=device, progress=progress)
    if sustained:
        report = _with_sustained(report, places, progress)
    return _beside_others(replace(report, seconds=time.monotonic() - begin), others.cores())


def _beside_others(report: BenchReport, cores: float) -> BenchReport:
    """Says what was measured beside others, here and in every plan made with it."""
    report = replace(report, profile=replace(report.profile, others_cores=cores))
    if not are_busy(cores):
        return report
    note = f"others used {cores:.1f} cores meanwhile: the machine alone may be faster; measure again when it is quiet"
    return replace(report, notes=(*report.notes, note))


def _with_recipe(places: tuple[Path, ...], recipe: Recipe, *, quick: bool, device: str, progress: Progress) -> BenchReport:
    from fuyou_cli.engine.devices.cuda import free_memory
    from fuyou_cli.machine.measure.recipe_stages import measure_recipe
    from fuyou_cli.training.plan_step import anatomy_of

    target = device_named(device)
    progress("the recipe's model")
    anatomy, sizes = anatomy_of(recipe, assumed_hardware(*places, device=target.type), say=write_status)
    report = measure(*places, quick=quick, device=device, progress=progress)
    free = free_memory() if target.type == "cuda" else probe.memory_available()
    return report.with_found(measure_recipe(anatomy, sizes, target, quick=quick, free=free, progress=progress))


def _with_sustained(report: BenchReport, places: tuple[Path, ...], progress: Progress) -> BenchReport:
    from fuyou_cli.machine.measure.sustained import measure_sustained

    progress("sustained writing")
    free, count = probe.striped_space(*places), _drives_of(places)
    return report.with_found(measure_sustained(*places, free=free, count=count, progress=progress))


def _drives_of(places: tuple[Path, ...]) -> int:
    """Counts the drives, each with a fast region of its own; one where the file system hides them."""
    return max(1, len(drives.drives_under(*places)))


def _agreed(places: tuple[Path, ...], yes: bool) -> bool:
    """Says what sustained writing costs, and asks. Raises UsageError where there is nobody to ask."""
    from fuyou_cli.machine.measure.sustained import most_written

    named = ", ".join(map(str, places))
    most = most_written(probe.striped_space(*places), _drives_of(places))
    rated = sum(drive.rated_bytes for drive in drives.drives_under(*places))
    share = f", {100 * most / rated:.3f} % of what its drives are rated for" if rated else ""
    write_status(f"--sustained writes until the rate settles: up to {gb(most)} to {named}{share}. The files are removed.")
    if yes:
        return True
    answer = confirm(f"Write up to {gb(most)}?")
    if answer is None:
        raise UsageError("nothing was measured: there is no terminal to ask at", hint="add --yes")
    if not answer:
        write_status("nothing was measured")
    return answer


def _places(directory: Path | None, recipe: Recipe | None) -> tuple[Path, ...]:
    """Names the folders a store is striped over."""
    if directory is not None:
        return (folder(directory, key="--dir"),)
    if recipe is not None:
        return recipe.offload_directories(os.environ)
    return (folder(os.environ.get("FUYOU_OFFLOAD_DIR") or ".", key="FUYOU_OFFLOAD_DIR"),)


def _device_of(recipe: Recipe | None) -> str:
    """Names the recipe's device; an emulated one computes on the processor."""
    named = recipe.offload.device if recipe is not None else "auto"
    return "cpu" if named == "emulated" else named
