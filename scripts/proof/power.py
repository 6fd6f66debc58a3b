"""Cuts the power anywhere in a run, and continues from the disk that each cut leaves.

One run of a few steps is recorded: every call below the folder of its store, with its data. For each cut that folder is rebuilt
as a disk could hold it (disk.py), and the same command runs to its end. At the cut there must be a state at least as new as the
last one that was durable by then. The end must be that of the uninterrupted run.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.store_folders import STORE_FILE

from .crashes import Ending, check_went_on, compare, ending, finished, named_steps
from .disk_model import Left, rebuild
from .setting import Lost
from .shim import Call, namings
from .tiny_runs import Place

_PATIENCE = 600.0  # seconds for the recorded run
STEPS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Holds a run nobody cut. `begun`: the step it continued from, -1 for a new one; `named`: for each manifest, from which
    moment on it was durable, and its step (-1 if it says `loading`)."""

    recipe: Path
    disk: Path  # the folder with its store
    base: Path | None  # a copy of what was in it before
    kept: Path
    calls: tuple[Call, ...]
    begun: int
    named: tuple[tuple[int, int], ...]
    end: Ending


@dataclass(kw_only=True, slots=True)
class Cuts:
    """Counts power cuts so far, and what they took."""

    points: int = 0
    within: int = 0  # a commit
    newer: int = 0  # left a state that was not sure to be there
    from_nothing: int = 0  # left none
    written: int = 0  # calls that were not flushed and were there, and so on: see `Left`
    torn: int = 0
    missing: int = 0
    names_missing: int = 0

    def add(self, left: Left) -> None:
        self.written += left.written
        self.torn += left.torn
        self.missing += left.missing
        self.names_missing += left.names_missing


def recorded(place: Place, name: str, changes: Mapping[str, Any], *, steps: int = STEPS, resumed_at: int = 0) -> Recording:
    """Records a run to its end. With `resumed_at` it was stopped after so many steps before, and only the rest is recorded."""
    disk = place.folder / name / "disk"
    folders = [folder.replace("{folder}", str(disk)) for folder in changes.get("offload.dir", ["{folder}/stores"])]
    changes = {**changes, "offload.dir": folders}
    recipe = place.recipe(name, changes, steps=steps)
    disk.mkdir()
    base = None
    if resumed_at:
        place.recipe(name, {**changes, "export.at_end": False}, steps=resumed_at)
        finished(place, recipe)
        base = place.folder / f"{name}-before"  # not beside the recipe: its folder has one store
        shutil.copytree(disk, base)
        place.recipe(name, changes, steps=steps)
    trace, kept = place.trace(disk), recipe.parent / "written"
    child = place.begin("finetune", recipe, trace=trace, kept=kept)
    over = child.is_over(_PATIENCE)
    if not over:
        child.kill()
    end = child.wait()
    if not over or end.code != 0:
        raise Lost(f"{recipe}: exit code {end.code}\n{end.text}")
    check_went_on(end, recipe)
    calls = tuple(sorted((call for call in trace.calls() if call.what not in ("read", "open")), key=lambda call: call.begin))
    return Recording(
        recipe=recipe, disk=disk, base=base, kept=kept, calls=calls, begun=resumed_at or -1,
        named=tuple(_named(calls, kept)), end=ending(recipe),
    )  # fmt: skip


def _named(calls: Sequence[Call], kept: Path) -> Iterator[tuple[int, int]]:
    """Yields from which moment on each manifest had its name for certain, and its step."""
    steps = named_steps(list(calls), kept)
    for (_, flush), step in zip(namings(list(calls), manifests.NAME), steps, strict=True):
        yield flush.end, -1 if step is None else step


def instants(recording: Recording, count: int, draw: random.Random) -> list[int]:
    """Lists moments: every other one anywhere in the log, those between inside a commit, from the flush of the store to that
    of its manifest's folder."""
    anywhere = sorted({moment for call in recording.calls for moment in (call.begin, call.end)})
    within = [moment for begin, end in _commits(recording.calls) for moment in anywhere if begin <= moment <= end]
    return [draw.choice(within if number % 2 else anywhere) for number in range(count)]


def _commits(calls: Sequence[Call]) -> list[tuple[int, int]]:
    """Returns the span of each commit: from the first flush of its data, file after file of a stripe, to where its name is."""
    found = []
    for _, flush in namings(list(calls), manifests.NAME):
        before = [call for call in calls if call.what == "flush" and call.begin < flush.begin]
        data = {call.file: call.begin for call in before if call.file.endswith(STORE_FILE)}  # the last of each file
        found.append((min(data.values() or (call.begin for call in before), default=0), flush.end))
    return found


def cut_power(place: Place, recording: Recording, *, points: int, seed: int) -> Cuts:
    """Makes `points` cuts, each with a run to the end after it."""
    cuts, commits = Cuts(), _commits(recording.calls)
    for number, at in enumerate(instants(recording, points, random.Random(seed))):
        what = f"cut {number} of seed {seed}, at {at} of the log"
        _forget(recording)
        left = rebuild(
            recording.disk, recording.calls, recording.kept, at=at, draw=random.Random(f"{seed}:{number}"), base=recording.base
        )
        least = [recording.begun, *(step for sure, step in recording.named if sure <= at)][-1]
        found = _step_on(recording.disk)
        if found < least:
            raise Lost(f"{what}: step {least} was committed, step {found} is what is left")
        compare(finished(place, recording.recipe), recording.end, what)
        cuts.add(left)
        cuts.points += 1
        cuts.within += any(begin <= at <= end for begin, end in commits)
        cuts.newer += found > least
        cuts.from_nothing += found < 0
    return cuts


def _forget(recording: Recording) -> None:
    """Empties the disk and removes what is left of an earlier run."""
    for folder in (recording.disk, recording.recipe.parent / "out"):
        shutil.rmtree(folder, ignore_errors=True)
    recording.disk.mkdir()


def _step_on(disk: Path) -> int:
    """Returns the step of the newest committed state, -1 for none."""
    names = (manifests.NAME, manifests.BEFORE)
    folders = {path.parent for name in names for path in disk.rglob(name)}
    found = [saved for folder in folders if (saved := manifests.newest(folder)[0]) is not None and saved.state == "committed"]
    return max((saved.step for saved in found), default=-1)
