"""Keeps what backward needs of each stage's forward: its input (the boundary), outputs of operators, or both.

`Recompute` keeps the input alone and runs the forward again. `KeptOutputs` gets outputs of operators back besides, from a
`OutputPlace`: `Swap` stores them with the boundary, in the arena or on the ssd; `Keep` leaves them in the device's memory.
`open_activations` gives each stage what the plan chose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..core.errors import UsageError
from ..core.units import align_up
from ..planner.boundary_layout import (
    OUTPUT_ALIGN,
    RECORD_ALIGN,
    BoundaryLayout,
    device_boundaries,
    device_layouts,
    uneven_layout,
)
from ..planner.device import BOUNDARIES_ACROSS
from ..planner.ledgers import BoundaryLedger, WaitUntil
from ..spec.model import OperatorSpec, StageSpec
from ..spec.plan import MicroBatch, Span
from .context import Context, HostMemory
from .devices.base import Device, Event
from .experts import first_matrix, is_product, outputs_of
from .moves import Waiting
from .operators import (
    ATTENTION,
    HandedCall,
    InAttention,
    KeptCalls,
    Notes,
    Only,
    Operators,
    OperatorWeights,
    Resting,
    Views,
    factors,
    handing_over,
    is_linear,
    linear_inside,
    linear_into,
    name_of,
    numbers_of,
    product_into,
    product_of,
)


class Activations:
    """What happens between forward and backward of one stage."""

    def forward(self, run: Forward, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Returns `run(x)` without a graph, and keeps what backward needs. `parameters`: the stage's, as installed."""
        raise NotImplementedError

    def begin(self, micro_batch: int) -> None:
        """Starts uploading what one micro-batch kept to a separate device. Its backward comes soon."""

    def recompute(
        self, run: Forward, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        """Returns `run(x)` with its graph, for backward. `flat`: the stage's weights; None: it has none."""
        return run(x)

    def forget(self) -> None:
        """Gives up a step. No copy may be under way."""


def open_activations(context: Context, *, boundaries: Boundaries, waiting: Waiting) -> list[Activations]:
    model, plan, device = context.model, context.plan, context.device
    leaving: Downloads = []
    on_device = keep_places(context)

    def of(stage: int) -> Activations:
        with_boundary: OutputPlace = Swap(stage, boundaries=boundaries, memory=context.memory, device=device)
        places = dict.fromkeys(plan.stages[stage].kept, with_boundary) | on_device[stage]
        if not places:
            return Recompute(model.stages[stage], as_backward=device.separate and model.stages[stage].kind == "block")
        return KeptOutputs(
            model.stages[stage], places,
            began=boundaries.awaits, waiting=waiting, leaving=leaving, separate=device.separate,
        )  # fmt: skip

    return [of(stage.index) for stage in model.stages]


# ---- the input alone ----------------------------------------------------------------------------------------------
# Runs a stage's forward again for its backward, from the stage's input, and computes only what backward needs.
#
# Backward never reads the value of some products. An example is the last product of a block that is added to the block's
# input: only the sum leaves the block, and no gradient depends on the product's value. Such a product is not computed again;
# zeros replace it. `OperatorTrace` finds these products when a block is inspected. Here they are recognised by the weight
# that a call gets, as a look at every operator would cost microseconds each. Where a weight is part of a parameter, or used
# twice, they are recognised by their number.

_NOTHING_KEPT = KeptCalls(functions={}, attention=None, as_returned={})
Forward = Callable[[torch.Tensor], torch.Tensor]  # a stage's forward of one micro-batch


def without_saving(run: Forward, x: torch.Tensor) -> torch.Tensor:
    """Runs a forward as the recompute will: with autograd on, but without saving what autograd would save. Some kernels return
    more if a gradient is wanted, or other kernels run, which round differently and draw other dropout."""
    hooks = torch.autograd.graph.saved_tensors_hooks(_drop, _refuse)
    with torch.enable_grad(), hooks:
        return run(x.detach().requires_grad_(True)).detach()


class Recompute(Activations):
    """Of a stage that keeps only its input. `as_backward`: of a block on a GPU, where attention takes
    other kernels without gradients. On a processor forward is faster without."""

    def __init__(self, stage: StageSpec, *, as_backward: bool = False) -> None:
        self._stage, self.as_backward = stage, as_backward
        self._numbers = numbers_of(stage, ())

    def forward(self, run: Forward, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        return without_saving(run, x) if self.as_backward else run(x)

    def recompute(
        self, run: Forward, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        with sparing(self._stage, flat, self._numbers, parameters):
            return run(x)


class Sparing(Operators):
    """Spares the products of `stage` whose values nobody reads, inside the context, where its weights lie in `flat` (None: it
    has none). Subclasses do more with operators."""

    def __init__(self, stage: StageSpec, flat: torch.Tensor | None) -> None:
        super().__init__()
        self._weights: dict[int, int] = {}  # operator -> address of its weight
        if flat is not None:
            self._weights = {o.index: flat.data_ptr() + o.weight * flat.element_size() for o in stage.unneeded}

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        weight = self._weights.get(index)
        if weight is not None and is_product(func) and weight == first_matrix(args):
            return args[0].new_zeros(outputs_of(args))
        pair = factors(func, args) if weight is not None else None
        if pair is None or weight not in (pair[0].data_ptr(), pair[1].data_ptr()):
            return func(*args, **kwargs)
        return pair[0].new_zeros(pair[0].shape[0], pair[1].shape[1])

    def inside(
        self, calls: KeptCalls | None, numbers: Mapping[int, int] | None, parameters: Sequence[nn.Parameter]
    ) -> AbstractContextManager[Any]:
        """Does so inside the context, only in the calls that compute kept outputs if they are known, and in those of products
        to spare. `numbers`: of the operators' weights among `parameters`."""
        if calls is None or numbers is None:
            return self
        weights = {operator: parameters[number] for operator, number in numbers.items()}
        return handing_over(partial(self._hand_over, calls, Only(self)), weights, attention=calls.attention is not None)

    def _hand_over(self, calls: KeptCalls, only: Only, handed: HandedCall) -> Any:
        if handed.operator == ATTENTION:
            assert calls.attention is not None
            with InAttention(only.of(calls.attention, 0)):
                return handed.run()
        if handed.func is not calls.functions.get(handed.operator, handed.func):
            return handed.run()
        only.of(handed.operator, handed.address)
        if is_linear(handed) and handed.args[0].is_contiguous():  # otherwise torch may not multiply it flat
            return linear_inside(only, handed.args)
        with only:
            return handed.run()


def sparing(
    stage: StageSpec, flat: torch.Tensor | None, numbers: Mapping[int, int] | None, parameters: Sequence[nn.Parameter]
) -> AbstractContextManager[Any]:
    """Spares what a second forward need not compute, inside the context, where no output is kept."""
    return Sparing(stage, flat).inside(_NOTHING_KEPT, numbers, parameters) if stage.unneeded else nullcontext()


def _drop(tensor: torch.Tensor) -> None:
    """Drops what autograd would save in a forward that will be recomputed."""


def _refuse(nothing: None) -> NoReturn:
    raise AssertionError("a forward that is recomputed has no backward of its own")


# ---- outputs as well ----------------------------------------------------------------------------------------------
# Keeps outputs of operators from forward to backward. Forward puts them in their places. The recompute gets them back and
# computes only what was not kept.
#
# Each output is given back once, so the model's code may change it in place; twice where the norm is measured first, which is
# not done for code that may (`planner/search.may_measure_first`). Forward runs as the recompute will (`without_saving`). An
# output is never a parameter, and two outputs never share memory, so nothing is kept twice. Which calls of the model's code
# compute them is noted once for each shape (`operators.handing_over`).

_WITHOUT = "set offload.activations=recompute, which does not depend on the model's operators"


# Descriptions of kept tensors, other values as they are; whether the operator returns a tuple.
KeptOutput = tuple[list[Any], bool]
Downloads = list[list[Event]]  # copies to the host, by micro-batch, over all stages in order
Outputs = dict[int, KeptOutput]  # by operator
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # sources and targets
Arrived = dict[int, tuple[list[Any], list[Event]]]  # by operator: values for compute, and copies to wait for


class OutputPlace:
    """Where outputs of one stage are kept. In this base class compute writes and reads them in order, so nothing waits."""

    direct = True  # compute may write there directly, so that a product needs no copy
    waits = False  # copies run beside compute, and may be asked for together

    def room(self, micro_batch: int, operator: int) -> int:
        """Returns the bytes of an output's memory."""
        raise NotImplementedError

    def kept_tensor(self, micro_batch: int, operator: int, resting: Resting) -> torch.Tensor:
        """Returns the place of one tensor of an output."""
        raise NotImplementedError

    def put(self, value: torch.Tensor, target: torch.Tensor) -> Event | None:
        """Copies a computed tensor. Returns the end of the copy if compute does not wait for it."""
        target.copy_(value)
        return None

    def put_all(self, pairs: Pairs) -> list[Event]:
        """Copies computed tensors, if copies wait. Returns when they are over."""
        raise AssertionError("compute copies outputs itself")

    def for_backward(self, kept: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that backward computes with: this one, or memory for a copy of it."""
        return kept

    def bring_all(self, pairs: Pairs) -> list[Event]:
        """Copies outputs to what `for_backward` returned for them, if copies wait. Returns when they are over."""
        raise AssertionError("compute reads outputs where they are")


class KeptOutputs(Activations):
    """Of a stage that keeps outputs. Remembers their layouts from forward to backward. `places`: by
    operator; `began`: called with the stage and copies between the device and where its boundary is kept."""

    def __init__(
        self, stage: StageSpec, places: Mapping[int, OutputPlace], *, began: Callable[..., None], waiting: Waiting, leaving:
        Downloads, separate: bool,
    ) -> None:  # fmt: skip
        self._stage, self.places, self._began, self._waiting, self._separate = stage, places, began, waiting, separate
        self.chosen = {operator.index: operator for operator in stage.operators if operator.index in places}
        self.products = {index for index, spec in self.chosen.items() if spec.kind == "mm" and not spec.overwritten}
        self._resting: dict[int, Outputs] = {}  # by micro-batch
        self._leaving = leaving
        self._arriving: dict[int, Arrived] = {}
        self._numbers = numbers_of(stage, tuple(places))  # of weights among parameters; None: calls are not looked for
        self._calls_by_shape: dict[torch.Size, tuple[KeptCalls, Outputs] | None] = {}  # by shape of the input

    def forward(self, run: Forward, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Runs the forward. At its end the copies of the previous micro-batch have ended."""
        mode = _Keeping(self, micro_batch)
        if self._numbers is None or (x.shape in self._calls_by_shape and self._calls_by_shape[x.shape] is None):
            with mode:
                y = without_saving(run, x)
        else:
            weights = {o: parameters[number] for o, number in self._numbers.items() if o in self.places}
            y = self._handed_over(mode, run, x, weights)
        self._resting[micro_batch] = mode.outputs
        copies = [*mode.copies.values(), *mode.put_later()]
        self._leaving.append(copies)
        self._began(self._stage.index, *copies)
        # Outputs hold the device's memory until they are copied: so no more than two micro-batches hold some.
        while len(self._leaving) > 1:
            events = self._leaving.pop(0)
            with nullcontext() if all(event.done() for event in events) else self._waiting(BOUNDARIES_ACROSS):
                for event in events:
                    event.synchronize()  # sync: the outputs of the previous micro-batch
        return y

    def _handed_over(self, mode: _Keeping, run: Forward, x: torch.Tensor, weights: OperatorWeights) -> torch.Tensor:
        if (known := self._calls_by_shape.get(x.shape)) is not None:
            keeping = _KeepingCalls(mode, *known)
            with handing_over(keeping.hand_over, weights, attention=known[0].attention is not None):
                y = without_saving(run, x)
            keeping.check()
            return y
        notes = Notes(mode.outputs, lambda: mode.last)
        with handing_over(notes.hand_over, weights, attention=True), mode:
            y = without_saving(run, x)
        calls = None if mode.changed else notes.calls()
        if calls is not None and calls.attention is not None and self.chosen[calls.attention].kind != "attention":
            calls = None  # it is one of attention's own products, which later calls do not look for
        self._calls_by_shape[x.shape] = None if calls is None else (calls, mode.outputs)
        return y

    def begin(self, micro_batch: int) -> None:
        self._arriving[micro_batch] = self._bring_kept(micro_batch)

    def recompute(
        self, run: Forward, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        arrived = self._arriving.pop(micro_batch) if self._separate else self._bring_kept(micro_batch)
        mode = GivingBack(arrived, self._resting[micro_batch], self._stage, flat)
        calls, _ = self._calls_by_shape.get(x.shape) or (None, None)
        with mode.inside(calls, self._numbers, parameters):
            return run(x)

    def forget(self) -> None:
        self._resting.clear()
        self._leaving.clear()
        self._arriving.clear()

    def _bring_kept(self, micro_batch: int) -> Arrived:
        """Returns the kept values of every operator, where backward computes with them. Copies may be under way."""
        arrived: Arrived = {}
        pairs, copied = list[tuple[torch.Tensor, torch.Tensor]](), list[Event]()
        for index, (values, _) in self._resting[micro_batch].items():
            place, outputs = self.places[index], list[Any](values)
            for number, value in enumerate(values):
                if isinstance(value, Resting):
                    kept = place.kept_tensor(micro_batch, index, value)
                    outputs[number] = place.for_backward(kept)
                    if place.waits:
                        pairs.append((kept, outputs[number]))
            arrived[index] = outputs, copied if place.waits else []
        if pairs:  # all are from one place
            copied += next(place for place in self.places.values() if place.waits).bring_all(pairs)
        self._began(self._stage.index, *copied)
        return arrived


class _Keeping(Operators):
    """Copies outputs as soon as they are computed. An operator that writes into a tensor waits until its copy has ended.
    Products that are kept in direct places are computed there. The model's code then computes with the kept value itself and
    must not change it. `changed`: it changed an output; `last`: where the newest was computed (address and elements);
    `at_risk`: a change of the newest would change what is kept."""

    def __init__(self, stage: KeptOutputs, micro_batch: int) -> None:
        super().__init__()
        self.outputs: Outputs = {}
        self.before: Outputs = {}  # of an earlier micro-batch of this shape
        self.stage, self._micro_batch = stage, micro_batch
        self.copies: dict[int, Event] = {}  # by storage; the last copy of a storage ends after its others
        self.products_in_place: dict[int, OperatorSpec] = {}  # by storage: products computed in their place
        self.later: list[tuple[OutputPlace, torch.Tensor, torch.Tensor]] | None = None  # copies to be asked for at the end
        self.changed, self.at_risk, self.last = False, False, (0, 0)

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        spec = self.stage.chosen.get(index)
        if spec is None:
            return func(*args, **kwargs)
        if spec.kind != kind:
            raise UsageError(f"operator {index} of a stage is {kind}, but the plan was made for {spec.name}", hint=_WITHOUT)
        place, out = self.stage.places[index], None
        if place.direct and not spec.overwritten and (resting := product_of(func, args)) is not None:
            out = self._product_in_place(spec, Resting(0, *resting), func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
            self.outputs[index] = self._keep(spec, out)
        return out

    def _product_in_place(self, spec: OperatorSpec, resting: Resting, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Computes a product in its place. Returns None if it has no room there."""
        place = self.stage.places[spec.index]
        if resting.end > place.room(self._micro_batch, spec.index):
            return None
        out = product_into(func, args, kwargs, place.kept_tensor(self._micro_batch, spec.index, resting))
        self.outputs[spec.index] = [resting], False
        self.products_in_place[out.untyped_storage()._cdata] = spec
        self.at_risk, self.last = True, (out.data_ptr(), out.numel())
        return out

    def linear_in_place(self, index: int, args: Any, output: KeptOutput) -> torch.Tensor:
        """Computes a linear layer without a bias in its place, without a look at its operators."""
        target = self.stage.places[index].kept_tensor(self._micro_batch, index, output[0][0])
        self.outputs[index], self.at_risk = output, True
        return linear_into(args, target)

    def other_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable and (self.copies or self.products_in_place):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._before_change(leaf.untyped_storage()._cdata, func)
        return func(*args, **kwargs)

    def _before_change(self, storage: int, func: Any) -> None:
        """Makes sure that the kept copy of this storage stays as it is."""
        if storage in self.copies:
            self.changed = True
            self.copies[storage].wait()
        if storage in self.products_in_place:
            raise _changed(name_of(func), self.products_in_place[storage])

    def _keep(self, spec: OperatorSpec, out: Any) -> KeptOutput:
        place, end = self.stage.places[spec.index], 0
        values: list[Any] = []
        for value in out if isinstance(out, tuple) else (out,):
            if not isinstance(value, torch.Tensor) or value.numel() * value.element_size() < OUTPUT_ALIGN:
                # A number, or a small tensor like a kernel's random state: it stays where it is.
                values.append(value.clone() if isinstance(value, torch.Tensor) else value)
                continue
            resting = self._as_before(spec.index, len(values), value) or Resting.of(value, end)
            if resting.end > (room := place.room(self._micro_batch, spec.index)):
                raise UsageError(
                    f"the output of {spec.name} takes {resting.end} bytes, but the plan has {room}",
                    hint="set offload.activations=recompute, which keeps no outputs",
                )
            values.append(resting)
            self.put(spec.index, value, resting)
            self.last = value.data_ptr(), value.numel()
            end = align_up(resting.end, OUTPUT_ALIGN)
        return values, isinstance(out, tuple)

    def _as_before(self, index: int, number: int, value: torch.Tensor) -> Resting | None:
        """Returns how such a tensor of an output was kept before. To find its strides again would take time."""
        values = self.before[index][0] if index in self.before else []
        earlier = values[number] if number < len(values) else None
        return (
            earlier if isinstance(earlier, Resting) and (earlier.shape, earlier.dtype) == (value.shape, value.dtype) else None
        )

    def put(self, index: int, value: torch.Tensor, resting: Resting) -> None:
        """Copies a computed tensor of an output to its place, now or later."""
        place = self.stage.places[index]
        target = place.kept_tensor(self._micro_batch, index, resting)
        if place.waits and self.later is not None:
            self.later.append((place, value, target))
            self.at_risk = True
            return
        copied = place.put(value, target)
        self.at_risk = copied is not None
        if copied is not None:
            self.copies[value.untyped_storage()._cdata] = copied

    def put_later(self) -> list[Event]:
        """Begins the copies that were put off. Returns when they are over. All are to one place."""
        if not self.later:
            return []
        return self.later[0][0].put_all([(value, target) for _, value, target in self.later])


class _KeepingCalls:
    """Keeps outputs in calls that are known to compute them: `mode` sees these alone. Copies that run beside compute begin when
    the forward has ended, all at once. A change of an output until then is found by torch's own count of changes."""

    def __init__(self, mode: _Keeping, calls: KeptCalls, outputs: Outputs) -> None:
        self._mode, self._calls, self._outputs = mode, calls, outputs
        mode.later, mode.before = [], outputs
        self._only = Only(mode)
        self._watched: list[tuple[torch.Tensor, int, int]] = []  # an output, its changes so far, its operator

    def hand_over(self, handed: HandedCall) -> Any:
        operator = handed.operator
        if operator == ATTENTION:
            assert self._calls.attention is not None
            with InAttention(self._only.of(self._calls.attention, 0), lambda out: self._watch(ATTENTION, out.detach())):
                return handed.run()
        if handed.func is not self._calls.functions[operator]:  # for example, one that asks for the weight's dtype
            return handed.run()
        output, as_returned = self._outputs[operator], self._calls.as_returned.get(operator)
        if as_returned is not None and not self._mode.stage.places[operator].direct:
            out = handed.run()
            value = out.detach()
            self._mode.put(operator, value, as_returned)
            self._mode.outputs[operator] = output
        elif as_returned is not None and operator in self._mode.stage.products and is_linear(handed):
            value = out = self._mode.linear_in_place(operator, handed.args, output)
        else:
            with self._only.of(operator, handed.address):
                out = handed.run()
            value = out.detach()
        self._watch(operator, value)
        return out

    def _watch(self, operator: int, value: torch.Tensor) -> None:
        if self._mode.at_risk:
            self._watched.append((value, value._version, operator))

    def check(self) -> None:
        """Raises UsageError if the forward changed an output, or did not compute what it did before."""
        for value, version, operator in self._watched:
            if value._version != version:
                number = self._calls.attention if operator == ATTENTION else operator
                assert number is not None
                raise _changed("the model's code", self._mode.stage.chosen[number])
        if self._mode.outputs.keys() != self._outputs.keys():
            raise UsageError("a stage's operators are others than they were for the micro-batch before", hint=_WITHOUT)


def _changed(changer: str, spec: OperatorSpec) -> UsageError:
    what = f"{changer} changes the output of {spec.name}, or one beside it, in place, which the plan did not expect"
    return UsageError(what, hint=_WITHOUT)


class GivingBack(Sparing):
    """Returns a kept output instead of computing it, once it has arrived."""

    def __init__(self, arrived: Arrived, outputs: Outputs, stage: StageSpec, flat: torch.Tensor | None) -> None:
        super().__init__(stage, flat)
        self._arrived, self._outputs = arrived, outputs

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        if index not in self._outputs:
            return super().operator(index, kind, func, args, kwargs)
        values, copies = self._arrived.pop(index)
        while copies:  # of all outputs, which share this list
            copies.pop().wait()
        return tuple(values) if self._outputs[index][1] else values[0]


# ---- boundaries ---------------------------------------------------------------------------------------------------
# Keeps each stage's boundary (its input for all rows) as tensors, copied to where the ledger keeps it, or to a place of its
# own in the device's memory.
#
# Outputs of operators that the plan keeps in RAM or on the ssd are stored with it: each micro-batch's after its own rows.


@dataclass(frozen=True, slots=True)
class _Kind:
    shape: torch.Size
    dtype: torch.dtype
    layout: BoundaryLayout
    parts: tuple[MicroBatch, ...]

    def of(self, number: int) -> torch.Size:
        """Returns the shape of one micro-batch's rows."""
        part = self.parts[number]
        return torch.Size((part.end - part.first, part.width, *self.shape[2:]))


class Boundaries:
    """Keeps boundaries: in forward `stash`, or `room` and `rows` to be filled, then `seal`. In backward `take`, then `drop`."""

    def __init__(self, context: Context) -> None:
        model, plan = context.model, context.plan
        self.model, self.plan, self.memory = model, plan, context.memory
        resting = [stage.stage for stage in plan.stages if stage.boundary == "gpu"]
        self._places, size = device_boundaries(model, plan.group, resting)
        self._device_memory = context.device.empty(size) if size else None
        self.ledger = BoundaryLedger(plan=plan, transfers=context.daemon)
        self._kinds: dict[int, _Kind] = {}
        self._unsealed: set[int] = set()
        self._copies: dict[int, deque[Event]] = {}  # by stage: copies into its place in forward, out of it in backward
        # Stages, and what to do after their copies. Only the first is looked at: copies end in about the order they begin in.
        self._after = deque[tuple[int, Callable[[int], None]]]()

    def stash(self, stage: int, boundary: torch.Tensor, parts: tuple[MicroBatch, ...], wait_until: WaitUntil) -> None:
        """Keeps a copy of `boundary` (host memory). The copy is complete, unless outputs will be stored beside it."""
        self.room(stage, boundary, parts, wait_until)
        for number, part in enumerate(parts):
            self.rows(stage, number).copy_(part.of(boundary))
        if not self.plan.stages[stage].kept:
            self.seal(stage)

    def room(self, stage: int, boundary: torch.Tensor, parts: tuple[MicroBatch, ...], wait_until: WaitUntil) -> None:
        """Finds a place for `boundary` and the outputs beside it. It is filled micro-batch by micro-batch until it is
        sealed."""
        layout = self._layout(stage, boundary, parts)
        # The boundary of the step before, until it was read.
        wait_until(lambda: stage not in self.ledger.kept, "a slot for a boundary")
        span = self.ledger.room(stage, wait_until)
        planned = self.model.widest_bytes_per_token * self.plan.group.tokens if span is None else span.size
        if layout.size > align_up(planned, RECORD_ALIGN):
            raise UsageError(
                f"the boundary of stage {stage} takes {layout.size} bytes, but the plan has {planned}",
                hint="its dtype is wider than precision.compute: this model family is not supported yet",
            )
        self.ledger.place(stage, span, layout.size)
        self._kinds[stage] = _Kind(boundary.shape, boundary.dtype, layout, parts)
        self._unsealed.add(stage)

    def rows(self, stage: int, number: int) -> torch.Tensor:
        """Returns the rows of one micro-batch where they are kept. Valid between `room` or `take` and `seal` or `drop`."""
        kind = self._kinds[stage]
        shape, first_byte = kind.of(number), kind.layout.begins(number)
        size = shape.numel() * kind.dtype.itemsize
        if self._device_memory is not None and stage in self._places:
            begin = self._places[stage] + first_byte
            return self._device_memory[begin : begin + size].view(kind.dtype).view(shape)
        begin = (self.ledger.span_of(stage).offset + first_byte) // kind.dtype.itemsize
        # Without `data`, a write to any other part of the arena would count as a change of these rows.
        return self.memory.all_of(kind.dtype)[begin : begin + shape.numel()].data.view(shape)

    def awaits(self, stage: int, *copies: Event) -> None:
        """Notes copies between the device and the place of the stage's boundary."""
        self._copies.setdefault(stage, deque()).extend(copies)

    def seal(self, stage: int) -> None:
        """Notes that the stage's forward is submitted. The boundary is complete once its copies are over."""
        if stage in self._unsealed:
            self._unsealed.remove(stage)
            self._follow(stage, self.ledger.seal)

    def advance(self) -> None:
        """Handles copies that have ended, and then the ledger's own work. Never waits."""
        while self._after and self._are_over(self._after[0][0]):
            stage, follows = self._after.popleft()
            self._copies.pop(stage, None)
            follows(stage)
        self.ledger.advance()

    def _are_over(self, stage: int) -> bool:
        """Whether the stage's copies have ended. Finished copies are not asked again, because this runs after every
        layer."""
        left = self._copies.get(stage, ())
        while left and left[0].done():
            left.popleft()
        return not left

    def forget(self, wait_until: WaitUntil) -> None:
        """Drops every boundary. No copy may be under way."""
        self._after.clear()
        self._copies.clear()
        self._unsealed.clear()
        self.ledger.forget(wait_until)

    def _follow(self, stage: int, follows: Callable[[int], None]) -> None:
        self._after.append((stage, follows))
        self.advance()

    def take(self, stage: int, wait_until: WaitUntil) -> list[torch.Tensor]:
        """Returns the boundary as stashed, micro-batch by micro-batch, valid until it is dropped."""
        self.ledger.ready(stage, wait_until)
        return [self.rows(stage, number) for number in range(len(self._kinds[stage].parts))]

    def output(self, stage: int, micro_batch: int, operator: int) -> Span:
        """Returns where in the arena an operator's output rests. Valid between stash and seal, and between take and drop."""
        span = self._kinds[stage].layout.output(micro_batch, operator)
        return Span(offset=self.ledger.span_of(stage).offset + span.offset, size=span.size)

    def drop(self, stage: int) -> None:
        """Notes that the stage's backward is submitted. The boundary is freed once its copies are over."""
        self._follow(stage, self.ledger.drop)

    def leave(self, stage: int) -> None:
        """Does the same for a backward that another follows: the boundary stays at its home."""
        self._follow(stage, self.ledger.leave)

    def _layout(self, stage: int, boundary: torch.Tensor, parts: tuple[MicroBatch, ...]) -> BoundaryLayout:
        """Returns the layout of this boundary, which may be smaller than planned."""
        token = boundary[0, 0].numel() * boundary.element_size()
        numerics, kept = self.plan.numerics, self.plan.stages[stage].kept
        planned = 0 if numerics.padding == "step" else numerics.micro_batch_tokens
        return uneven_layout(self.model.stages[stage], kept, parts, token_bytes=token, planned=planned)


# ---- places: with the boundary ------------------------------------------------------------------------------------
# Stores outputs of operators with their stage's boundary, in the arena or on the ssd.


class Swap(OutputPlace):
    """A separate device copies outputs to the host and back while it computes. On device cpu backward uses
    them where they are."""

    def __init__(self, stage: int, *, boundaries: Boundaries, memory: HostMemory, device: Device) -> None:
        self.direct, self.waits = False, device.separate
        self._stage, self._boundaries, self._device = stage, boundaries, device
        self._views = Views(memory.all_of)

    def room(self, micro_batch: int, operator: int) -> int:
        return self._boundaries.output(self._stage, micro_batch, operator).size

    def kept_tensor(self, micro_batch: int, operator: int, resting: Resting) -> torch.Tensor:
        return self._views.at(self._boundaries.output(self._stage, micro_batch, operator).offset, resting)

    def put(self, value: torch.Tensor, target: torch.Tensor) -> Event | None:
        return self._device.download(value, target) if self._device.separate else super().put(value, target)

    def put_all(self, pairs: Pairs) -> list[Event]:
        return self._device.download_all(pairs)

    def for_backward(self, kept: torch.Tensor) -> torch.Tensor:
        return self._device.empty_like(kept) if self._device.separate else kept

    def bring_all(self, pairs: Pairs) -> list[Event]:
        return self._device.upload_all(pairs)


# ---- places: on the device ----------------------------------------------------------------------------------------
# Keeps outputs of operators in the device's memory from forward to backward, so that they are never copied to the host. One
# block of memory for all of them is allocated when a run begins.


class Keep(OutputPlace):
    """`memory`: of the device, for one stage's outputs for a sweep's rows (uint8, 1-D)."""

    def __init__(self, memory: torch.Tensor, layout: BoundaryLayout) -> None:
        self._layout, self._begin = layout, int(memory.storage_offset())
        self._views = Views(memory.view)

    def room(self, micro_batch: int, operator: int) -> int:
        return self._layout.outputs[operator].size

    def kept_tensor(self, micro_batch: int, operator: int, resting: Resting) -> torch.Tensor:
        return self._views.at(self._begin + self._layout.begin(micro_batch, operator), resting)


def keep_places(context: Context) -> list[dict[int, OutputPlace]]:
    """Allocates the plan's memory for outputs on the device. Returns their places by stage and operator."""
    model, plan = context.model, context.plan
    every = tuple(() if model.compiled else stage.kept_there for stage in plan.stages)  # compute allocates a graph
    layouts = device_layouts(model, plan.group, every)
    size = sum(layout.size for _, layout in layouts)
    if not size:
        return [{} for _ in layouts]
    memory = context.device.empty(size)
    places: list[OutputPlace] = [Keep(memory[begin : begin + layout.size], layout) for begin, layout in layouts]
    return [dict.fromkeys(kept, place) for kept, place in zip(every, places, strict=True)]
