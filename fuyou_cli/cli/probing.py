"""A machine that nobody has measured yet, measured before it is planned with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.units import duration, gb

from .console import write_status
from .machine import is_measured

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe

PATIENCE = 300.0  # seconds: the quick bench of a recipe takes a fifth of that


def probe_once(loaded: LoadedRecipe, device: str) -> None:
    """Quickly, where no profile is kept of this machine and the recipe's drives; kept for the plans to come. What cannot be
    measured is said, and left to assumed rates."""
    directories = loaded.recipe.offload_directories(os.environ)
    if is_measured(*directories, device="cpu" if device == "emulated" else device):
        return
    write_status("measuring this machine, once: about a minute, and at most 2 GB written (--dry-run assumes rates instead)")
    ways = [["bench", "--json", str(loaded.path), *loaded.overrides]]
    if len(directories) == 1:  # a model that cannot be trained yet has no stage to measure: then the machine alone
        ways.append(["bench", "--json", "--dir", str(directories[0])])
    reason = ""
    made = [place for folder in directories for place in (folder, *folder.parents) if not place.exists()]
    for way in ways:
        found, reason = _measured(way)
        _remove_empty(made)
        if found is not None:
            seconds, written = duration(found["seconds"]), gb(found["written_bytes"])
            write_status(f"measured in {seconds}, {written} written and removed; kept for the plans to come")
            return
    write_status(f"note: it could not be measured, and rates are assumed: {reason}")


def _remove_empty(folders: list[Path]) -> None:
    """What measuring made: a plan leaves no folder behind."""
    for place in sorted(set(folders), key=lambda place: len(place.parts), reverse=True):
        with suppress(OSError):  # never made, or somebody's by now
            place.rmdir()


def _measured(arguments: list[str]) -> tuple[dict[str, Any] | None, str]:
    """The result of `fuyou bench` in a process of its own (what it loads and allocates is no part of a run's process), or
    why there is none."""
    command = [sys.executable, "-m", "fuyou_cli", *arguments]
    package = str(Path(__file__).resolve().parents[2])  # so that it is this fuyou, wherever it lies
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    try:
        return json.loads(done.stdout) if done.returncode == 0 else None, _reason(done.stderr)
    except ValueError:
        return None, _reason(done.stderr)


def _reason(text: str) -> str:
    """The first line of an error."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    return lines[0].removeprefix("error: ") if lines else "fuyou bench failed"
