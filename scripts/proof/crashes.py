"""Runs that are killed again and again, and what is left of them.

A run of some sixty tiny steps is killed at moments drawn from its first byte in the store to its end, gone on with, killed
again, and so on to its end. What it ends with must be what a run ends with that nobody killed: every extent's sum, the losses
and the export. After each kill the newest manifest must be at least as new as the last whose folder had been flushed by then.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from fuyou_cli.training import losses as loss_files
from fuyou_cli.training import manifest as manifests
from fuyou_cli.training.manifest import Manifest

from .nursery import Child, Nursery
from .rows import model_folder, own_text
from .runs import child_environment
from .shim import Call, Trace, build, namings, preloaded

STEPS = 60
_ROWS = 48
_PATIENCE = 120.0  # seconds for one run
IN_RAM = {f"offload.{kind}": "cpu" for kind in ("weights", "optimizer_states", "gradients", "boundaries")}
UNCLIPPED = {"train.clip_grad_norm": None}
ANY_LENGTH = {"lr_scheduler.name": "constant", "lr_scheduler.warmup_steps": 0}  # a stopped run may be made longer
VARIANTS: dict[str, dict[str, Any]] = {
    "in_place, on the ssd, clipped": {},
    "in_place, on the ssd, half deferred": {**UNCLIPPED, "offload.defer_updates": 0.5},
    "in_place, in RAM": {**IN_RAM, **UNCLIPPED},
    "in_place, every third step": {**UNCLIPPED, "checkpoint.commit_every_steps": 3},
    "redo, on the ssd, clipped": {"checkpoint.mode": "redo"},
    "redo, in RAM": {**UNCLIPPED, "checkpoint.mode": "redo", "offload.weights": "cpu", "offload.optimizer_states": "cpu"},
    "snapshot, every second step": {"checkpoint.mode": "snapshot", "checkpoint.snapshot_every_steps": 2},
}
IN_CI = ("in_place, in RAM", "redo, on the ssd, clipped")
_MANIFEST_WRITTEN = ".manifest.new"  # before it is renamed


class Lost(Exception):
    """A proof has failed: what is left of a run is not what it should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """What a run that came to its end left behind."""

    sums: tuple[tuple[str, str, int], ...]  # stage, tensor, sum
    losses: tuple[float, ...]
    export: tuple[tuple[str, str], ...]  # file, digest


@dataclass(kw_only=True, slots=True)
class Tally:
    """Kills so far, those within a commit or an update, and whole runs compared."""

    kills: int = 0
    within: int = 0
    runs: int = 0
    steps: list[int] = field(default_factory=list)  # that were committed when a run was killed


