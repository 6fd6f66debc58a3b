"""Kills runs again and again and checks what is left of them.

A run of some sixty tiny steps is killed at moments drawn from its first byte in the store to its end. It is continued, killed
again, and so on to its end. The end must equal that of a run nobody killed: every extent's checksum, the losses and the export.
After each kill the newest manifest must be at least as new as the last one whose folder had been flushed by then. No run may
find it damaged and fall back behind it.

No log of calls sees what io_uring does. Runs with it are killed too: after each kill the newest manifest must be at least as
new as the one found on the disk just before, and every extent that it names must be as it was written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fuyou_cli.core.units import MiB
from fuyou_cli.machine.profile import io_uring_refusal
from fuyou_cli.spec.plan import Span
from fuyou_cli.swap.kernels import has_io_uring
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.at_rest import Damage, ExtentSums, at_rest, saved_store
from fuyou_cli.training.state.manifest import Manifest
from fuyou_cli.training.state.store_folders import STORE_FILE, part_size, read_losses

from .nursery import Child, Ended
from .setting import Lost
from .shim import Call, Trace, namings
from .tiny_runs import IN_RAM, STEPS, TWO_FOLDERS, UNCLIPPED, Place

_PATIENCE = 600.0  # seconds for one run
_LOOKS = (0, 1, 1, 1, 1, 2, 2, 3, 5)  # times that a run is seen within a commit or an update before it is killed; one is drawn
_LOOK, _LOOKED_AT = 0.001, 300  # seconds from one look to the next; the last calls of a trace, which are soon read
_WINDOW = 8 * MiB  # of memory, to read extents with
_BACKEND, _NORM_FIRST = "offload.io.backend", "offload.norm_first"
_IO_URING = {_BACKEND: "io_uring"}
VARIANTS: dict[str, dict[str, Any]] = {
    "on the ssd, clipped": {},
    "on the ssd, all deferred": {**UNCLIPPED, "offload.defer_updates": 1},
    "in RAM": {**IN_RAM, **UNCLIPPED, "checkpoint.commit_every_steps": 1},
    "in RAM, committed as planned": {
        **IN_RAM,
        "offload.gradients": "ssd",
        "offload.boundaries": "ssd",
        "train.batch_size": 48,
        "train.micro_batch_size": 8,
    },
    "every third step": {**UNCLIPPED, "checkpoint.commit_every_steps": 3},
    "over two folders": TWO_FOLDERS,
    "io_uring": _IO_URING,
    "on the ssd, the norm measured first": {_NORM_FIRST: "always", "offload.gradients": "auto"},
}
# Said where the newest state is not whole.
_FELL_BACK = ("falling back to the state after step", "; continuing from the state after step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Holds what a run that came to its end left behind."""

    sums: tuple[tuple[str, str, int], ...]  # stage, tensor, sum
    losses: tuple[float, ...]
    export: tuple[tuple[str, str], ...]  # file, digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Describes a run nobody killed: its end, the seconds from its first byte in the store, and how much of each of the store's
    files holds extents (not known without a trace)."""

    end: Ending
    seconds: float
    durable: int = 0


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts kills so far, those within a commit or an update, and whole runs compared."""

    kills: int = 0
    within: int = 0
    runs: int = 0
    held: float = 0.0  # seconds that a killed run's store was still locked, at most; looked at without a trace
    steps: list[int] = field(default_factory=list)  # that were committed when a run was killed


def is_unseen(changes: Mapping[str, Any]) -> bool:
    """Tells whether the log of calls does not see its I/O."""
    return bool(changes.get(_BACKEND) == "io_uring")


