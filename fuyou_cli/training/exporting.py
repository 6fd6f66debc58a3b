"""Exports a committed store as a directory that `from_pretrained` loads, extent by extent.

Every extent is checksummed as it is read, and so is what lies in the checkpoint's own files, where a run has summed it. The new
files take their place only when all checksums match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from ..adapters.adapter_names import is_added
from ..checkpoint.files import ADAPTER_CONFIG_NAME, companion_files
from ..checkpoint.writer import OutTensor, write_checkpoint
from ..core.errors import SwapError, UsageError
from ..core.units import MiB, align_up
from ..spec.model import ITEM_SIZE
from ..swap.daemon import SwapDaemon
from ..swap.kernels import CHECKSUM_BLOCK, checksum, join
from ..swap.store import Arena
from .packed_reading import PackedReader
from .state.at_rest import at_rest
from .state.extent_checks import MODULUS, not_as_named
from .state.kept_companions import kept_companions
from .state.source_checks import file_of, other_content
from .state.stored import Manifest, StoredExtent, StoredStage, StoredTensor, Untouched
from .untouched import OwnValues, own_values, with_untouched

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PIECE = 16 * MiB
_WINDOW = _PIECE + MiB  # one piece, and room for the store's alignment
STEP = "fuyou_step"  # in a file's metadata: the steps after which it was written
READ_ARENA = 2 * _WINDOW  # bytes of the arena that `StoreWeights` reads through


class Written(Protocol):
    """Gives weights to write."""

    dtype: str

    @property
    def metadata(self) -> dict[str, str]: ...

    def tensors(self) -> list[OutTensor]: ...

    def read(self, tensor: OutTensor, first: int, count: int) -> memoryview: ...

    def check(self) -> None: ...


class Weights(Written, Protocol):
    """Gives the weights of a store, or of a run under way, and says what they are."""

    def model_name(self, tensor: OutTensor) -> str: ...

    def is_trained(self, tensor: OutTensor) -> bool: ...


@dataclass(slots=True)
class _Summed:
    """Holds the sum of the first `end` bytes of an extent, and the sum of the last of them, from `begin` on."""

    begin: int = 0
    end: int = 0
    total: int = 0
    last: int = 0


class StoreWeights:
    """Reads the weights that a manifest names, as bytes of `dtype`, under the names in the checkpoint they came from. `own`: of
    frozen ones, what they were before they were rounded; None: as they were computed with."""

    def __init__(
        self, manifest: Manifest, daemon: SwapDaemon, arena: Arena, *, dtype: str, own: OwnValues | None = None
    ) -> None:
        self.manifest, self.daemon, self.arena, self.dtype, self._own = manifest, daemon, arena, dtype, own
        self._summed: dict[StoredExtent, _Summed] = {}
        self._packed: tuple[str, PackedReader | None] = ("", None)  # the quantised tensor that was read last
        self._places: dict[str, list[tuple[StoredStage, StoredTensor]]] = {}
        for stage in manifest.stages:
            for tensor in stage.tensors:
                self._places.setdefault(tensor.stored_as, []).append((stage, tensor))
        for name, places in self._places.items():
            _check_complete(name, [tensor for _, tensor in places])

    def model_name(self, tensor: OutTensor) -> str:
        """Returns the model's name of a tensor."""
        return self._places[tensor.name][0][1].name

    def is_trained(self, tensor: OutTensor) -> bool:
        stage, stored = self._places[tensor.name][0]
        return stored.offset < stage.trained

    @property
    def metadata(self) -> dict[str, str]:
        """Returns what a file of these weights says of them."""
        return {STEP: str(self.manifest.step)}

    def tensors(self) -> list[OutTensor]:
        return [OutTensor(name=name, dtype=self.dtype, shape=places[0][1].shape) for name, places in self._places.items()]

    def read(self, tensor: OutTensor, first: int, count: int) -> memoryview:
        """Returns elements [first, first + count) of a tensor in its dtype, from all its stages. The view is valid until the
        next call."""
        parts = [
            (stage, stored, begin, end)
            for stage, stored in self._places[tensor.name]
            if (begin := max(first, stored.first)) < (end := min(first + count, stored.first + stored.count))
        ]
        if len(parts) == 1:
            return self._part(*parts[0], tensor.dtype)
        joined = bytearray()
        for part in parts:
            joined += self._part(*part, tensor.dtype)
        return memoryview(joined)

    def _part(self, stage: StoredStage, stored: StoredTensor, first: int, end: int, dtype: str) -> memoryview:
        """Returns elements [first, end) of the whole tensor in `dtype`; all of them are in one stage."""
        begin, count = stored.offset + first - stored.first, end - first
        compute, is_trained = self.manifest.compute_dtype, stored.offset < stage.trained
        if begin >= stage.params - stage.quantised:
            weights: Buffer = self._decoded(stage, stored, first - stored.first, count)
        elif not is_trained:
            weights = self._frozen(stage, begin - stage.trained, count, ITEM_SIZE[compute])
        else:
            assert stage.weights is not None
            weights = self._elements(stage.weights, begin, count, ITEM_SIZE[compute])
        if compute == dtype:
            return memoryview(weights)
        if compute == "float32":
            return bytes_of(torch.frombuffer(weights, dtype=torch.float32).to(torch.bfloat16))
        if not is_trained and begin < stage.params - stage.quantised and self._own is not None:
            rounded = torch.frombuffer(weights, dtype=torch.bfloat16)
            if (values := self._own.read(stored.stored_as, first, rounded)) is not None:
                return bytes_of(values)
        if not is_trained or stage.remainder is None:
            return bytes_of(torch.frombuffer(weights, dtype=torch.bfloat16).float())
        remainder = self._elements(stage.remainder, begin, count, 2, window=_WINDOW)
        master = torch.empty(count, dtype=torch.float32)
        join(weights, remainder, master.numpy().data)
        return bytes_of(master)

    def _decoded(self, stage: StoredStage, stored: StoredTensor, first: int, count: int) -> memoryview:
        """Returns elements of a quantised tensor as a run computes with them: decoded, in the compute dtype."""
        kind, compute, frozen = self.manifest.quantisation, self.manifest.compute_dtype, stage.frozen
        assert kind is not None and frozen is not None
        bank = ITEM_SIZE[compute] * (stage.params - stage.trained - stage.quantised)  # where it begins

        def read(part: tuple[int, int], begin: int, end: int) -> memoryview:
            return self._bytes(frozen, bank + part[0] + begin, bank + part[0] + end, 0)

        name, reader = self._packed
        if reader is None or name != stored.name:
            reader = PackedReader(kind, stage.packed(kind)[0][stored.name], read, compute)
            self._packed = stored.name, reader
        return reader.elements(first, count)

    def _frozen(self, stage: StoredStage, begin: int, count: int, item: int) -> memoryview:
        """Returns the bytes of `count` frozen elements, of the store or of the checkpoint's files."""
        if stage.frozen is not None:
            return self._elements(stage.frozen, begin, count, item)
        place, size, align = begin * item, count * item, 4096
        number, piece = next(
            (number, piece) for number, piece in enumerate(stage.pieces) if piece.place <= place < piece.place + piece.size
        )
        if number < len(stage.piece_sums):
            return self._bytes(stage.summed_pieces[number], place - piece.place, place - piece.place + size, 0)
        inside = (place - piece.place) % align
        self.daemon.wait(self.daemon.read(0, piece.offset + place - piece.place - inside, align_up(inside + size, align)))
        return self.arena.view(inside, size)

    def _elements(self, extent: StoredExtent, begin: int, count: int, item: int, *, window: int = 0) -> memoryview:
        """Returns the bytes of `count` elements of an extent, through the arena window at `window`."""
        return self._bytes(extent, begin * item, (begin + count) * item, window)

    def _bytes(self, extent: StoredExtent, begin: int, end: int, window: int, *, is_tile: bool = False) -> memoryview:
        """Returns bytes [begin, end) of an extent, through the arena window at `window`."""
        align = 4096
        first = begin // align * align
        self._fetch(extent, first, min(align_up(end, align), extent.size) - first, window, is_tile=is_tile)
        return self.arena.view(window + begin - first, end - begin)

    def _fetch(self, extent: StoredExtent, first: int, size: int, window: int, *, is_tile: bool = False) -> None:
        """Reads bytes of an extent, and adds those that follow the summed ones to the sum. A block or tile that several tensors
        share is read for each of them, and must be the same every time."""
        self.daemon.wait(self.daemon.read(window, extent.offset + first, size))
        summed = self._summed.setdefault(extent, _Summed())
        if first == summed.begin < summed.end:
            summed.total += checksum(self.arena.view(window, summed.end - first), position=first) - summed.last
        if first <= summed.end < first + size:
            fresh = self.arena.view(window + summed.end - first, first + size - summed.end)
            summed.total += checksum(fresh, position=summed.end)
            summed.end = first + size
            summed.begin = first if is_tile else summed.end - CHECKSUM_BLOCK
            summed.last = checksum(
                self.arena.view(window + summed.begin - first, summed.end - summed.begin), position=summed.begin
            )

    def check(self) -> None:
        """Reads the rest of each extent that was read. Raises SwapError if one is not what was written, or ModelFileError where
        it is of the checkpoint's files."""
        for stage in self.manifest.stages:
            for name, extent in stage.extents():
                if (total := self._total(extent)) != extent.sum:
                    raise SwapError(
                        f"{name} of {stage.name}: {not_as_named(self.manifest, extent, total)}",
                        hint="`fuyou verify` reads the whole state again. If it is damaged, running the recipe again goes "
                        "back to the state before",
                    )
            for piece in stage.summed_pieces:
                if self._total(piece) != piece.sum:
                    raise other_content(file_of(self.manifest, piece))

    def _total(self, extent: StoredExtent) -> int:
        """Returns the sum of an extent, of which the rest is read now; one that was not read counts as it should be."""
        if extent not in self._summed:
            return extent.sum
        while (end := self._summed[extent].end) < extent.size:
            self._fetch(extent, end, min(_PIECE, extent.size - end), 0)
        return self._summed[extent].total % MODULUS


