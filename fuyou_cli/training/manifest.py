"""The manifest of a run's store: which extents hold which generation of which stage, and where the run stands.

It is written to a temporary file, synced, renamed and its directory synced; the data it names is on stable storage
before. A store being filled says `loading`: there is nothing in it to lose. `committed` names one state whose extents no
update writes over before the next manifest is on stable storage (planner/commits.py): wherever a run ends, the newest
manifest is true. The one before it is kept beside it: where a part of the newest state has become unreadable, the older one
may still be whole.

The last line holds a digest of the others, so that a manifest is the one that was written or none.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from ..core.disk import failed_writing, sync_directory
from ..core.errors import UsageError
from ..core.json_files import find_text, object_in
from ..spec.plan import Numerics, StateTensor, StoreMode
from ..spec.strict import AtMost, made
from .believable import why_not

State = Literal["loading", "committed"]

NAME = "manifest.json"
BEFORE = "manifest.before.json"  # of the commit before
COMPANIONS = "companions"  # the folder beside it with what an export needs besides weights
VERSION = 4
TENSORS = get_args(StateTensor)  # of a stage, in the order of a place
_EXTENTS = (*TENSORS, "gradients")
_NEW = ".manifest.new"  # fixed names: what a killed run leaves is written over by the next
_NEW_BEFORE = ".manifest.before.new"
BESIDE = (BEFORE, _NEW, _NEW_BEFORE)  # what there may be next to a manifest
_DIGEST = ',\n"digest": '
LARGEST = 64 << 20  # bytes; a mixture of a hundred thousand tensors takes a third of it
_LARGEST_SUM = (1 << 64) - 1
_DAMAGED = "start over with checkpoint.resume=never"


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
    sum: Annotated[int, AtMost(_LARGEST_SUM)]


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
    random: dict[str, Any]  # states of generators (training/random_states.py)
    mode: StoreMode
    keep: int  # states that can be gone back to
    due: DueUpdate | None  # of stages with gradients
    stages: tuple[StoredStage, ...]
    skipped: int = 0  # of these steps, that updated nothing (train.skip_nonfinite)
    skipped_in_row: int = 0  # of these, the last ones


def write(directory: Path, manifest: Manifest, *, keep: bool = False) -> None:
    """Replaces the manifest of `directory` in one step, on stable storage when this returns. With `keep` the one that was
    there is kept as the one before; else that goes too."""
    path = directory / NAME
    try:
        _write_whole(directory / _NEW, _text(manifest))
        if keep:
            _set_aside(path, directory)
        else:
            (directory / BEFORE).unlink(missing_ok=True)
        (directory / _NEW).replace(path)
        sync_directory(directory)
    except OSError as error:
        raise failed_writing(path, error) from error


def _write_whole(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
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


def go_back(directory: Path) -> None:
    """The manifest before the newest is the newest again."""
    try:
        (directory / BEFORE).replace(directory / NAME)
        sync_directory(directory)
    except OSError as error:
        raise failed_writing(directory / NAME, error) from error


def _text(manifest: Manifest) -> str:
    """A line for each key, the digest of all others last."""
    content = {"fuyou_store": VERSION, **asdict(manifest)}
    body = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(content[key])}" for key in sorted(content))
    return f'{body}{_DIGEST}"{_digest(body)}"\n}}\n'


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def newest(directory: Path) -> tuple[Manifest | None, str]:
    """The manifest to go on from, and why it is the one before the newest where it is. Raises as `read` does."""
    try:
        found = read(directory)
        if found is not None or not (directory / BEFORE).is_file():
            return found, ""
        return read(directory, BEFORE), f"{directory / NAME} is gone"
    except UsageError as error:
        with suppress(UsageError):
            if (older := read(directory, BEFORE)) is not None:
                return older, error.message
        raise


def read(directory: Path, name: str = NAME) -> Manifest | None:
    """The manifest of `directory`, None when there is none. Raises UsageError when it is not one."""
    path = directory / name
    if os.path.lexists(directory) and not directory.is_dir():
        hint = "offload.dir and checkpoint.resume name folders"
        raise UsageError(f"there can be no store in {directory}: a file is in its place", hint=hint)
    text = find_text(path, limit=LARGEST, hint=_DAMAGED)
    return None if text is None else _parsed(path, text)


def _parsed(path: Path, text: str) -> Manifest:
    """A digest says that a manifest is whole, not who wrote it: every value is looked at as if anybody had."""
    content = object_in(path, text, names=True, hint=_DAMAGED)
    version = content.pop("fuyou_store", None)
    if type(version) is not int or version != VERSION:
        raise UsageError(f"{path} is not a manifest of version {VERSION}", hint="it was written by another version")
    body, _, _ = text.rpartition(_DIGEST)
    if content.pop("digest", None) != _digest(body):
        raise UsageError(f"{path} is damaged: its digest is not that of its content", hint=_DAMAGED)
    try:
        found: Manifest = made(Manifest, content)
    except UsageError as error:
        raise UsageError(f"{path} is damaged: {error.message}", hint=_DAMAGED) from None
    if wrong := why_not(found):
        raise UsageError(f"{path} is damaged: {wrong}", hint=_DAMAGED)
    return found
