"""Fills a run's store from a checkpoint, or from the stores of another number of ranks, and moves whole stages between arena
and store.

Loading streams each tensor through a weight slot, or through the stage's home in RAM. It needs the memory of one slot and one
piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...checkpoint.quantised_files import reads_parts
from ...checkpoint.reader import TensorEntry, TensorReader
from ...core.errors import DamagedStateError, SwapError, UsageError
from ...engine.context import HostMemory
from ...engine.skeleton import TORCH_DTYPE
from ...engine.updates import MODULUS, DeviceStates, Extents, Sums
from ...planner.ledgers import Record
from ...spec.model import ITEM_SIZE, MOMENTS, Dtype, ModelSpec, StageSpec
from ...spec.packed_tensors import PackedTensor
from ...spec.plan import Plan, Span, StagePlan, StateTensor
from ...swap.daemon import SwapDaemon
from ...swap.kernels import Workers, checksum, split, sum_squares
from ..quantised_weights import DecodingReader, PackedReader, Read, quantise
from .at_rest import ExtentSums, OpenStore, Progress, SavedStore, at_rest, not_as_named
from .manifest import TENSORS, Manifest, StoredExtent, StoredStage, StoredTensor
from .resume import check_stages

if TYPE_CHECKING:
    from ..adapting import Added

# ---- first weights ----------------------------------------------------------------------------------------------------

_PIECE = 1 << 22  # elements of a checkpoint that are converted at once


class FirstWeights:
    """Reads the first weights of one stage after the other."""

    def __init__(self, entries: Mapping[str, TensorEntry], reader: TensorReader, added: Added, *, dtype: Dtype) -> None:
        self._entries, self._reader, self._added_to, self._dtype = entries, reader, added, dtype
        self._decoding = DecodingReader(reader, dtype)
        self._added: Mapping[str, torch.Tensor] = {}
        self._packed: tuple[StageSpec, torch.Tensor] | None = None

    def begin(self, stage: StageSpec) -> bool:
        """Makes `fill` ready for a stage. Tells whether its trained values fit the compute dtype without a remainder. What an
        adapter begins with depends on the weights as they are computed with, so quantised ones come first."""
        self._added = self._added_to([tensor.name for tensor in stage.tensors], self._computed)
        trained = (tensor.name for tensor in stage.trained_tensors if tensor.name not in self._added)
        return self._dtype == "float32" or all(_narrow(self._entries[name]) for name in trained)

    def fill(self, stage: StageSpec, begin: int, weights: torch.Tensor, low_bits: torch.Tensor | None) -> None:
        """Reads elements of the stage from `begin` on, as many as `weights` holds, with zeros between tensors.
        `low_bits`: remainders of trained ones."""
        end = begin + weights.numel()
        weights.zero_()
        if low_bits is not None:
            low_bits.zero_()
        for tensor in stage.tensors:
            first, last = max(begin, tensor.offset), min(end, tensor.offset + tensor.numel)
            if first >= last:
                continue
            part, skipped = slice(first - begin, last - begin), tensor.first + first - tensor.offset
            if tensor.name in self._added:
                weights[part] = self._added[tensor.name].view(-1)[skipped : skipped + last - first]
            elif low_bits is None or tensor.frozen or self._entries[tensor.name].scales is not None:
                self._read(self._entries[tensor.name], weights[part], first=skipped)
            else:
                self._read_split(self._entries[tensor.name], weights[part], low_bits[part], first=skipped)

    def fill_quantised(self, stage: StageSpec, bank: torch.Tensor, *, workers: Workers) -> None:
        """Reads the tensors of the stage that rest quantised into their `bank` (bytes), and quantises those that are not."""
        firsts = {tensor.name: tensor.first for tensor in stage.tensors}

        def parts(name: str, at: PackedTensor) -> Read | None:
            """Returns what reads the parts of a tensor that the checkpoint has quantised; None for any other."""
            entry = self._entries[name]
            return None if entry.scales is None else reads_parts(entry, at, self._reader, first=firsts[name])

        quantise(stage, bank, self._pieces, parts, dtype=self._dtype, workers=workers)
        self._packed = stage, bank

    def _computed(self, name: str) -> Iterator[torch.Tensor]:
        """Yields the same pieces of what is computed with: of a tensor that rests quantised, the decoded values."""
        stage, bank = self._packed or (None, None)
        if stage is None or bank is None or stage.quantisation is None or name not in (packed := stage.packed()):
            yield from self._pieces(name)
            return
        at, held = packed[name], bank.numpy().data
        reader = PackedReader(
            stage.quantisation, at, lambda part, begin, end: held[part[0] + begin : part[0] + end], self._dtype
        )
        for begin in range(0, at.numel, _PIECE):
            values = reader.elements(begin, min(_PIECE, at.numel - begin))
            yield torch.frombuffer(values, dtype=TORCH_DTYPE[self._dtype])

    def _pieces(self, name: str, most: int = _PIECE) -> Iterator[torch.Tensor]:
        """Yields a tensor of the checkpoint in the compute dtype, as 1-D pieces of `most` elements from its beginning."""
        entry = self._entries[name]
        piece = torch.empty(min(most, entry.numel), dtype=TORCH_DTYPE[self._dtype])
        for begin in range(0, entry.numel, most):
            part = piece[: min(most, entry.numel - begin)]
            self._read(entry, part, first=begin)
            yield part

    def _read(self, entry: TensorEntry, values: torch.Tensor, *, first: int) -> None:
        """Reads elements from `first` on. Raises UsageError for NaN or Inf: otherwise they would look like a fault of the
        learning rate later."""
        self._decoding.read_into(entry, values, first=first)
        nonfinite = sum_squares(values.view(torch.uint8).numpy().data, self._dtype)[1]
        if nonfinite:
            raise _damaged(entry, nonfinite, "not finite")

    def _read_split(self, entry: TensorEntry, weights: torch.Tensor, remainder: torch.Tensor, *, first: int) -> None:
        """Splits elements of a tensor wider than bfloat16, from `first` on, into weights and remainder, piece by piece."""
        piece = torch.empty(min(_PIECE, weights.numel()), dtype=torch.float32)
        for begin in range(0, weights.numel(), _PIECE):
            count = min(_PIECE, weights.numel() - begin)
            self._reader.read_into(entry, piece[:count], first_element=first + begin)
            nonfinite = split(
                piece[:count].numpy().data,
                weights[begin : begin + count].view(torch.int16).numpy().data,
                remainder[begin : begin + count].numpy().data,
            )
            if nonfinite:
                raise _damaged(entry, nonfinite, "not finite in bfloat16")


def _narrow(entry: TensorEntry) -> bool:
    """Tells whether bfloat16 has all that is read of a tensor. What is decoded is rounded to it once."""
    return entry.scales is not None or entry.dtype == "bfloat16"


def _damaged(entry: TensorEntry, count: int, what: str) -> UsageError:
    values = "1 value" if count == 1 else f"{count:,} values"
    return UsageError(
        f"{entry.file}: {values} of {entry.name} {'is' if count == 1 else 'are'} {what}",
        hint="the checkpoint is damaged: download it again, or use an earlier one",
    )


# ---- stages -----------------------------------------------------------------------------------------------------------


class StageFiles:
    """Moves whole stages between the store and the arena or device, outside of training."""

    def __init__(self, *, model: ModelSpec, plan: Plan, daemon: SwapDaemon, memory: HostMemory, states: DeviceStates) -> None:
        self.model, self.plan, self.daemon, self.memory, self.states = model, plan, daemon, memory, states
        self.dtype = TORCH_DTYPE[model.compute_dtype]

    def load(
        self, entries: Mapping[str, TensorEntry], added: Added, records: Sequence[Record], progress: Callable[[int], None]
    ) -> None:
        """Writes generation 0 of every stage from a checkpoint's tensors and from those `added`. `progress` gets the parameters
        loaded."""
        with TensorReader() as reader, Workers(self.plan.io.update_threads) as workers:
            source = FirstWeights(entries, reader, added, dtype=self.model.compute_dtype)
            for stage, plan, record in zip(self.model.stages, self.plan.stages, records, strict=True):
                if stage.params:
                    self._load_stage(stage, plan, record, source, workers)
                    progress(stage.numel)

    def _load_stage(self, stage: StageSpec, plan: StagePlan, record: Record, source: FirstWeights, workers: Workers) -> None:
        if plan.updated_on_device:
            record.sums = self._load_there(stage, source, exact=_begun(stage, record, source))
            return
        slot = plan.weights_ram or self.plan.slot_classes[plan.slot_class].weight_slots[0]
        if stage.quantised:
            packed = self.memory.tensor(slot, torch.uint8, stage.weight_bytes)[-stage.packed_bytes :]
            source.fill_quantised(stage, packed, workers=workers)
        exact = _begun(stage, record, source)
        remainder = None if exact else self._remainder_span(plan)
        weights = self.memory.tensor(slot, self.dtype, stage.params - stage.quantised)
        low_bits = None if remainder is None else self.memory.tensor(remainder, torch.int16, stage.trained)
        source.fill(stage, 0, weights[: stage.trained] if stage.source else weights, low_bits)
        if plan.weights_ram is not None:
            self._read_pieces(stage, plan)
        if plan.trained_ram is not None:
            self.memory.tensor(plan.trained_ram, self.dtype).copy_(weights[: stage.trained])
        behind = Span(offset=slot.offset + stage.trained_weight_bytes, size=stage.frozen_weight_bytes)
        filled: dict[StateTensor, Span | None] = {"weights": slot, "frozen": behind, "remainder": remainder}
        record.sums = Sums(
            **{
                name: self._written(span, extent, stage.index)
                for name, span in filled.items()
                if span is not None and (extent := plan.extent(name, 0)) is not None
            }
        )

    def _load_there(self, stage: StageSpec, source: FirstWeights, *, exact: bool) -> Sums:
        """Loads a stage that rests on the device: to the store and to the device."""
        trained: tuple[StateTensor, ...] = ("weights",) if exact else ("weights", "remainder")
        sums = self._load_bank(stage, trained, 0, stage.trained, source)
        if stage.source:
            self._fetch_pieces(stage.index)
            return Sums(**sums)
        return Sums(**sums, **self._load_bank(stage, ("frozen",), stage.trained, stage.params, source))

    def _read_pieces(self, stage: StageSpec, plan: StagePlan) -> None:
        """Reads frozen weights from the checkpoint's files to their home in RAM."""
        assert plan.weights_ram is not None
        begin = plan.weights_ram.offset + stage.trained_weight_bytes
        for piece in stage.source:
            self.daemon.wait(self.daemon.read(begin + piece.place, piece.offset, piece.size, label=stage.index))

    def _fetch_pieces(self, stage: int) -> None:
        """Reads frozen weights from the checkpoint's files to their home on the device."""
        frozen = self.states.homes[stage].tensor("frozen")
        assert frozen is not None
        bytes_of_bank = frozen.view(torch.uint8)
        for piece in self.model.stages[stage].source:
            target, span = bytes_of_bank[piece.place : piece.place + piece.size], Span(offset=piece.offset, size=piece.size)
            total = self.states.copies.fetch(stage, target, span)
            if self.daemon.written is not None:
                self.daemon.written.check(span, total, self.model.stages[stage].name)

    def _load_bank(
        self, stage: StageSpec, names: tuple[StateTensor, ...], first: int, end: int, source: FirstWeights
    ) -> dict[str, int]:
        """Loads elements of a stage that rests on the device, in parts that two slots hold; returns checksums."""
        if first == end:
            return {}
        slots, extents = self.plan.staging_slots, self.states.at_rest(stage.index, 0)
        items, totals = (
            {name: 2 if name == "remainder" else ITEM_SIZE[self.model.compute_dtype] for name in names},
            dict.fromkeys(names, 0),
        )
        most = slots[0].size // max(items.values())
        for begin in range(first, end, most):
            count = min(most, end - begin)
            parts = {name: Span(offset=slot.offset, size=items[name] * count) for name, slot in zip(names, slots, strict=False)}
            weights = self.memory.tensor(parts[names[0]], self.dtype)
            low_bits = self.memory.tensor(parts["remainder"], torch.int16) if "remainder" in parts else None
            source.fill(stage, begin, weights, low_bits)
            for name, part in parts.items():
                (target, extent), place = extents[name], items[name] * (begin - first)
                to = Span(offset=extent.offset + place, size=part.size)
                totals[name] += self._written(part, to, stage.index, position=place)
                self.states.copies.put(part, target[place : place + part.size])
        return {str(name): total % MODULUS for name, total in totals.items()}

    def _remainder_span(self, plan: StagePlan) -> Span:
        """Returns the span that holds a stage's remainder while loading: its home, or a gradient slot (never smaller)."""
        if plan.remainder_ram is not None:
            return plan.remainder_ram
        slots = self.plan.slot_classes[plan.slot_class]
        spare = next(iter(slots.gradient_slots or slots.weight_slots[1:]), plan.gradients_ram)
        if spare is None:
            raise UsageError(
                "training this float32 checkpoint in bfloat16 needs its remainders in RAM",
                hint="set offload.optimizer_states=cpu, or convert the checkpoint to bfloat16",
            )
        return spare

    def _written(self, span: Span, extent: Span | None, label: int, *, position: int = 0) -> int:
        """Writes a span to the store. Returns its checksum, `position` bytes into a larger one."""
        assert extent is not None
        self.daemon.wait(self.daemon.write(span.offset, extent.offset, extent.size, label=label))
        return checksum(self.memory.arena.view(span.offset, extent.size), position=position)

    def save_resident(self, records: Sequence[Record]) -> int:
        """Writes tensors that rest only in RAM or on the device to the extents of their generation. Returns the bytes
        written."""
        written = 0
        for plan, record in zip(self.plan.stages, records, strict=True):
            for name, ram, extent in _resting_in_ram(plan, record):
                if getattr(record.sums, name) is None:  # otherwise the last update wrote it
                    record.sums = replace(record.sums, **{name: self._written(ram, extent, record.stage)})
                    written += extent.size
            extents = self._on_device(record)
            alone = {name: at for name, at in extents.items() if getattr(record.sums, name) is None}
            if alone:
                sums = self.states.copies.begin(record.stage, alone).finish(time.sleep)
                record.sums = replace(record.sums, **{str(name): total for name, total in sums.items()})
                written += sum(extent.size for _, extent in alone.values())
        return written

    def _on_device(self, record: Record) -> Extents:
        """Returns a stage's tensors that rest on the device and are not zero."""
        extents = self.states.at_rest(record.stage, record.turn)
        return {name: extents[name] for name in resting(record) if name in extents}

    def restore(self, saved: Manifest, records: Sequence[Record]) -> None:
        """Sets generations as saved, and reads back the tensors that rest in RAM or on the device."""
        check_stages(saved, self.model, self.plan)
        for plan, record, stage in zip(self.plan.stages, records, saved.stages, strict=True):
            set_as_saved(record, stage)
            self._expect((*(extent for _, extent in stage.extents()), *stage.summed_pieces))
            spec = self.model.stages[record.stage]
            if plan.updated_on_device and spec.source:
                self._fetch_pieces(record.stage)
            elif plan.weights_ram is not None:
                self._read_pieces(spec, plan)
            for _, ram, home in _resting_in_ram(plan, record):
                self.daemon.wait(self.daemon.read(ram.offset, home.offset, home.size, label=record.stage))
            for name, (target, span) in self._on_device(record).items():
                if self.states.copies.fetch(record.stage, target, span) != getattr(record.sums, name):
                    raise SwapError(f"{name} of {stage.name} changed between two reads of the store")

    # ---- from another number of ranks ----------------------------------------------------------------------------
    #
    # Each number of ranks has folders of its own (`store_folders.of_rank`), and where a stage lies in a store follows from the
    # plan of the rank that computes it. So every stage is copied, from the store of its owner before into that of its owner
    # now, and compared with the checksums in the old manifest on the way, and read back from here before it is committed
    # (`Saver.bring`). What is there stays as it is until all ranks have committed what is here: whatever ends the run before,
    # the same command begins again from there.

    def bring(
        self, saved: SavedStore, records: Sequence[Record], window: Span, *, say: Callable[[str], None], progress: Progress
    ) -> None:
        """Copies the stages that are computed here into their places of the same turn. `window`: a span of the arena that
        nobody else uses; `progress` gets the bytes copied. Raises DamagedStateError where one is not what was written."""
        for share in stores_of(saved):
            together = zip(share.manifest.stages, records, self.model.stages, strict=True)
            own = [(stage, record) for stage, record, spec in together if stage.params and not spec.away]
            if not own:
                continue
            with at_rest(share, arena=self.memory.arena, say=say, model_files="none") as store:
                for stage, record in own:
                    self._bring_stage(store, stage, record, window, progress)

    def _bring_stage(self, store: OpenStore, stage: StoredStage, record: Record, window: Span, progress: Progress) -> None:
        set_as_saved(record, stage)
        for name, extent in stage.extents():
            to = self.plan.stages[record.stage].extent(name, stage.turn)
            assert to is not None and to.size == extent.size, (stage.name, name, extent, to)
            if (total := self._copied(store, extent, to, window)) != extent.sum:
                raise DamagedStateError(
                    f"{name} of {stage.name}: {not_as_named(store.manifest, extent, total)}",
                    hint="start as many ranks as before: they go back to the state before, where that is whole",
                )
            progress(extent.size)
        self._expect(stage.summed_pieces)

    def _expect(self, extents: Iterable[StoredExtent]) -> None:
        """Has each read of these compared from now on, if reads are."""
        if self.daemon.written is not None:
            for extent in extents:
                self.daemon.written.expect(Span(offset=extent.offset, size=extent.size), extent.sum)

    def _copied(self, store: OpenStore, extent: StoredExtent, to: Span, window: Span) -> int:
        """Copies an extent, and returns the checksum of what was read."""

        def write(piece: Span, position: int) -> None:
            self.daemon.wait(self.daemon.write(piece.offset, to.offset + position, piece.size))

        return ExtentSums(store.daemon, store.arena, window).of(extent, write)

    def describe(self, records: Sequence[Record], stored_as: Mapping[str, str]) -> tuple[StoredStage, ...]:
        """Describes where every stage rests now. `stored_as`: names of the model's tensors in the checkpoint they came from."""
        together = zip(self.model.stages, self.plan.stages, records, strict=True)
        return tuple(self._described(stage, plan, record, stored_as) for stage, plan, record in together)

    def _described(self, stage: StageSpec, plan: StagePlan, record: Record, stored_as: Mapping[str, str]) -> StoredStage:
        extents: dict[str, StoredExtent | None] = dict.fromkeys(TENSORS)
        for name in resting(record) if stage.params else ():
            if (extent := plan.extent(name, record.turn)) is not None:
                total = getattr(record.sums, name)
                assert total is not None, extent
                extents[name] = StoredExtent(offset=extent.offset, size=extent.size, sum=total)
        known = self.daemon.written
        sums = [known.known(Span(offset=p.offset, size=p.size)) for p in stage.source] if known is not None else []
        return StoredStage(
            name=stage.name,
            params=stage.params,
            trained=stage.trained,
            quantised=stage.quantised,
            generation=record.generation,
            turn=record.turn,
            zero_moments=record.zero_moments,
            zero_remainder=record.zero_remainder,
            **extents,
            pieces=stage.source,
            piece_sums=tuple(total for total in sums if total is not None) if None not in sums else (),  # all of them or none
            tensors=tuple(
                StoredTensor(
                    name=t.name, stored_as=stored_as[t.name], shape=t.model_shape, offset=t.offset, first=t.first,
                    count=t.numel, decay=t.decay,
                )
                for t in stage.tensors
            ),
        )  # fmt: skip