def why_not(changes: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Says why such a variant of a kind of run cannot be made here. Returns an empty text if it can."""
    if changes.get(_NORM_FIRST) == "always" and "adapter.r" in run:
        return "a step of an adapter has one backward"
    return no_io_uring() if is_unseen(changes) else ""


def no_io_uring() -> str:
    """Says why no run can use io_uring here. Returns an empty text if one can."""
    return (io_uring_refusal() or "") if has_io_uring() else "the extension was built without it"


def store_of(recipe: Path) -> Path:
    """Returns the folder of the run's one manifest."""
    (found,) = recipe.parent.rglob(manifests.NAME)
    return found.parent


def finished(place: Place, recipe: Path, *, trace: Trace | None = None) -> Ending:
    """Runs to the end, from the newest state there is."""
    return _ended(place.begin("finetune", recipe, trace=trace), recipe)


def _ended(child: Child, recipe: Path) -> Ending:
    """Returns the ending of a run that came to its end."""
    if not child.is_over(_PATIENCE):
        child.kill()
        raise Lost(f"{recipe}: not over after {_PATIENCE:g} s\n{child.wait().text}")
    _check_ended(child.wait(), recipe)
    return ending(recipe)


def _check_ended(end: Ended, recipe: Path) -> None:
    if end.code != 0:
        raise Lost(f"{recipe}: exit code {end.code}\n{end.text}")
    check_went_on(end, recipe)


def check_went_on(end: Ended, what: Path | str) -> None:
    """Checks that a run continued from the newest state: one that falls back ends well too, but has lost what was committed."""
    if any(words in end.text for words in _FELL_BACK):
        raise Lost(f"{what}: the newest state was not whole\n{end.text}")


def ending(recipe: Path) -> Ending:
    store = store_of(recipe)
    saved = manifests.read(store)
    assert saved is not None
    losses, note = read_losses(store, saved.step)
    if note:
        raise Lost(note)
    return Ending(
        sums=tuple((stage.name, name, extent.sum) for stage in saved.stages for name, extent in stage.extents()),
        losses=tuple(losses),
        export=exported(recipe),
    )


def exported(recipe: Path) -> tuple[tuple[str, str], ...]:
    """Returns every file that a run has exported, with a digest: of the model or the adapter."""
    return tuple(found for name in ("model", "adapter") for found in digests(recipe.parent / "out" / name))


def digests(folder: Path) -> tuple[tuple[str, str], ...]:
    """Returns every file below the folder with a digest of its content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    return tuple((str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files)


def compare(ours: Ending, theirs: Ending, what: str) -> None:
    if ours.losses != theirs.losses:
        first = next(n for n, pair in enumerate(zip(ours.losses, theirs.losses, strict=False), 1) if pair[0] != pair[1])
        raise Lost(f"{what}: other losses from step {first} on")
    if ours.sums != theirs.sums:
        raise Lost(f"{what}: other states: {set(ours.sums) ^ set(theirs.sums)}")
    if ours.export != theirs.export:
        raise Lost(f"{what}: another export")


def damaged(store: Path) -> tuple[tuple[Damage, ...], tuple[Damage, ...]]:
    """Returns what is damaged in the newest committed state and in the one named before it."""
    with at_rest(saved_store(store), arena_size=_WINDOW) as opened:
        older = manifests.read(store, manifests.BEFORE)
        sums = ExtentSums(opened.daemon, opened.arena, Span(offset=0, size=_WINDOW))
        states = (opened.manifest, older if older is not None and older.run == opened.manifest.run else None)
        newest, before = (tuple(sums.damages(state)) if state is not None else () for state in states)
    return newest, before


# ---- one kill --------------------------------------------------------------------------------------------------------


def first_store_byte(trace: Trace) -> Call | None:
    return next((call for call in trace.calls() if _is_store_write(call)), None)


def _is_store_write(call: Call) -> bool:
    return call.what == "write" and call.file.endswith(STORE_FILE)


def is_within(calls: list[Call], durable: int) -> bool:
    """Tells whether the run was within a commit or an update: extents were written since a manifest was last named for good."""
    named = max((flush.end for _, flush in namings(calls, manifests.NAME)), default=0)
    return any(_is_store_write(call) and call.offset < durable and call.begin > named for call in calls)


def _writing(place: Place, recipe: Path, trace: Trace | None) -> Child | None:
    """Starts a run and waits until it has begun to write to its store. Returns None if it was over before."""
    before = _touched(recipe)
    child, begun = place.begin("finetune", recipe, trace=trace), time.monotonic()
    while (first_store_byte(trace) is None) if trace is not None else (_touched(recipe) == before):
        if child.is_over():
            _check_ended(child.wait(), recipe)
            return None
        if time.monotonic() - begun > _PATIENCE:
            child.kill()
            raise Lost(f"{recipe}: nothing was written\n{child.wait().text}")
        time.sleep(0.001)
    return child


def _touched(recipe: Path) -> list[tuple[Path, int]]:
    """Returns the file of the store, once there is one, and its time. It looks at no other files, because an export renames
    folders."""
    return [(path, path.stat().st_mtime_ns) for path in (recipe.parent / "out").glob(f"store/*/{STORE_FILE}")]


def killed(
    place: Place, recipe: Path, seconds: float, tally: Tally, durable: int, *, unseen: bool = False, looks: int = 0
) -> bool:
    """Kills a run so many seconds after its first byte in the store. Returns False if it was over before. `unseen`: without a
    trace; `looks`: how often since then the trace must have shown it within a commit or an update."""
    trace = None if unseen else place.trace(recipe.parent)
    child = _writing(place, recipe, trace)
    if child is None:
        return False
    is_over = child.is_over(seconds)
    while trace is not None and looks > 0 and not is_over:
        looks -= is_within(trace.calls(last=_LOOKED_AT), durable)
        is_over = looks > 0 and child.is_over(_LOOK)  # the last time it is killed at once: an adapter's commit takes a few ms
    least = _step_in(_touched(recipe)[0][0].parent) if unseen else None
    if not is_over:
        child.kill()
    end = child.wait()
    if end.code != -9:  # it may have ended just before
        _check_ended(end, recipe)
        return False
    check_went_on(end, recipe)
    tally.kills += 1
    if trace is None:
        _check_whole(recipe, least, tally)
    else:
        calls = trace.calls()
        tally.within += is_within(calls, durable)
        check_kept(recipe, calls, place.manifests, tally)
    return True


def step_of(recipe: Path) -> int | None:
    """Returns the step of the newest committed state."""
    found = list(recipe.parent.rglob(manifests.NAME))
    return _step_in(found[0].parent) if found else None


def _step_in(store: Path) -> int | None:
    saved = manifests.newest(store)[0]
    return saved.step if saved is not None and saved.state == "committed" else None


def check_kept(recipe: Path, calls: list[Call], manifests_written: Path, tally: Tally) -> None:
    """Checks that no committed state is lost: one named by a manifest whose folder had been flushed."""
    named = named_steps(calls, manifests_written)
    _check_step(recipe, named[-1] if named else None, tally)


def _check_step(recipe: Path, least: int | None, tally: Tally) -> None:
    step = step_of(recipe)
    if least is not None and (step is None or step < least):
        raise Lost(f"{recipe}: step {least} was committed, step {step} is what is left")
    tally.steps.append(-1 if step is None else step)


def _check_whole(recipe: Path, least: int | None, tally: Tally) -> None:
    """Checks that what was on the disk just before the kill, or something newer, is there as it was written. A kill is known to
    be within an update if something of the state before had been written over."""
    tally.held = max(tally.held, _until_free(recipe))
    _check_step(recipe, least, tally)
    if tally.steps[-1] < 0:
        return
    newest, before = damaged(store_of(recipe))
    if newest:
        raise Lost(f"{recipe}: the state after step {tally.steps[-1]} is damaged: {newest[0]}")
    tally.within += bool(before)


def _until_free(recipe: Path) -> float:
    """Returns the seconds until nobody holds the store: the kernel closes a killed process's io_uring files a while later."""
    begun = time.monotonic()
    for path, _ in _touched(recipe):
        with path.open("rb") as file:
            while not _is_free(file):
                if time.monotonic() - begun > _PATIENCE:
                    raise Lost(f"{path}: still locked {_PATIENCE:g} s after the kill")
                time.sleep(0.001)
    return time.monotonic() - begun


def _is_free(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def named_steps(calls: list[Call], manifests_written: Path) -> list[int | None]:
    """Returns the step of every manifest that was named for good, in order, and None for one that says `loading`."""
    named = _named(calls, manifests_written)
    return [None if content["state"] == "loading" else content["step"] for content in named]


def _named(calls: list[Call], manifests_written: Path) -> Iterator[dict[str, Any]]:
    """Yields every manifest that was named for good, in order."""
    for renamed, _ in namings(calls, manifests.NAME):
        writes = [call for call in calls if call.what == "write" and call.file == renamed.file and call.end < renamed.begin]
        last = max((call.begin for call in calls if call.what == "create" and call.file == renamed.file
                    and call.begin < renamed.begin), default=0)  # fmt: skip
        with manifests_written.open("rb") as file:
            yield json.loads(b"".join(_bytes(file, call) for call in writes if call.begin > last))


def _bytes(file: BinaryIO, call: Call) -> bytes:
    file.seek(call.bytes_at)
    return file.read(call.result)


def _durable_size(calls: list[Call], manifests_written: Path, saved: Manifest) -> int:
    """Returns bytes of each of the store's files that hold extents of any generation. Of a stripe's files that hold any it is
    the fewest: already a little of one may be what one step needs."""
    stages = (stage for content in _named(calls, manifests_written) for stage in content["stages"])
    extents = (value for stage in stages for value in stage.values() if isinstance(value, dict))
    size = max(extent["offset"] + extent["size"] for extent in extents)
    count = len(saved.files)
    parts = (part_size(size, stripe=saved.stripe, count=count, index=index) for index in range(count))
    return min(filter(None, parts))


# ---- chains ----------------------------------------------------------------------------------------------------------


def reference(place: Place, name: str, changes: Mapping[str, Any], *, steps: int = STEPS) -> Whole:
    """Makes a run that nobody kills."""
    recipe = place.recipe(f"{name}/whole", changes, steps=steps)
    if is_unseen(changes):
        child = _writing(place, recipe, None)
        assert child is not None
        begun = time.monotonic()
        return Whole(end=_ended(child, recipe), seconds=time.monotonic() - begun)
    trace = place.trace(recipe.parent)
    end = finished(place, recipe, trace=trace)
    first, calls = first_store_byte(trace), trace.calls()
    saved = manifests.read(store_of(recipe))
    assert first is not None and saved is not None
    seconds = max(call.seconds for call in calls) - first.seconds
    return Whole(end=end, seconds=seconds, durable=_durable_size(calls, place.manifests, saved))


def kill_runs(
    place: Place, name: str, changes: Mapping[str, Any], whole: Whole, *, kills: int, each: int, seed: int, steps: int = STEPS
) -> Tally:
    """Kills runs `kills` times, `each` times per run, at moments drawn over a whole run's time. Most then wait for the next
    commit or update, and for a while within it. `name`: of a folder; `whole`: the same run, not killed."""
    draw, tally = random.Random(f"{name} {seed}"), Tally()
    while tally.kills < kills:
        recipe = place.recipe(f"{name}/seed{seed}-{tally.runs}", changes, steps=steps)
        moments = sorted(draw.uniform(0, whole.seconds) for _ in range(min(each, kills - tally.kills)))
        for before, moment in zip([0.0, *moments], moments, strict=False):
            looks = draw.choice(_LOOKS)
            if not killed(place, recipe, moment - before, tally, whole.durable, unseen=is_unseen(changes), looks=looks):
                break
        compare(finished(place, recipe), whole.end, f"{name}, seed {seed}, run {tally.runs}")
        tally.runs += 1
        shutil.rmtree(recipe.parent)  # stores are large
    return tally


# ---- loads and exports -----------------------------------------------------------------------------------------------


def kill_loads(place: Place, *, kills: int, seed: int, steps: int = 4) -> Tally:
    """Kills loads between the first byte in the store and the commit of step 0. A run that got further continues to its end."""
    whole = reference(place, f"load{seed}", {}, steps=steps)
    seconds = _loading_seconds(place, f"load{seed}/timed", steps)
    draw, tally = random.Random(seed), Tally()
    while tally.kills < kills:
        recipe = place.recipe(f"load{seed}/killed{tally.runs}", {}, steps=steps)
        while tally.kills < kills and step_of(recipe) is None:  # a state once committed is not loaded again
            if not killed(place, recipe, draw.uniform(0, seconds), tally, whole.durable):
                break
        compare(finished(place, recipe), whole.end, f"killed while loading, run {tally.runs}")
        tally.runs += 1
        shutil.rmtree(recipe.parent)
    return tally


def _loading_seconds(place: Place, name: str, steps: int) -> float:
    """Returns the seconds from the first byte in the store to the folder's flush that follows the manifest of step 0."""
    recipe = place.recipe(name, {}, steps=steps)
    trace = place.trace(recipe.parent)
    finished(place, recipe, trace=trace)
    first, calls = first_store_byte(trace), trace.calls()
    assert first is not None
    _, (_, flush), *_ = namings(calls, manifests.NAME)  # the first says `loading`
    return flush.seconds - first.seconds


def kill_exports(place: Place, *, kills: int, seed: int) -> Tally:
    """Kills exports between the first byte and the end. The next export is complete, and the store unchanged."""
    recipe = place.recipe(f"export{seed}", {"export.at_end": False}, steps=2)
    finished(place, recipe)
    store, out = store_of(recipe), recipe.parent / "exported"
    kept = (store / manifests.NAME).read_bytes()
    words = ("export", str(store), str(out), "--dtype", "float32")
    seconds, draw, tally = _export_seconds(place, words, out), random.Random(seed), Tally()
    expected = digests(out)
    while tally.kills < kills:
        for path in sorted(out.rglob("*"), reverse=True):
            path.unlink()
        child = place.begin(*words, trace=(trace := place.trace(recipe.parent)))
        while not any(call.what in ("create", "mkdir") and "exported" in call.file for call in trace.calls()):
            if child.is_over():
                raise Lost(f"export: exit code {child.wait().code} before anything was written")
            time.sleep(0.001)
        if child.is_over(draw.uniform(0, seconds)):
            if child.wait().code != 0:
                raise Lost("export: failed")
            continue
        child.kill()
        child.wait()
        tally.kills += 1
        end = place.begin(*words).wait()
        if end.code != 0 or digests(out) != expected:
            raise Lost(f"export after a kill: exit code {end.code}, {set(digests(out)) ^ set(expected)}\n{end.text}")
        if (store / manifests.NAME).read_bytes() != kept:
            raise Lost("an export changed the store")
        tally.runs += 1
    return tally


def _export_seconds(place: Place, words: tuple[str, ...], out: Path) -> float:
    trace = place.trace(out.parent)
    end = place.begin(*words, trace=trace).wait()
    if end.code != 0:
        raise Lost(end.text)
    times = [call.seconds for call in trace.calls() if "exported" in call.file]
    return times[-1] - times[0]
