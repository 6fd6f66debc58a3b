"""Measures a new machine before it is planned with, and the layers of a new recipe: narrow ones, or those with an adapter, take
longer for their FLOPs than any that the machine was measured with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.core.paths import remove_left
from fuyou_cli.core.units import duration
from fuyou_cli.spec.hardware import ON_PROCESSOR

from .measure.timing import are_busy, cores_now
from .profile import kept_profile, why_not_kept

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe

PATIENCE = 300.0  # seconds; the quick bench of a recipe takes a fifth of it


def measure_once(loaded: LoadedRecipe, device: str, *, layers: str = "", say: Callable[[str], None]) -> None:
    """Measures quickly what is not known yet, and keeps it for later plans: this machine and the recipe's drives, or only the
    recipe's `layers` (`StageRate.layers`; empty: none that can be timed).

    A profile measured beside busy programs is replaced as soon as a run finds the machine idle. If measuring fails, says why
    and leaves the known or assumed rates.
    """
    directories = loaded.recipe.offload_directories(os.environ)
    device = "cpu" if device in ON_PROCESSOR else device
    kept = kept_profile(*directories, device=device)
    before = None if kept is None else kept.others_cores
    if whole := before is None or _is_due(before, say):
        once = "once" if before is None else "again"
        what = f"this machine, {once}: about a minute, at most 2 GB written"
        ways = [[str(loaded.path), *loaded.overrides]]
        if len(directories) == 1:  # a model that cannot be trained yet has no stage to measure: measure only the machine
            ways.append(["--dir", str(directories[0])])
    elif kept is not None and layers and not any(rate.layers == layers for rate in kept.stage_rates):
        what = "this model's layers, once: about half a minute"
        ways = [[str(loaded.path), *loaded.overrides, "--layers"]]
    else:
        return
    if why := why_not_kept(*directories, device=device):
        say(f"note: rates are {_known(before)}: new ones cannot be kept ({why}); set XDG_CACHE_HOME to another folder")
        return
    say(f"measuring {what} (offload.measure=false skips it)")
    begin, reason = time.monotonic(), ""
    created = [place for folder in directories for place in (folder, *folder.parents) if not place.exists()]
    for way in ways:
        code, reason = _measured(way, directories)
        _remove_empty(created)
        if not code:
            seconds, files = duration(time.monotonic() - begin), ", and all test files are removed" if whole else ""
            say(f"measured in {seconds}; the rates are kept for later plans{files}")
            now = kept_profile(*directories, device=device)
            if whole and now is not None and are_busy(now.others_cores):
                say(f"note: {_beside(now.others_cores)}: the next run that finds it idle measures again")
            return
        if code != UsageError.exit_code:  # it may have written, and would write again
            break
    say(f"note: {'the machine' if whole else 'the layers'} could not be measured, so rates are {_known(before)}: {reason}")


def _is_due(before: float, say: Callable[[str], None]) -> bool:
    """Whether to repeat a measurement made while other programs used so many cores, and says why or why not."""
    if not are_busy(before):
        return False
    now = cores_now()
    if are_busy(now):
        say(f"note: {_beside(before)}, and use {now:.1f} now: a run that finds it idle measures again")
        return False
    say(f"{_beside(before)}; it is idle now")
    return True


def _beside(cores: float) -> str:
    return f"other programs used {cores:.1f} cores while this machine was measured"


def _known(before: float | None) -> str:
    return "assumed" if before is None else "those measured before"


def _remove_empty(folders: list[Path]) -> None:
    """Removes the folders that measuring made: a plan leaves no folder behind."""
    for place in sorted(set(folders), key=lambda place: len(place.parts), reverse=True):
        with suppress(OSError):  # never made, or in use by now
            place.rmdir()


def _measured(arguments: list[str], directories: Iterable[Path]) -> tuple[int, str]:
    """Runs `fuyou bench` in its own process, because its memory is not part of a run's process. It leaves nothing in
    `directories`, however it ends. Returns the exit code, and the reason if it is not 0."""
    command = [sys.executable, "-m", "fuyou_cli", "bench", *arguments]
    package = str(Path(__file__).resolve().parents[2])  # so that the process runs this very fuyou
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    if "TORCHELASTIC_RUN_ID" in environment and environment.get("OMP_NUM_THREADS") == "1":
        del environment["OMP_NUM_THREADS"]  # torchrun gives each of its processes one thread: the machine has more
    try:
        code, err = _run(command, environment, directories)
    except subprocess.TimeoutExpired:
        return FuyouError.exit_code, f"it took more than {duration(PATIENCE)}"
    except OSError as error:
        return FuyouError.exit_code, str(error)
    return code, _reason(err, code)


def _run(command: list[str], environment: dict[str, str], directories: Iterable[Path]) -> tuple[int, str]:
    """Returns exit code and stderr. Raises TimeoutExpired. Always ends the process and its children, also at Ctrl-C."""
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=null, stdout=null, stderr=pipe, text=True) as child:
        try:
            _, err = child.communicate(timeout=PATIENCE)
        finally:
            child.kill()
            child.wait()
            remove_left(directories, child.pid)
    return child.returncode, err


def _reason(text: str, code: int) -> str:
    """Returns the first line of an error, or what the exit code tells."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    if lines:
        return lines[0].removeprefix("error: ")
    if code == -signal.SIGKILL:
        return "`fuyou bench` was killed, usually because memory ran out"
    return f"`fuyou bench` was ended by signal {-code}" if code < 0 else f"`fuyou bench` failed, exit code {code}"
