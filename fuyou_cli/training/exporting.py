"""From a committed store to a directory `from_pretrained` loads: weights streamed extent by extent through one window.

Every extent is summed as it is read, and what is written takes its place only when every sum is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ..core.errors import SwapError, UsageError
from ..core.units import MiB, align_up
from ..swap.arena import Arena
from ..swap.daemon import SwapDaemon
from ..swap.kernels import CHECKSUM_BLOCK, checksum, join
from .at_rest import at_rest
from .checkpoint.companions import companion_files
from .checkpoint.writer import OutTensor, write_checkpoint
from .companions import kept_companions
from .manifest import Manifest, StoredExtent, StoredStage, StoredTensor
from .verify import MODULUS, not_as_written

_PIECE = 16 * MiB
_WINDOW = _PIECE + MiB  # one piece with the store's alignment around it


@dataclass(slots=True)
class _Summed:
    """Of an extent: so many bytes from its beginning, their sum, and that of their last block."""

    end: int = 0
    total: int = 0
    last: int = 0


class StoreWeights:
    """Reads the weights a manifest names, under the names of the checkpoint they came from, so that whatever loaded that
    one loads this. Elements come as bytes of the asked dtype; a tensor in several stages is put together as it is read."""

    def __init__(self, manifest: Manifest, daemon: SwapDaemon, arena: Arena, *, dtype: str) -> None:
        self.manifest, self.daemon, self.arena, self.dtype = manifest, daemon, arena, dtype
        self._summed: dict[StoredExtent, _Summed] = {}
        self._places: dict[str, list[tuple[StoredStage, StoredTensor]]] = {}
        for stage in manifest.stages:
            for tensor in stage.tensors:
                self._places.setdefault(tensor.stored_as, []).append((stage, tensor))
        for name, places in self._places.items():
            _check_complete(name, [tensor for _, tensor in places])

    def tensors(self) -> list[OutTensor]:
        return [OutTensor(name=name, dtype=self.dtype, shape=places[0][1].shape) for name, places in self._places.items()]

    def read(self, tensor: OutTensor, first: int, count: int) -> memoryview:
        """Elements [first, first + count) of a tensor, valid until the next call."""
        parts = [
            (stage, stored, begin, end)
            for stage, stored in self._places[tensor.name]
            if (begin := max(first, stored.first)) < (end := min(first + count, stored.first + stored.count))
        ]
        if len(parts) == 1:
            return self._part(*parts[0])
        joined = bytearray()
        for part in parts:
            joined += self._part(*part)
        return memoryview(joined)

    def _part(self, stage: StoredStage, stored: StoredTensor, first: int, end: int) -> memoryview:
        """Elements [first, end) of the whole tensor, all of them in one stage."""
        begin, count = stored.offset + first - stored.first, end - first
        compute = self.manifest.compute_dtype
        assert stage.weights is not None
        weights = self._elements(stage.weights, begin, count, 2 if compute == "bfloat16" else 4, 0)
        if compute == self.dtype:
            return weights
        if compute == "float32":
            return _bytes_of(torch.frombuffer(weights, dtype=torch.float32).to(torch.bfloat16))
        if stage.remainder is None:
            return _bytes_of(torch.frombuffer(weights, dtype=torch.bfloat16).float())
        remainder = self._elements(stage.remainder, begin, count, 2, _WINDOW)
        master = torch.empty(count, dtype=torch.float32)
        join(weights, remainder, master.numpy().data)
        return _bytes_of(master)

    def _elements(self, extent: StoredExtent, begin: int, count: int, item: int, window: int) -> memoryview:
        """Bytes of `count` elements of an extent, through the arena window at `window`."""
        align = 4096
        first = begin * item // align * align
        size = min(align_up(begin * item + count * item, align), extent.size) - first
        self._fetch(extent, first, size, window)
        inside = begin * item - first
        return self.arena.view(window + inside, count * item)

    def _fetch(self, extent: StoredExtent, first: int, size: int, window: int) -> None:
        """Bytes of an extent. Those that follow what is summed are summed too; a block that several tensors share is read for
        each of them, and has to be the same every time."""
        self.daemon.wait(self.daemon.read(window, extent.offset + first, size))
        summed = self._summed.setdefault(extent, _Summed())
        if first == summed.end - CHECKSUM_BLOCK:
            summed.total += checksum(self.arena.view(window, CHECKSUM_BLOCK), position=first) - summed.last
        if first <= summed.end < first + size:
            fresh = self.arena.view(window + summed.end - first, first + size - summed.end)
            summed.total += checksum(fresh, position=summed.end)
            summed.end = first + size
            summed.last = checksum(fresh[-CHECKSUM_BLOCK:], position=summed.end - CHECKSUM_BLOCK)

    def check(self) -> None:
        """Raises SwapError where an extent that was read is not what was written; what of it was not read, is."""
        for stage in self.manifest.stages:
            for name, extent in stage.extents():
                if extent not in self._summed:
                    continue
                while (end := self._summed[extent].end) < extent.size:
                    self._fetch(extent, end, min(_PIECE, extent.size - end), 0)
                total = self._summed[extent].total % MODULUS
                if total != extent.sum:
                    raise SwapError(
                        f"{name} of {stage.name}: {not_as_written(self.manifest, extent, total)}",
                        hint="nothing was exported: `fuyou verify` reads it all again, and the run's own recipe goes back to "
                        "the state before where this one is damaged",
                    )


def _check_complete(name: str, parts: list[StoredTensor]) -> None:
    """Raises UsageError unless the parts follow one another and make up the whole tensor."""
    end = 0
    for part in parts:
        if part.first != end or part.shape != parts[0].shape:
            raise UsageError(f"the store's parts of {name} do not fit together", hint="its manifest is damaged")
        end += part.count
    if end != prod(parts[0].shape):
        raise UsageError(f"the store holds {end} elements of {name}, not all", hint="its manifest is damaged")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def export_store(
    source: Path,
    out: Path,
    *,
    dtype: str,
    max_shard_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Writes the committed weights of the store in `source` to `out`; the shards' paths."""
    with at_rest(source, arena_size=2 * _WINDOW) as store:
        manifest = store.manifest
        if manifest.due is not None:
            raise UsageError(
                f"the run in {source} was killed between the gradients of step {manifest.step} and its last updates",
                hint="run its recipe again: it goes on from there, and a run that ends or is stopped has all of them done",
            )
        weights = StoreWeights(manifest, store.daemon, store.arena, dtype=dtype)
        return write_checkpoint(
            out,
            weights.tensors(),
            weights.read,
            max_shard_size=max_shard_size,
            metadata={"fuyou_step": str(manifest.step)},
            companions=companion_files(kept_companions(source) or Path(manifest.model_dir), dtype=dtype),
            progress=progress,
            check=weights.check,
        )