OF_RECORD = ("generation", "turn", "zero_moments", "zero_remainder")  # that a saved stage has, too


def set_as_saved(record: Record, stage: StoredStage) -> None:
    """Sets what the ledger knows of a stage as it was saved."""
    for name in OF_RECORD:
        setattr(record, name, getattr(stage, name))
    record.sums = Sums(**{name: None if (at := getattr(stage, name)) is None else at.sum for name in TENSORS})


def stores_of(saved: SavedStore) -> tuple[SavedStore, ...]:
    """Returns the stores that hold a state: those of all ranks that have trained it."""
    return saved.shares or (saved,)


def _begun(stage: StageSpec, record: Record, source: FirstWeights) -> bool:
    """Begins a stage's generation 0. Tells whether its weights need no remainder."""
    exact = source.begin(stage)
    record.generation, record.turn, record.zero_moments, record.zero_remainder = 0, 0, True, exact
    return exact


def _resting_in_ram(plan: StagePlan, record: Record) -> Iterator[tuple[StateTensor, Span, Span]]:
    """Yields what of a stage rests in RAM and is not zero: its name, where, and the extent of the record's generation."""
    for name in resting(record):
        ram, extent = plan.ram(name), plan.extent(name, record.turn)
        if ram is not None and extent is not None:
            yield name, ram, extent


def resting(record: Record) -> Iterator[StateTensor]:
    """Yields the tensors of a stage that are not all zero."""
    yield "weights"
    yield "frozen"
    if not record.zero_remainder:
        yield "remainder"
    if not record.zero_moments:
        yield from MOMENTS
