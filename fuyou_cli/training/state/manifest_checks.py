"""Checks that a manifest's values fit together, once their types are right. Later code uses offsets, counts and paths
unchecked."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import PurePath

from ...checkpoint.header import METADATA
from ...core.json_files import shown
from ...core.typed import LARGEST
from ...core.units import align_up
from ...spec.model import ITEM_SIZE, MOMENTS, PAGE, SOURCES_AT, STATE_NAMES
from ...spec.packed_tensors import MXFP4_BLOCK
from ...spec.plan import Numerics
from .stored import Manifest, StoredExtent, StoredStage, StoredTensor

_MOST_FILES = 16  # files of a store: FY_MAX_DIRECTORIES in native/include/fuyou.h
MOST_SOURCES = 1024  # FY_MAX_SOURCES there
MOST_THREADS = 1024  # torch crashes if the system runs out of threads; a recipe's limit is the same
_LARGEST_WHOLE = (1 << 31) - 1  # of whole numbers in a recipe
_NUMERICS = {  # smallest and largest value
    "batch_size": (1, _LARGEST_WHOLE),
    "micro_batch_size": (1, _LARGEST_WHOLE),
    "max_seq_len": (1, _LARGEST_WHOLE),
    "torch_threads": (1, MOST_THREADS),
    "head_chunk_tokens": (0, _LARGEST_WHOLE),
    "vocabulary_rows": (0, _LARGEST_WHOLE),
    "range_experts": (0, _LARGEST_WHOLE),
    "width_step": (1, _LARGEST_WHOLE),
    "document_step": (0, _LARGEST_WHOLE),
}


def why_not(manifest: Manifest) -> str:
    """Returns the first contradiction in a manifest, or an empty string."""
    return next(_contradictions(manifest), "")


def _contradictions(manifest: Manifest) -> Iterator[str]:
    yield from _paths(manifest)
    yield from _of_numerics(manifest.numerics)
    if manifest.numerics.compute_dtype != manifest.compute_dtype:
        yield f"its weights are in {manifest.compute_dtype}, but its numerics say {manifest.numerics.compute_dtype}"
    if manifest.state == "loading" and manifest.stages:
        yield "it has committed stages, but its state is loading"
    if manifest.state == "committed" and not manifest.stages:
        yield "it has no committed stage"
    elif manifest.state == "committed" and not any(stage.tensors for stage in manifest.stages):
        yield "it has no committed tensor"
    if manifest.state == "committed" and not manifest.random:
        yield "it has no states of random generators"
    for one in (*manifest.evaluated_before, *([manifest.evaluated] if manifest.evaluated is not None else ())):
        if not one.best_step <= one.step <= manifest.step:
            yield f"evaluated after step {one.step}, best after step {one.best_step}"
    if not manifest.skipped_in_row <= manifest.skipped <= manifest.step:
        yield f"it counts {manifest.skipped} skipped steps of {manifest.step}, the last {manifest.skipped_in_row} in a row"
    for change in manifest.changes:
        if change.step > manifest.step:
            yield f"{shown(change.key)} changed after step {change.step}"
    for index, stage in enumerate(manifest.stages):
        for wrong in _of_stage(stage, manifest):
            yield f"stages[{index}]: {wrong}"


def _of_numerics(numerics: Numerics) -> Iterator[str]:
    """Checks that the numerics are within the limits of a recipe, because a run resumes with them if its recipe says `auto`."""
    for key, (least, most) in _NUMERICS.items():
        value = getattr(numerics, key)
        if not least <= value <= most:
            yield f"numerics.{key} is {value}"
    if numerics.micro_batch_size and numerics.batch_size % numerics.micro_batch_size:
        yield f"micro-batches of {numerics.micro_batch_size} rows do not divide batches of {numerics.batch_size}"


def _paths(manifest: Manifest) -> Iterator[str]:
    if not 1 <= len(manifest.files) <= _MOST_FILES or len(manifest.parts) != len(manifest.files):
        yield f"it names {len(manifest.files)} files and {len(manifest.parts)} part files"
    if len(set(manifest.files)) != len(manifest.files):
        yield "it names a file twice"
    if len(manifest.sources) > MOST_SOURCES or not all(source.size for source in manifest.sources):
        yield f"it names {len(manifest.sources)} files of a checkpoint, or an empty one"
    sources = (source.path for source in manifest.sources)
    for path in (*manifest.files, *manifest.parts, *manifest.companions, manifest.model_dir, *sources):
        if not is_plain(path):
            yield f"{shown(path)} is not a plain absolute path"


def is_plain(path: str) -> bool:
    """Tells whether a store may name this path: it must be absolute and without `..`."""
    return "\0" not in path and PurePath(path).is_absolute() and ".." not in PurePath(path).parts


def _of_stage(stage: StoredStage, manifest: Manifest) -> Iterator[str]:
    named = dict(stage.extents())
    if not stage.params:
        if named or stage.tensors:
            yield "has tensors but no parameters"
        return
    if stage.trained > stage.params:
        yield f"has {stage.trained} trained parameters of {stage.params}"
        return
    if stage.trained and stage.generation != manifest.step:
        yield f"generation {stage.generation} after step {manifest.step}"
    has_frozen = "frozen" in named or bool(stage.pieces)
    if ("weights" in named, has_frozen) != (stage.trained > 0, stage.trained < stage.params):
        yield "its extents of weights must match its trained and frozen parameters"
    if not stage.trained:
        if set(named) - {"frozen"}:
            yield "has states of frozen parameters"
    elif {name for name in named if name in MOMENTS} != _moments_of(stage, manifest):
        yield "its moments must have extents unless they are zero, and only then"
    if stage.trained and ("remainder" in named) != (manifest.compute_dtype == "bfloat16" and not stage.zero_remainder):
        yield "its remainder must have an extent if the weights are bfloat16 and it is not zero, and only then"
    if wrong := _of_quantised(stage, manifest):
        yield wrong
        return
    if stage.pieces:
        yield from _of_pieces(stage, manifest)
    for name, extent in named.items():
        yield from (f"{name}: {wrong}" for wrong in _of_extent(extent, _bytes_of(name, stage, manifest), manifest.store_size))
    for index, tensor in enumerate(stage.tensors):
        yield from (f"tensors[{index}]: {wrong}" for wrong in _of_tensor(tensor, stage))


def _moments_of(stage: StoredStage, manifest: Manifest) -> set[str]:
    """Returns the names of the moments that the optimizer keeps and that are not zero."""
    return set() if stage.zero_moments else {name for name in MOMENTS if manifest.layout.size(name, stage.trained)}


def _of_pieces(stage: StoredStage, manifest: Manifest) -> Iterator[str]:
    """Checks that pieces follow one another, lie in the files named, and hold every frozen tensor."""
    item, end = ITEM_SIZE[manifest.compute_dtype], 0
    last = SOURCES_AT + sum(align_up(source.size, PAGE) for source in manifest.sources)
    for piece in stage.pieces:
        if piece.place != end or piece.offset % PAGE or not piece.size or piece.size % PAGE:
            yield "its pieces of files must be whole pages, one behind the other"
        if not SOURCES_AT <= piece.offset <= last - piece.size:
            yield f"has a piece of {piece.size} bytes at {piece.offset}, which no file has"
        end += piece.size
    if len(stage.piece_sums) not in (0, len(stage.pieces)):
        yield f"has {len(stage.piece_sums)} checksums of {len(stage.pieces)} pieces"
    for tensor in stage.tensors:
        begin, size = item * (tensor.offset - stage.trained), item * tensor.count
        if begin >= 0 and not any(p.place <= begin and begin + size <= p.place + p.size for p in stage.pieces):
            yield f"no piece of a file holds {shown(tensor.name)}"


def _bytes_of(name: str, stage: StoredStage, manifest: Manifest) -> int:
    """Returns the bytes that an extent of this name must have."""
    if name in STATE_NAMES:
        return manifest.layout.size(name, stage.trained)
    item = ITEM_SIZE[manifest.compute_dtype]
    if name != "frozen":
        return item * stage.trained
    packed = stage.packed(manifest.quantisation)[1] if stage.quantised and manifest.quantisation is not None else 0
    return item * (stage.params - stage.trained - stage.quantised) + packed


def _of_quantised(stage: StoredStage, manifest: Manifest) -> str:
    """Returns what is wrong with the quantised parameters of a stage, or an empty string."""
    first = stage.params - stage.quantised
    if first < stage.trained or (stage.quantised and manifest.quantisation is None):
        return f"has {stage.quantised} quantised parameters of {stage.params}, {stage.trained} of them trained"
    for tensor in stage.tensors if stage.quantised else ():
        if tensor.offset < first < tensor.offset + tensor.count or (tensor.offset >= first and not _whole(tensor, manifest)):
            return f"its {shown(tensor.name)} is not a whole matrix among the quantised ones"
    return ""


def _whole(tensor: StoredTensor, manifest: Manifest) -> bool:
    """Tells whether a tensor is a matrix, or whole matrices of those that a tensor joins, that its format can hold."""
    if not 2 <= len(tensor.shape) <= 3 or not 0 < prod(tensor.shape) <= LARGEST:
        return False
    if manifest.quantisation == "fp8" and len(tensor.shape) != 2:
        return False
    if manifest.quantisation == "mxfp4" and tensor.shape[-2] % MXFP4_BLOCK:
        return False
    matrix = prod(tensor.shape[-2:])
    return tensor.count > 0 and tensor.count % matrix == 0 and tensor.first % matrix == 0


def _of_extent(extent: StoredExtent, size: int, store_size: int) -> Iterator[str]:
    if extent.size != size:
        yield f"has {extent.size} bytes, but should have {size}"
    if extent.offset + extent.size > store_size:
        yield f"ends at byte {extent.offset + extent.size}, but the store has {store_size} bytes"


def _of_tensor(tensor: StoredTensor, stage: StoredStage) -> Iterator[str]:
    if tensor.stored_as == METADATA:
        yield f"no tensor of a checkpoint has the name {shown(tensor.stored_as)}"
    whole = prod(tensor.shape)
    if whole > LARGEST:
        yield f"its {len(tensor.shape)} dimensions have more elements than any tensor"
    elif tensor.first + tensor.count > whole:
        yield f"holds elements {tensor.first} to {tensor.first + tensor.count} of a tensor of {whole}"
    end = tensor.offset + tensor.count
    if end > stage.params or tensor.offset < stage.trained < end:
        yield f"takes elements {tensor.offset} to {end} of a stage of {stage.params}, {stage.trained} of them trained"
