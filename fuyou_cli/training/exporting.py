"""Exports a committed store as a directory that `from_pretrained` loads: the model, LoRA's adapter in peft's files, or the
model with the adapter merged in, piece by piece.

Every extent is checksummed as it is read, and so is what lies in the checkpoint's own files, where a run has summed it. The new
files take their place only when all checksums match. At the end of a run of several ranks the first one writes, and the others
give it the weights of their stores, piece by piece: their boxes may be others.

What training leaves alone is not in the store: parts that do not run on text, as a vision tower, layers that the model's class
does not read, as those that predict further tokens, the values of buffers, and what frozen weights were before they were
rounded to the dtype of compute. An export copies these from the checkpoint that the run began with, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from zlib import crc32

import torch

from ..adapters.adapter_names import adapted_layer, file_name, is_added, lora_names
from ..adapters.merging import LoraSettings, LoraWeights, read_settings
from ..checkpoint.files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    CODE_PATTERN,
    CONFIG_NAME,
    TOKENIZER_CONFIG_NAME,
    companion_files,
    matches,
    names_code,
    open_checkpoint,
    read_json,
)
from ..checkpoint.reader import BYTES_PER_ELEMENT, FLOATS, TensorEntry, TensorReader, weights_mark
from ..checkpoint.writer import OutTensor, Read, write_checkpoint
from ..core.errors import SwapError, UsageError
from ..core.units import MiB, align_up
from ..engine.skeleton import TORCH_DTYPE, auto_class, load_config
from ..spec.model import ITEM_SIZE
from ..spec.packed_tensors import READ_ONLY
from ..swap.kernels import CHECKSUM_BLOCK, checksum, join
from .quantised_weights import DecodingReader, PackedReader
from .state import manifest as manifests
from .state.at_rest import MODULUS, OpenStore, SavedStore, at_rest, file_of, not_as_named, other_content
from .state.kept_companions import kept_adapter, kept_companions
from .state.manifest import Manifest, StoredExtent, StoredStage, StoredTensor, Untouched

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ..engine.ranks import Ranks


# ---- weights of a store -----------------------------------------------------------------------------------------------

_PIECE = 16 * MiB
_WINDOW = _PIECE + MiB  # one piece, and room for the store's alignment
STEP = "fuyou_step"  # in a file's metadata: the steps after which it was written
READ_ARENA = 2 * _WINDOW  # bytes of the arena that `StoreWeights` reads through


class OutWeights(Protocol):
    """Gives weights to write."""

    dtype: str

    @property
    def metadata(self) -> dict[str, str]: ...

    def tensors(self) -> list[OutTensor]: ...

    def read(self, tensor: OutTensor, first: int, count: int) -> memoryview: ...

    def check(self) -> None: ...


class Weights(OutWeights, Protocol):
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


def _check_complete(name: str, parts: list[StoredTensor]) -> None:
    """Raises UsageError unless the parts follow one another and make up the whole tensor. A part twice, in place of another,
    would have the right length."""
    end = 0
    for part in parts:
        if part.first != end or part.shape != parts[0].shape:
            raise UsageError(f"the store's parts of {name} do not fit together", hint="its manifest is damaged")
        end += part.count
    if end != prod(parts[0].shape):
        raise UsageError(f"the store holds {end} elements of {name}, not all", hint="its manifest is damaged")


class StoreWeights:
    """Reads the weights that a manifest names, as bytes of `dtype`, under the names in the checkpoint they came from. Where
    several ranks have trained the model, each of the stores has some of the stages. `own`: of frozen ones, what they were
    before they were rounded; None: as they were computed with. `away`: stores of ranks that give what they have."""

    def __init__(self, *stores: OpenStore, dtype: str, own: OwnValues | None = None, away: Sequence[_AwayReader] = ()) -> None:
        self.manifest, self.dtype = stores[0].manifest, dtype
        self._readers: list[_StoreReader | _AwayReader] = [*(_StoreReader(store, own) for store in stores), *away]
        self._places: dict[str, list[tuple[_StoreReader | _AwayReader, StoredStage, StoredTensor]]] = {}
        for stages in zip(*(reader.manifest.stages for reader in self._readers), strict=True):
            for reader, stage in zip(self._readers, stages, strict=True):
                for tensor in stage.tensors:
                    self._places.setdefault(tensor.stored_as, []).append((reader, stage, tensor))
        for name, places in self._places.items():
            _check_complete(name, [tensor for *_, tensor in places])

    def model_name(self, tensor: OutTensor) -> str:
        """Returns the model's name of a tensor."""
        return self._places[tensor.name][0][2].name

    def is_trained(self, tensor: OutTensor) -> bool:
        _, stage, stored = self._places[tensor.name][0]
        return stored.offset < stage.trained

    @property
    def metadata(self) -> dict[str, str]:
        """Returns what a file of these weights says of them."""
        return {STEP: str(self.manifest.step)}

    def tensors(self) -> list[OutTensor]:
        return [OutTensor(name=name, dtype=self.dtype, shape=places[0][2].shape) for name, places in self._places.items()]

    def read(self, tensor: OutTensor, first: int, count: int) -> memoryview:
        """Returns elements [first, first + count) of a tensor in its dtype, from all its stages. The view is valid until the
        next call."""
        parts = [
            (reader, stage, stored, begin, end)
            for reader, stage, stored in self._places[tensor.name]
            if (begin := max(first, stored.first)) < (end := min(first + count, stored.first + stored.count))
        ]
        if len(parts) == 1:
            reader, stage, stored, begin, end = parts[0]
            return reader.part(stage, stored, begin, end, tensor.dtype)
        joined = bytearray()
        for reader, stage, stored, begin, end in parts:
            joined += reader.part(stage, stored, begin, end, tensor.dtype)
        return memoryview(joined)

    def check(self) -> None:
        """Reads the rest of each extent that was read. Raises SwapError if one is not what was written, or ModelFileError where
        it is of the checkpoint's files."""
        for reader in self._readers:
            reader.check()


