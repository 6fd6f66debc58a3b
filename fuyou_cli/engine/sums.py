"""The way of gradients from compute to their update: summed where the device computes, brought to the host, handed over.

On device cpu a stage's gradients are summed where they rest. A device with memory of its own sums in spans that take
turns with their downloads; what follows a download runs when somebody looks (`advance`) or waits (`settle`). Squares are summed
by the device too, where the gradients are: what follows knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ..planner.device import GRADIENTS_ACROSS, square_lanes
from ..planner.residency import Residency
from ..spec.model import ITEM_SIZE, ModelSpec
from ..spec.plan import Plan
from .devices.base import Device, Event, Squares
from .gradients import GradientSum
from .host_memory import HostMemory
from .moves import Waiting
from .skeleton import TORCH_DTYPE

HandOver = Callable[[int, torch.Tensor, list[float]], None]  # (stage, its gradients in host memory, squares of each tensor)


@dataclass(frozen=True, slots=True)
class _Download:
    """Complete gradients on their way to the host: the device span they leave, where they are squared meanwhile, and what
    follows."""

    event: Event
    squares: Squares | None  # None: nobody asks for them
    span: torch.Tensor
    arrived: Callable[[list[float]], None]

    def done(self) -> bool:
        return self.event.done() and (self.squares is None or self.squares.done())

    def wait(self) -> list[float]:
        """Until the span is nobody's; the squares. A copy that failed is over as well: here it says so."""
        self.event.synchronize()
        return [] if self.squares is None else self.squares.values()


class GradientSums:
    """The sums under way, by stage. Complete ones go to `hand_over`."""

    def __init__(
        self,
        *,
        model: ModelSpec,
        plan: Plan,
        residency: Residency,
        memory: HostMemory,
        device: Device,
        hand_over: HandOver,
        waiting: Waiting,
    ) -> None:
        self.model, self.residency, self.memory, self.device = model, residency, memory, device
        self._hand_over, self._waiting = hand_over, waiting
        self._dtype = TORCH_DTYPE[plan.numerics.accumulate_dtype]
        self._sums: dict[int, GradientSum] = {}
        self._spans = self._open_spans(ITEM_SIZE[plan.numerics.accumulate_dtype])
        longest = max(tensor.numel for stage in model.stages for tensor in stage.tensors) if device.separate else 0
        self._lanes = device.empty(8 * square_lanes(longest) if device.separate else 0)
        self._downloads: list[_Download] = []

    def _open_spans(self, item: int) -> list[torch.Tensor]:
        """On a separate device two spans take turns with their downloads; one more stays with a tied head that is not cut."""
        if not self.device.separate:
            return []
        largest = max(stage.params for stage in self.model.stages) * item
        stays = self.model.tied_head and not self.model.head_is_cut
        return [self.device.empty(largest) for _ in range(3 if stays else 2)]

    def open(self, owner: int, *, resume: bool = False) -> GradientSum | None:
        """The sum of the gradients of stage `owner`, begun or gone on with in the slot it has taken; None for a stage without
        parameters. With `resume` it goes on from what rested at the gradients' home."""
        spec = self.model.stages[owner]
        if spec.params == 0:
            return None
        if owner not in self._sums:
            span = self.residency.resume_gradients(owner) if resume else self.residency.acquire_gradients(owner)
            flat = host = self.memory.tensor(span, self._dtype, spec.params)
            if self.device.separate:
                self.residency.wait_until(lambda: bool(self._spans), GRADIENTS_ACROSS)  # the oldest download is over
                flat = self._spans.pop(0).view(self._dtype)[: spec.params]
                if resume:
                    arrived = self.device.upload(host, flat, bulk=True)
                    with self._waiting(GRADIENTS_ACROSS):
                        arrived.wait()
            self._sums[owner] = GradientSum(spec, flat, touched=set(range(len(spec.tensors))) if resume else set())
        return self._sums[owner]

    def close(self, owner: int, total: GradientSum | None) -> None:
        """The stage's gradients are complete: they are handed over once they are in host memory."""
        self._bring(owner, total, partial(self._hand_over, owner), look=True)

    def rest(self, owner: int, total: GradientSum | None) -> None:
        """One of two users has added its gradients: they rest until the other resumes the sum."""
        self._bring(owner, total, lambda host, squares: self.residency.rest_gradients(owner), look=False)

    def _bring(
        self, owner: int, total: GradientSum | None, then: Callable[[torch.Tensor, list[float]], None], *, look: bool
    ) -> None:
        if total is None:
            return
        total.complete()
        del self._sums[owner]
        host = self.memory.tensor(self.residency.acquire_gradients(owner), self._dtype, total.stage.params)
        runs = [(tensor.offset, tensor.numel) for tensor in total.stage.tensors]
        if not self.device.separate:
            then(host, self.device.squares(host, runs, self._lanes).values() if look else [])
            return
        event = self.device.download(total.flat, host, bulk=True)  # first: it does not wait for the squares
        squares = self.device.squares(total.flat, runs, self._lanes) if look else None
        # The update reads and writes the host's weights; they stay held until the gradients have arrived.
        record = self.residency.records[owner]
        self.residency.hold(record)

        def arrived(squares: list[float]) -> None:
            then(host, squares)
            self.residency.let_go(record)

        self._downloads.append(_Download(event, squares, _whole(total.flat), arrived))

    def advance(self) -> None:
        """Hands over what has arrived. Never waits."""
        while self._downloads and self._downloads[0].done():
            self._arrive()

    def settle(self) -> None:
        """Everything under way has arrived and is handed over."""
        while self._downloads:
            with self._waiting(GRADIENTS_ACROSS):
                self._downloads[0].wait()
            self._arrive()

    def _arrive(self) -> None:
        squares = self._downloads[0].wait()
        download = self._downloads.pop(0)
        self._spans.append(download.span)
        download.arrived(squares)

    def forget(self) -> None:
        """A step was given up: nothing is handed over."""
        for download in self._downloads:
            download.wait()
            self._spans.append(download.span)
        self._downloads.clear()
        for total in self._sums.values():
            if self.device.separate:
                self._spans.append(_whole(total.flat))
        self._sums.clear()


def _whole(flat: torch.Tensor) -> torch.Tensor:
    """The uint8 device span a typed view was cut from."""
    return torch.as_strided(flat.view(torch.uint8), (flat.untyped_storage().nbytes(),), (1,), 0)
