"""Flips single bits in what a run has committed: each is found and named, and the run falls back to the state before.

The stores are of runs that came to their end; one is striped.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.at_rest import Verified, saved_store, verify_store
from fuyou_cli.training.state.manifest import Manifest, StoredExtent

from .crashes import Ending, check_went_on, compare, damaged, ending, finished, store_of
from .nursery import Ended
from .setting import Lost
from .tiny_runs import TWO_FOLDERS, Place

_STEPS = 3
STORES: dict[str, Mapping[str, Any]] = {
    "one folder": {},
    "two folders": TWO_FOLDERS,
    "every second step": {"checkpoint.commit_every_steps": 2},
}
Names = tuple[tuple[str, str], ...]  # stage and tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """Holds a run that is over, and whose two states are there."""

    recipe: Path
    folders: tuple[Path, ...]  # of the store; the first has the manifests
    copies: tuple[Path, ...]  # of these
    newest: Manifest
    older: Manifest
    end: Ending  # of the run

    @property
    def store(self) -> Path:
        return self.folders[0]


@dataclass(kw_only=True, slots=True)
class Found:
    """Counts flips found so far, and those after which the run was started again and fell back or refused."""

    flips: int = 0
    went_back: int = 0
    refused: int = 0


@dataclass(kw_only=True, slots=True)
class FoundManifests:
    """Counts the same of manifests; `older`: of the one before, which a run with the newest does not need."""

    flips: int = 0
    gone_on: int = 0
    older: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bit:
    """Names one bit of an extent."""

    stage: str
    tensor: str
    at: int  # byte of the store
    file: Path
    byte: int  # of the file
    bit: int

    def flip(self) -> None:
        """Flips the bit; a second flip undoes it."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CLOEXEC)
        try:
            value = os.pread(descriptor, 1, self.byte)[0] ^ (1 << self.bit)
            os.pwrite(descriptor, bytes([value]), self.byte)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def harmed(self, saved: Manifest) -> Names:
        """Returns the parts of a state that hold the bit."""
        return tuple((stage, tensor) for stage, tensor, extent in _extents(saved) if 0 <= self.at - extent.offset < extent.size)


def _extents(saved: Manifest) -> list[tuple[str, str, StoredExtent]]:
    return [(stage.name, tensor, extent) for stage in saved.stages for tensor, extent in stage.extents()]


# ---- stores ----------------------------------------------------------------------------------------------------------


def stopped(place: Place, name: str = "flips", kind: str = "one folder") -> Stopped:
    """Makes the store of a run of three steps."""
    recipe = place.recipe(name, {**STORES[kind], "export.at_end": False}, steps=_STEPS)
    end = finished(place, recipe)
    store = store_of(recipe)
    newest, older = manifests.read(store), manifests.read(store, manifests.BEFORE)
    if newest is None or older is None:
        raise Lost(f"{store}: two states are wanted")
    harmed, stale = damaged(store)
    if harmed or stale:
        raise Lost(f"{store}: damaged before anything was flipped: {(harmed or stale)[0]}")
    folders = tuple(Path(file).parent for file in newest.files)
    # Not beside the recipe: its folder has one store.
    copies = tuple(place.folder / f"{name}-before{number}" for number in range(len(folders)))
    for folder, copy in zip(folders, copies, strict=True):
        shutil.copytree(folder, copy)
    return Stopped(
        recipe=recipe, folders=folders, copies=copies, newest=newest, older=older, end=end
    )  # fmt: skip


def _put_back(run: Stopped) -> None:
    for folder, copy in zip(run.folders, run.copies, strict=True):
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)


# ---- bits of extents -------------------------------------------------------------------------------------------------


def drawn(saved: Manifest, draw: random.Random) -> Bit:
    """Draws a bit. Every extent is equally likely, and every bit of it."""
    stage, tensor, extent = draw.choice(_extents(saved))
    at = extent.offset + draw.randrange(extent.size)
    block, within = divmod(at, saved.stripe)
    turn, index = divmod(block, len(saved.files))
    file, byte = Path(saved.files[index]), turn * saved.stripe + within
    return Bit(stage=stage, tensor=tensor, at=at, file=file, byte=byte, bit=draw.randrange(8))


