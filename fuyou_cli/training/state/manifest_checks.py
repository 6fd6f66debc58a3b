"""Checks that a manifest's values, whose types are right, fit together: offsets, counts and paths of a store are used
unchecked from here on."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import PurePath

from ...checkpoint.header import METADATA
from ...core.json_files import shown
from ...core.typed import LARGEST
from ...spec.model import ITEM_SIZE
from ...spec.plan import Numerics
from .stored import Manifest, StoredExtent, StoredStage, StoredTensor

_MOST_FILES = 16  # of a stripe: FY_MAX_DIRECTORIES of native/include/fuyou.h
_ITEMS = {"remainder": 2, "momentum": 4, "variance": 4}  # bytes of an element; of weights it is the compute dtype's
MOST_THREADS = 1024  # torch crashes when the system has no more of them; a recipe may ask for as many
_LARGEST_WHOLE = (1 << 31) - 1  # of the numbers of a recipe
_NUMERICS = {  # at least and at most
    "batch_size": (1, _LARGEST_WHOLE),
    "micro_batch_size": (1, _LARGEST_WHOLE),
    "max_seq_len": (1, _LARGEST_WHOLE),
    "torch_threads": (1, MOST_THREADS),
    "head_chunk_tokens": (0, _LARGEST_WHOLE),
    "vocabulary_rows": (0, _LARGEST_WHOLE),
}


def why_not(manifest: Manifest) -> str:
    """Says the first thing that cannot be, empty where there is none."""
    return next(_contradictions(manifest), "")


def _contradictions(manifest: Manifest) -> Iterator[str]:
    yield from _paths(manifest)
    yield from _of_numerics(manifest.numerics)
    if manifest.numerics.compute_dtype != manifest.compute_dtype:
        yield f"weights in {manifest.compute_dtype}, computed with in {manifest.numerics.compute_dtype}"
    if manifest.state == "loading" and manifest.stages:
        yield "stages are committed while the store is loading"
    if manifest.state == "committed" and not manifest.stages:
        yield "no stage is committed"
    elif manifest.state == "committed" and not any(stage.tensors for stage in manifest.stages):
        yield "no tensor is committed"
    if manifest.state == "committed" and not manifest.random:
        yield "no states of random generators"
    if (manifest.due is not None) != any(stage.gradients is not None for stage in manifest.stages):
        yield "gradients without an update that is due, or one without gradients"
    if manifest.evaluated is not None and not manifest.evaluated.best_step <= manifest.evaluated.step <= manifest.step:
        yield f"evaluated after step {manifest.evaluated.step}, best after step {manifest.evaluated.best_step}"
    if not manifest.skipped_in_row <= manifest.skipped <= manifest.step:
        yield f"{manifest.skipped} steps of {manifest.step} skipped, {manifest.skipped_in_row} of them last"
    for index, stage in enumerate(manifest.stages):
        for wrong in _of_stage(stage, manifest):
            yield f"stages[{index}]: {wrong}"


def _of_numerics(numerics: Numerics) -> Iterator[str]:
    """Checks that they are within what a recipe may say: a run resumes with them where its recipe says `auto`."""
    for key, (least, most) in _NUMERICS.items():
        value = getattr(numerics, key)
        if not least <= value <= most:
            yield f"numerics.{key} is {value}"
    if numerics.micro_batch_size and numerics.batch_size % numerics.micro_batch_size:
        yield f"batches of {numerics.batch_size} rows in micro-batches of {numerics.micro_batch_size}"


def _paths(manifest: Manifest) -> Iterator[str]:
    if not 1 <= len(manifest.files) <= _MOST_FILES or len(manifest.parts) != len(manifest.files):
        yield f"{len(manifest.files)} files and {len(manifest.parts)} part files"
    if len(set(manifest.files)) != len(manifest.files):
        yield "a file is named twice"
    for path in (*manifest.files, *manifest.parts, *manifest.companions, manifest.model_dir):
        if not is_plain(path):
            yield f"{shown(path)} is not a plain absolute path"


def is_plain(path: str) -> bool:
    """Tells whether a path is one that a store names: absolute, and without `..`."""
    return "\0" not in path and PurePath(path).is_absolute() and ".." not in PurePath(path).parts


def _of_stage(stage: StoredStage, manifest: Manifest) -> Iterator[str]:
    named = dict(stage.extents())
    if not stage.params:
        if named or stage.tensors:
            yield "tensors of no parameters"
        return
    if stage.trained > stage.params:
        yield f"{stage.trained} trained parameters of {stage.params}"
        return
    if stage.trained and stage.generation + ("gradients" in named) != manifest.step:
        yield f"generation {stage.generation} after step {manifest.step}"
    if "gradients" in named and manifest.mode != "redo":
        yield f"gradients of a step to be done in a store of mode {manifest.mode}"
    if ("weights" in named, "frozen" in named) != (stage.trained > 0, stage.trained < stage.params):
        yield "no weights"
    if not stage.trained:
        if set(named) - {"frozen"}:
            yield "states of frozen parameters"
    elif {name for name in named if name in ("momentum", "variance")} != (
        set() if stage.zero_moments else {"momentum", "variance"}
    ):
        yield "moments that are zero take no extent, all others do"
    if stage.trained and ("remainder" in named) != (manifest.compute_dtype == "bfloat16" and not stage.zero_remainder):
        yield "a remainder that is zero takes no extent, nor do weights without one"
    for name, extent in named.items():
        item = _ITEMS.get(name, ITEM_SIZE[manifest.compute_dtype])
        item = ITEM_SIZE[manifest.numerics.accumulate_dtype] if name == "gradients" else item
        count = stage.params - stage.trained if name == "frozen" else stage.trained
        yield from (f"{name}: {wrong}" for wrong in _of_extent(extent, count * item, manifest.store_size))
    for index, tensor in enumerate(stage.tensors):
        yield from (f"tensors[{index}]: {wrong}" for wrong in _of_tensor(tensor, stage))


def _of_extent(extent: StoredExtent, size: int, store_size: int) -> Iterator[str]:
    if extent.size != size:
        yield f"{extent.size} bytes, {size} are wanted"
    if extent.offset + extent.size > store_size:
        yield f"bytes {extent.offset} to {extent.offset + extent.size} of a store of {store_size}"


def _of_tensor(tensor: StoredTensor, stage: StoredStage) -> Iterator[str]:
    if tensor.stored_as == METADATA:
        yield f"no tensor of a checkpoint is called {shown(tensor.stored_as)}"
    whole = prod(tensor.shape)
    if whole > LARGEST:
        yield f"{len(tensor.shape)} dimensions of more elements than any tensor has"
    elif tensor.first + tensor.count > whole:
        yield f"elements {tensor.first} to {tensor.first + tensor.count} of {whole}"
    end = tensor.offset + tensor.count
    if end > stage.params or tensor.offset < stage.trained < end:
        yield f"elements {tensor.offset} to {end} of a stage of {stage.params}, {stage.trained} of them trained"
