"""Opens a model of safetensors, or a run's store, to compute with its weights forward alone. Nothing is written."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from fuyou_cli.adapters.adapter_names import base_name
from fuyou_cli.checkpoint.files import ADAPTER_CONFIG_NAME, CONFIG_NAME, an_adapter, open_checkpoint
from fuyou_cli.checkpoint.hub import Progress, resolve
from fuyou_cli.checkpoint.names import entries_for
from fuyou_cli.checkpoint.reader import PIECE, TensorEntry, TensorReader
from fuyou_cli.core import probe
from fuyou_cli.core.disk import status_of
from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import Anatomy, Slotted, dissect, whole_in_place
from fuyou_cli.engine.cutting import cut_experts, cut_vocabulary, resolved_rows
from fuyou_cli.engine.devices.cuda import free_memory
from fuyou_cli.engine.forward_only import HUGE_PAGE, SLOTS, ReadInto, ReadPages, Visited, WeightStream
from fuyou_cli.engine.processor import slow_bfloat16
from fuyou_cli.engine.skeleton import TORCH_DTYPE, build, load_config
from fuyou_cli.recipe.schema import MemoryLimit
from fuyou_cli.spec.model import InPlace, Piece
from fuyou_cli.training.evaluation import kept_step
from fuyou_cli.training.exporting import READ_ARENA, MergedWeights, StoreWeights, as_trained, left_alone
from fuyou_cli.training.in_place_files import GPU_ALIGNMENT, addresses, lying_in
from fuyou_cli.training.numerics import for_tensors
from fuyou_cli.training.quantised_weights import DecodingReader
from fuyou_cli.training.run_log import LOG, saved_of
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.at_rest import SavedStore, at_rest, find_saved_store, find_store, whole_store
from fuyou_cli.training.state.kept_companions import kept_adapter, kept_companions
from fuyou_cli.training.state.manifest import Manifest

_READ = 1 << 21  # elements of a store at once: no more than a store's window holds


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundModel:
    """A model without its weights: as it is before `open_for_inference` reads any. `store`: its weights are a run's."""

    folder: Path  # config.json and the tokenizer
    store: SavedStore | None
    anatomy: Anatomy  # in evaluation mode, its vocabulary cut where that is large
    dtype: Literal["float32", "bfloat16"]

    def check_ids(self, ids: Iterable[int], place: str) -> None:
        """Raises UsageError at `place` for a token id that the model has no embedding for."""
        rows = int(self.anatomy.model.get_input_embeddings().num_embeddings)
        if (strange := max(ids, default=0)) >= rows:
            raise UsageError(
                f"{place}: the tokenizer gives the token id {strange:,}, but the model only has embeddings below {rows:,}",
                hint=f"check that the tokenizer in {self.folder} belongs to this model",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bytes that a command divides among a model's weights and the work of a pass: of RAM for the whole process, which has
    `process` of it before, and of a device's own memory (None: it computes in RAM)."""

    ram: int
    process: int
    device: int | None = None

    @classmethod
    def now(cls, ram: int, device: torch.device, limit: MemoryLimit | None = None) -> Budget:
        """Returns the budget of this process as it is now. `limit`: of a GPU's memory, of which only what is free counts."""
        own = None
        if device.type == "cuda":
            free = free_memory(device)
            most = free if limit is None else limit.resolve(total=torch.cuda.mem_get_info(device)[1], auto=free)
            own = for_tensors(min(free, most))
        return cls(ram=ram, process=probe.process_bytes(), device=own)

    def for_weights(self, found: FoundModel, work: int) -> int:
        """Returns the bytes of RAM that are left for weights beside this `work` and what reads them; below 0 if it is too
        much."""
        return self.ram - self.process - work - (PIECE if found.store is None else READ_ARENA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The weights of a model that pass through it. `check` raises SwapError if a store's bytes are not those written; call it
    after a pass. `read_bytes` returns the bytes of weights read so far."""

    weights: WeightStream
    check: Callable[[], None]
    read_bytes: Callable[[], int]


def open_source(
    source: str, *, dtype: Literal["auto", "float32", "bfloat16"] = "auto", attention: str = "sdpa", trusted: bool = False,
    say: Callable[[str], None], progress: Progress = lambda name, done, total: None,
) -> FoundModel:  # fmt: skip
    """Opens what a command names: a model's folder or hub name, a run's store, or a run's output folder. A model of the hub is
    fetched if it is not here. Otherwise as `find`."""
    if not source.strip():
        raise UsageError("the model has no name", hint="give a model's folder or hub name, a run's store or its output_dir")
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = resolve(source, trust_remote_code=trusted, say=say, progress=progress)
    found = find(folder, dtype=dtype, attention=attention, trusted=trusted)
    if found.store is None and found.folder != folder and (note := _note_of_a_newer_state(folder, found.folder)):
        say(note)
    return found


def _note_of_a_newer_state(output_dir: Path, exported: Path) -> str | None:
    """Returns a note if the store of a run holds a newer state than the model that was exported into its output folder."""
    with suppress(UsageError):  # the store is not what is read
        if (store := saved_of(output_dir)) is None or (saved := find_saved_store(store)) is None:
            return None
        step, newest = kept_step(exported), saved.manifest.step
        if step is not None and step < newest:
            return (
                f"note: reading {exported}, which was exported after step {step}; the run has saved step {newest} since: name "
                f"{store} to read that, or export it"
            )
    return None


def cut_to_fit(found: FoundModel, memory: int) -> FoundModel:
    """Returns the model with blocks cut into ranges of their experts (`engine/cutting`), as large as two of them fit `memory`
    bytes of RAM. As it is where whole blocks fit, where it was cut before, or where its experts cannot be stages."""
    dtype = TORCH_DTYPE[found.dtype]
    mixtures = [stage for stage in found.anatomy.stages if stage.kind == "block" and stage.experts]
    if not mixtures or Visited.of(found.anatomy, dtype).least <= memory or any(s.expert_range for s in mixtures):
        return found
    counts = [next(iter(stage.experts[0][1].values())).experts for stage in mixtures]
    routed = [sum(tensor.numel for tensor in stage.tensors if tensor.routed) for stage in mixtures]
    largest = max(-(-elements // count) for elements, count in zip(routed, counts, strict=True)) * dtype.itemsize
    size = max(1, min(max(counts) - 1, max(0, memory) // (SLOTS * largest)))
    while (anatomy := cut_experts(found.anatomy, size)) and size > 1 and Visited.of(anatomy, dtype).least > memory:
        size //= 2
    if not any(stage.expert_range for stage in anatomy.stages):
        return found
    return replace(found, anatomy=anatomy)


def is_store(source: Path) -> bool:
    """Tells a run's store, or a folder that holds one, from a folder with a model."""
    names = (manifests.NAME, manifests.BEFORE)
    return any(status_of(source / name) is not None for name in names) or (
        not (source / CONFIG_NAME).is_file() and any(source.glob(f"*/{manifests.NAME}"))
    )


def find(
    source: Path, *, dtype: Literal["auto", "float32", "bfloat16"] = "auto", attention: str = "sdpa", trusted: bool = False
) -> FoundModel:
    """Finds a model in a folder (its own, or a run's output folder with `model` in it), or in a run's store. The store of an
    output folder without `model` may lie elsewhere. Takes no memory for weights.

    `dtype`: what it computes in; auto: as the run did, or as the configuration says. `trusted`: the model's own code may run.
    Raises UsageError for anything else, and for a model that cannot be streamed.
    """
    store = find_store(source) if is_store(source) else _store_of_output(source)
    folder = source
    if store is not None:
        folder = kept_companions(store.folder) or Path(store.manifest.model_dir)
        dtype = store.manifest.compute_dtype if dtype == "auto" else dtype
    elif not (source / CONFIG_NAME).is_file() and (source / "model" / CONFIG_NAME).is_file():
        folder = source / "model"
    elif not (source / CONFIG_NAME).is_file() and any(
        (place / ADAPTER_CONFIG_NAME).is_file() for place in (source, source / "adapter")
    ):
        where = _where_its_store_is(_output_of(source))
        hint = (
            f"{where}: name that folder, or merge it: fuyou export STORE OUT --merged; without the adapter, name the base model"
        )
        raise an_adapter(source, hint)
    elif not (source / CONFIG_NAME).is_file() and (source / LOG).is_file():
        raise UsageError(
            f"{source}: its run has not exported a model yet",
            hint=f"{_where_its_store_is(source)}: name that folder; or run its recipe to the end, or `fuyou export` it",
        )
    config = load_config(folder, trust_remote_code=trusted)
    if dtype == "auto":
        dtype = "float32" if config.dtype in (None, torch.float32) else "bfloat16"
    model = build(config, dtype=dtype, attention=attention, trust_remote_code=trusted).eval()
    whole = dissect(model)
    return FoundModel(folder=folder, store=store, anatomy=cut_vocabulary(whole, resolved_rows(whole, "auto")), dtype=dtype)


def _output_of(source: Path) -> Path:
    """Returns the output folder of which `source` may be the exported adapter; any other folder as it is."""
    return source.parent if (source / ADAPTER_CONFIG_NAME).is_file() else source


def _store_of_output(source: Path) -> SavedStore | None:
    """Returns the store of a run's output folder in which there is no model, or of the adapter in it, if a state is saved."""
    if any((folder / CONFIG_NAME).is_file() for folder in (source, source / "model")):
        return None
    store = saved_of(_output_of(source))
    if store is None or (_output_of(source) != source and kept_adapter(store) is None):
        return None
    with suppress(UsageError):  # a damaged one: the caller says where it lies
        saved = whole_store(store)
        return saved if saved.manifest.state == "committed" else None
    return None


def _where_its_store_is(output_dir: Path) -> str:
    """Says where the newest saved state of a run is, by its output folder."""
    store = saved_of(output_dir)
    return "its store is in the recipe's offload.dir" if store is None else f"its newest saved state is in {store}"


@contextmanager
def open_for_inference(
    found: FoundModel, *, memory: int, device: torch.device | None = None, device_memory: int = 0,
    say: Callable[[str], None] | None = None,
) -> Iterator[Opened]:  # fmt: skip
    """Opens the weights of a model for passes over its stages.

    It holds in host memory at most `memory` bytes of weights, beside the window of a store (`READ_ARENA`) or a reader's piece:
    stages that stay as far as they fit, and two slots of the largest other one. Nothing is read before the first pass. The
    caller counts its own: boundaries, what a stage computes with, caches of keys and values. `device`: where stages compute;
    at most `device_memory` bytes of weights are in its own memory, or one stage's.

    Raises PlanError if `memory` is too little, UsageError for weights that do not fit the model or a store in use.
    """
    dtype, anatomy, pages = TORCH_DTYPE[found.dtype], found.anatomy, None
    if say is not None and (slow := slow_bfloat16(found.dtype, "cpu" if device is None else device.type)):
        say(f"note: {slow}: compute in float32, by --dtype float32 or precision.compute=float32")
    with ExitStack() as stack:
        check: Callable[[], None] | None = None  # a folder's bytes have no checksums
        if found.store is None:
            entries = entries_for(
                anatomy.model, open_checkpoint(found.folder), untouched=anatomy.untouched, parts=anatomy.parts
            )
            readers = [stack.enter_context(TensorReader()) for _ in range(2)]
            read = _of_files(found, entries, readers[0])
            if (lying := _in_place(found, entries, device)) is not None:
                memory += lying.more
                anatomy, pages = lying.anatomy, lying.reading(readers[1])
            else:
                anatomy = _in_file_order(anatomy, entries)

            def bytes_read() -> int:
                return sum(reader.bytes_read for reader in readers)
        else:
            shares = found.store.shares or (found.store,)
            states = [stack.enter_context(at_rest(share, arena_size=READ_ARENA, say=say)) for share in shares]
            memory -= (len(states) - 1) * READ_ARENA
            weights = as_trained(found.store.folder, StoreWeights(*states, dtype=found.dtype))
            read, check = _of_store(found, found.store.manifest, weights), weights.check

            def bytes_read() -> int:
                return sum(state.daemon.counters().read_bytes for state in states)

        sizes = {"memory": memory, "device_memory": device_memory}
        stream = stack.enter_context(WeightStream(anatomy, read, dtype=dtype, device=device, pages=pages, **sizes))
        yield Opened(weights=stream, check=check or (lambda: None), read_bytes=bytes_read)


@dataclass(frozen=True, kw_only=True, slots=True)
class _InPlace:
    """Holds a model whose stages are laid out as in its files. `more`: bytes that their pages take beyond its own layout."""

    anatomy: Anatomy
    begins: dict[Path, int]
    more: int

    def reading(self, reader: TensorReader) -> ReadPages:
        files, begins = list(self.begins), list(self.begins.values())
        sizes = {file: file.stat().st_size for file in files}

        def read(piece: Piece, into: torch.Tensor) -> None:
            number = bisect_right(begins, piece.offset) - 1
            begin = piece.offset - begins[number]
            reader.read_pages(files[number], begin, min(begin + piece.size, sizes[files[number]]), into.numpy().data)

        return read


def _in_place(found: FoundModel, entries: Mapping[str, TensorEntry], device: torch.device | None) -> _InPlace | None:
    """Returns the model as it lies in its files; None where it is not computed with so, or takes much more memory.

    What it takes more has the place of the piece that a reader converts with (`PIECE`), as nothing is converted."""
    begins = addresses(sorted({entry.file for entry in entries.values()}))
    alignment = GPU_ALIGNMENT if device is not None and device.type == "cuda" else 1
    files = InPlace(tensors=lying_in(entries, begins), sources=(), alignment=alignment)
    if (anatomy := whole_in_place(found.anatomy, files, found.dtype)) is None:
        return None
    own, lying = (Visited.of(version, TORCH_DTYPE[found.dtype]) for version in (found.anatomy, anatomy))
    more = max(0, lying.total_bytes - own.total_bytes) + SLOTS * max(0, lying.largest - own.largest)
    return _InPlace(anatomy=anatomy, begins=begins, more=more) if more + HUGE_PAGE <= PIECE else None


def _in_file_order(anatomy: Anatomy, entries: Mapping[str, TensorEntry]) -> Anatomy:
    """Returns the anatomy with the parameters of each stage, which keep their places, in the order to read them in:
    where reads go here and there, a kernel reads ahead what nobody wants."""

    def place(slotted: Slotted) -> tuple[Path, int]:
        entry = entries[slotted.spec.name]
        return entry.file, entry.begin

    stages = (replace(stage, parameters=tuple(sorted(stage.parameters, key=place))) for stage in anatomy.stages)
    return replace(anatomy, stages=tuple(stages))


def _of_files(found: FoundModel, entries: Mapping[str, TensorEntry], reader: TensorReader) -> ReadInto:
    decoding = DecodingReader(reader, found.dtype)
    return lambda name, into, first: decoding.read_into(entries[name], into, first=first)


def _of_store(found: FoundModel, saved: Manifest, weights: StoreWeights | MergedWeights) -> ReadInto:
    stored_as = {base_name(tensor.name): tensor.stored_as for stage in saved.stages for tensor in stage.tensors}
    shapes = {tensor.name: tensor.model_shape for stage in found.anatomy.stages for tensor in stage.tensors}
    known = {tensor.name: tensor for tensor in weights.tensors()}
    if found.anatomy.buffers and saved.untouched is not None:
        left_alone(saved.untouched, folder := Path(saved.model_dir))
        entries_for(
            found.anatomy.model, open_checkpoint(folder), untouched=found.anatomy.untouched, parts=found.anatomy.parts
        )  # gives the buffers values
    for name, shape in shapes.items():
        if name not in stored_as or known[stored_as[name]].shape != shape:
            raise UsageError(
                f"{found.store and found.store.folder}: its tensors are not those of the model in {found.folder}: {name}",
                hint="export it (fuyou export STORE OUT) and name the exported folder",
            )

    def read(name: str, into: torch.Tensor, first: int) -> None:
        for begin in range(0, into.numel(), _READ):
            part = into[begin : begin + _READ]
            part.view(torch.uint8).numpy().data[:] = weights.read(known[stored_as[name]], first + begin, part.numel())

    return read
