"""Measure a machine that nobody has measured yet, before it is planned with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.units import duration, gb
from fuyou_cli.machine.profile_store import is_measured, why_not_kept
from fuyou_cli.machine.scratch import remove_left

from .console import write_status
from .error_screen import USAGE

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe

PATIENCE = 300.0  # seconds: the quick bench of a recipe takes a fifth of that


def probe_once(loaded: LoadedRecipe, device: str) -> None:
    """Measure quickly, where no profile is kept of this machine and the recipe's drives; kept for the plans to come. What
    cannot be measured is said, and left to assumed rates."""
    directories = loaded.recipe.offload_directories(os.environ)
    device = "cpu" if device == "emulated" else device
    if is_measured(*directories, device=device):
        return
    if why := why_not_kept(*directories, device=device):
        write_status(f"note: rates are assumed: measured ones could not be kept ({why}); XDG_CACHE_HOME names another folder")
        return
    write_status("measuring this machine, once: about a minute, at most 2 GB written (offload.measure=false skips it)")
    ways = [["bench", "--json", str(loaded.path), *loaded.overrides]]
    if len(directories) == 1:  # a model that cannot be trained yet has no stage to measure: then the machine alone
        ways.append(["bench", "--json", "--dir", str(directories[0])])
    bench = _Bench()
    made = [place for folder in directories for place in (folder, *folder.parents) if not place.exists()]
    for way in ways:
        bench = _measured(way, directories)
        _remove_empty(made)
        if bench.found is not None:
            seconds, written = duration(bench.found["seconds"]), gb(bench.found["written_bytes"])
            write_status(f"measured in {seconds}, {written} written and removed; kept for the plans to come")
            return
        if not bench.refused:  # it may have written, and would once more
            break
    write_status(f"note: the machine could not be measured, rates are assumed: {bench.reason}")


def _remove_empty(folders: list[Path]) -> None:
    """Remove what measuring made: a plan leaves no folder behind."""
    for place in sorted(set(folders), key=lambda place: len(place.parts), reverse=True):
        with suppress(OSError):  # never made, or somebody's by now
            place.rmdir()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bench:
    """Hold how `fuyou bench` ended: what it found, or why it found nothing."""

    found: dict[str, Any] | None = None
    reason: str = ""
    refused: bool = False  # what it was asked for, before it measured or wrote anything


def _measured(arguments: list[str], directories: Iterable[Path]) -> _Bench:
    """Run `fuyou bench` in a process of its own (what it loads and allocates is no part of a run's process), which leaves
    nothing in `directories`, however it ends."""
    command = [sys.executable, "-m", "fuyou_cli", *arguments]
    package = str(Path(__file__).resolve().parents[2])  # so that it is this fuyou, wherever it lies
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    try:
        code, out, err = _run(command, {**os.environ, "PYTHONPATH": path}, directories)
    except subprocess.TimeoutExpired:
        return _Bench(reason=f"it took more than {duration(PATIENCE)}")
    except OSError as error:
        return _Bench(reason=str(error))
    try:
        return _Bench(found=json.loads(out)) if code == 0 else _Bench(reason=_reason(err, code), refused=code == USAGE)
    except ValueError:
        return _Bench(reason=_reason(err, code))


def _run(command: list[str], environment: dict[str, str], directories: Iterable[Path]) -> tuple[int, str, str]:
    """Return exit code and output. Raises TimeoutExpired; neither then nor at a Ctrl-C is anything of it left."""
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            out, err = child.communicate(timeout=PATIENCE)
        finally:
            child.kill()
            child.wait()
            remove_left(directories, child.pid)
    return child.returncode, out, err


def _reason(text: str, code: int) -> str:
    """Return the first line of an error, or what is known of an end without a word."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    if lines:
        return lines[0].removeprefix("error: ")
    if code == -signal.SIGKILL:
        return "`fuyou bench` was killed, as a rule because memory ran out"
    return f"`fuyou bench` was ended by signal {-code}" if code < 0 else f"`fuyou bench` failed, exit code {code}"
