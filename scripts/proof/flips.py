"""Single bits flipped in what a stopped run has committed: each is found, named, and gone back behind."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training import manifest as manifests
from fuyou_cli.training.at_rest import Verified, verify_store
from fuyou_cli.training.manifest import Manifest, StoredExtent

from .crashes import Ending, Lost, Place, compare, ending, finished, store_of

_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """A run at its end, two of whose states are whole."""

    recipe: Path
    store: Path
    copy: Path  # of the store's folder
    newest: Manifest
    older: Manifest
    end: Ending


@dataclass(kw_only=True, slots=True)
class Found:
    """Flips so far; those after which the run was started again, and went back or refused."""

    flips: int = 0
    went_back: int = 0
    refused: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bit:
    """Of one extent."""

    stage: str
    tensor: str
    file: Path
    byte: int
    bit: int

    def flip(self) -> None:
        """Twice is never."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CLOEXEC)
        try:
            value = os.pread(descriptor, 1, self.byte)[0] ^ (1 << self.bit)
            os.pwrite(descriptor, bytes([value]), self.byte)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def stopped(place: Place, name: str = "flips") -> Stopped:
    recipe = place.recipe(name, {"export.at_end": False}, steps=_STEPS)
    finished(place, recipe)
    store = store_of(recipe)
    newest, older = manifests.read(store), manifests.read(store, manifests.BEFORE)
    if newest is None or older is None or (newest.step, older.step) != (_STEPS, _STEPS - 1):
        raise Lost(f"{store}: two states in a row are wanted")
    copy = place.folder / f"{name}-before"  # not beside the recipe: its folder has one store
    shutil.copytree(store, copy)
    found = Stopped(recipe=recipe, store=store, copy=copy, newest=newest, older=older, end=ending(recipe))
    if any(state.damages for state in verify_store(store)):
        raise Lost(f"{store}: damaged before anything was flipped")
    return found


def _drawn(saved: Manifest, draw: random.Random) -> _Bit:
    """Every extent is as likely as another, and every bit of it."""
    every: list[tuple[str, str, StoredExtent]] = [
        (stage.name, tensor, extent) for stage in saved.stages for tensor, extent in stage.extents()
    ]
    (file,) = saved.files
    stage, tensor, extent = draw.choice(every)
    byte = extent.offset + draw.randrange(extent.size)
    return _Bit(stage=stage, tensor=tensor, file=Path(file), byte=byte, bit=draw.randrange(8))


def flip_bits(place: Place, run: Stopped, *, flips: int, seed: int, resumed_every: int) -> Found:
    """One at a time. After every `resumed_every`-th the run is started again; every fourth of these times the state before is
    damaged too."""
    draw, found = random.Random(seed), Found()
    for number in range(flips):
        bit = _drawn(run.newest, draw)
        what = f"flip {number} of seed {seed}: bit {bit.bit} of byte {bit.byte}, in {bit.tensor} of {bit.stage}"
        bit.flip()
        _check_named(verify_store(run.store), bit, what)
        found.flips += 1
        if number % resumed_every:
            bit.flip()
        elif number // resumed_every % 4 == 3:
            _drawn(run.older, draw).flip()
            _check_refused(place, run, what)
            found.refused += 1
        else:
            _check_went_back(place, run, bit, what)
            found.went_back += 1
    if any(state.damages for state in verify_store(run.store)):
        raise Lost(f"{run.store}: damaged when every bit was put back")
    return found


def _check_named(states: list[Verified], bit: _Bit, what: str) -> None:
    """In the newest state that one tensor is damaged, in the one before none."""
    newest, older = states
    damaged = [(damage.stage, damage.tensor) for damage in newest.damages]
    if damaged != [(bit.stage, bit.tensor)] or older.damages:
        raise Lost(f"{what}: verified as {damaged}, and {len(older.damages)} in the state before")


def _check_went_back(place: Place, run: Stopped, bit: _Bit, what: str) -> None:
    """It says so, and ends as it had ended."""
    end = place.begin("finetune", run.recipe).wait()
    said = (
        f"the state after step {run.newest.step} is damaged: {bit.tensor} of {bit.stage}",
        f"going back to the state after step {run.older.step}, which is whole",
    )
    if end.code != 0 or not all(text in end.err for text in said):
        raise Lost(f"{what}: exit code {end.code}\n{end.text}")
    compare(ending(run.recipe), run.end, what)
    _put_back(run)


def _check_refused(place: Place, run: Stopped, what: str) -> None:
    """Nothing is computed, and both states are left as they are."""
    end = place.begin("finetune", run.recipe).wait()
    if end.code != 1 or "no older one is whole" not in end.err:
        raise Lost(f"{what}, and one more in the state before: exit code {end.code}\n{end.text}")
    for name in (manifests.NAME, manifests.BEFORE):
        if (run.store / name).read_bytes() != (run.copy / name).read_bytes():
            raise Lost(f"{what}: {name} is another")
    _put_back(run)


def _put_back(run: Stopped) -> None:
    shutil.rmtree(run.store)
    shutil.copytree(run.copy, run.store)


def flip_manifests(run: Stopped, *, flips: int, seed: int) -> int:
    """Bits of the newest manifest, one at a time: it is never taken for one. How many were found."""
    path, draw, found = run.store / manifests.NAME, random.Random(seed), 0
    whole = path.read_bytes()
    try:
        for _ in range(flips):
            byte, bit = draw.randrange(len(whole)), draw.randrange(8)
            path.write_bytes(whole[:byte] + bytes([whole[byte] ^ (1 << bit)]) + whole[byte + 1 :])
            try:
                saved, why = manifests.newest(run.store)
            except UsageError as error:
                raise Lost(f"{path}: bit {bit} of byte {byte}: the one before was not taken: {error}") from None
            found += saved == run.older and bool(why)
    finally:
        path.write_bytes(whole)
    return found