class _StoreReader:
    """Reads the stages of one store."""

    def __init__(self, store: OpenStore, own: OwnValues | None) -> None:
        self.manifest, self.daemon, self.arena, self._own = store.manifest, store.daemon, store.arena, own
        self._summed: dict[StoredExtent, _Summed] = {}
        self._packed: tuple[str, PackedReader | None] = ("", None)  # the quantised tensor that was read last

    def part(self, stage: StoredStage, stored: StoredTensor, first: int, end: int, dtype: str) -> memoryview:
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

    def _bytes(self, extent: StoredExtent, begin: int, end: int, window: int) -> memoryview:
        """Returns bytes [begin, end) of an extent, through the arena window at `window`."""
        align = 4096
        first = begin // align * align
        self._fetch(extent, first, min(align_up(end, align), extent.size) - first, window)
        return self.arena.view(window + begin - first, end - begin)

    def _fetch(self, extent: StoredExtent, first: int, size: int, window: int) -> None:
        """Reads bytes of an extent, and adds those that follow the summed ones to the sum. A block that several tensors
        share is read for each of them, and must be the same every time."""
        self.daemon.wait(self.daemon.read(window, extent.offset + first, size))
        summed = self._summed.setdefault(extent, _Summed())
        if first == summed.begin < summed.end:
            summed.total += checksum(self.arena.view(window, summed.end - first), position=first) - summed.last
        if first <= summed.end < first + size:
            fresh = self.arena.view(window + summed.end - first, first + size - summed.end)
            summed.total += checksum(fresh, position=summed.end)
            summed.end = first + size
            summed.begin = summed.end - CHECKSUM_BLOCK
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


# Asked of a rank beside weights: its manifest, and to compare the checksums of what was read.
_MANIFEST, _CHECK = "manifest", "check"


