"""Fills a run's store from a checkpoint, and moves whole stages between arena and store.

Loading streams each tensor through a weight slot, or through the stage's home in RAM. It needs the memory of one slot and one
piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...checkpoint.header import TensorEntry
from ...checkpoint.reader import TensorReader
from ...core.disk import file_systems, store_files
from ...core.errors import OutOfSpaceError, SwapError, UsageError
from ...engine.device_states import MODULUS, DeviceStates, Extents
from ...engine.host_memory import HostMemory
from ...engine.skeleton import TORCH_DTYPE
from ...engine.updates import Sums
from ...planner.records import Record
from ...spec.model import ITEM_SIZE, MOMENTS, ModelSpec, StageSpec
from ...spec.plan import Plan, Span, StagePlan, StateTensor
from ...swap.daemon import SwapDaemon
from ...swap.kernels import Workers, checksum
from .first_weights import Added, FirstWeights
from .manifest import NAME
from .stored import TENSORS, Manifest, StoredExtent, StoredStage, StoredTensor


def check_space(paths: Sequence[Path], size: int) -> None:
    """Raises OutOfSpaceError if the disks have no room for the store, before anything is written."""
    for disk in file_systems(store_files(paths, size)):
        if disk.problem:
            raise OutOfSpaceError(
                disk.problem, hint="free some space, or name another directory in offload.dir; several are striped"
            )


def check_stages(saved: Manifest, model: ModelSpec, plan: Plan) -> None:
    """Raises UsageError where a manifest has other stages than the model, or elsewhere than the plan; the store is not opened
    before, which may make it longer."""
    wanted = [(stage.name, stage.params, stage.trained, stage.quantised, stage.source) for stage in model.stages]
    if [(stage.name, stage.params, stage.trained, stage.quantised, stage.pieces) for stage in saved.stages] != wanted:
        raise UsageError(
            f"{Path(saved.files[0]).with_name(NAME)}: its {len(saved.stages)} stages do not match the {len(wanted)} of this "
            "model in number or size",
            hint="name the model that the run was started with, or start over with checkpoint.resume=never",
        )
    for stage_plan, stage in zip(plan.stages, saved.stages, strict=True):
        places = {name: stage_plan.extent(name, stage.turn) for name in TENSORS}
        if any(places[name] != Span(offset=extent.offset, size=extent.size) for name, extent in stage.extents()):
            raise UsageError(
                f"the saved {stage.name} is not where this version of fuyou would put it",
                hint="another version made the store: start over with checkpoint.resume=never",
            )


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
        if plan.updated_there:
            record.sums = self._load_there(stage, source, exact=_begun(stage, record, source))
            return
        slot = plan.weights_ram or self.plan.slot_classes[plan.slot_class].weight_slots[0]
        if stage.quantised:
            packed = self.memory.tensor(slot, torch.uint8, stage.weight_bytes)[-stage.packed_bytes :]
            source.fill_quantised(stage, packed, workers=workers)
        exact = _begun(stage, record, source)
        remainder = None if exact else self._remainder_span(plan)
        weights = self.memory.tensor(slot, self.dtype, stage.params - stage.quantised)
        rest = None if remainder is None else self.memory.tensor(remainder, torch.int16, stage.trained)
        source.fill(stage, 0, weights[: stage.trained] if stage.source else weights, rest)
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
        there = frozen.view(torch.uint8)
        for piece in self.model.stages[stage].source:
            target, span = there[piece.place : piece.place + piece.size], Span(offset=piece.offset, size=piece.size)
            total = self.states.copies.fetch(stage, target, span)
            if self.daemon.written is not None:
                self.daemon.written.check(span, total, self.model.stages[stage].name)

    def _load_bank(
        self, stage: StageSpec, names: tuple[StateTensor, ...], first: int, end: int, source: FirstWeights
    ) -> dict[str, int]:
        """Loads elements of a stage that rests on the device, in parts that two slots hold; returns checksums."""
        if first == end:
            return {}
        slots, there = self.plan.staging_slots, self.states.at_rest(stage.index, 0)
        items, totals = (
            {name: 2 if name == "remainder" else ITEM_SIZE[self.model.compute_dtype] for name in names},
            dict.fromkeys(names, 0),
        )
        most = slots[0].size // max(items.values())
        for begin in range(first, end, most):
            count = min(most, end - begin)
            parts = {name: Span(offset=slot.offset, size=items[name] * count) for name, slot in zip(names, slots, strict=False)}
            weights = self.memory.tensor(parts[names[0]], self.dtype)
            rest = self.memory.tensor(parts["remainder"], torch.int16) if "remainder" in parts else None
            source.fill(stage, begin, weights, rest)
            for name, part in parts.items():
                (target, extent), place = there[name], items[name] * (begin - first)
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
            there = self._on_device(record)
            alone = {name: at for name, at in there.items() if getattr(record.sums, name) is None}
            if alone:
                sums = self.states.copies.begin(record.stage, alone).finish(time.sleep)
                record.sums = replace(record.sums, **{str(name): total for name, total in sums.items()})
                written += sum(extent.size for _, extent in alone.values())
        return written

    def _on_device(self, record: Record) -> Extents:
        """Returns a stage's tensors that rest on the device and are not zero."""
        there = self.states.at_rest(record.stage, record.turn)
        return {name: there[name] for name in _at_rest(record) if name in there}

    def restore(self, saved: Manifest, records: Sequence[Record]) -> None:
        """Sets generations as saved, and reads back the tensors that rest in RAM or on the device."""
        check_stages(saved, self.model, self.plan)
        for plan, record, stage in zip(self.plan.stages, records, saved.stages, strict=True):
            record.generation, record.turn = stage.generation, stage.turn
            record.sums = Sums(**{name: None if (at := getattr(stage, name)) is None else at.sum for name in TENSORS})
            record.zero_moments, record.zero_remainder = stage.zero_moments, stage.zero_remainder
            if self.daemon.written is not None:  # from now on each read of its extents is checked
                for extent in (*(extent for _, extent in stage.extents()), *stage.summed_pieces):
                    self.daemon.written.expect(Span(offset=extent.offset, size=extent.size), extent.sum)
            spec = self.model.stages[record.stage]
            if plan.updated_there and spec.source:
                self._fetch_pieces(record.stage)
            elif plan.weights_ram is not None:
                self._read_pieces(spec, plan)
            for _, ram, home in _resting_in_ram(plan, record):
                self.daemon.wait(self.daemon.read(ram.offset, home.offset, home.size, label=record.stage))
            for name, (target, there) in self._on_device(record).items():
                if self.states.copies.fetch(record.stage, target, there) != getattr(record.sums, name):
                    raise SwapError(f"{name} of {stage.name} changed between two reads of the store")

    def describe(self, records: Sequence[Record], stored_as: Mapping[str, str]) -> tuple[StoredStage, ...]:
        """Describes where every stage rests now. `stored_as`: names of the model's tensors in the checkpoint they came from."""
        together = zip(self.model.stages, self.plan.stages, records, strict=True)
        return tuple(
            _stored(stage, plan, record, stored_as, piece_sums=self._sums_of_pieces(stage)) for stage, plan, record in together
        )

    def _sums_of_pieces(self, stage: StageSpec) -> tuple[int, ...]:
        """Returns the checksums of the pieces of the checkpoint's files as they were first read; none if one is not known."""
        known = self.daemon.written
        found = [known.known(Span(offset=p.offset, size=p.size)) for p in stage.source] if known is not None else []
        return tuple(total for total in found if total is not None) if None not in found else ()


