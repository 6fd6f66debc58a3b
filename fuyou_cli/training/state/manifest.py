"""The manifest of a run's store: which extents hold which generation of which stage, and where the run stands.

It is written to a temporary file, synced, renamed and its directory synced; the data it names is on stable storage
before. A store being filled says `loading`: there is nothing in it to lose. `committed` names one state whose extents no
update writes over before the next manifest is on stable storage (planner/commits.py): wherever a run ends, the newest
manifest is true. Those before it are kept beside it, one at least and as many as there are snapshots: where a part of the
newest state has become unreadable, an older one may still be whole. One that was gone back behind is kept as well.

The last line holds a digest of the others, so that a manifest is the one that was written or none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from ...core.disk import failed_writing, sync_directory
from ...core.errors import FuyouError, UsageError
from ...core.json_files import find_text, has_too_many_values, object_in
from ...core.own_files import open_own
from ...core.typed import from_json
from ...spec.plan import Numerics, StateTensor, StoreMode
from .validate import MOST_KEPT, why_not

State = Literal["loading", "committed"]

NAME = "manifest.json"
BEFORE = "manifest.before.json"  # of the commit before
DAMAGED = "manifest.damaged.json"  # was the newest, and was gone back behind
COMPANIONS = "companions"  # the folder beside it with what an export needs besides weights
VERSION = 5
TENSORS = get_args(StateTensor)  # of a stage, in the order of a place
_EXTENTS = (*TENSORS, "gradients")
_NEW = ".manifest.new"  # fixed names: what a killed run leaves is written over by the next
_NEW_BEFORE = ".manifest.before.new"
_BEFORE = (BEFORE, *(f"manifest.before-{number}.json" for number in range(2, MOST_KEPT)))  # the newest first
EVERY_NAME = (NAME, *_BEFORE, DAMAGED)  # of a manifest
BESIDE = (*_BEFORE, DAMAGED, _NEW, _NEW_BEFORE)  # what there may be next to one, however many states are kept
_DIGEST = ',\n"digest": '
LARGEST = 64 << 20  # bytes; a mixture of a hundred thousand tensors takes a third of it
_LARGEST_SUM = (1 << 64) - 1
_START_OVER = "start over with checkpoint.resume=never"
_LOST = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}  # of a file: a drive does not have it any more


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor, or the run of its elements that a stage holds."""

    name: str  # in the model
    stored_as: str  # in the checkpoint it came from, and in every export
    shape: tuple[int, ...]  # of the whole tensor
    offset: int  # elements within the stage
    first: int  # elements of the tensor before these
    count: int
    decay: bool  # whether AdamW's weight decay is of it


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredExtent:
    """Bytes of the store, and the sum (`swap.kernels.checksum`) of what was written there."""

    offset: int
    size: int
    sum: Annotated[int, Field(le=_LARGEST_SUM)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStage:
    """One stage at rest. Extents are None where every value is zero or there is no such tensor."""

    name: str
    params: int
    generation: int
    turn: int  # of its ring (spec.plan.Ring), which says where
    zero_moments: bool
    zero_remainder: bool
    weights: StoredExtent | None
    remainder: StoredExtent | None
    momentum: StoredExtent | None
    variance: StoredExtent | None
    gradients: StoredExtent | None  # of the step behind `generation`, whose update is to be done
    tensors: tuple[StoredTensor, ...]

    def extents(self) -> list[tuple[str, StoredExtent]]:
        """What of the stage is on the store, by name."""
        named = [(name, getattr(self, name)) for name in _EXTENTS]
        return [(name, extent) for name, extent in named if extent is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DueUpdate:
    """AdamW of the stages whose gradients make a step durable, as the step began it."""

    lr: float
    gradient_scale: float  # the clipping factor
    step: int  # 1 for the first: bias corrections
    skipped: bool  # every value stays as it is
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    run: str  # names this run in the part files of its folders
    files: tuple[str, ...]  # absolute paths of the store's files, in the order of the stripe
    parts: tuple[str, ...]  # of the part files beside them
    companions: tuple[str, ...]  # of what else there is of the run; all three are what `fuyou clean` may remove
    stripe: int
    store_size: int
    state: State
    step: int  # finished steps, the generation of every stage without gradients; as many losses are in training/losses.py
    written_total: int
    model_dir: str
    architecture: str
    compute_dtype: Literal["float32", "bfloat16"]
    numerics: Numerics
    fingerprints: dict[str, str]  # model, data, recipe: what a resumed run must agree on
    libraries: dict[str, str]  # versions of what computed it (training/libraries.py)
    random: dict[str, Any]  # states of generators (training/state/random_states.py)
    mode: StoreMode
    keep: int  # states that are there whole at any time, this one among them
    due: DueUpdate | None  # of stages with gradients
    stages: tuple[StoredStage, ...]
    skipped: int = 0  # of these steps, that updated nothing (train.skip_nonfinite)
    skipped_in_row: int = 0  # of these, the last ones


class DamagedManifest(UsageError):
    """What lies there is not what was written, or cannot be read any more."""


def beside(keep: int) -> tuple[str, ...]:
    """Of these, in a store that keeps so many states."""
    return (*_before(keep), DAMAGED, _NEW, _NEW_BEFORE)


def _before(keep: int) -> tuple[str, ...]:
    """Of the older ones, the newest first: one is kept even where its state is there only until the next step."""
    return _BEFORE[: max(1, keep - 1)]


def write(directory: Path, manifest: Manifest, *, keep: bool = False) -> None:
    """Replaces the manifest of `directory` in one step, on stable storage when this returns. With `keep` the one that was
    there is kept as the one before, and those before it move on; else they go too."""
    path, text = directory / NAME, _text(manifest)
    _refuse_unreadable(path, text)
    try:
        _write_whole(directory / _NEW, text)
        if keep:
            _move_on(directory, _before(manifest.keep))
            _set_aside(path, directory)
        else:
            for name in (*_BEFORE, DAMAGED):
                (directory / name).unlink(missing_ok=True)
        (directory / _NEW).replace(path)
        sync_directory(directory)
    except OSError as error:
        raise failed_writing(path, error) from error


def _refuse_unreadable(path: Path, text: str) -> None:
    """What `read` refuses is not committed: the state before it can still be gone on from."""
    if len(text) > LARGEST or has_too_many_values(text):
        raise FuyouError(
            f"{path} would have {len(text):,} bytes, which is more than can be read again: nothing is committed",
            hint="the model has more tensors than the state of a run can name",
        )


def _write_whole(path: Path, text: str) -> None:
    with os.fdopen(open_own(path, anew=True), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _set_aside(path: Path, directory: Path) -> None:
    """The manifest gets its second name in one step; where links are refused it is moved, and for a moment the one before is
    the newest (`newest` finds it)."""
    new = directory / _NEW_BEFORE
    new.unlink(missing_ok=True)
    try:
        os.link(path, new)
    except OSError:
        path.replace(directory / BEFORE)
    else:
        new.replace(directory / BEFORE)


def _move_on(directory: Path, names: tuple[str, ...]) -> None:
    """Each takes the name of the one before it, from the oldest on: one may be missing, none is there twice."""
    for newer, older in zip(names[-2::-1], names[:0:-1], strict=True):
        if (directory / newer).exists():
            (directory / newer).replace(directory / older)


def go_back(directory: Path, older: Manifest) -> None:
    """One of those before the newest is the newest again; the newest is kept aside, those between are gone back behind too."""
    place = next((place for place, name in enumerate(_BEFORE) if _is(directory, name, older)), None)
    if place is None:  # it was read a moment ago
        raise FuyouError(f"{directory}: the manifest of the state after step {older.step} cannot be read any more")
    try:
        with suppress(FileNotFoundError):
            (directory / NAME).replace(directory / DAMAGED)
        (directory / _BEFORE[place]).replace(directory / NAME)
        for name in _BEFORE[:place]:
            (directory / name).unlink(missing_ok=True)
        sync_directory(directory)
    except OSError as error:
        raise failed_writing(directory / NAME, error) from error


def _is(directory: Path, name: str, manifest: Manifest) -> bool:
    try:
        return read(directory, name) == manifest
    except UsageError:
        return False


def _text(manifest: Manifest) -> str:
    """A line for each key, the digest of all others last."""
    content = {"fuyou_store": VERSION, **asdict(manifest)}
    body = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(content[key])}" for key in sorted(content))
    return f'{body}{_DIGEST}"{_digest(body)}"\n}}\n'


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def newest(directory: Path) -> tuple[Manifest | None, str]:
    """The manifest to go on from, and why it is not the newest where it is none. Raises as `read` does: what cannot be read
    now may be whole, and is not gone back behind."""
    try:
        found = read(directory)
    except DamagedManifest as error:
        if (older := next(_readable(directory), None)) is None:
            raise
        return older, error.message
    if found is not None or (older := next(_readable(directory), None)) is None:
        return found, ""
    return older, f"{directory / NAME} is gone"


def before(directory: Path, manifest: Manifest) -> Iterator[Manifest]:
    """The states of its run that are kept beside it, the newest first, whether whole or not. In redo a step has several
    manifests."""
    for older in _readable(directory):
        if older.run == manifest.run and older.step <= manifest.step and older != manifest:
            yield older


def _readable(directory: Path) -> Iterator[Manifest]:
    for name in _BEFORE:
        with suppress(UsageError):
            if (found := read(directory, name)) is not None:
                yield found


def read(directory: Path, name: str = NAME) -> Manifest | None:
    """The manifest of `directory`, None when there is none. Raises DamagedManifest where it is not one, UsageError where it
    cannot be read."""
    path = directory / name
    if os.path.lexists(directory) and not directory.is_dir():
        hint = "offload.dir and checkpoint.resume name folders"
        raise UsageError(f"there can be no store in {directory}: a file is in its place", hint=hint)
    try:
        text = find_text(path, limit=LARGEST, hint=_START_OVER)
    except UsageError as error:
        if isinstance(error.__context__, OSError) and error.__context__.errno not in _LOST:
            raise
        raise DamagedManifest(error.message, hint=error.hint) from None
    return None if text is None else _parsed(path, text)


def _parsed(path: Path, text: str) -> Manifest:
    """A digest says that a manifest is whole, not who wrote it: every value is looked at as if anybody had."""
    try:
        content = object_in(path, text, names=True)
    except UsageError as error:
        raise DamagedManifest(error.message, hint=_START_OVER) from None
    version = content.pop("fuyou_store", None)
    body, _, _ = text.rpartition(_DIGEST)
    is_sealed = content.pop("digest", None) == _digest(body)
    if type(version) is not int or version != VERSION:
        kind = UsageError if is_sealed else DamagedManifest
        raise kind(f"{path} is not a manifest of version {VERSION}", hint="it was written by another version")
    if not is_sealed:
        raise DamagedManifest(f"{path} is damaged: its digest is not that of its content", hint=_START_OVER)
    try:
        found = from_json(Manifest, content)
    except UsageError as error:
        raise DamagedManifest(f"{path} is damaged: {error.message}", hint=_START_OVER) from None
    if wrong := why_not(found):
        raise DamagedManifest(f"{path} is damaged: {wrong}", hint=_START_OVER)
    return found