class _AwayReader:
    """Reads the stages of the store of another rank, which is inside `give_weights`."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        place = Path(f"rank {rank} on {ranks.hosts[rank]}") / manifests.NAME
        self.manifest = manifests.parsed(place, bytes(ranks.ask(rank, _MANIFEST)).decode())

    def part(self, stage: StoredStage, stored: StoredTensor, first: int, end: int, dtype: str) -> memoryview:
        return self._ranks.ask(self._rank, [stage.name, stored.name, first, end, dtype])

    def check(self) -> None:
        self._ranks.ask(self._rank, _CHECK)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


@contextmanager
def _opened(
    saved: SavedStore, *, dtype: str, say: Callable[[str], None] | None, model_dir: Path | None, trained_only: bool
) -> Iterator[tuple[list[OpenStore], OwnValues | None]]:
    """Opens the stores of a committed state here, and its frozen weights as they were before they were rounded, if these are
    to be read."""
    with ExitStack() as stack:
        files: Literal["compared", "none"] = "none" if trained_only else "compared"
        stores = [
            stack.enter_context(at_rest(share, arena_size=READ_ARENA, say=say, model_files=files))
            for share in saved.shares or (saved,)
        ]
        own: OwnValues | None = None
        if not trained_only:
            folder = model_dir or Path(saved.manifest.model_dir)
            own = stack.enter_context(own_values(saved.manifest, folder, dtype=dtype, say=say))
        yield stores, own


@contextmanager
def stored_weights(
    saved: SavedStore,
    *,
    dtype: str,
    say: Callable[[str], None] | None,
    model_dir: Path | None = None,
    trained_only: bool = False,
    ranks: Ranks | None = None,
) -> Iterator[StoreWeights]:
    """Opens the committed weights of a store, to be read as `dtype`. `model_dir`: where the model's checkpoint is now, if not
    where it was. `trained_only`: nothing of what is frozen is read. `ranks`: the others give those of their stores."""
    with _opened(saved, dtype=dtype, say=say, model_dir=model_dir, trained_only=trained_only) as (stores, own):
        away = [] if ranks is None else [_AwayReader(ranks, rank) for rank in range(ranks.size) if rank != ranks.rank]
        for rank, reader in enumerate(away, start=1):
            if (reader.manifest.run, reader.manifest.commit) != (saved.manifest.run, saved.manifest.commit):
                what = f"the store of rank {rank} is of another commit than {saved.folder}"
                raise UsageError(what, hint="start all ranks again: they go on from the last commit that all have")
        yield StoreWeights(*stores, dtype=dtype, own=own, away=away)


def give_weights(saved: SavedStore, ranks: Ranks, *, dtype: str, model_dir: Path, say: Callable[[str], None] | None) -> None:
    """Gives the first rank, which exports what all have trained (`export_store`), the weights of this rank's store. Raises
    PeerLost."""
    trained_only = kept_adapter(saved.folder) is not None
    with _opened(saved, dtype=dtype, say=say, model_dir=model_dir, trained_only=trained_only) as ((store,), own):
        reader = _StoreReader(store, own)
        places = {(stage.name, tensor.name): (stage, tensor) for stage in saved.manifest.stages for tensor in stage.tensors}

        def give(question: Any) -> Buffer:
            if question == _MANIFEST:
                return manifests.text_of(saved.manifest).encode()
            if question == _CHECK:
                reader.check()
                return b""
            stage, tensor, first, end, dtype = question
            return reader.part(*places[stage, tensor], first, end, dtype)

        ranks.answer(give)


def export_store(
    saved: SavedStore,
    out: Path,
    *,
    dtype: str,
    max_shard_size: int,
    merged: bool = False,
    model_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
    ranks: Ranks | None = None,
) -> list[Path]:
    """Writes what a store's run has trained to `out`: a model, or an adapter unless it is to be `merged`. `model_dir`: where
    the model's checkpoint is now, if not where it was; `ranks`: of the run, which are all here or in `give_weights`. Returns
    the files of weights."""
    adapter = kept_adapter(saved.folder)
    if merged and adapter is None:
        what = f"{saved.folder} holds a model and no adapter, so there is nothing to merge"
        raise UsageError(what, hint="leave out --merged")
    alone = None if merged else adapter
    model_dir = model_dir or Path(saved.manifest.model_dir)
    companions = kept_companions(saved.folder) or model_dir
    trained_only = alone is not None
    with stored_weights(
        saved, dtype=dtype, say=say, model_dir=model_dir, trained_only=trained_only, ranks=ranks
    ) as weights:  # fmt: skip
        if alone is not None:
            return write_adapter(weights, out, companions=companions, configuration=alone, progress=progress)
        if adapter is None and any(is_added(weights.model_name(tensor)) for tensor in weights.tensors()):
            raise UsageError(
                f"{saved.folder} holds an adapter, but its {ADAPTER_CONFIG_NAME} is gone",
                hint="running its recipe again writes the file anew",
            )
        return write_model(
            as_trained(saved.folder, weights),
            out,
            companions=companions,
            untouched=saved.manifest.untouched,
            model_dir=model_dir,
            max_shard_size=max_shard_size,
            progress=progress,
        )


def write_model(
    weights: OutWeights,
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


# ---- what training leaves alone ---------------------------------------------------------------------------------------


class UntouchedError(UsageError):
    """Reports a folder that does not hold what a run has left alone of its model."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            hint="put the model that the run began with back there, or name its new folder with the recipe: "
            "`fuyou export RECIPE OUT model.name_or_path=FOLDER`",
        )


