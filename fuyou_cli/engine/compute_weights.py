"""Keeps weights where compute can use them: in the arena itself on device cpu, as uploaded copies on a separate device. Those
that rest quantised are decoded there, into memory that such stages share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..planner.device import WEIGHTS_UP, decode_scratch, decoded_at_once
from ..spec.model import ITEM_SIZE, Dtype, StageSpec
from ..spec.packed_tensors import DYNAMIC_BLOCK, FP8_BLOCK, MXFP4_BLOCK, NF4_BLOCK, PackedTensor, Quantised
from ..spec.plan import Span
from ..swap.kernels import Workers, dynamic_decode, dynamic_levels, fp8_decode, int8_decode, mxfp4_decode, nf4_decode
from .context import Context
from .devices.base import Device, Event
from .moves import Waiting
from .skeleton import TORCH_DTYPE
from .updates import DeviceStates


@dataclass(slots=True, eq=False)
class _Uploaded:
    memory: torch.Tensor
    owner: int | None = None
    generation: int = -1
    arrived: Event | None = None
    used: Event | None = None  # the last compute that reads this memory; an upload must wait for it


class ComputeWeights:
    """Weights for compute. Two device spans are used in turn, so that one stage's upload runs beside another's compute.
    Stages whose weights have their home on the device keep their own span. They are uploaded again only when there is a new
    generation, or never if they are updated there (`states`)."""

    def __init__(self, context: Context, *, states: DeviceStates, waiting: Waiting) -> None:
        model, plan, device = context.model, context.plan, context.device
        self.model, self.memory, self.device = model, context.memory, device
        self._states, self._waiting = states, waiting
        self.dtype = TORCH_DTYPE[model.compute_dtype]
        self._decoded = DecodedWeights(context) if model.decoded_bytes else None
        self.homes: dict[int, _Uploaded] = {}
        self.turns: list[_Uploaded] = []
        if device.separate:
            streamed = [s.weight_bytes for s, p in zip(model.stages, plan.stages, strict=True) if p.weights != "gpu"]
            largest = max(streamed, default=0)
            self.turns = [_Uploaded(device.empty(largest)) for _ in range(2 if largest else 0)]
            for stage, stage_plan in zip(model.stages, plan.stages, strict=True):
                if stage_plan.weights == "gpu" and not stage_plan.updated_on_device:
                    self.homes[stage.index] = _Uploaded(device.empty(stage.weight_bytes))

    @property
    def _places(self) -> tuple[_Uploaded, ...]:
        return (*self.turns, *self.homes.values())

    def flat(self, owner: int, span: Span, generation: int) -> torch.Tensor:
        """Returns the weights of `owner` (1-D, compute dtype) for compute submitted from now on."""
        if (on_device := self._states.weights(owner)) is not None:
            return on_device
        stage, at_rest = self.model.stages[owner], self._at_rest(owner, span)
        if self.device.separate:
            uploaded = self._upload(owner, at_rest, generation)
            assert uploaded.arrived is not None
            with self._waiting(WEIGHTS_UP):
                uploaded.arrived.wait()
            at_rest = uploaded.memory.view(at_rest.dtype)[: at_rest.numel()]
        if not stage.quantised:
            return at_rest
        assert self._decoded is not None
        return self._decoded.of(stage, at_rest, generation)

    def begin(self, owner: int, span: Span, generation: int) -> None:
        """Starts the upload for the next visit while this one computes. It is asked after every micro-batch, mostly with the
        upload under way."""
        if self.device.separate and not self._has(owner, generation) and self._states.weights(owner) is None:
            self._upload(owner, self._at_rest(owner, span), generation)

    def _has(self, owner: int, generation: int) -> bool:
        """Whether this generation is on the device, or on its way there."""
        home = self.homes.get(owner)
        places = self.turns if home is None else (home,)
        return any((place.owner, place.generation) == (owner, generation) for place in places)

    def note_compute(self, owner: int) -> None:
        """Makes the next copy over these weights wait for the visit that was submitted last."""
        for uploaded in self._places:
            if uploaded.owner == owner:
                uploaded.used = self.device.compute_end()

    def forget(self, owner: int) -> None:
        """Forgets the copy of `owner` on the device: the next visit computes with other rows of a table."""
        for uploaded in self.turns:
            if uploaded.owner == owner:
                uploaded.owner = None

    def settle(self, owner: int) -> None:
        """Waits (sync) until the upload from the host's weights of `owner` has ended, so that they may be overwritten."""
        for uploaded in self._places:
            if uploaded.owner == owner and uploaded.arrived is not None:
                with self._waiting(WEIGHTS_UP):
                    uploaded.arrived.synchronize()

    def settle_all(self) -> None:
        """Waits (sync) until no upload is under way, so that any of the host's slots may be reused."""
        for uploaded in self._places:
            if uploaded.arrived is not None:
                uploaded.arrived.synchronize()

    def close(self) -> None:
        if self._decoded is not None:
            self._decoded.close()

    def _at_rest(self, owner: int, span: Span) -> torch.Tensor:
        """Returns the weights of `owner` in host memory (1-D): in the compute dtype, or bytes where some are quantised."""
        stage = self.model.stages[owner]
        if stage.quantised:
            return self.memory.tensor(span, torch.uint8, stage.weight_bytes)
        return self.memory.tensor(span, self.dtype, stage.params)

    def _upload(self, owner: int, host: torch.Tensor, generation: int) -> _Uploaded:
        target = self.homes.get(owner)
        if target is None:
            # Its own span, or the one used longest ago; now used last, so the other one is reused next.
            target = next((turn for turn in self.turns if turn.owner == owner), self.turns[0])
            self.turns.remove(target)
            self.turns.append(target)
        if (target.owner, target.generation) == (owner, generation):
            return target
        target.owner, target.generation = owner, generation
        place = target.memory.view(host.dtype)[: host.numel()]
        target.arrived = self.device.upload(host, place, after=target.used, bulk=True)
        return target