def _check_complete(name: str, parts: list[StoredTensor]) -> None:
    """Raises UsageError unless the parts follow one another and make up the whole tensor."""
    end = 0
    for part in parts:
        if part.first != end or part.shape != parts[0].shape:
            raise UsageError(f"the store's parts of {name} do not fit together", hint="its manifest is damaged")
        end += part.count
    if end != prod(parts[0].shape):
        raise UsageError(f"the store holds {end} elements of {name}, not all", hint="its manifest is damaged")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


@contextmanager
def stored_weights(
    source: Path, *, dtype: str, say: Callable[[str], None] | None, model_dir: Path | None = None, trained_only: bool = False
) -> Iterator[StoreWeights]:
    """Opens the committed weights of the store in `source`, to be read as `dtype`. `model_dir`: where the model's checkpoint is
    now, if not where it was. `trained_only`: nothing of what is frozen is read."""
    with ExitStack() as stack:
        files: Literal["compared", "none"] = "none" if trained_only else "compared"
        store = stack.enter_context(at_rest(source, arena_size=READ_ARENA, say=say, model_files=files))
        own: OwnValues | None = None
        if not trained_only:
            folder = model_dir or Path(store.manifest.model_dir)
            own = stack.enter_context(own_values(store.manifest, folder, dtype=dtype, say=say))
        yield StoreWeights(store.manifest, store.daemon, store.arena, dtype=dtype, own=own)