@contextmanager
def with_untouched(
    untouched: Untouched | None, model_dir: Path, tensors: list[OutTensor], read: Read
) -> Iterator[tuple[list[OutTensor], Read]]:
    """Adds what a run left alone, in the dtypes of its checkpoint, to the tensors to write and to what reads them: what is
    quantised there decoded to bfloat16. Raises UntouchedError if the folder does not hold it any more."""
    if untouched is None:
        yield tensors, read
        return
    entries = left_alone(untouched, model_dir)
    dtypes = {name: entry.dtype if entry.scales is None else "bfloat16" for name, entry in entries.items()}
    more = [OutTensor(name=name, dtype=dtypes[name], shape=entry.shape) for name, entry in entries.items()]
    with TensorReader() as reader:
        decoding = DecodingReader(reader, "bfloat16")

        def read_either(tensor: OutTensor, first: int, elements: int) -> memoryview:
            entry = entries.get(tensor.name)
            if entry is None:
                return read(tensor, first, elements)
            if entry.scales is not None:
                return decoding.read(entry, first, elements)
            item = BYTES_PER_ELEMENT[entry.dtype]
            return memoryview(reader.read_some(entry, first * item, elements * item))

        yield [*tensors, *more], read_either


def left_alone(untouched: Untouched, model_dir: Path) -> dict[str, TensorEntry]:
    """Finds the tensors in the checkpoint's folder, and checks that they are those of the run."""
    try:
        stored = open_checkpoint(model_dir).entries
    except UsageError as error:
        raise UntouchedError(f"what was not trained is in the model's checkpoint: {error.message}") from error
    untouched_entries = {name: stored[name] for name in untouched.names if name in stored}
    if len(untouched_entries) < len(untouched.names) or weights_mark(untouched_entries) != untouched.mark:
        raise UntouchedError(f"{model_dir}: does not hold the parts of the model that were not trained as they were")
    return untouched_entries


class OwnValues:
    """Reads frozen tensors as the model's files have them. Each element must round to what the store has, whose checksums an
    export compares: so the files are those that the run began with."""

    def __init__(self, entries: Mapping[str, TensorEntry], reader: TensorReader) -> None:
        self._entries, self._reader = entries, reader

    def read(self, name: str, first: int, rounded: torch.Tensor) -> torch.Tensor | None:
        """Returns elements of a tensor from `first` on, in float32, that round to `rounded` (1-D, bfloat16). None: the file has
        these. Raises UsageError if they do not."""
        if (entry := self._entries.get(name)) is None:
            return None
        values = torch.empty(len(rounded), dtype=torch.float32)
        self._reader.read_into(entry, values, first_element=first)
        if not torch.equal(values.bfloat16().view(torch.int16), rounded.view(torch.int16)):
            raise UsageError(
                f"{entry.file}: {name} is not what the run began with, so what was not trained cannot be exported in float32",
                hint="put the file back as it was, or export in bfloat16 (--dtype bfloat16, or export.dtype)",
            )
        return values


