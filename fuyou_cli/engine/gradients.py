"""Brings gradients from compute to their update: sums them where the device computes, copies them to the host, and hands them
over.

Each parameter's gradient is added as soon as autograd has it, then dropped, so only one tensor's gradient exists beside the
sum. Additions follow the order of micro-batches, which is part of the numerics. So are lanes: groups of micro-batches that are
summed apart, and then in a binary tree, so that replicas can sum a part of the tree each (`replicas`).

On device cpu a stage's gradients are summed where they rest. A separate device sums and squares them in spans that are reused
after their downloads. What follows a download runs in `advance` or `settle`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..core.errors import NumericsError
from ..planner.device import GRADIENTS_ACROSS, square_lanes
from ..planner.ledgers import Residency
from ..planner.memory import summing_spans
from ..planner.ring import AMONG_REPLICAS
from ..planner.schedule import Visit
from ..spec.model import ITEM_SIZE, StageSpec
from ..spec.plan import Span
from .anatomy import Installed
from .context import Context
from .devices.base import Event, Squares, ValueRun
from .moves import Waiting
from .skeleton import TORCH_DTYPE
from .updates import DeviceStates

if TYPE_CHECKING:
    from .replicas import Replicas  # loads torch.distributed, which one process does not need

PIECE = 1 << 19  # elements added at once
LOOK = "lower optimizer.lr or look at the data of this step"  # the remedy if a step's numbers are not finite

# (stage, its gradients where they rest, the squares of each tensor; None: nobody looked at them)
HandOver = Callable[[int, torch.Tensor, list[float] | None], None]


@dataclass(slots=True)
class GradientSum:
    """The gradients of one stage in one flat tensor (host or device memory), laid out like its trained weights.
    `lane_ends`: the micro-batch behind each lane; none: there is one lane."""

    stage: StageSpec
    flat: torch.Tensor  # of the lane under way
    touched: set[int] = field(default_factory=set)
    lane_ends: tuple[int, ...] = ()
    _lane: int = 0
    _lane_sums: list[torch.Tensor] = field(default_factory=list)  # of subtrees whose right neighbour is still to come

    def begin(self, micro_batch: int) -> None:
        """Adds to the lane of a micro-batch from now on. `micro_batch`: its number within the sweep."""
        while self.lane_ends and micro_batch >= self.lane_ends[self._lane]:
            self._begin_lane()

    def _begin_lane(self) -> None:
        self._end_lane()
        self._lane_sums.append(self.flat.clone())
        self.touched.clear()
        self._lane += 1

    def _end_lane(self) -> None:
        """Adds the lane to its left neighbours, as far up in the tree as they are complete."""
        self._zero_untouched()
        lane = self._lane
        while lane % 2:
            self.flat.add_(self._lane_sums.pop())
            lane //= 2

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Adds a whole tensor's gradient (any float dtype) to parameter `index`."""
        target = self._place(index)
        if index in self.touched:
            add_in_pieces(target, gradient)
        else:
            target.copy_(gradient)
            self.touched.add(index)

    def add_rows(self, index: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Adds `values` (len(rows), ...) to the distinct rows of parameter `index`."""
        target = self._place(index)
        if index not in self.touched:
            target.zero_()
            self.touched.add(index)
        target.index_add_(0, rows, values.to(target.dtype))

    def add_part(self, index: int, first: int, gradient: torch.Tensor) -> None:
        """Adds to the elements of parameter `index` from `first` on, in their order."""
        target, is_new = self._part(index, first, gradient.numel())
        if is_new:
            target.copy_(gradient.reshape(-1))
        else:
            add_in_pieces(target, gradient.reshape(-1))

    def add_product(self, index: int, first: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds the matrix left x right to the elements of parameter `index` from `first` on, rounded to their dtype before as
        a gradient is. In the dtype of the sum it is computed there."""
        rows, columns = left.shape[0], right.shape[1]
        target, is_new = self._part(index, first, rows * columns)
        if left.dtype != target.dtype:
            gradient = torch.mm(left, right).view(-1)
            target.copy_(gradient) if is_new else add_in_pieces(target, gradient)
        elif is_new:
            torch.mm(left, right, out=target.view(rows, columns))
        else:
            target.view(rows, columns).addmm_(left, right)

    def _part(self, index: int, first: int, count: int) -> tuple[torch.Tensor, bool]:
        """Returns some elements of parameter `index`, and whether nothing was added to any of the parameter yet and all are
        meant. Others are zero then. Of one tensor for all experts none counts as all, as a range may hold a single one: a
        product that is added to zeros has other last bits."""
        spec, is_new = self.stage.tensors[index], index not in self.touched
        is_all = count == spec.numel and spec.whole is None
        if is_new:
            self.touched.add(index)
            if not is_all:
                self.flat[spec.offset : spec.offset + spec.numel].zero_()
        return self.flat[spec.offset + first : spec.offset + first + count], is_new and is_all

    def _place(self, index: int) -> torch.Tensor:
        spec = self.stage.tensors[index]
        return self.flat[spec.offset : spec.offset + spec.numel].view(spec.shape)

    @contextmanager
    def collecting(self, parameters: Installed) -> Iterator[None]:
        """Adds gradients of the stage's installed parameters to the sum, inside the context, instead of setting `.grad`."""
        anchors = [bank.anchor for bank in parameters.banks]  # which stand for experts, and have no gradient
        for bank in parameters.banks:
            bank.sink = self

        def collect(index: int) -> object:
            def hook(parameter: torch.Tensor) -> None:
                assert parameter.grad is not None
                self.add(index, parameter.grad)
                parameter.grad = None

            return parameters[index].register_post_accumulate_grad_hook(hook)

        hooks = [
            collect(index)
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad and not any(parameter is anchor for anchor in anchors)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()  # type: ignore[attr-defined]

    def complete(self) -> None:
        """Sums all lanes. What has no gradient is zero then."""
        while self._lane + 1 < len(self.lane_ends):
            self._begin_lane()
        self._end_lane()

    def _zero_untouched(self) -> None:
        """Zeroes parameters without a gradient, and the padding between tensors, because the update reads them all."""
        end = 0
        for index, spec in enumerate(self.stage.trained_tensors):
            if end < spec.offset:
                self.flat[end : spec.offset].zero_()
            end = spec.offset + spec.numel
            if index not in self.touched:
                self.flat[spec.offset : end].zero_()
        self.flat[end:].zero_()


def add_in_pieces(target: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds in place. torch on the CPU first copies a gradient of another dtype; in pieces the copy stays in the cache."""
    if gradient.dtype == target.dtype or target.device.type != "cpu" or gradient.numel() <= PIECE:
        target.add_(gradient)
        return
    rows = max(1, PIECE * len(gradient) // max(1, gradient.numel()))
    for part, more in zip(target.split(rows), gradient.split(rows), strict=True):
        part.add_(more)


# ---- the norm --------------------------------------------------------------------------------------------------------


def squared_norm(
    stage: StageSpec, squares: Sequence[float], summed: torch.Tensor, *, step: int, changed: bool, reached: set[str]
) -> float:
    """Sums the squares of a stage's gradients, tensor by tensor in order. `squares`: of every tensor, as the device summed
    them; `summed`: the gradients, where they rest. Adds the names of tensors with a gradient other than zero to `reached`.

    Raises NumericsError naming the tensor if a value is not finite. `changed`: an update of the step has begun.
    """
    total = 0.0
    for spec, value in zip(stage.trained_tensors, squares, strict=True):
        if not math.isfinite(value):
            not_finite = int((~summed[spec.offset : spec.offset + spec.numel].isfinite()).sum())
            what = f"step {step}: {not_finite} gradients of {spec.name} ({stage.name}) are not finite"
            raise NumericsError(what, hint=LOOK, changed=changed)
        if value:
            reached.add(spec.name)
        total += value
    return total


# ---- to the host -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Span:
    """Device memory (uint8) for one sum. `used`: the end of the last compute that read or wrote it."""

    memory: torch.Tensor
    used: Event | None = None


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Describes a sum on its way to the device, where a later visit continues it."""

    memory: torch.Tensor
    arrived: Event


@dataclass(frozen=True, slots=True)
class _Download:
    """Describes gradients on their way to the host: the device span they leave, their squares, and what follows."""

    event: Event
    squares: Squares | None  # None: they are not needed
    span: _Span | None  # None: they rest on the device
    arrived: Callable[[list[float] | None], None]
    cause: str = GRADIENTS_ACROSS  # of waits for it
    updates: bool = False  # what follows may be an update on the device, which computes with the span

    def done(self) -> bool:
        return self.event.done() and (self.squares is None or self.squares.done())

    def wait(self) -> list[float] | None:
        """Waits until the span is free and returns the squares. Raises the error of a copy that failed."""
        self.event.synchronize()
        return None if self.squares is None else self.squares.result()


class GradientSums:
    """The sums under way, by stage. Passes complete ones to `hand_over`. `lane_ends`: of the sweep (`GradientSum`)."""

    replicas: Replicas | None = None  # whose sums are added up

    def __init__(
        self, context: Context, *, residency: Residency, states: DeviceStates, hand_over: HandOver, waiting: Waiting
    ) -> None:
        model, plan, device = context.model, context.plan, context.device
        self.model, self.memory, self.device = model, context.memory, device
        self.residency, self._states, self._hand_over, self._waiting = residency, states, hand_over, waiting
        self._dtype = TORCH_DTYPE[plan.numerics.accumulate_dtype]
        self._sums: dict[int, GradientSum] = {}
        self._touched: dict[int, set[int]] = {}  # sums that rest: the parameters that have a gradient
        self._ahead: dict[int, _Ahead] = {}
        self._spans = self._open_spans(ITEM_SIZE[plan.numerics.accumulate_dtype], plan.sweeps)
        longest = max(tensor.numel for stage in model.stages for tensor in stage.tensors) if device.separate else 0
        self._lanes = device.empty(8 * square_lanes(longest) if device.separate else 0)
        self.lane_ends: tuple[int, ...] = ()
        # Handed over in the order in which they left, so updates begin in the order of backward.
        self._downloads: list[_Download] = []

    def _open_spans(self, item: int, sweeps: int) -> list[_Span]:
        """Opens spans on a separate device. They are used in turn, beside copies."""
        if not self.device.separate:
            return []
        resting = {stage for stage, home in self._states.homes.items() if home.gradients is not None}
        largest = max((stage.trained for stage in self.model.stages if stage.index not in resting), default=0)
        return [_Span(self.device.empty(largest * item)) for _ in range(summing_spans(self.model, resting, sweeps))]

    def begin(self, owner: int) -> None:
        """Uploads the sum that the next visit continues, if it rests in host memory and a span is free."""
        record = self.residency.records[owner]
        rests_on_host = record.gradients == "resumed" and record.gradient_read is None and self._states.gradients(owner) is None
        if rests_on_host and owner not in self._sums and owner not in self._ahead and self._spans:
            self._send(owner, self.residency.resume_gradients(owner))

    def _send(self, owner: int, span: Span) -> None:
        place = self._spans.pop(0)
        params = self.model.stages[owner].trained
        flat = place.memory.view(self._dtype)[:params]
        host = self.memory.tensor(span, self._dtype, params)
        self._ahead[owner] = _Ahead(place.memory, self.device.upload(host, flat, after=place.used, bulk=True))

    def open(self, owner: int, *, resume: bool = False) -> GradientSum | None:
        """Begins or continues the sum of the gradients of stage `owner`, in the slot it has taken. Returns None for a stage
        that learns nothing. With `resume` it continues from what rested at the gradients' home."""
        spec = self.model.stages[owner]
        if spec.trained == 0:
            return None
        if owner not in self._sums:
            span = self.residency.resume_gradients(owner) if resume else self.residency.acquire_gradients(owner)
            flat = self._states.gradients(owner)
            if flat is None:
                flat = self._to_sum_in(owner, span, resume=resume)
            touched = self._touched.pop(owner) if resume else set[int]()
            self._sums[owner] = GradientSum(spec, flat, touched=touched, lane_ends=self.lane_ends)
        return self._sums[owner]

    def _to_sum_in(self, owner: int, span: Span, *, resume: bool) -> torch.Tensor:
        """Returns where the gradients are summed that rest in the host's `span`, or do not rest. With `resume`, compute
        submitted from now on finds there what rested."""
        params = self.model.stages[owner].trained
        if not self.device.separate:
            return self.memory.tensor(span, self._dtype, params)
        if owner not in self._ahead:
            self.residency.wait_until(lambda: bool(self._spans), GRADIENTS_ACROSS)  # until the oldest download has ended
            if not resume:
                return self._spans.pop(0).memory.view(self._dtype)[:params]
            self._send(owner, span)
        ahead = self._ahead.pop(owner)
        with self._waiting(GRADIENTS_ACROSS):
            ahead.arrived.wait()
        return ahead.memory.view(self._dtype)[:params]

    def end(self, visit: Visit, owner: int, total: GradientSum | None) -> None:
        """Hands over the stage's gradients at the end of a visit, or lets them rest if more will come."""
        if total is None:
            return
        if visit.rest:  # one of two users, or a sweep, has added its gradients; another resumes the sum
            self._touched[owner] = set(total.touched)
            self._bring(owner, total, lambda host, squares: self.residency.rest_gradients(owner), look=False)
        else:
            # A first backward that measures the norm needs the squares alone; the one that follows has them already.
            once = not (visit.measures or visit.again)
            hand_over = partial(self._hand_over, owner)
            self._bring(owner, total, hand_over, look=once or visit.measures, leaves=once or visit.again)

    def _bring(
        self, owner: int, total: GradientSum, then: Callable[[torch.Tensor, list[float] | None], None], *, look: bool,
        leaves: bool = True,
    ) -> None:  # fmt: skip
        """Brings a sum to its home or slot and calls `then`. If it does not leave, nothing but its squares is needed."""
        total.complete()
        del self._sums[owner]
        span = self.residency.acquire_gradients(owner)
        runs = [(tensor.offset, tensor.numel) for tensor in total.stage.trained_tensors]
        if self.replicas is not None:
            assert look and leaves, "replicas compute one backward a step"
            self._share(self.replicas, owner, total.flat, runs, then)
            return
        if not self.device.separate:
            then(total.flat, self.device.squares(total.flat, runs, self._lanes).result() if look else None)
            if not leaves:
                self.residency.drop_gradients(owner)
            return
        # Submitted first, so that it does not wait for the squares.
        resting, event = self._send_home(owner, total, span) if leaves else (total.flat, self.device.compute_end())
        squares = self.device.squares(total.flat, runs, self._lanes) if look else None
        takes_turns = self._states.gradients(owner) is None
        span_left = _Span(_span_memory(total.flat), self.device.compute_end()) if takes_turns else None
        record = self.residency.records[owner]
        if leaves:  # the update uses the host's weights, so they stay held until the gradients have arrived
            self.residency.hold(record)
        else:
            self.residency.drop_gradients(owner)

        def arrived(squares: list[float] | None) -> None:
            then(resting, squares)
            if leaves:
                self.residency.let_go(record)

        self._downloads.append(_Download(event, squares, span_left, arrived, updates=owner in self._states.homes))

    def _share(
        self, replicas: Replicas, owner: int, flat: torch.Tensor, runs: list[ValueRun],
        then: Callable[[torch.Tensor, list[float] | None], None],
    ) -> None:  # fmt: skip
        """Adds up the sums of all replicas, beside compute, and calls `then`."""
        record = self.residency.records[owner]
        self.residency.hold(record)

        def arrived(squares: list[float] | None) -> None:
            then(flat, self.device.squares(flat, runs, self._lanes).result())
            self.residency.let_go(record)

        self._downloads.append(_Download(replicas.begin(flat), None, None, arrived, cause=AMONG_REPLICAS))

    def _send_home(self, owner: int, total: GradientSum, span: Span) -> tuple[torch.Tensor, Event]:
        """Sends a sum from the device to where it rests (`span`: in host memory). Returns that place, and the copy's end."""
        if owner in self._states.homes:
            self._states.summed(owner, total.flat)
            return total.flat, self.device.compute_end()
        resting = self.memory.tensor(span, self._dtype, total.stage.trained)
        return resting, self.device.download(total.flat, resting, bulk=True)

    def advance(self) -> None:
        """Hands over the gradients that have arrived. Never waits."""
        while self._downloads and self._downloads[0].done():
            self._arrive()

    def settle(self) -> None:
        """Waits until all gradients under way have arrived and are handed over."""
        while self._downloads:
            with self._waiting(self._downloads[0].cause):
                self._downloads[0].wait()
            self._arrive()

    def _arrive(self) -> None:
        squares = self._downloads[0].wait()
        download = self._downloads.pop(0)
        self._give_back(download.span)
        download.arrived(squares)
        if download.span is not None and download.updates:  # which has read the span after its squares
            download.span.used = self.device.compute_end()

    def forget(self) -> None:
        """Gives up the step. Hands nothing over."""
        for download in self._downloads:
            download.wait()
            self._give_back(download.span)
        self._downloads.clear()
        if self.device.separate:
            for owner, total in self._sums.items():
                if self._states.gradients(owner) is None:
                    self._spans.append(_Span(_span_memory(total.flat)))
            self._spans += [_Span(ahead.memory) for ahead in self._ahead.values()]
        self._sums.clear()
        self._ahead.clear()
        self._touched.clear()

    def _give_back(self, span: _Span | None) -> None:
        if span is not None:
            self._spans.append(span)


def _span_memory(flat: torch.Tensor) -> torch.Tensor:
    """Returns the uint8 device span that a typed view was cut from."""
    return torch.as_strided(flat.view(torch.uint8), (flat.untyped_storage().nbytes(),), (1,), 0)