class Place:
    """A folder with a tiny model and a recipe, and a nursery whose children have the shim in them."""

    def __init__(self, folder: Path, nursery: Nursery, environment: Mapping[str, str], model: Path, text: Path) -> None:
        self.folder, self.nursery, self.model, self.text = folder, nursery, model, text
        self.environment = dict(environment)
        self.traces = 0

    def recipe(self, name: str, changes: Mapping[str, Any], *, steps: int = STEPS) -> Path:
        """Written to a folder of its own."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {
            "output_dir": str(folder / "out"),
            "model": {"name_or_path": str(self.model)},
            "dataset": {
                "train": [{"path": str(self.text), "format": "prompt_completion"}], "max_seq_len": 32, "overlong": "split",
                "cache_dir": str(self.folder / "rows"),
            },
            "optimizer": {"lr": 1e-3},
            "train": {"max_steps": steps, "batch_size": 4, "micro_batch_size": 2, "threads": 1, "clip_grad_norm": 0.5},
            "offload": {
                "device": "cpu", "max_memory": {"cpu": "4GiB"}, "weights": "ssd", "optimizer_states": "ssd",
                "gradients": "ssd", "boundaries": "ssd", "io": {"backend": "threads"},
            },
            "export": {"dtype": "float32"},
        }  # fmt: skip
        for key, value in changes.items():
            *sections, last = key.split(".")
            target = content
            for section in sections:
                target = target.setdefault(section, {})
            target[last] = value
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    def trace(self, root: Path) -> Trace:
        self.traces += 1
        return Trace(self.folder / f"trace{self.traces % 4}", root)

    @property
    def manifests(self) -> Path:
        """All that the last run wrote into manifests."""
        return self.folder / "manifests"

    def begin(self, *words: str | Path, trace: Trace | None = None, fault: str = "", kept: Path | None = None) -> Child:
        seen: dict[str, str] = {}
        if trace is not None:
            of = "" if kept is not None else _MANIFEST_WRITTEN
            seen = trace.environment(fault=fault, kept=kept or self.manifests, kept_of=of)
        return self.nursery.begin([*map(str, words)], folder=self.folder, environment={**self.environment, **seen})


@contextmanager
def placed(folder: Path, *, under: Path | None = None) -> Iterator[Place]:
    """Where tiny runs are killed. What they leave open below `under` is told."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.jsonl"
    if not text.exists():
        text.write_text(own_text(_ROWS), encoding="utf-8")
    model = model_folder(folder, "1m", text)
    environment = {**child_environment(), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    library = build(folder)
    with Nursery(folder=folder, environment=preloaded(environment, library), under=under) as nursery:
        yield Place(folder, nursery, environment, model, text)


def store_of(recipe: Path) -> Path:
    """The folder of the run's one manifest."""
    (found,) = recipe.parent.rglob(manifests.NAME)
    return found.parent


def finished(place: Place, recipe: Path, *, trace: Trace | None = None) -> Ending:
    """Runs to the end."""
    child = place.begin("finetune", recipe, trace=trace)
    if not child.is_over(_PATIENCE):
        child.kill()
        raise Lost(f"{recipe}: not over after {_PATIENCE:g} s\n{child.wait().text}")
    end = child.wait()
    if end.code != 0:
        raise Lost(f"{recipe}: exit code {end.code}\n{end.text}")
    return ending(recipe)


def ending(recipe: Path) -> Ending:
    store = store_of(recipe)
    saved = manifests.read(store)
    assert saved is not None
    losses, note = loss_files.read(store, saved.step)
    if note:
        raise Lost(note)
    return Ending(
        sums=tuple((stage.name, name, extent.sum) for stage in saved.stages for name, extent in stage.extents()),
        losses=tuple(losses),
        export=digests(recipe.parent / "out" / "model"),
    )


def digests(folder: Path) -> tuple[tuple[str, str], ...]:
    """Every file below the folder, and a digest of what is in it."""
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


# ---- one kill --------------------------------------------------------------------------------------------------------


def durable_size(saved: Manifest) -> int:
    """Bytes of the store that hold extents, of both generations; the very last may count as what one step needs."""
    return max((extent.offset + extent.size for stage in saved.stages for _, extent in stage.extents()), default=0)


def first_store_byte(trace: Trace) -> Call | None:
    return next((call for call in trace.calls() if _is_store_write(call)), None)


def _is_store_write(call: Call) -> bool:
    return call.what == "write" and call.file.endswith("store.bin")


def is_within(calls: list[Call], durable: int) -> bool:
    """Whether a commit's first write had been made, or an update's, and its folder not been flushed: extents were written to
    since the last time a manifest was named."""
    named = max((flush.end for _, flush in namings(calls, manifests.NAME)), default=0)
    return any(_is_store_write(call) and call.offset < durable and call.begin > named for call in calls)


def killed(
    place: Place, recipe: Path, seconds: float, tally: Tally, durable: int, *, words: tuple[str, ...] = ("finetune",)
) -> bool:
    """Kills a run so many seconds after its first byte in the store. False: it was over before."""
    trace = place.trace(recipe.parent)
    child = place.begin(*words, recipe, trace=trace)
    begun = time.monotonic()
    while first_store_byte(trace) is None:
        if child.is_over():
            _check_ended(child, recipe)
            return False
        if time.monotonic() - begun > _PATIENCE:
            child.kill()
            raise Lost(f"{recipe}: nothing was written\n{child.wait().text}")
        time.sleep(0.001)
    if child.is_over(seconds):
        _check_ended(child, recipe)
        return False
    child.kill()
    end = child.wait()
    if end.code != -9:
        raise Lost(f"{recipe}: exit code {end.code} instead of being killed\n{end.text}")
    calls = trace.calls()
    tally.kills += 1
    tally.within += is_within(calls, durable)
    check_kept(recipe, calls, place.manifests, tally)
    return True


def _check_ended(child: Child, recipe: Path) -> None:
    end = child.wait()
    if end.code != 0:
        raise Lost(f"{recipe}: exit code {end.code}\n{end.text}")


def _step_of(recipe: Path) -> int | None:
    """Of the newest committed state."""
    found = list(recipe.parent.rglob(manifests.NAME))
    saved = manifests.newest(found[0].parent)[0] if found else None
    return saved.step if saved is not None and saved.state == "committed" else None


def check_kept(recipe: Path, calls: list[Call], manifests_written: Path, tally: Tally) -> None:
    """No state is lost that was committed: named by a manifest whose folder had been flushed."""
    named = named_steps(calls, manifests_written)
    step = _step_of(recipe)
    if named and named[-1] is not None and (step is None or step < named[-1]):
        raise Lost(f"{recipe}: step {named[-1]} was committed, step {step} is what is left")
    tally.steps.append(-1 if step is None else step)


def named_steps(calls: list[Call], manifests_written: Path) -> list[int | None]:
    """The step of every manifest that was named for good, in order; None of one that says `loading`."""
    found: list[int | None] = []
    for renamed, _ in namings(calls, manifests.NAME):
        writes = [call for call in calls if call.what == "write" and call.file == renamed.file and call.end < renamed.begin]
        last = max((call.begin for call in calls if call.what == "create" and call.file == renamed.file
                    and call.begin < renamed.begin), default=0)  # fmt: skip
        with manifests_written.open("rb") as file:
            text = b"".join(_bytes(file, call) for call in writes if call.begin > last)
        is_loading = b'"state": "loading"' in text
        (step,) = re.findall(rb'^"step": (\d+),$', text, re.MULTILINE)
        found.append(None if is_loading else int(step))
    return found


def _bytes(file: BinaryIO, call: Call) -> bytes:
    file.seek(call.bytes_at)
    return file.read(call.result)


# ---- chains ----------------------------------------------------------------------------------------------------------


def reference(place: Place, name: str, changes: Mapping[str, Any], *, steps: int) -> tuple[Ending, float, int]:
    """A run nobody kills: its end, seconds from its first byte in the store, and the size of its durable part."""
    recipe = place.recipe(f"{name}/whole", changes, steps=steps)
    trace = place.trace(recipe.parent)
    end = finished(place, recipe, trace=trace)
    first = first_store_byte(trace)
    assert first is not None
    saved = manifests.read(store_of(recipe))
    assert saved is not None
    return end, max(call.seconds for call in trace.calls()) - first.seconds, durable_size(saved)


def kill_runs(
    place: Place, name: str, changes: Mapping[str, Any], *, kills: int, each: int, seed: int, steps: int = STEPS
) -> Tally:
    """`kills` kills, `each` of one run, whose moments are drawn over a whole run's time."""
    slug = hashlib.sha256(json.dumps([name, seed]).encode()).hexdigest()[:8]
    expected, seconds, durable = reference(place, slug, changes, steps=steps)
    draw, tally = random.Random(seed), Tally()
    while tally.kills < kills:
        recipe = place.recipe(f"{slug}/run{tally.runs}", changes, steps=steps)
        moments = sorted(draw.uniform(0, seconds) for _ in range(min(each, kills - tally.kills)))
        for before, moment in zip([0.0, *moments], moments, strict=False):
            if not killed(place, recipe, moment - before, tally, durable):
                break
        compare(finished(place, recipe), expected, f"{name}, run {tally.runs}")
        tally.runs += 1
        _forget(recipe)
    return tally


def _forget(recipe: Path) -> None:
    """Stores are large."""
    for path in recipe.parent.rglob("store.bin"):
        path.unlink()


# ---- killed while the model is loaded, and while it is exported -------------------------------------------------------


def kill_loads(place: Place, *, kills: int, seed: int, steps: int = 4) -> Tally:
    """Kills between the first byte in the store and the commit of step 0; a run that got as far goes on to its end."""
    expected, _, durable = reference(place, f"load{seed}", {}, steps=steps)
    seconds = _loading_seconds(place, f"load{seed}/timed", steps)
    draw, tally = random.Random(seed), Tally()
    while tally.kills < kills:
        recipe = place.recipe(f"load{seed}/killed{tally.runs}", {}, steps=steps)
        while tally.kills < kills and _step_of(recipe) is None:  # a state once committed is not loaded again
            if not killed(place, recipe, draw.uniform(0, seconds), tally, durable):
                break
        compare(finished(place, recipe), expected, f"killed while loading, run {tally.runs}")
        tally.runs += 1
        _forget(recipe)
    return tally


def _loading_seconds(place: Place, name: str, steps: int) -> float:
    """From the first byte in the store to the folder's flush that follows the manifest of step 0."""
    recipe = place.recipe(name, {}, steps=steps)
    trace = place.trace(recipe.parent)
    finished(place, recipe, trace=trace)
    first, calls = first_store_byte(trace), trace.calls()
    assert first is not None
    _, (_, flush), *_ = namings(calls, manifests.NAME)  # the first says `loading`
    return flush.seconds - first.seconds


def kill_exports(place: Place, *, kills: int, seed: int) -> Tally:
    """Kills between an export's first byte and its end; the next export is whole, and the store as it was."""
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
