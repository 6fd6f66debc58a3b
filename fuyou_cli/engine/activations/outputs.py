"""Keeps outputs of operators from forward to backward. Forward puts them in their places. The recompute gets them back and
computes only what was not kept.

Each output is given back once, so the model's code may change it in place; twice where the norm is measured first, which is
not done for code that may (`planner/candidate.may_measure_first`). Forward runs as the recompute will (`without_saving`). An
output is never a parameter, and two outputs never share memory, so nothing is kept twice. Which calls of the model's code
compute them is noted once for each shape (`called`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...core.errors import UsageError
from ...core.units import align_up
from ...planner.boundary_layout import OUTPUT_ALIGN
from ...planner.device import BOUNDARIES_ACROSS
from ...spec.model import OperatorSpec, StageSpec
from ..devices.base import Event
from ..moves import Waiting
from .called import (
    ATTENTION,
    Handed,
    InAttention,
    Known,
    Notes,
    Only,
    Weights,
    handing_over,
    is_linear,
    linear_into,
    numbers_of,
)
from .operators import Operators, name_of, product_into, product_of
from .recompute import Run, Sparing, without_saving
from .resting import Resting

_WITHOUT = "set offload.activations=recompute, which does not depend on the model's operators"


Output = tuple[list[Any], bool]  # descriptions of kept tensors, other values as they are; whether the operator returns a tuple
Leaving = list[list[Event]]  # copies to the host, by micro-batch, over all stages in order
Outputs = dict[int, Output]  # by operator
Arrived = dict[int, tuple[list[Any], list[Event]]]  # by operator: values for compute, and copies to wait for


class Place(Protocol):
    """Defines where outputs of one stage are kept."""

    direct: bool  # compute may write there directly, so that a product needs no copy
    waits: bool  # copies run beside compute, and may be asked for together

    def room(self, micro_batch: int, operator: int) -> int:
        """Returns the bytes of an output's memory."""
        ...

    def there(self, micro_batch: int, operator: int, resting: Resting) -> torch.Tensor:
        """Returns the place of one tensor of an output."""
        ...

    def put(self, value: torch.Tensor, there: torch.Tensor) -> Event | None:
        """Copies a computed tensor. Returns the end of the copy if compute does not wait for it."""
        ...

    def put_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        """Copies computed tensors, if copies wait. Returns when they are over."""
        ...

    def arriving(self, there: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that backward computes with: this one, or memory for a copy of it."""
        ...

    def bring_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        """Copies outputs to what `arriving` returned for them, if copies wait. Returns when they are over."""
        ...


class KeptOutputs:
    """Implements `Activations` for a stage that keeps outputs. Remembers their layouts from forward to backward. `places`: by
    operator; `began`: called with the stage and copies between the device and where its boundary is kept."""

    def __init__(
        self,
        stage: StageSpec,
        places: Mapping[int, Place],
        *,
        began: Callable[..., None],
        waiting: Waiting,
        leaving: Leaving,
        separate: bool,
    ) -> None:
        self._stage, self.places, self._began, self._waiting, self._separate = stage, places, began, waiting, separate
        self.chosen = {operator.index: operator for operator in stage.operators if operator.index in places}
        self.products = {index for index, spec in self.chosen.items() if spec.kind == "mm" and not spec.overwritten}
        self._resting: dict[int, Outputs] = {}  # by micro-batch
        self._leaving = leaving
        self._arriving: dict[int, Arrived] = {}
        self._numbers = numbers_of(stage, tuple(places))  # of weights among parameters; None: calls are not looked for
        self._known: dict[torch.Size, tuple[Known, Outputs] | None] = {}  # by shape of the input

    def forward(self, run: Run, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Runs the forward. At its end the copies of the previous micro-batch have ended."""
        mode = _Keeping(self, micro_batch)
        if self._numbers is None or (x.shape in self._known and self._known[x.shape] is None):
            with mode:
                y = without_saving(run, x)
        else:
            weights = {o: parameters[number] for o, number in self._numbers.items() if o in self.places}
            y = self._handed_over(mode, run, x, weights)
        self._resting[micro_batch] = mode.outputs
        copies = [*mode.copies.values(), *mode.put_later()]
        self._leaving.append(copies)
        self._began(self._stage.index, *copies)
        while len(self._leaving) > 1:
            events = self._leaving.pop(0)
            with nullcontext() if all(event.done() for event in events) else self._waiting(BOUNDARIES_ACROSS):
                for event in events:
                    event.synchronize()  # sync: the outputs of the previous micro-batch
        return y

    def _handed_over(self, mode: _Keeping, run: Run, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Runs the forward with a look at the calls that compute what is kept, or notes them."""
        if (found := self._known.get(x.shape)) is not None:
            calls = _KeepingCalls(mode, *found)
            with handing_over(calls.hand_over, weights, attention=found[0].attention is not None):
                y = without_saving(run, x)
            calls.check()
            return y
        notes = Notes(mode.outputs, lambda: mode.last)
        with handing_over(notes.hand_over, weights, attention=True), mode:
            y = without_saving(run, x)
        known = None if mode.changed else notes.known()
        if known is not None and known.attention is not None and self.chosen[known.attention].kind != "attention":
            known = None  # it is one of attention's own products, which later calls do not look for
        self._known[x.shape] = None if known is None else (known, mode.outputs)
        return y

    def begin(self, micro_batch: int) -> None:
        self._arriving[micro_batch] = self._given(micro_batch)

    def again(
        self, run: Run, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        given = self._arriving.pop(micro_batch) if self._separate else self._given(micro_batch)
        mode = GivingBack(given, self._resting[micro_batch], self._stage, flat)
        known, _ = self._known.get(x.shape) or (None, None)
        with mode.inside(known, self._numbers, parameters):
            return run(x)

    def forget(self) -> None:
        self._resting.clear()
        self._leaving.clear()
        self._arriving.clear()

    def _given(self, micro_batch: int) -> Arrived:
        """Returns the kept values of every operator, where backward computes with them. Copies to there may be under way."""
        arrived: Arrived = {}
        pairs, copied = list[tuple[torch.Tensor, torch.Tensor]](), list[Event]()
        for index, (values, _) in self._resting[micro_batch].items():
            place, here = self.places[index], list[Any](values)
            for number, value in enumerate(values):
                if isinstance(value, Resting):
                    there = place.there(micro_batch, index, value)
                    here[number] = place.arriving(there)
                    if place.waits:
                        pairs.append((there, here[number]))
            arrived[index] = here, copied if place.waits else []
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
        self.computed_there: dict[int, OperatorSpec] = {}  # by storage: products computed in their place
        self.later: list[tuple[Place, torch.Tensor, torch.Tensor]] | None = None  # copies to be asked for at the end
        self.changed, self.at_risk, self.last = False, False, (0, 0)

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        spec = self.stage.chosen.get(index)
        if spec is None:
            return func(*args, **kwargs)
        if spec.kind != kind:
            raise UsageError(f"operator {index} of a stage is {kind}, but the plan was made for {spec.name}", hint=_WITHOUT)
        place, out = self.stage.places[index], None
        if place.direct and not spec.overwritten and (resting := product_of(func, args)) is not None:
            out = self._computed_there(spec, Resting(0, *resting), func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
            self.outputs[index] = self._keep(spec, out)
        return out

    def _computed_there(self, spec: OperatorSpec, resting: Resting, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Computes a product in its place. Returns None if it has no room there."""
        place = self.stage.places[spec.index]
        if resting.end > place.room(self._micro_batch, spec.index):
            return None
        out = product_into(func, args, kwargs, place.there(self._micro_batch, spec.index, resting))
        self.outputs[spec.index] = [resting], False
        self.computed_there[out.untyped_storage()._cdata] = spec
        self.at_risk, self.last = True, (out.data_ptr(), out.numel())
        return out

    def linear_there(self, index: int, args: Any, output: Output) -> torch.Tensor:
        """Computes a linear layer without a bias in its place, without a look at its operators."""
        there = self.stage.places[index].there(self._micro_batch, index, output[0][0])
        self.outputs[index], self.at_risk = output, True
        return linear_into(args, there)

    def beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable and (self.copies or self.computed_there):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._before_change(leaf.untyped_storage()._cdata, func)
        return func(*args, **kwargs)

    def _before_change(self, storage: int, func: Any) -> None:
        """Makes sure that the kept copy of this storage stays as it is."""
        if storage in self.copies:
            self.changed = True
            self.copies[storage].wait()
        if storage in self.computed_there:
            raise _changed(name_of(func), self.computed_there[storage])

    def _keep(self, spec: OperatorSpec, out: Any) -> Output:
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
        known = values[number] if number < len(values) else None
        return known if isinstance(known, Resting) and (known.shape, known.dtype) == (value.shape, value.dtype) else None

    def put(self, index: int, value: torch.Tensor, resting: Resting) -> None:
        """Copies a computed tensor of an output to its place, now or later."""
        place = self.stage.places[index]
        there = place.there(self._micro_batch, index, resting)
        if place.waits and self.later is not None:
            self.later.append((place, value, there))
            self.at_risk = True
            return
        copied = place.put(value, there)
        self.at_risk = copied is not None
        if copied is not None:
            self.copies[value.untyped_storage()._cdata] = copied

    def put_later(self) -> list[Event]:
        """Begins the copies that were put off. Returns when they are over. All are to one place."""
        if not self.later:
            return []
        return self.later[0][0].put_all([(value, there) for _, value, there in self.later])


class _KeepingCalls:
    """Keeps outputs in calls that are known to compute them: `mode` sees these alone. Copies that run beside compute begin when
    the forward has ended, all at once. A change of an output until then is found by torch's own count of changes."""

    def __init__(self, mode: _Keeping, known: Known, outputs: Outputs) -> None:
        self._mode, self._known, self._outputs = mode, known, outputs
        mode.later, mode.before = [], outputs
        self._only = Only(mode)
        self._watched: list[tuple[torch.Tensor, int, int]] = []  # an output, its changes so far, its operator

    def hand_over(self, handed: Handed) -> Any:
        operator = handed.operator
        if operator == ATTENTION:
            assert self._known.attention is not None
            with InAttention(self._only.of(self._known.attention, 0), self._saw_attention):
                return handed.run()
        if handed.func is not self._known.calls[operator]:  # for example, one that asks for the weight's dtype
            return handed.run()
        output, as_returned = self._outputs[operator], self._known.as_returned.get(operator)
        if as_returned is not None and not self._mode.stage.places[operator].direct:
            out = handed.run()
            value = out.detach()
            self._mode.put(operator, value, as_returned)
            self._mode.outputs[operator] = output
        elif as_returned is not None and operator in self._mode.stage.products and is_linear(handed):
            value = out = self._mode.linear_there(operator, handed.args, output)
        else:
            with self._only.of(operator, handed.address):
                out = handed.run()
            value = out.detach()
        self._watch(operator, value)
        return out

    def _saw_attention(self, out: torch.Tensor) -> None:
        self._watch(ATTENTION, out.detach())

    def _watch(self, operator: int, value: torch.Tensor) -> None:
        if self._mode.at_risk:
            self._watched.append((value, value._version, operator))

    def check(self) -> None:
        """Raises UsageError if the forward changed an output, or did not compute what it did before."""
        for value, version, operator in self._watched:
            if value._version != version:
                number = self._known.attention if operator == ATTENTION else operator
                assert number is not None
                raise _changed("the model's code", self._mode.stage.chosen[number])
        if self._mode.outputs.keys() != self._outputs.keys():
            raise UsageError("a stage's operators are others than they were for the micro-batch before", hint=_WITHOUT)


def _changed(who: str, spec: OperatorSpec) -> UsageError:
    what = f"{who} changes the output of {spec.name}, or one beside it, in place, which the plan did not expect"
    return UsageError(what, hint=_WITHOUT)


class GivingBack(Sparing):
    """Returns a kept output instead of computing it, once it has arrived."""

    def __init__(self, given: Arrived, outputs: Outputs, stage: StageSpec, flat: torch.Tensor | None) -> None:
        super().__init__(stage, flat)
        self._given, self._outputs = given, outputs

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        if index not in self._outputs:
            return super().operator(index, kind, func, args, kwargs)
        values, copies = self._given.pop(index)
        while copies:  # of all outputs, which share this list
            copies.pop().wait()
        return tuple(values) if self._outputs[index][1] else values[0]
