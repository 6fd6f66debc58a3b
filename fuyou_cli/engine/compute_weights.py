"""Keeps weights where compute can use them: in the arena itself on device cpu, as uploaded copies on a separate device. Those
that rest quantised are decoded there, into memory that such stages share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..planner.device import WEIGHTS_UP
from ..spec.model import ModelSpec
from ..spec.plan import Plan, Span
from .decoding import DecodedWeights
from .device_states import DeviceStates
from .devices.base import Device, Event
from .host_memory import HostMemory
from .moves import Waiting
from .skeleton import TORCH_DTYPE


@dataclass(slots=True, eq=False)
class _Uploaded:
    memory: torch.Tensor
    owner: int | None = None
    generation: int = -1
    arrived: Event | None = None
    used: Event | None = None  # the last compute that reads this memory; an upload must wait for it


class ComputeWeights:
    """Holds weights for compute. Two device spans are used in turn, so that one stage's upload runs beside another's compute.
    Stages whose weights have their home on the device keep their own span. They are uploaded again only when there is a new
    generation, or never if they are updated there (`states`)."""

    def __init__(
        self, *, model: ModelSpec, plan: Plan, memory: HostMemory, device: Device, states: DeviceStates, waiting: Waiting
    ) -> None:
        self.model, self.memory, self.device, self._waiting = model, memory, device, waiting
        self._states = states
        self.dtype = TORCH_DTYPE[model.compute_dtype]
        self._decoded = None
        if model.decoded_bytes:
            self._decoded = DecodedWeights(model=model, plan=plan, memory=memory, device=device)
        self.homes: dict[int, _Uploaded] = {}
        self.turns: list[_Uploaded] = []
        if device.separate:
            streamed = [s.weight_bytes for s, p in zip(model.stages, plan.stages, strict=True) if p.weights != "gpu"]
            largest = max(streamed, default=0)
            self.turns = [_Uploaded(device.empty(largest)) for _ in range(2 if largest else 0)]
            for stage, stage_plan in zip(model.stages, plan.stages, strict=True):
                if stage_plan.weights == "gpu" and not stage_plan.updated_there:
                    self.homes[stage.index] = _Uploaded(device.empty(stage.weight_bytes))

    def flat(self, owner: int, span: Span, generation: int) -> torch.Tensor:
        """Returns the weights of `owner` (1-D, compute dtype) for compute submitted from now on."""
        if (updated_there := self._states.weights(owner)) is not None:
            return updated_there
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
        """Tells whether this generation is on the device, or on its way there."""
        home = self.homes.get(owner)
        places = self.turns if home is None else (home,)
        return any((place.owner, place.generation) == (owner, generation) for place in places)

    def computed(self, owner: int) -> None:
        """Makes the next copy over these weights wait for the visit that was submitted last."""
        for uploaded in (*self.turns, *self.homes.values()):
            if uploaded.owner == owner:
                uploaded.used = self.device.computed()

    def forget(self, owner: int) -> None:
        """Forgets the copy of `owner` on the device: the next visit computes with other rows of a table."""
        for uploaded in self.turns:
            if uploaded.owner == owner:
                uploaded.owner = None

    def settle(self, owner: int) -> None:
        """Waits (sync) until the upload from the host's weights of `owner` has ended, so that they may be overwritten."""
        for uploaded in (*self.turns, *self.homes.values()):
            if uploaded.owner == owner and uploaded.arrived is not None:
                with self._waiting(WEIGHTS_UP):
                    uploaded.arrived.synchronize()

    def settle_all(self) -> None:
        """Waits (sync) until no upload is under way, so that any of the host's slots may be reused."""
        for uploaded in (*self.turns, *self.homes.values()):
            if uploaded.arrived is not None:
                uploaded.arrived.synchronize()

    def close(self) -> None:
        """Ends the threads that decode."""
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
            target = next((turn for turn in self.turns if turn.owner == owner), None)
            if target is not None:  # now used last, so the other span is reused next
                self.turns.remove(target)
                self.turns.append(target)
        if target is not None and target.owner == owner and target.generation == generation:
            return target
        if target is None:
            target = self.turns.pop(0)  # the span used longest ago
            self.turns.append(target)
        target.owner, target.generation = owner, generation
        there = target.memory.view(host.dtype)[: host.numel()]
        target.arrived = self.device.upload(host, there, after=target.used, bulk=True)
        return target