def export_store(
    source: Path,
    out: Path,
    *,
    dtype: str,
    max_shard_size: int,
    model_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Path]:
    """Writes the committed weights of the store in `source` to `out`. `model_dir`: where the model's checkpoint is now, if not
    where it was. Returns the paths of the shards."""
    with stored_weights(source, dtype=dtype, say=say, model_dir=model_dir) as weights:
        if any(is_added(weights.model_name(tensor)) for tensor in weights.tensors()):
            raise UsageError(
                f"{source} holds an adapter, but its {ADAPTER_CONFIG_NAME} is gone",
                hint="running its recipe again writes the file anew",
            )
        return write_whole(weights, source, weights.manifest, out, model_dir, max_shard_size, progress)


def write_whole(
    weights: Written,
    source: Path,
    manifest: Manifest,
    out: Path,
    model_dir: Path | None,
    max_shard_size: int,
    progress: Callable[[int, int], None] | None,
) -> list[Path]:
    """Writes a whole model from the store in `source`, as `export_store` says."""
    model_dir = model_dir or Path(manifest.model_dir)
    return write_model(
        weights,
        out,
        companions=kept_companions(source) or model_dir,
        untouched=manifest.untouched,
        model_dir=model_dir,
        max_shard_size=max_shard_size,
        progress=progress,
    )


def write_model(
    weights: Written,
    out: Path,
    *,
    companions: Path,
    untouched: Untouched | None,
    model_dir: Path,
    max_shard_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Writes a whole model to `out`: its weights, what was left alone of the checkpoint in `model_dir`, and the files of the
    folder `companions`. Returns the shards."""
    with with_untouched(untouched, model_dir, weights.tensors(), weights.read) as (tensors, read):
        return write_checkpoint(
            out,
            tensors,
            read,
            max_shard_size=max_shard_size,
            metadata=weights.metadata,
            companions=companion_files(companions, dtype=weights.dtype),
            progress=progress,
            check=weights.check,
        )
