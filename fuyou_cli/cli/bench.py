"""Runs `fuyou bench`: measures this machine, prints the results, and keeps them for later plans."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from fuyou_cli.core import disk, probe
from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.core.paths import folder
from fuyou_cli.core.process import settle_for_training
from fuyou_cli.core.units import duration, gb, gib
from fuyou_cli.machine import profile
from fuyou_cli.machine.measure.timing import BackgroundLoad, are_busy
from fuyou_cli.machine.measure.whole import BenchReport, device_named, measure
from fuyou_cli.machine.profile import assumed_hardware, card, endurance, keep, keep_layers, kept_profile
from fuyou_cli.spec.hardware import ON_PROCESSOR, HardwareProfile
from fuyou_cli.training.plan_step import own_layers

from .console import agreed, result_console, status_console, write_status
from .error_screen import like_ctrl_c
from .render.theme import Symbols, column, heading, machine_in_words, pairs, ruled, say, show, symbols, tera

if TYPE_CHECKING:
    import torch

    from fuyou_cli.machine.measure.timing import Findings
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.plan_step import OwnLayers

Progress = Callable[[str], None]


@like_ctrl_c()  # so that its files are removed however it ends
def run_bench(
    directory: Path | None,
    *,
    quick: bool,
    json_output: bool,
    device: str | None = None,
    loaded: LoadedRecipe | None = None,
    sustained: bool = False,
    layers: bool = False,
    yes: bool = False,
    out: Console | None = None,
) -> BenchReport | None:
    """Measures and prints to `out`, as a table or one JSON object. A recipe adds its own block and head; `layers`: only these
    are measured, on a machine whose profile is kept.

    Measures in `directory`; by default in the recipe's store folders as one striped store, else in the default store folder,
    else here. Keeps the profile for later plans. On a terminal, stderr shows what is being measured on one line that disappears
    at the end. Returns None if the user does not agree to `sustained` writing: then nothing is measured.
    """
    out, recipe = out or result_console(), loaded.recipe if loaded is not None else None
    places = _places(directory, recipe)
    if sustained and not _agreed(places, yes):
        return None
    chosen = device or (recipe.offload.device if recipe is not None else "auto")
    chosen = "cpu" if chosen in ON_PROCESSOR else chosen
    begin, others = time.monotonic(), BackgroundLoad()
    with status_console().status("starting", spinner="line") as status:

        def progress(what: str) -> None:
            status.update(f"measuring: {what}")

        report = _measured(places, recipe, quick=quick, device=chosen, layers=layers, progress=progress)
        if sustained:
            from fuyou_cli.machine.measure.store_rates import measure_sustained

            progress("sustained writing")
            free, count = disk.striped_space(*places), _drives_of(places)
            report = report.with_found(measure_sustained(*places, free=free, count=count, progress=progress))
    report = replace(report, seconds=time.monotonic() - begin)
    if layers:
        report = replace(report, profile=keep_layers(report.profile, *places, say=write_status))
    else:
        report = _beside_others(report, others.cores())
        report = replace(report, profile=keep(report.profile, *places, say=write_status))
    if json_output:
        out.file.write(json.dumps(bench_json(report), indent=2) + "\n")
    else:
        show_bench(out, report)
    return report


def _beside_others(report: BenchReport, cores: float) -> BenchReport:
    """Notes, here and for all later plans, that other programs were running during the measurement."""
    report = replace(report, profile=replace(report.profile, others_cores=cores))
    if not are_busy(cores):
        return report
    note = f"other programs used {cores:.1f} cores meanwhile, so the machine may be faster: measure again when it is idle"
    free = replace(report.profile, dram=0.0)  # what was slower beside others may wait for their cores, not for the memory
    return replace(report, profile=free, notes=(*report.notes, note))


def _measured(
    places: tuple[Path, ...], recipe: Recipe | None, *, quick: bool, device: str, layers: bool, progress: Progress
) -> BenchReport:
    """Measures the machine, or with `layers` takes the profile that is kept of it. Then measures a recipe's own stages, whose
    errors are found before."""
    if recipe is None:
        if layers:
            raise UsageError("--layers measures a recipe's layers: name the recipe", hint="fuyou bench RECIPE --layers")
        return measure(*places, quick=quick, device=device, progress=progress)
    target = device_named(device)
    progress("the recipe's model")
    memory = card()[1] if target.type == "cuda" else 0
    own = own_layers(recipe, assumed_hardware(*places, device=target.type, device_memory=memory), say=write_status)
    if layers:
        if (profile := kept_profile(*places, device=target.type)) is None:
            raise UsageError("--layers: this machine has no profile yet", hint="measure it all: fuyou bench RECIPE")
        settle_for_training()  # stages get their memory as in a run
        report = BenchReport(profile=profile, rates=(), notes=(), quick=quick, seconds=0.0, written_bytes=0)
    else:
        report = measure(*places, quick=quick, device=device, progress=progress)
    findings = _layers(recipe, own, target, quick=quick, progress=progress)
    if layers and not findings.stage_rates:
        raise FuyouError("; ".join(findings.notes))
    return report.with_found(findings)


def _layers(recipe: Recipe, own: OwnLayers, target: torch.device, *, quick: bool, progress: Progress) -> Findings:
    """Times the stages in the memory that a run would have: on a processor within its budget."""
    from fuyou_cli.engine.compiled import load_compiler
    from fuyou_cli.engine.devices.cuda import free_memory
    from fuyou_cli.machine.measure.compute import measure_recipe

    if compiled := recipe.train.compile:
        load_compiler()
    if target.type == "cuda":
        free = free_memory()
    else:
        free = probe.memory_available()
        budget = recipe.offload.max_memory.cpu.resolve(total=probe.memory_limit(), auto=free + probe.process_bytes())
        free = max(0, min(free, budget - probe.process_bytes()))
    return measure_recipe(
        own.anatomy, own.sizes, target, quick=quick, free=free, compiled=compiled, layers=own.layers, progress=progress
    )  # fmt: skip


def _drives_of(places: tuple[Path, ...]) -> int:
    """Counts the drives, each with its own fast region; one if the file system hides them."""
    return max(1, len(profile.drives_under(*places)))


def _agreed(places: tuple[Path, ...], yes: bool) -> bool:
    """Tells what sustained writing costs, and asks. Raises UsageError if nobody can be asked."""
    from fuyou_cli.machine.measure.store_rates import most_written

    most = most_written(disk.striped_space(*places), _drives_of(places))
    rated = sum(drive.rated_bytes for drive in profile.drives_under(*places))
    share = f", {100 * most / rated:.3f} % of its drives' rated writes" if rated else ""
    named = f"{', '.join(map(str, places))}{share}"
    write_status(f"--sustained writes until the rate settles: up to {gb(most)} to {named}. The files are removed.")
    return agreed(f"Write up to {gb(most)}?", yes=yes, otherwise="nothing was measured")


def _places(directory: Path | None, recipe: Recipe | None) -> tuple[Path, ...]:
    """Names the folders that a store is striped over."""
    if directory is not None:
        return (folder(directory, key="--dir"),)
    if recipe is not None:
        return recipe.offload_directories(os.environ)
    return (folder(os.environ.get("FUYOU_OFFLOAD_DIR") or ".", key="FUYOU_OFFLOAD_DIR"),)


# ---- what is shown ---------------------------------------------------------------------------------------------------


SCHEMA_VERSION = 2


def show_bench(console: Console, report: BenchReport) -> None:
    """Prints the machine, then every rate: median and range of the repeats."""
    shapes, profile = symbols(console), report.profile
    say(console, Text.assemble(("fuyou bench", "bold"), f"  {'quick' if report.quick else 'full'}"))
    pairs(console, _machine(profile, f" {shapes.dot} "))
    _rates(console, report, "Arithmetic", "FLOP/s", shapes)
    _rates(console, report, "Moving bytes", "B/s", shapes)
    if report.notes:
        heading(console, "Notes")
        for note in report.notes:
            say(console, f"- {note}", indent=2)
    console.print()
    say(console, f"{duration(report.seconds)}, {gb(report.written_bytes)} written, nothing left behind", style="dim")


def _machine(profile: HardwareProfile, dot: str) -> list[tuple[str, str]]:
    rows = [("machine", dot.join(machine_in_words(profile)))]
    if profile.pinnable:
        rows.append(("pinned", f"at most {gib(profile.pinnable)}: {profile.pinnable_why}"))
    rows += [("drive", f"{d.model}, {gb(d.capacity)}, {endurance(d)}") for d in profile.drives if d.model]
    rows.append(("process", f"{gib(profile.process_bytes)} with torch and transformers loaded, before the model"))
    if profile.device == "cpu":
        shares = f"compute keeps {profile.shared_compute:.0%} and the update {profile.shared_adamw:.0%} of its rate alone"
        rows.append(("at once", f"beside one update thread, {shares}"))
    return rows


def bench_json(report: BenchReport) -> dict[str, object]:
    """Returns the same as data: rates per second, and `profile` as `fuyou plan` reads it."""
    return {"schema_version": SCHEMA_VERSION, "digest": report.profile.digest(), **asdict(report)}


def _rates(console: Console, report: BenchReport, title: str, unit: str, shapes: Symbols) -> None:
    rates = [rate for rate in report.rates if rate.unit == unit]
    scale, name = (1, "TFLOPS") if unit == "FLOP/s" else (1000, "GB/s")
    least = min((rate.repeats for rate in rates), default=0)
    heading(console, f"{title} ({name})", f"median of at least {least} repeats (stages: mean), and their range")
    content = ruled(shapes, "what", "rate", "range")
    column(content, "measured on", wrap=True, style="dim")
    for rate in rates:
        value, low, high = (tera(figure * scale) for figure in (rate.value, rate.low, rate.high))
        content.add_row(Text(rate.name), Text(value, style="bold"), f"{low} to {high}", Text(rate.note))
    show(console, content, indent=2)
