"""Updates of stages: requests to the daemon (homes, segments, scalars), and AdamW where weights, states and gradients rest on
the device, with copies of them to the store when a commit names them."""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import get_args

import numpy as np
import torch

from ..core.errors import NumericsError
from ..planner.device import UPDATE_SCRATCH
from ..planner.ledgers import UPDATE_PRIORITY, Record, update_priority
from ..planner.memory import gradients_rest, update_scratch
from ..spec.model import STATE_NAMES, StageSpec, StateLayout
from ..spec.plan import Numerics, Span, StagePlan, StateTensor
from ..swap.daemon import Home, Result, Segment, SwapDaemon, Update
from ..swap.kernels import checksum
from .context import Context, HostMemory
from .devices.base import Device, Event, Squares
from .devices.gpu_kernels import Launch, Rounded, adamw_kernel
from .skeleton import TORCH_DTYPE


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Describes the optimizer as the recipe asks for it. Lion has no epsilon."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalars:
    """What one step's updates need besides tensors."""

    optimizer: Optimizer
    lr: float
    step: int  # 1 for the first step, for bias corrections
    gradient_scale: float = 1.0  # the clipping factor
    skipped: bool = False  # every value stays as it is and counts as this step's


def build_update(
    record: Record, stage: StageSpec, plan: StagePlan, *, numerics: Numerics, layout: StateLayout, target: int, copied: bool
) -> Update:
    """Returns the request for the update of one stage, whose `record.due` holds its `Scalars`. `target`: the place of the
    stage's pair to write; `copied`: also write what rests in RAM."""
    at = plan.trained_ram or record.span
    assert at is not None
    scalars: Scalars = record.due
    optimizer, summed_in = scalars.optimizer, record.gradient_slot or plan.gradients_ram  # neither: gradients rest on the ssd

    def offset(tensor: StateTensor, turn: int) -> int | None:
        extent = plan.extent(tensor, turn)
        return None if extent is None else extent.offset

    def home(tensor: StateTensor, ram: Span | None, *, zero: bool) -> Home:
        new = offset(tensor, target)
        if ram is not None and new is not None:
            return Home(arena=ram.offset, source=None, target=new if copied else None)
        return Home(arena=None, source=None if zero else offset(tensor, record.turn), target=new)

    return Update(
        params=stage.trained, weights_dtype=layout.weights, gradients_dtype=numerics.accumulate_dtype,
        states_dtype=layout.dtype, rule=layout.rule, weights=at.offset,
        weights_target=offset("weights", target) if plan.writes_weights or copied else None,
        gradients=None if summed_in is None else summed_in.offset,
        gradients_source=plan.gradients_extent.offset if summed_in is None and plan.gradients_extent else None,
        remainder=home("remainder", plan.remainder_ram, zero=record.zero_remainder),
        momentum=home("momentum", plan.momentum_ram, zero=record.zero_moments),
        variance=home("variance", plan.variance_ram, zero=record.zero_moments),
        lr=scalars.lr, beta1=optimizer.beta1, beta2=optimizer.beta2, epsilon=optimizer.epsilon,
        gradient_scale=scalars.gradient_scale, step=scalars.step, priority=update_priority(plan), label=stage.index,
        seed=numerics.seed,
        # Parameters outside all segments keep their values. So a skipped step moves the same bytes as any other, and homes and
        # commits stay the same.
        segments=[] if scalars.skipped else segments_of(stage, weight_decay=optimizer.weight_decay),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Checksums of one stage as it rests on the store (`kernels.checksum`). A sum is None if that tensor is not there in
    this generation."""

    weights: int | None = None
    frozen: int | None = None
    remainder: int | None = None
    momentum: int | None = None
    variance: int | None = None


def sums_of(result: Result, plan: StagePlan, before: Sums | None, *, copied: bool) -> Sums:
    """Returns the checksums of what an update wrote, and of what it left as it was `before`. `copied`: also of what rests in
    RAM."""
    states = copied or plan.states == "ssd"
    return Sums(
        weights=result.weights_sum if copied or plan.writes_weights else None,
        frozen=None if before is None else before.frozen,
        remainder=result.remainder_sum if states and plan.remainder_at is not None else None,
        momentum=result.momentum_sum if states else None,
        variance=result.variance_sum if states and plan.variance_at is not None else None,
    )


def segments_of(stage: StageSpec, *, weight_decay: float) -> list[Segment]:
    """Joins consecutive trained parameters with the same settings. Padding is part of a segment: its gradients are zero, so its
    weights stay zero."""
    segments: list[Segment] = []
    for tensor in stage.trained_tensors:
        decay = weight_decay if tensor.decay else 0.0
        if segments and segments[-1].weight_decay == decay:
            first = segments[-1].first
            segments[-1] = Segment(first=first, count=tensor.offset + tensor.numel - first, weight_decay=decay)
        else:
            segments.append(Segment(first=tensor.offset, count=tensor.numel, weight_decay=decay))
    return segments


# ---- on the device -------------------------------------------------------------------------------------------------
# Keeps weights, states and gradients of stages on the device, updates them there, and copies them to the store
# when a commit names them.
#
# The device runs an update in order with its other work. Whatever computes with the new weights runs later, so an update's
# ticket is done as soon as it is submitted. Whether all masters are finite is known a little later (`look`). If the result will
# be committed, the ticket is done once all of it is on the store, copied through small slots (`StagedCopies`).


_NOTHING = Result(*[0] * len(Result._fields))


@dataclass(slots=True, eq=False)
class _Home:
    weights: torch.Tensor  # trained ones, which `state` has too, then frozen ones
    state: DeviceState
    gradients: torch.Tensor | None  # None: gradients do not rest
    summed: torch.Tensor | None = None  # gradients for the next update

    def tensor(self, name: StateTensor) -> torch.Tensor | None:
        """Returns one of the tensors that survive a run."""
        if name == "frozen":
            return self.weights[self.state.weights.numel() :]
        found: torch.Tensor | None = getattr(self.state, name)
        return found


@dataclass(frozen=True, slots=True)
class _Finite:
    """The check of whether an update's masters are finite, on its way to the host."""

    stage: StageSpec
    generation: int
    worst: Squares

    def check(self, *, narrow: bool) -> None:
        """Raises NumericsError if one is not. Waits until that is known."""
        if is_lost(int(self.worst.result()[0]), narrow=narrow):
            raise lost(f"weights of {self.stage.name}", generation=self.generation)


def lost(what: str, *, generation: int) -> NumericsError:
    """Returns the error for weights that are not finite after the update that made a generation."""
    return NumericsError(
        f"step {generation}: {what} are not finite after the update",
        hint="lower optimizer.lr, or set train.clip_grad_norm, which sees gradients before anything is updated",
        changed=True,
    )


class DeviceStates:
    """The stages' memory on the device. Does nothing for a plan without such stages."""

    def __init__(self, context: Context) -> None:
        model, plan, device = context.model, context.plan, context.device
        self.model, self.plan, self.device = model, plan, device
        self._narrow = model.compute_dtype == "bfloat16"
        on_device = [stage for stage in plan.stages if stage.updated_on_device]
        self.homes = {
            stage.stage: self._open(model.stages[stage.stage], rests=gradients_rest(model, stage, plan.sweeps))
            for stage in on_device
        }
        largest = max((model.stages[stage].trained for stage in self.homes), default=0)
        self._adamw = DeviceAdamW(device.empty(update_scratch(largest))) if on_device else None
        self.copies = StagedCopies(slots=plan.staging_slots, daemon=context.daemon, memory=context.memory, device=device)
        self._tickets = count(-1, -1)  # negative, so that they differ from the daemon's tickets
        self._updating: dict[int, tuple[_Finite, StageCopy] | None] = {}  # by ticket; None: ends on the device
        self._unknown: deque[_Finite] = deque()

    def _open(self, stage: StageSpec, *, rests: bool) -> _Home:
        gradients = stage.gradient_bytes(self.plan.numerics.accumulate_dtype) if rests else 0
        sizes: dict[str, int] = {"weights": stage.weight_bytes, "gradients": gradients}
        sizes.update((name, stage.state_size(name)) for name in STATE_NAMES)
        # Separate tensors: autograd treats a change of one as a change of all that share an allocation.
        parts = {name: self.device.empty(size) for name, size in sizes.items()}
        weights = parts["weights"].view(TORCH_DTYPE[self.model.compute_dtype])
        summed_in = TORCH_DTYPE[self.plan.numerics.accumulate_dtype]
        return _Home(
            weights=weights,
            state=DeviceState(
                weights=weights[: stage.trained],
                remainder=parts["remainder"].view(torch.int16) if self._narrow else None,
                momentum=parts["momentum"].view(torch.float32),
                variance=parts["variance"].view(torch.float32),
            ),
            gradients=parts["gradients"].view(summed_in) if rests else None,
        )

    def weights(self, stage: int) -> torch.Tensor | None:
        """Returns the weights of a stage to compute with, or None if they do not rest only on the device."""
        home = self.homes.get(stage)
        return None if home is None else home.weights

    def gradients(self, stage: int) -> torch.Tensor | None:
        """Returns where gradients of a stage are summed if they rest on the device, otherwise None."""
        home = self.homes.get(stage)
        return None if home is None else home.gradients

    def summed(self, stage: int, gradients: torch.Tensor) -> None:
        """Takes complete gradients on the device. They stay until the update that uses them is submitted."""
        if stage in self.homes:
            self.homes[stage].summed = gradients

    # ---- updates -------------------------------------------------------------------------------------------------

    def update(self, record: Record, *, target: int, copied: bool) -> int:
        """Updates a stage, whose `record.due` holds its `Scalars`. Returns a ticket. `copied`: the result is also written to
        the stage's place at turn `target`."""
        self.look()
        home, stage = self.homes[record.stage], self.model.stages[record.stage]
        scalars: Scalars = record.due
        # Never written so far: the device's memory is allocated uninitialized.
        for zeroed in (home.state.momentum, home.state.variance) if record.zero_moments else ():
            zeroed.zero_()
        if record.zero_remainder and home.state.remainder is not None:
            home.state.remainder.zero_()
        assert self._adamw is not None and home.summed is not None
        segments = [] if scalars.skipped else segments_of(stage, weight_decay=scalars.optimizer.weight_decay)
        worst = self._adamw.update(home.state, home.summed, scalars, segments)
        finite = _Finite(stage, record.generation + 1, self.device.numbers(worst))
        ticket = next(self._tickets)
        if copied:
            written: Extents = {name: at for name, at in self.at_rest(record.stage, target).items() if name != "frozen"}
            copy = self.copies.begin(record.stage, written)
            self._updating[ticket] = finite, copy
        else:
            self._updating[ticket] = None
            self._unknown.append(finite)  # for a later `look`: to ask now would wait for the device
        return ticket

    def poll(self, ticket: int) -> Result | None:
        """Returns the result of an update once. Returns None while it is on its way to the store."""
        updating = self._updating[ticket]
        if updating is None:
            del self._updating[ticket]
            return _NOTHING
        finite, copy = updating
        sums = copy.advance()
        if sums is None or not finite.worst.done():
            return None
        del self._updating[ticket]
        finite.check(narrow=self._narrow)
        return _NOTHING._replace(**{f"{name}_sum": total for name, total in sums.items()})

    def look(self) -> None:
        """Raises NumericsError if an update's masters are known by now not to be finite. Never waits."""
        while self._unknown and self._unknown[0].worst.done():
            self._unknown.popleft().check(narrow=self._narrow)

    def settle(self) -> None:
        """Waits until all updates are known to be finite. Raises NumericsError like `look`."""
        while self._unknown:
            self._unknown.popleft().check(narrow=self._narrow)

    # ---- to and from the store -----------------------------------------------------------------------------------

    def at_rest(self, stage: int, turn: int) -> dict[StateTensor, tuple[torch.Tensor, Span]]:
        """Returns what rests of a stage on the device, by name: the tensor, and its extent at a turn."""
        home, plan = self.homes.get(stage), self.plan.stages[stage]
        found: dict[StateTensor, tuple[torch.Tensor, Span]] = {}
        for name in _TENSORS if home is not None else ():
            assert home is not None
            tensor, extent = home.tensor(name), plan.extent(name, turn)
            if tensor is not None and extent is not None:
                found[name] = tensor.view(torch.uint8), extent
        return found

    def close(self) -> None:
        self.copies.close()


_TENSORS: tuple[StateTensor, ...] = get_args(StateTensor)


# ---- the update ---------------------------------------------------------------------------------------------------
# Updates weights and states that rest on a device, on that device, bit for bit like the library in host memory
# (native/src/adamw.c).
#
# On an NVIDIA GPU it is one kernel (`gpu_kernels`), elsewhere tensor operations. Every operation has one rounding, in the
# library's order. None is fused with another: there is no multiply-add, and no multiplication by a reciprocal in place of a
# division (torch does that on a GPU for a divisor on the host). Products, sums, quotients and roots of float32 are rounded
# alike everywhere, denormals included.

_LOST = 0x7F800000 - 0x8000  # bits of a master without the sign; from this value on it is not finite when rounded to bfloat16
_LOST_WIDE = 0x7F800000


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """What one update of a stage reads and writes: 1-D tensors of the same length on the device."""

    weights: torch.Tensor  # bfloat16, or float32 (then they are the masters)
    remainder: torch.Tensor | None  # int16, only with bfloat16 weights
    momentum: torch.Tensor
    variance: torch.Tensor

    def part(self, begin: int, end: int) -> DeviceState:
        remainder = None if self.remainder is None else self.remainder[begin:end]
        weights, momentum, variance = (values[begin:end] for values in (self.weights, self.momentum, self.variance))
        return DeviceState(weights=weights, remainder=remainder, momentum=momentum, variance=variance)


def rounded_scalars(scalars: Scalars, weight_decay: float) -> Rounded:
    optimizer, step, lr = scalars.optimizer, scalars.step, scalars.lr
    blend = 1.0 - optimizer.beta1
    from_gradient = abs(blend) >= 0.5
    return Rounded(
        scale=_float(scalars.gradient_scale), decay=_float(1.0 - lr * _float(weight_decay)),
        blend=_float(_float(blend) - 1.0) if from_gradient else _float(blend), from_gradient=from_gradient,
        beta2=_float(optimizer.beta2), one_less_beta2=_float(1.0 - optimizer.beta2),
        correction=_float(math.sqrt(1.0 - optimizer.beta2**step)), epsilon=_float(optimizer.epsilon),
        negative_step=_float(-(lr / (1.0 - optimizer.beta1**step))),
    )  # fmt: skip


class DeviceAdamW:
    """Runs AdamW: as one kernel where there is one for the device (`gpu_kernels`), otherwise as tensor operations, chunk by
    chunk in `scratch` (uint8, device memory; four values of 4 bytes for each parameter of a chunk). `fused`: whether to look
    for a kernel."""

    def __init__(self, scratch: torch.Tensor, *, fused: bool = True) -> None:
        self._fused = fused
        self._count = scratch.numel() // (UPDATE_SCRATCH * 4)
        floats = scratch[: self._count * UPDATE_SCRATCH * 4].view(torch.float32)
        self._floats = floats.split(self._count)
        self._divisor = torch.zeros((), device=scratch.device)  # by one on the host torch multiplies with its reciprocal
        self._worst = torch.zeros((), dtype=torch.int32, device=scratch.device)
        self._kernels: dict[tuple[bool, bool], Launch | None] = {}

    def update(
        self, state: DeviceState, gradients: torch.Tensor, scalars: Scalars, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Updates `state` in place after the compute submitted so far. `gradients`: 1-D, bfloat16 or float32; not changed.
        Parameters outside all segments keep every value. Returns the largest bits of a master without its sign, a 0-D int32
        tensor on the device that is valid until the next call (see `is_lost`)."""
        self._worst.zero_()
        launch = self._kernel(state.remainder is not None, gradients.dtype == torch.bfloat16)
        for segment in segments:
            rounded, end = rounded_scalars(scalars, segment.weight_decay), segment.first + segment.count
            at_once = max(1, segment.count) if launch is not None else self._count
            for begin in range(segment.first, end, at_once):
                part, summed = state.part(begin, min(begin + at_once, end)), gradients[begin : min(begin + at_once, end)]
                if launch is None:
                    self._chunk(part, summed, rounded)
                else:
                    launch(part.weights, part.remainder, part.momentum, part.variance, summed, self._worst, rounded)
        return self._worst

    def _kernel(self, narrow_weights: bool, narrow_gradients: bool) -> Launch | None:
        key = narrow_weights, narrow_gradients
        if self._fused and key not in self._kernels:
            self._kernels[key] = adamw_kernel(
                self._worst.device, narrow_weights=narrow_weights, narrow_gradients=narrow_gradients
            )
        return self._kernels.get(key)

    def _chunk(self, state: DeviceState, gradients: torch.Tensor, k: Rounded) -> None:
        p, g, t, u = (values[: gradients.numel()] for values in self._floats)
        if state.remainder is None:
            p = state.weights
        else:
            _join(state.weights, state.remainder, p, u)
        m, v = state.momentum, state.variance
        p.mul_(k.decay)
        g.copy_(gradients).mul_(k.scale)
        torch.sub(g, m, out=t)
        t.mul_(k.blend)
        torch.add(g if k.from_gradient else m, t, out=m)
        torch.mul(g, k.one_less_beta2, out=t)
        t.mul_(g)
        v.mul_(k.beta2).add_(t)
        _root(v, t)
        t.div_(self._divisor.fill_(k.correction)).add_(k.epsilon)
        torch.mul(m, k.negative_step, out=u)
        p.add_(u.div_(t))
        bits, spare = p.view(torch.int32), t.view(torch.int32)
        torch.bitwise_and(bits, 0x7FFFFFFF, out=spare)
        torch.maximum(self._worst, spare.amax(), out=self._worst)
        if state.remainder is not None:
            _split(bits, state.weights, state.remainder, spare)


def is_lost(worst: int, *, narrow: bool) -> bool:
    """Whether a master with these bits is not finite, or not finite as bfloat16 (`narrow`)."""
    return worst >= (_LOST if narrow else _LOST_WIDE)


def _root(values: torch.Tensor, roots: torch.Tensor) -> None:
    """Takes square roots. On a GPU torch rounds them as IEEE 754 says. On the host they are MKL's, which are rounded
    differently."""
    if values.is_cpu:
        np.sqrt(values.numpy(), out=roots.numpy())
    else:
        torch.sqrt(values, out=roots)


def _join(weights: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor, spare: torch.Tensor) -> None:
    bits, rest = master.view(torch.int32), spare.view(torch.int32)
    bits.copy_(weights.view(torch.int16)).bitwise_left_shift_(16)
    bits.add_(rest.copy_(remainder))


def _split(bits: torch.Tensor, weights: torch.Tensor, remainder: torch.Tensor, spare: torch.Tensor) -> None:
    """Splits masters. Both halves, after an arithmetic shift back, fit in int16, so no conversion has to cut."""
    torch.add(bits, 0x8000, out=spare)
    weights.view(torch.int16).copy_(spare.bitwise_right_shift_(16))
    bits.bitwise_left_shift_(16)
    remainder.copy_(bits.bitwise_right_shift_(16))


def _float(value: float) -> float:
    """Rounds to float32."""
    return ctypes.c_float(value).value


# ---- copies to the store ------------------------------------------------------------------------------------------
# Copies tensors that rest on a device to the store and back, through a few small slots of the arena.
#
# On the way to the store, a piece is copied to a slot, then written and checksummed at once; another thread computes the
# checksum. The slots form a pipeline: while a piece is copied from the device, others are written and checksummed. Only a
# caller that asks for the end (`finish`) waits.

MODULUS = 1 << 64  # checksums of parts are added modulo this
_PAUSE = 1e-3  # seconds between two polls of a waiting caller

Extents = Mapping[StateTensor, tuple[torch.Tensor, Span]]  # bytes on the device, and their place on the store


@dataclass(slots=True, eq=False)
class _Piece:
    """Describes a part of an extent on its way to the store. A piece equals only itself: tensors have no equality."""

    name: StateTensor
    source: torch.Tensor
    target: int  # offset in the store
    position: int  # offset in the extent
    slot: Span
    arrived: Event
    total: Future[int] | None = None
    write: int | None = None


class StagedCopies:
    """The slots that the copies under way share. `daemon` reads and writes."""

    def __init__(self, *, slots: tuple[Span, ...], daemon: SwapDaemon, memory: HostMemory, device: Device) -> None:
        self.daemon, self.memory, self.device = daemon, memory, device
        self.free = list(slots)
        self.piece = slots[0].size if slots else 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staged-sums")

    def begin(self, stage: int, extents: Extents) -> StageCopy:
        """Begins to copy tensors of a stage, as compute submitted so far leaves them, to their extents."""
        return StageCopy(self, stage, extents)

    def sum(self, span: Span, position: int) -> Future[int]:
        """Computes the checksum of what a slot holds, `position` bytes into an extent, on another thread."""
        return self._thread.submit(lambda: checksum(self.memory.arena.view(span.offset, span.size), position=position))

    def fetch(self, stage: int, target: torch.Tensor, extent: Span) -> int:
        """Copies an extent to the device (1-D, bytes). Returns its checksum when it is there."""
        slot, total = self.free[0], 0
        for begin in range(0, extent.size, self.piece):
            part = Span(offset=slot.offset, size=min(self.piece, extent.size - begin))
            self.daemon.wait(self.daemon.read(part.offset, extent.offset + begin, part.size, label=stage))
            total += checksum(self.memory.arena.view(part.offset, part.size), position=begin)
            self.put(part, target[begin : begin + part.size])
        return total % MODULUS

    def put(self, slot: Span, target: torch.Tensor) -> None:
        """Copies what a slot holds to the device. Returns when it is there."""
        self.device.upload(self.memory.tensor(slot, torch.uint8), target).synchronize()

    def close(self) -> None:
        """Ends the thread. Gives up what is under way."""
        self._thread.shutdown()


class StageCopy:
    def __init__(self, copies: StagedCopies, stage: int, extents: Extents) -> None:
        self._copies, self._stage = copies, stage
        self._pieces = self._cut(extents)
        self._next = next(self._pieces, None)
        self._under_way: deque[_Piece] = deque()
        self._sums: dict[StateTensor, int] = dict.fromkeys(extents, 0)

    def _cut(self, extents: Extents) -> Iterator[tuple[StateTensor, torch.Tensor, int, int]]:
        for name, (tensor, extent) in extents.items():
            for begin in range(0, extent.size, self._copies.piece):
                yield name, tensor[begin : begin + self._copies.piece], extent.offset + begin, begin

    def advance(self) -> dict[StateTensor, int] | None:
        """Moves what can move. Returns the checksum of every extent once all are written, None before. Never waits."""
        for piece in list(self._under_way):
            if self._is_over(piece):
                self._under_way.remove(piece)
        while self._next is not None and self._copies.free:
            self._begin(*self._next)
            self._next = next(self._pieces, None)
        return None if self._next is not None or self._under_way else self._sums

    def finish(self, wait: Callable[[float], None]) -> dict[StateTensor, int]:
        """Returns the checksums when all is written. `wait`: sleeps for this many seconds."""
        while (sums := self.advance()) is None:
            wait(_PAUSE)
        return sums

    def _begin(self, name: StateTensor, source: torch.Tensor, target: int, position: int) -> None:
        copies = self._copies
        free = copies.free.pop()
        slot = Span(offset=free.offset, size=source.numel())
        arrived = copies.device.download(source, copies.memory.tensor(slot, torch.uint8))
        self._under_way.append(_Piece(name, source, target, position, slot, arrived))

    def _is_over(self, piece: _Piece) -> bool:
        copies = self._copies
        if piece.total is None:
            if not piece.arrived.done():
                return False
            piece.arrived.synchronize()  # raises the copy's error
            piece.total = copies.sum(piece.slot, piece.position)
            piece.write = copies.daemon.write(
                piece.slot.offset, piece.target, piece.slot.size, priority=UPDATE_PRIORITY + self._stage, label=self._stage
            )
        if piece.write is not None and copies.daemon.poll(piece.write) is not None:
            piece.write = None
        if piece.write is not None or not piece.total.done():
            return False
        self._sums[piece.name] = (self._sums[piece.name] + piece.total.result()) % MODULUS
        copies.free.append(Span(offset=piece.slot.offset, size=copies.piece))
        return True