def flip_bits(place: Place, run: Stopped, *, flips: int, seed: int, resumed_every: int) -> Found:
    """Flips bits one at a time. After every `resumed_every`-th the run is started again; in every fourth of these the state
    before is damaged too."""
    draw, found = random.Random(seed), Found()
    for number in range(flips):
        bit = drawn(run.newest, draw)
        what = f"flip {number} of seed {seed}: bit {bit.bit} of byte {bit.byte} of {bit.file}, in {bit.tensor} of {bit.stage}"
        bit.flip()
        _check_named(run, verify_store(saved_store(run.store)), bit, what)
        found.flips += 1
        if number % resumed_every:
            bit.flip()
            continue
        both = number // resumed_every % 4 == 3
        if both:
            drawn(run.older, draw).flip()
        end = place.begin("finetune", run.recipe).wait()
        if both or bit.harmed(run.older):
            _check_refused(run, end, what)
            found.refused += 1
        else:
            _check_went_back(run, end, bit, what)
            found.went_back += 1
        _put_back(run)
    if damaged(run.store)[0]:
        raise Lost(f"{run.store}: damaged when every bit was put back")
    return found


def _check_named(run: Stopped, states: list[Verified], bit: Bit, what: str) -> None:
    """Checks that the newest state has only that one tensor damaged, and the one before none, unless both have it."""
    newest, *older = (tuple((damage.stage, damage.tensor) for damage in state.damages) for state in states)
    if newest != bit.harmed(run.newest) or len(newest) != 1:
        raise Lost(f"{what}: verified as {newest}")
    if older != [bit.harmed(run.older)]:
        raise Lost(f"{what}: {older} of the state before")


def _check_went_back(run: Stopped, end: Ended, bit: Bit, what: str) -> None:
    """Checks that the run says so, and ends as it had ended."""
    said = (
        f"the state after step {run.newest.step} is damaged: {bit.tensor} of {bit.stage}",
        f"falling back to the state after step {run.older.step}, which is intact",
    )
    if end.code != 0 or not all(text in end.err for text in said):
        raise Lost(f"{what}: exit code {end.code}\n{end.text}")
    compare(ending(run.recipe), run.end, what)


def _check_refused(run: Stopped, end: Ended, what: str) -> None:
    """Checks that nothing is computed, and that both states are left as they are."""
    if end.code != 1 or "no older one is whole" not in end.err:
        raise Lost(f"{what}, and the state before is not whole: exit code {end.code}\n{end.text}")
    for name in (manifests.NAME, manifests.BEFORE):
        if (run.store / name).read_bytes() != (run.copies[0] / name).read_bytes():
            raise Lost(f"{what}: {name} is another")


# ---- bits of manifests -----------------------------------------------------------------------------------------------


def flip_manifests(place: Place, run: Stopped, *, flips: int, seed: int, resumed_every: int) -> FoundManifests:
    """Flips bits of the newest manifest, one at a time: it is never used, and the one before is. After every `resumed_every`-th
    the run is started again: it continues from there, and ends as it had ended. Every fourth of these times the bit is one of
    the manifest before instead, and nothing is lost."""
    draw, found = random.Random(seed), FoundManifests()
    for number in range(flips):
        again, turn = number % resumed_every == 0, number // resumed_every % 4
        older = again and turn == 3
        path = run.store / (manifests.BEFORE if older else manifests.NAME)
        whole = path.read_bytes()
        byte, bit = draw.randrange(len(whole)), draw.randrange(8)
        what = f"flip {number} of seed {seed}: bit {bit} of byte {byte} of {path}"
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ (1 << bit)]) + whole[byte + 1 :])
        _check_taken(run, older, what)
        found.flips += 1
        if not again:
            path.write_bytes(whole)
            continue
        _check_gone_on(run, place.begin("finetune", run.recipe).wait(), older, what)
        found.gone_on += not older
        found.older += older
        _put_back(run)
    return found


def _check_taken(run: Stopped, older: bool, what: str) -> None:
    """Checks which manifest is taken for the newest."""
    try:
        saved, why = manifests.newest(run.store)
    except UsageError as error:
        raise Lost(f"{what}: the one before was not taken: {error}") from None
    if (saved, bool(why)) != ((run.newest, False) if older else (run.older, True)):
        raise Lost(f"{what}: taken for the manifest of step {saved.step if saved is not None else None}, {why or 'no word'}")


def _check_gone_on(run: Stopped, end: Ended, older: bool, what: str) -> None:
    if end.code != 0:
        raise Lost(f"{what}: exit code {end.code}\n{end.text}")
    if older:
        check_went_on(end, what)
    elif f"; continuing from the state after step {run.older.step}" not in end.err:
        raise Lost(f"{what}: not a word of it\n{end.text}")
    compare(ending(run.recipe), run.end, what)
