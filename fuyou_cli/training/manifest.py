"""The manifest of a run's store: which extents hold which generation of which stage, and where the run stands.

It is written to a temporary file, synced, renamed and its directory synced; the data it names is on stable storage
before. A store being filled says `loading`: there is nothing in it to lose. `committed` names one state, and stays true
through the first step after it, which writes to the other extents only; from the second step on the store says
`running`, and one whose run did not stop in order is refused, because its extents may belong to different steps.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..core.disk import sync_directory
from ..core.errors import FuyouError, UsageError

State = Literal["loading", "committed", "running"]

NAME = "manifest.json"
COMPANIONS = "companions"  # the folder beside it with what an export needs besides weights
VERSION = 3
_LARGEST = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor, or the run of its elements that a stage holds."""

    name: str  # in the model
    stored_as: str  # in the checkpoint it came from, and in every export
    shape: tuple[int, ...]  # of the whole tensor
    offset: int  # elements within the stage
    first: int  # elements of the tensor before these
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStage:
    """One stage at rest. `weights`, `remainder` are the (offset, size) of the valid extents; None where every value is
    zero or there is none."""

    name: str
    params: int
    generation: int
    zero_moments: bool
    zero_remainder: bool
    weights: tuple[int, int]
    remainder: tuple[int, int] | None
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    run: str  # names this run in the part files of its folders
    files: tuple[str, ...]  # absolute paths of the store's files, in the order of the stripe
    parts: tuple[str, ...]  # of the part files beside them
    companions: tuple[str, ...]  # of what an export needs besides; all three are what `fuyou clean` may remove
    stripe: int
    store_size: int
    state: State
    step: int  # finished steps
    written_total: int
    model_dir: str
    architecture: str
    compute_dtype: Literal["float32", "bfloat16"]
    numerics: dict[str, Any]
    fingerprints: dict[str, str]  # model, data, recipe: what a resumed run must agree on
    losses: tuple[float, ...]
    stages: tuple[StoredStage, ...]


def write(directory: Path, manifest: Manifest) -> None:
    """Replaces the manifest of `directory` in one step."""
    text = json.dumps({"fuyou_store": VERSION, **asdict(manifest)}, indent=1, sort_keys=True) + "\n"
    temporary = directory / f".{NAME}.{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / NAME)
        sync_directory(directory)
    except OSError as error:
        raise FuyouError(f"cannot write {directory / NAME}: {error.strerror}") from error


def read(directory: Path) -> Manifest | None:
    """The manifest of `directory`, None when there is none. Raises UsageError when it is not one."""
    path = directory / NAME
    try:
        if path.stat().st_size > _LARGEST:
            raise UsageError(f"{path} is too large to be a manifest")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        hint = "offload.dir and checkpoint.resume name folders"
        raise UsageError(f"there can be no store in {directory}: a file is in its place", hint=hint) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="start over with checkpoint.resume=never") from None
    return _parsed(path, content)


def _parsed(path: Path, content: Any) -> Manifest:
    if not isinstance(content, dict) or content.get("fuyou_store") != VERSION:
        raise UsageError(f"{path} is not a manifest of version {VERSION}", hint="it was written by another version")
    fields = {key: value for key, value in content.items() if key != "fuyou_store"}
    try:
        fields["stages"] = tuple(_stage(stage) for stage in fields["stages"])
        fields["files"] = tuple(str(name) for name in fields["files"])
        fields["parts"] = tuple(str(name) for name in fields["parts"])
        fields["companions"] = tuple(str(name) for name in fields["companions"])
        fields["losses"] = tuple(float(loss) for loss in fields["losses"])
        if fields["state"] not in get_args(State):
            raise ValueError(f"state {fields['state']!r}")
        return Manifest(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}", hint="start over with checkpoint.resume=never") from None


def _stage(content: dict[str, Any]) -> StoredStage:
    tensors = tuple(
        StoredTensor(
            **{key: item[key] for key in ("name", "stored_as", "offset", "first", "count")}, shape=tuple(item["shape"])
        )
        for item in content["tensors"]
    )
    weights, remainder = content["weights"], content["remainder"]
    return StoredStage(
        **{key: content[key] for key in ("name", "params", "generation", "zero_moments", "zero_remainder")},
        weights=(int(weights[0]), int(weights[1])),
        remainder=None if remainder is None else (int(remainder[0]), int(remainder[1])),
        tensors=tensors,
    )
