"""Kills runs while the model is loaded, and while it is exported."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from fuyou_cli.training.state import manifest as manifests

from .crashes import Tally, compare, digests, finished, first_store_byte, killed, reference, step_of, store_of
from .setting import Lost
from .shim import namings
from .tiny_runs import Place


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