@contextmanager
def own_values(
    saved: Manifest, model_dir: Path, *, dtype: str, say: Callable[[str], None] | None
) -> Iterator[OwnValues | None]:
    """Opens the model's files for an export in a wider `dtype` than the run computed in. None: the store has all there is, or
    the files are not there, which `say` gets."""
    frozen = {
        tensor.stored_as: tensor.shape
        for stage in saved.stages
        for tensor in stage.tensors
        if stage.frozen is not None and stage.trained <= tensor.offset < stage.params - stage.quantised
    }
    if not frozen or (saved.compute_dtype, dtype) != ("bfloat16", "float32"):
        yield None
        return
    stored, problem = {}, f"{model_dir} does not hold the model that the run began with"
    try:
        stored = open_checkpoint(model_dir).entries
    except UsageError as error:
        problem = error.message
    own = (*FLOATS, *READ_ONLY)  # what is decoded has no values of its own
    is_it = all(name in stored and stored[name].shape == shape and stored[name].dtype in own for name, shape in frozen.items())
    if not is_it and say is not None:
        say(f"note: {problem}. So what was not trained is written as it was computed with, rounded to {saved.compute_dtype}")
    wider = {name: stored[name] for name in frozen if stored[name].dtype in {*FLOATS} - {saved.compute_dtype}} if is_it else {}
    with TensorReader() as reader:
        yield OwnValues(wider, reader) if wider else None


# ---- adapters ---------------------------------------------------------------------------------------------------------

_AT_ONCE = 1 << 20  # elements merged at once: what is computed with takes some megabytes
_OF_THE_MODEL = (CONFIG_NAME, "generation_config.json")  # companions that an adapter's folder does not have; nor model's code