def _begun(stage: StageSpec, record: Record, source: FirstWeights) -> bool:
    """Begins a stage's generation 0. Tells whether its weights need no remainder."""
    exact = source.begin(stage)
    record.generation, record.turn, record.zero_moments, record.zero_remainder = 0, 0, True, exact
    return exact


def _resting_in_ram(plan: StagePlan, record: Record) -> Iterator[tuple[StateTensor, Span, Span]]:
    """Yields what of a stage rests in RAM and is not zero: its name, where, and the extent of the record's generation."""
    for name in _at_rest(record):
        ram, extent = plan.ram(name), plan.extent(name, record.turn)
        if ram is not None and extent is not None:
            yield name, ram, extent


def _at_rest(record: Record) -> Iterator[StateTensor]:
    """Yields the tensors of a stage that are not all zero."""
    yield "weights"
    yield "frozen"
    if not record.zero_remainder:
        yield "remainder"
    if not record.zero_moments:
        yield from MOMENTS


def _stored(
    stage: StageSpec, plan: StagePlan, record: Record, stored_as: Mapping[str, str], *, piece_sums: tuple[int, ...]
) -> StoredStage:
    found: dict[str, StoredExtent | None] = dict.fromkeys(TENSORS)
    for name in _at_rest(record) if stage.params else ():
        if (extent := plan.extent(name, record.turn)) is not None:
            found[name] = _summed(extent, getattr(record.sums, name))
    return StoredStage(
        name=stage.name,
        params=stage.params,
        trained=stage.trained,
        quantised=stage.quantised,
        generation=record.generation,
        turn=record.turn,
        zero_moments=record.zero_moments,
        zero_remainder=record.zero_remainder,
        **found,
        pieces=stage.source,
        piece_sums=piece_sums,
        tensors=tuple(
            StoredTensor(
                name=t.name,
                stored_as=stored_as[t.name],
                shape=t.model_shape,
                offset=t.offset,
                first=t.first,
                count=t.numel,
                decay=t.decay,
            )
            for t in stage.tensors
        ),
    )


def _summed(extent: Span, total: int | None) -> StoredExtent:
    assert total is not None, extent
    return StoredExtent(offset=extent.offset, size=extent.size, sum=total)