# ---- quantised weights --------------------------------------------------------------------------------------------
# Decodes quantised weights into the memory that a block computes with: on the host with the native codecs, on a device with
# tensor operations. Both round a float32 product once, so all devices compute with the same bits.

_AT_ONCE = 1 << 22  # elements whose doubly quantised maxima the host decodes at once; whole maxima of maxima
_ONE_127TH = float(np.float32(1) / np.float32(127))
ByteRange = tuple[int, int]


class Decoder:
    def decode(self, kind: Quantised, bank: torch.Tensor, at: PackedTensor, values: torch.Tensor) -> None:
        """Fills `values` (1-D, compute dtype) with the tensor that lies `at` its place in `bank` (bytes), in the order in
        which it rests (`TensorSpec.transposed`)."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends its threads."""


class DecodedWeights:
    """The weights of one stage as compute needs them: quantised ones decoded, behind copies of all others. It stays until
    another such stage computes."""

    def __init__(self, context: Context) -> None:
        model, plan, device = context.model, context.plan, context.device
        self._dtype, self._item = TORCH_DTYPE[model.compute_dtype], ITEM_SIZE[model.compute_dtype]
        self._decoder: Decoder
        self._held: tuple[int, int] | None = None
        if device.separate:
            self._flat = device.empty(model.decoded_bytes).view(self._dtype)
            self._decoder = DeviceDecoder(device, decoded_at_once(model))
        elif plan.decoded is not None:
            self._flat = context.memory.tensor(plan.decoded, self._dtype)
            self._decoder = HostDecoder(model.compute_dtype, threads=plan.numerics.torch_threads)
        self._packed = {stage.index: stage.packed() for stage in model.stages if stage.quantised}

    def of(self, stage: StageSpec, at_rest: torch.Tensor, generation: int) -> torch.Tensor:
        """Returns the stage's weights (1-D, compute dtype) from its bytes at rest, for compute submitted from now on."""
        flat, kind = self._flat[: stage.params], stage.quantisation
        assert kind is not None
        if self._held == (stage.index, generation):
            return flat
        self._held = None  # until all of it is there
        plain = stage.params - stage.quantised
        flat[:plain].copy_(at_rest[: plain * self._item].view(self._dtype))
        bank, places = at_rest[plain * self._item :], self._packed[stage.index]
        for tensor in stage.tensors:
            if tensor.quantised:
                self._decoder.decode(kind, bank, places[tensor.name], flat[tensor.offset : tensor.offset + tensor.numel])
        self._held = (stage.index, generation)
        return flat

    def close(self) -> None:
        self._decoder.close()


def part(bank: torch.Tensor, at: ByteRange, dtype: torch.dtype) -> torch.Tensor:
    return bank[at[0] : at[0] + at[1]].view(dtype)


# ---- on the host -----------------------------------------------------------------------------------------------------

_BY_ROW = {"int8": int8_decode, "fp8": fp8_decode}
_BY_BLOCK = {"mxfp4": mxfp4_decode, "nf4": nf4_decode}


