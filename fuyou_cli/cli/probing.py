"""A machine that nobody has measured yet, measured before it is planned with."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import FuyouError
from fuyou_cli.core.units import duration, gb

from .console import write_status
from .machine import is_measured, keep

if TYPE_CHECKING:
    from pathlib import Path

    from fuyou_cli.recipe.load import LoadedRecipe

    from .measure import BenchReport


def probe_once(loaded: LoadedRecipe) -> None:
    """Quickly, where no profile is kept of this machine and the recipe's drives; kept for the plans to come. What cannot be
    measured is said, and left to assumed rates."""
    import os

    from fuyou_cli.training.prepare import device_name

    directories = loaded.recipe.offload_directories(os.environ)
    named = device_name(loaded.recipe)
    device = "cpu" if named == "emulated" else named
    if is_measured(*directories, device=device):
        return
    write_status("measuring this machine, once (--dry-run leaves it, and assumes rates)")
    try:
        report = _measured(loaded, directories, device)
    except (FuyouError, OSError) as error:
        write_status(f"note: it could not be measured, and rates are assumed: {error}")
        return
    write_status(f"measured in {duration(report.seconds)}, {gb(report.written_bytes)} written; kept for the plans to come")


def _measured(loaded: LoadedRecipe, directories: tuple[Path, ...], device: str) -> BenchReport:
    """With the recipe's own block and head; of a model that cannot be trained yet, without."""
    from rich.console import Console

    from .bench import run_bench
    from .measure import measure

    try:
        unseen = Console(file=io.StringIO())
        report = run_bench(None, quick=True, json_output=False, device=device, loaded=loaded, out=unseen)
    except FuyouError:
        report = measure(*directories, quick=True, device=device)
        keep(report.profile, *directories)
    assert report is not None  # only sustained writing asks
    return report