def write_adapter(
    weights: Weights,
    out: Path,
    *,
    companions: Path,
    configuration: bytes | Path,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Writes what was trained to `out`, with peft's configuration, and the tokenizer of the folder `companions`. Returns the
    path of its weights."""
    adapter = AdapterWeights(weights)
    left_out = _OF_THE_MODEL if names_code(companions, TOKENIZER_CONFIG_NAME) else (*_OF_THE_MODEL, CODE_PATTERN)
    files = {
        name: content
        for name, content in companion_files(companions, dtype=weights.dtype).items()
        if not matches(name, left_out)
    }
    return write_checkpoint(
        out,
        adapter.tensors(),
        adapter.read,
        max_shard_size=1 << 62,  # peft reads one file
        single=ADAPTER_NAME,
        metadata=weights.metadata,
        companions={**files, ADAPTER_CONFIG_NAME: configuration},
        progress=progress,
        check=weights.check,
    )


class AdapterWeights:
    """Reads everything that was trained: of LoRA, and of `modules_to_save`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        names = {one: weights.model_name(one) for one in weights.tensors() if weights.is_trained(one)}
        self._stored = {one.name if is_added(name) else file_name(name): one for one, name in names.items()}

    def tensors(self) -> list[OutTensor]:
        return [replace(stored, name=name) for name, stored in self._stored.items()]

    def read(self, tensor: OutTensor, first: int, count: int) -> memoryview:
        return self._weights.read(self._stored[tensor.name], first, count)


class MergedWeights:
    """Reads the model's weights with the adapter merged in, as peft's `merge_and_unload` does. Each is rounded once.

    A and B of one layer are in memory at a time. With DoRA a matrix is read twice: its norms come first."""

    def __init__(self, weights: StoreWeights, settings: LoraSettings) -> None:
        self._weights, self._settings, self.dtype = weights, settings, weights.dtype
        self._stored = {weights.model_name(one): one for one in weights.tensors()}
        # masters count only where the result is as wide
        narrow = weights.dtype == weights.manifest.compute_dtype == "bfloat16"
        self._wide = "bfloat16" if narrow else "float32"
        self._layer: str | None = None
        self._lora: LoraWeights
        self._norms: torch.Tensor | None = None
        self._seen: dict[int, int] = {}  # with DoRA: where a piece begins, and its sum when it was read for the norms

    @property
    def metadata(self) -> dict[str, str]:
        return self._weights.metadata

    def check(self) -> None:
        self._weights.check()

    def tensors(self) -> list[OutTensor]:
        return [stored for name, stored in self._stored.items() if not is_added(name)]

    def read(self, tensor: OutTensor, first: int, count: int) -> memoryview:
        """Returns elements [first, first + count) of a tensor. The view is valid until the next call."""
        layer = adapted_layer(self._weights.model_name(tensor), self._stored)
        if layer is None:
            return self._agreed(tensor, first, count)
        if layer != self._layer:
            self._begin(layer, tensor)
        merged = torch.empty(count, dtype=TORCH_DTYPE[tensor.dtype])
        for begin in range(0, count, _AT_ONCE):
            piece = self._piece(tensor, first + begin, min(_AT_ONCE, count - begin))
            merged[begin : begin + len(piece)] = self._lora.merged(piece, first + begin, norms=self._norms)
        return bytes_of(merged)

    def _begin(self, layer: str, tensor: OutTensor) -> None:
        """Reads what is merged into a layer's matrix."""
        a, b, magnitude = (self._whole(name) for name in lora_names(layer))
        shape = tensor.shape[::-1] if self._settings.fan_in_fan_out else tensor.shape
        is_dora = self._settings.use_dora
        if a is None or b is None or (len(b), a.shape[-1]) != shape or is_dora != (magnitude is not None):
            raise UsageError(f"the store's adapter of {layer} does not fit its weights", hint="its manifest is damaged")
        scaling = self._settings.scaling(layer, len(a))
        self._lora = LoraWeights(
            a=a, b=b, scaling=scaling, transposed=self._settings.fan_in_fan_out, magnitude=magnitude
        )  # fmt: skip
        self._layer, self._norms, self._seen = layer, None, {}
        if is_dora:
            begins = range(0, tensor.numel, _AT_ONCE)
            self._norms = self._lora.output_norms(self._piece(tensor, at, min(_AT_ONCE, tensor.numel - at)) for at in begins)

    def _whole(self, name: str) -> torch.Tensor | None:
        """Returns a tensor of LoRA, in float32."""
        if (stored := self._stored.get(name)) is None:
            return None
        flat = torch.empty(stored.numel, dtype=torch.float32)
        for first in range(0, stored.numel, _AT_ONCE):
            part = flat[first : first + _AT_ONCE]
            part.copy_(self._elements(stored, first, len(part)))
        return flat.view(stored.shape)

    def _piece(self, tensor: OutTensor, first: int, count: int) -> torch.Tensor:
        """Returns elements of a matrix. Raises SwapError if they are not what was read for the norms: the store's own sum is
        of what was read first."""
        piece = self._elements(tensor, first, count)
        if self._settings.use_dora and self._seen.setdefault(first, (total := crc32(bytes_of(piece)))) != total:
            raise _changed(tensor)
        return piece

    def _elements(self, tensor: OutTensor, first: int, count: int) -> torch.Tensor:
        content = self._agreed(replace(tensor, dtype=self._wide), first, count)
        return torch.frombuffer(content, dtype=TORCH_DTYPE[self._wide])

    def _agreed(self, tensor: OutTensor, first: int, count: int) -> memoryview:
        """Reads trained elements twice. Sums are of what is read in its order, and merging does not follow it; but there is
        little of them."""
        once = crc32(self._weights.read(tensor, first, count)) if self._weights.is_trained(tensor) else None
        content = self._weights.read(tensor, first, count)
        if once is not None and crc32(content) != once:
            raise _changed(tensor)
        return content


def _changed(tensor: OutTensor) -> SwapError:
    return SwapError(f"{tensor.name} changed between two reads of the store", hint="nothing was exported: try again")


def as_trained(source: Path, weights: StoreWeights) -> StoreWeights | MergedWeights:
    """Returns the weights of the model that the store in `source` has trained: with its adapter merged in, if it has one."""
    kept = kept_adapter(source)
    return weights if kept is None else MergedWeights(weights, read_settings(kept))


def how_to_load(out: Path, store: Path) -> str | None:
    """Returns two lines of Python that load an adapter that was exported from a store. None: it is a model."""
    if not (out / ADAPTER_CONFIG_NAME).is_file():
        return None
    base = read_json(out / ADAPTER_CONFIG_NAME, names=True).get("base_model_name_or_path")
    kept, name = kept_companions(store), "AutoModelForCausalLM"
    if kept is not None:
        with suppress(UsageError):  # a model with code of its own
            name = auto_class(load_config(kept)).__name__
    return (
        "load it with transformers and peft:\n"
        f'  base = {name}.from_pretrained({base!r}, dtype="auto")\n'
        f"  model = PeftModel.from_pretrained(base, {str(out.resolve())!r})"
    )