class HostDecoder(Decoder):
    def __init__(self, dtype: Dtype, *, threads: int) -> None:
        self._dtype, self._workers = dtype, Workers(threads)

    def decode(self, kind: Quantised, bank: torch.Tensor, at: PackedTensor, values: torch.Tensor) -> None:
        out, codes, maxima = _bytes(values), *(_bytes(part(bank, place, torch.uint8)) for place in (at.codes, at.maxima))
        by_row, by_block = _BY_ROW.get(kind), _BY_BLOCK.get(kind)
        if by_row is not None:
            by_row(codes, maxima, at.columns, out, self._dtype, workers=self._workers)
        elif by_block is not None:
            by_block(codes, maxima, out, self._dtype, workers=self._workers)
        else:
            self._decode_double(bank, at, codes, out)

    def _decode_double(self, bank: torch.Tensor, at: PackedTensor, codes: Any, out: Any) -> None:
        packed, outer = (_bytes(part(bank, place, torch.uint8)) for place in (at.maxima, at.outer))
        mean, item = float(part(bank, at.mean, torch.float32)), ITEM_SIZE[self._dtype]
        blocks = _AT_ONCE // NF4_BLOCK
        for first in range(0, at.blocks, blocks):
            count = min(blocks, at.blocks - first)
            maxima: Any = np.empty(count, np.float32)
            of = slice(4 * (first // DYNAMIC_BLOCK), 4 * -(-(first + count) // DYNAMIC_BLOCK))
            dynamic_decode(packed[first : first + count], outer[of], maxima, offset=mean)
            begin, end = first * NF4_BLOCK, min((first + count) * NF4_BLOCK, at.numel)
            nf4_decode(
                codes[begin // 2 : (end + 1) // 2], maxima, out[begin * item : end * item], self._dtype, workers=self._workers
            )

    def close(self) -> None:
        self._workers.close()


def _bytes(values: torch.Tensor) -> Any:
    return values.view(torch.uint8).numpy()


# ---- on a device -----------------------------------------------------------------------------------------------------


class DeviceDecoder(Decoder):
    """Decodes with tensor operations, in memory of its own, a few million elements at once. Never waits for the device."""

    def __init__(self, device: Device, at_once: int) -> None:
        self._at_once, blocks = at_once, at_once // NF4_BLOCK
        scratch = device.empty(decode_scratch(at_once))
        sizes = (4 * at_once, 2 * at_once, 4 * blocks, 4 * blocks)
        parts: tuple[torch.Tensor, ...] = scratch.split(sizes)
        values, pairs, maxima, places = parts
        self._values, self._maxima = values.view(torch.float32), maxima.view(torch.float32)
        self._pairs, self._places = pairs.view(torch.int32), places.view(torch.int32)
        self._levels = torch.from_numpy(nf4_pairs()).to(device.torch_device)
        self._dynamic = torch.from_numpy(dynamic_levels()).to(device.torch_device)
        self._small_levels, self._powers = (
            torch.from_numpy(table).to(device.torch_device) for table in (mxfp4_pairs(), powers())
        )

    def decode(self, kind: Quantised, bank: torch.Tensor, at: PackedTensor, values: torch.Tensor) -> None:
        unit = {"int8": at.columns, "fp8": FP8_BLOCK * at.columns}.get(kind, 1)
        step = self._at_once // unit * unit
        if kind == "mxfp4":
            step = step * MXFP4_BLOCK // NF4_BLOCK  # its blocks are smaller, and there is room for so many
        decoders = {"int8": self._int8, "fp8": self._fp8, "mxfp4": self._mxfp4}
        decoded = decoders.get(kind, partial(self._nf4, kind))
        for begin in range(0, at.numel, step):
            end = min(begin + step, at.numel)
            values[begin:end].copy_(decoded(bank, at, begin, end))

    def _int8(self, bank: torch.Tensor, at: PackedTensor, begin: int, end: int) -> torch.Tensor:
        rows = slice(begin // at.columns, end // at.columns)
        decoded = self._values[: end - begin]
        decoded.copy_(part(bank, at.codes, torch.int8)[begin:end])
        scaled = decoded.view(-1, at.columns).mul_(part(bank, at.maxima, torch.float32)[rows, None])
        return scaled.mul_(_ONE_127TH).view(decoded.shape)

    def _fp8(self, bank: torch.Tensor, at: PackedTensor, begin: int, end: int) -> torch.Tensor:
        decoded = self._values[: end - begin]
        decoded.copy_(part(bank, at.codes, torch.float8_e4m3fn)[begin:end])
        matrix, across = decoded.view(-1, at.columns), -(-at.columns // FP8_BLOCK)
        scales = part(bank, at.maxima, torch.float32).view(-1, across)[begin // at.columns // FP8_BLOCK :]
        for row, last_row, high in _squares(matrix.shape[0]):
            for column, last_column, wide in _squares(at.columns):
                of_squares = scales[row // FP8_BLOCK :, column // FP8_BLOCK :][
                    : (last_row - row) // high, : (last_column - column) // wide
                ]
                squares = matrix[row:last_row, column:last_column].unflatten(1, (-1, wide)).unflatten(0, (-1, high))
                squares.mul_(of_squares[:, None, :, None])
        return decoded

    def _mxfp4(self, bank: torch.Tensor, at: PackedTensor, begin: int, end: int) -> torch.Tensor:
        self._look_up(self._small_levels, part(bank, at.codes, torch.uint8)[begin // 2 : end // 2])
        exponents = part(bank, at.maxima, torch.uint8)[begin // MXFP4_BLOCK : end // MXFP4_BLOCK]
        places, scales = (memory[: exponents.numel()] for memory in (self._places, self._maxima))
        places.copy_(exponents)
        torch.index_select(self._powers, 0, places, out=scales)
        decoded = self._values[: end - begin]
        decoded.view(-1, MXFP4_BLOCK).mul_(scales[:, None])
        return decoded

    def _look_up(self, levels: torch.Tensor, codes: torch.Tensor) -> None:
        pairs = self._pairs[: codes.numel()]
        pairs.copy_(codes)
        torch.index_select(levels, 0, pairs, out=self._values[: 2 * codes.numel()].view(-1, 2))

    def _nf4(self, kind: Quantised, bank: torch.Tensor, at: PackedTensor, begin: int, end: int) -> torch.Tensor:
        self._look_up(self._levels, part(bank, at.codes, torch.uint8)[begin // 2 : (end + 1) // 2])
        first, last = begin // NF4_BLOCK, -(-end // NF4_BLOCK)
        maxima = (
            self._maxima_of(bank, at, first, last) if kind == "nf4_double" else part(bank, at.maxima, torch.float32)[first:last]
        )
        self._values[: (last - first) * NF4_BLOCK].view(-1, NF4_BLOCK).mul_(maxima[:, None])
        return self._values[: end - begin]

    def _maxima_of(self, bank: torch.Tensor, at: PackedTensor, first: int, last: int) -> torch.Tensor:
        """Decodes the maxima of blocks [first, last); `first` begins a block of maxima."""
        codes, count = part(bank, at.maxima, torch.uint8)[first:last], last - first
        self._places[:count].copy_(codes)
        torch.index_select(self._dynamic, 0, self._places[:count], out=self._maxima[:count])
        outer = part(bank, at.outer, torch.float32)[first // DYNAMIC_BLOCK : -(-last // DYNAMIC_BLOCK)]
        self._maxima[: outer.numel() * DYNAMIC_BLOCK].view(-1, DYNAMIC_BLOCK).mul_(outer[:, None])
        return self._maxima[:count].add_(part(bank, at.mean, torch.float32))


def _squares(count: int) -> list[tuple[int, int, int]]:
    """Cuts rows or columns where squares of fp8 are cut: runs [first, end) of whole squares and of a rest, with their sides."""
    whole = count - count % FP8_BLOCK
    return [run for run in ((0, whole, FP8_BLOCK), (whole, count, count - whole)) if run[0] < run[1]]


def mxfp4_pairs() -> Any:
    """Returns float32 (256, 2): the levels that a byte of two codes stands for."""
    pairs: Any = np.empty((256, 2), np.float32)
    mxfp4_decode(bytes(range(256)), bytes([127] * (512 // MXFP4_BLOCK)), pairs.reshape(-1), "float32")
    return pairs


def powers() -> Any:
    """Returns float32 (256): the power of two that an exponent of mxfp4 stands for."""
    values: Any = np.empty((256, MXFP4_BLOCK), np.float32)
    mxfp4_decode(bytes([2] * (256 * MXFP4_BLOCK // 2)), bytes(range(256)), values.reshape(-1), "float32")
    return values[:, 0].copy()


def nf4_pairs() -> Any:
    """Returns float32 (256, 2): the levels that a byte of two codes stands for."""
    pairs: Any = np.empty((256, 2), np.float32)
    codes, ones = bytes(range(256)), bytes(np.ones(512 // NF4_BLOCK, np.float32))
    nf4_decode(codes, ones, pairs.reshape(-1), "float32")
    return pairs
