"""Holds weights, states and gradients of the stages that rest on the device, updates them there, and copies them to the store
when a commit names them.

The device runs an update in order with its other work. Whatever computes with the new weights runs later, so an update's ticket
is done as soon as it is submitted. Whether all masters are finite is known a little later (`look`). If the result will be
committed, the ticket is done once all of it is on the store, copied through small slots (`StagedCopies`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import get_args

import torch

from ..core.errors import NumericsError
from ..planner.device_homes import gradients_rest, update_scratch
from ..planner.records import Record
from ..spec.model import STATE_NAMES, ModelSpec, StageSpec
from ..spec.plan import Plan, Span, StateTensor
from ..swap.daemon import Result, SwapDaemon
from .device_adamw import DeviceAdamW, DeviceState, is_lost
from .devices.base import Device, Squares
from .host_memory import HostMemory
from .skeleton import TORCH_DTYPE
from .staged_copies import Extents, StageCopy, StagedCopies
from .updates import Scalars, segments_of

_NOTHING = Result(*[0] * len(Result._fields))


@dataclass(slots=True, eq=False)
class _Home:
    """Holds one stage's memory on the device."""

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


@dataclass(slots=True)
class _Updating:
    """Holds an update that ends with a copy on the store."""

    finite: _Finite
    copy: StageCopy


@dataclass(frozen=True, slots=True)
class _Finite:
    """Holds the check of whether an update's masters are finite, on its way to the host."""

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
    """Holds the stages' memory on the device. Does nothing for a plan without such stages."""

    def __init__(self, *, model: ModelSpec, plan: Plan, daemon: SwapDaemon, memory: HostMemory, device: Device) -> None:
        self.model, self.plan, self.device = model, plan, device
        self._narrow = model.compute_dtype == "bfloat16"
        there = [stage for stage in plan.stages if stage.updated_there]
        self.homes = {
            stage.stage: self._open(model.stages[stage.stage], rests=gradients_rest(model, stage, plan.sweeps))
            for stage in there
        }
        largest = max((model.stages[stage].trained for stage in self.homes), default=0)
        self._adamw = DeviceAdamW(device.empty(update_scratch(largest))) if there else None
        self.copies = StagedCopies(slots=plan.staging_slots, daemon=daemon, memory=memory, device=device)
        self._tickets = count(-1, -1)  # negative, so that they differ from the daemon's tickets
        self._updating: dict[int, _Updating | None] = {}
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
        self._begin_with_zeros(home.state, record)
        assert self._adamw is not None and home.summed is not None
        segments = [] if scalars.skipped else segments_of(stage, weight_decay=scalars.optimizer.weight_decay)
        worst = self._adamw.update(home.state, home.summed, scalars, segments)
        finite = _Finite(stage, record.generation + 1, self.device.numbers(worst))
        ticket = next(self._tickets)
        if copied:
            written: Extents = {name: at for name, at in self.at_rest(record.stage, target).items() if name != "frozen"}
            copy = self.copies.begin(record.stage, written)
            self._updating[ticket] = _Updating(finite, copy)
        else:
            self._updating[ticket] = None
            self._unknown.append(finite)
        return ticket

    def _begin_with_zeros(self, state: DeviceState, record: Record) -> None:
        if record.zero_moments:
            state.momentum.zero_()
            state.variance.zero_()
        if record.zero_remainder and state.remainder is not None:
            state.remainder.zero_()

    def poll(self, ticket: int) -> Result | None:
        """Returns the result of an update once. Returns None while it is on its way to the store."""
        updating = self._updating[ticket]
        if updating is None:
            del self._updating[ticket]
            return _NOTHING
        sums = updating.copy.advance()
        if sums is None or not updating.finite.worst.done():
            return None
        del self._updating[ticket]
        updating.finite.check(narrow=self._narrow)
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
        """Ends the thread that copies."""
        self.copies.close()


_TENSORS: tuple[StateTensor, ...] = get_args(StateTensor)
