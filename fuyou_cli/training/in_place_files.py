"""Finds the checkpoint's files that a run's frozen weights are read from, and says why they have to be copied instead.

A run that is resumed reads where it read before: the files must be the same, by size and header, and by time of change too if
the manifest has no checksums to compare their content with. One that had copied them goes on with its copy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import UnreadableError, UsageError
from ..core.units import align_up
from ..spec.model import PAGE, SOURCES_AT, InPlace, Lying, SourceFile
from .adapting import entries_of
from .state.at_rest import how_to_put_back

if TYPE_CHECKING:
    from ..checkpoint.reader import TensorEntry
    from ..recipe.schema import Recipe
    from .known_model import KnownModel
    from .state.manifest import Manifest

GPU_ALIGNMENT = 16  # bytes: the fast kernels of a GPU load as many at once

MOST_SOURCES = 1024  # FY_MAX_SOURCES in native/include/fuyou.h


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Holds where the tensors of a model lie in its files: each name with one of `lying`."""

    names: tuple[str, ...]
    lying: tuple[Lying, ...]
    sources: tuple[SourceFile, ...]


def files_in_place(
    recipe: Recipe, known: KnownModel, model_dir: Path, directories: Sequence[Path], saved: Manifest | None, *, device: str
) -> InPlace:
    """Returns where the model's frozen tensors lie. Raises UsageError if a saved run's files are gone or have changed."""
    if saved is not None and not saved.sources:
        return _refused("the saved run has them in its store")
    try:
        places = places_of(recipe, known, model_dir)
        in_place = InPlace(
            tensors=dict(zip(places.names, places.lying, strict=True)),
            sources=places.sources,
            alignment=GPU_ALIGNMENT if device == "cuda" else 1,
        )
    except (UsageError, OSError) as error:
        if saved is not None and isinstance(error, UnreadableError):
            raise
        if saved is None:
            return _refused(
                "the model is not downloaded yet (after `hf download`, a run reads its files and copies nothing)"
                if not model_dir.is_dir() or not any(model_dir.glob("*.safetensors"))
                else f"the model's files cannot be read: {error}"
            )
        raise _changed(str(error), timed=not saved.knows_pieces) from error
    if saved is not None:
        _check_same(saved, in_place.sources)
    elif reason := _reason([Path(source.path) for source in in_place.sources], directories):
        return _refused(reason)
    return in_place


def places_of(recipe: Recipe, known: KnownModel, model_dir: Path) -> Places:
    """Finds the model's tensors in its files. For a plan, files that were looked at before count as the same by their names,
    sizes and times of change. Raises UsageError if they do not hold what the model needs."""
    statuses = [(file.name, file.stat()) for file in sorted(model_dir.glob("*.safetensors*"))]
    about = (str(model_dir.absolute()), [(name, status.st_size, status.st_mtime_ns) for name, status in statuses])
    return known.once(Places, lambda: _found(recipe, known, model_dir), *about, of_files=True)


def _found(recipe: Recipe, known: KnownModel, model_dir: Path) -> Places:
    from ..checkpoint.files import open_checkpoint

    checkpoint = open_checkpoint(model_dir)  # before the model is built: its files may not be there
    entries = entries_of(recipe, known.build().anatomy, checkpoint)
    files = sorted({entry.file for entry in entries.values()})
    lying = lying_in(entries, addresses(files))
    sources = tuple(_described(file, entries) for file in files)
    return Places(names=tuple(lying), lying=tuple(lying.values()), sources=sources)


def _refused(why: str) -> InPlace:
    return InPlace(tensors={}, sources=(), refusal=why)


def _reason(files: Sequence[Path], directories: Sequence[Path]) -> str:
    """Returns why none of the files is read in place, or an empty string. A plan knows the rates of the store's drive only."""
    if len(files) > MOST_SOURCES:
        return f"the model has {len(files)} files, and at most {MOST_SOURCES} can be read from"
    if len(directories) > 1:
        return "the store is striped over several drives, which are faster together than the one with the model"
    if any(file.stat().st_mtime_ns < 0 for file in files):
        return "one of the model's files was last changed before 1970"
    place = next(folder for folder in (directories[0], *directories[0].parents) if folder.exists())
    if any(file.stat().st_dev != place.stat().st_dev for file in files):
        return "the model's files are on another file system than offload.dir"
    return ""


def addresses(files: Sequence[Path]) -> dict[Path, int]:
    """Returns where each file begins in the address space of a store that reads from them."""
    begins, end = dict[Path, int](), SOURCES_AT
    for file in files:
        begins[file] = end
        end += align_up(file.stat().st_size, PAGE)
    return begins


def lying_in(entries: Mapping[str, TensorEntry], begins: Mapping[Path, int]) -> dict[str, Lying]:
    """Returns where the tensors lie in files that begin there."""
    number = {file: place for place, file in enumerate(begins)}
    return {
        name: Lying(dtype=entry.dtype, source=number[entry.file], address=begins[entry.file] + entry.begin)
        for name, entry in entries.items()
    }


def _described(file: Path, entries: Mapping[str, TensorEntry]) -> SourceFile:
    """Describes a file. The digest is of what its header says of the model's tensors."""
    status = file.stat()
    tensors = sorted({(e.name, e.dtype, e.shape, e.begin) for e in entries.values() if e.file == file})
    digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
    return SourceFile(path=str(file.absolute()), size=status.st_size, changed=status.st_mtime_ns, header=digest)


def _check_same(saved: Manifest, files_now: Sequence[SourceFile]) -> None:
    if len(saved.sources) != len(files_now):
        what = f"the model had {len(saved.sources)} files of weights and has {len(files_now)}"
        raise _changed(what, timed=not saved.knows_pieces)
    for was, now in zip(saved.sources, files_now, strict=True):
        may_compare = saved.knows_pieces and now.changed >= 0
        for what in ("size", "header") if may_compare else ("size", "header", "changed"):
            if getattr(was, what) != getattr(now, what):
                word = {"size": "its size", "header": "its header", "changed": "its time of change"}[what]
                raise _changed(f"{now.path}: {word} is not what it was", timed=not may_compare, was=was)


def _changed(what: str, *, timed: bool, was: SourceFile | None = None) -> UsageError:
    """Makes the error for files that have changed. `timed`: their times of change count too. `was`: the one, if it is known."""
    files = "put the files back as they were" + (", with their times of change (cp -p)" if timed else "")
    return UsageError(
        f"the saved run reads its frozen weights from the model's files, and one has changed: {what}",
        hint=f"{files if was is None else how_to_put_back(was, timed=timed)}, or start over with checkpoint.resume=never",
    )
