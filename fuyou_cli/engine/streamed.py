"""Streams stages: the model's own forward calls a stage, and the passes compute it, forward and backward.

The model's own forward stays in charge of the order. Its stages get their `forward` replaced on the instance (undone on close).
Between them pass whole-batch tensors, in host memory or on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..spec.plan import MicroBatch
from .anatomy import Anatomy
from .attention import Documents, longest
from .calls import CallsByLength, Made, ModuleState, StageCall, boundary_of, one_row_masks, own_forward, with_boundary
from .compiled import CompiledBlocks

Forward = Callable[[torch.Tensor], torch.Tensor]
_LOOKS = 4  # forwards of a stage before which something to forget is looked for


@dataclass(frozen=True, slots=True)
class Call:
    """Describes one call of a stage's own forward that can be repeated per micro-batch: `run(x)` with the other arguments
    bound. `of_parts`: the same for each micro-batch, where they differ in length or keep documents apart."""

    stage: int
    run: Forward
    of_parts: Sequence[Forward] | None = None

    def of(self, number: int) -> Forward:
        return self.run if self.of_parts is None else self.of_parts[number]


class Passes(Protocol):
    """Computes streamed stages. Tensors are whole-batch, in host memory or on the device."""

    def forward(self, call: Call, x: torch.Tensor) -> torch.Tensor: ...

    def backward(self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None: ...

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        """Returns `value`, the same for all rows, on the device: one copy for all stages of a step."""
        ...


@dataclass(slots=True)
class Streamed:
    """Describes one call of a stage in a step. `before`: the call that made its input, None for ids; `gradient`: of its output,
    so far."""

    call: Call
    ids: torch.Tensor | None
    before: GradientEdge | None
    gradient: torch.Tensor | None = None

    def add_gradient(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def pop_gradient(self) -> torch.Tensor:
        gradient, self.gradient = self.gradient, None
        assert gradient is not None, self.call.stage
        return gradient


class StreamedStage(torch.autograd.Function):
    """Ends the model's own graph behind a stage. Its backward only collects the gradient that arrives there.

    `anchor` requires grad, so that the output does too. `x` does not, so that the graph goes no further.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, streamed: Streamed, passes: Passes) -> torch.Tensor:
        ctx.streamed = streamed
        return passes.forward(streamed.call, x)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.streamed.add_gradient(grad_y)
        return None, None, None, None


class Tape:
    """Records the stages' calls of one step, in order, and walks back through them.

    The walk is not left to autograd: on a GPU autograd runs nodes on its own thread, which no signal reaches. Autograd runs
    only what the model's own forward does between two stages. `divided`: the batch that the next calls are of.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        # Gets the stage and the input of every call whose input is an output.
        self.trace_input: Callable[[int, GradientEdge], None] = lambda stage, edge: None
        self.divided: Divided | None = None
        self._calls: list[Streamed] = []
        self._number = 0  # calls in this forward so far

    @contextmanager
    def forward_of(self, divided: Divided | None) -> Iterator[None]:
        """Tells how the batch is divided that the model's own forward is called with inside the context."""
        self.divided, self._number = divided, 0
        try:
            yield
        finally:
            self.divided = None

    def runs(self, call: StageCall, run_of: Callable[[StageCall], Forward]) -> Sequence[Forward] | None:
        """Returns what computes each micro-batch of the next call; None: all are computed as `call`."""
        number, self._number = self._number, self._number + 1
        return None if self.divided is None else self.divided.runs(number, call, run_of)

    def forget(self) -> None:
        self._calls.clear()

    def run(self, call: Call, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """Runs the stage on `x`, records the call and returns the output."""
        edge = get_gradient_edge(x) if x.requires_grad else None
        if edge is not None:
            self.trace_input(call.stage, edge)
        streamed = Streamed(call, None if x.is_floating_point() else x, edge)
        self._calls.append(streamed)
        y: torch.Tensor = StreamedStage.apply(anchor, x.detach(), streamed, self._passes)  # type: ignore[no-untyped-call]
        return y

    def hand_on(self, edge: GradientEdge, gradient: torch.Tensor, *, retain: bool = False) -> None:
        """Passes a computed gradient on to the stages whose outputs it belongs to. `retain`: another walk follows."""
        if isinstance(edge.node, StreamedStage._backward_cls):
            node: Any = edge.node
            node.streamed.add_gradient(gradient)
        else:
            torch.autograd.backward([edge], [gradient], retain_graph=retain)

    @torch.no_grad()
    def backward(self, *, retain: bool = False) -> None:
        """Visits the stages in reverse, from the gradients handed on so far. It holds no whole-batch tensors, because each is
        as large as a boundary. `retain`: another walk follows, so the calls stay recorded."""
        for number in reversed(range(len(self._calls))):
            streamed = self._calls[number] if retain else self._calls.pop()
            if streamed.gradient is None:  # nothing from here on learns anything
                continue
            gradient = self._passes.backward(streamed.call, streamed.ids, streamed.pop_gradient())
            if gradient is not None and streamed.before is not None:
                self.hand_on(streamed.before, gradient, retain=retain)
            del gradient


def sources_of(edge: GradientEdge) -> tuple[list[int], bool]:
    """Returns the stages of whose outputs the model's own forward made a tensor, and whether it is one of them as it is."""
    found, seen, left = set[int](), set[Any](), list[Any]([edge.node])
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if _is_streamed(node):
            found.add(node.streamed.call.stage)
        else:
            left += [before for before, _ in node.next_functions if before is not None]
    return sorted(found), _is_streamed(edge.node)


def _is_streamed(node: object) -> bool:
    return isinstance(node, StreamedStage._backward_cls)


class StageState:
    """Makes a stage forget its earlier forwards. To look for something to forget takes 50 us, so it is done before the first
    forwards, once in each forward of the model, and always if something was found."""

    def __init__(self, module: nn.Module) -> None:
        self._state, self._looks = ModuleState(module), _LOOKS

    def begin(self, *, look: bool = False) -> None:
        """Call it before a forward. `look`: looks in any case."""
        if self._looks or look:
            self._looks = _LOOKS if self._state.put_back() else max(0, self._looks - 1)


def streamed_forward(
    stage: int, name: str, original: Callable[..., Any], tape: Tape, passes: Passes, state: StageState | None = None,
    made: Made | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Returns the replacement for one stage's `forward`. Every tensor beside the stage's input must be the same for all
    rows. `made`: what the forward returns, where it may be another rank's."""
    anchor = torch.zeros((), requires_grad=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call, x = StageCall.split(name, original, args, kwargs)
        call = call.map_tensors(passes.shared)
        structure: list[Any] = [] if made is None else [made.structure]

        def run_of(call: StageCall) -> Forward:
            def run(part: torch.Tensor) -> torch.Tensor:
                if state is not None:
                    state.begin()
                out = call.output(part)
                boundary = boundary_of(out, name)
                # Without tensors, which would otherwise live until the stage is done.
                structure[:] = [with_boundary(out, None, name)]
                return boundary

            return run

        y = tape.run(Call(stage, run_of(call), tape.runs(call, run_of)), x, anchor)
        return with_boundary(structure[0], y, name)

    return forward


class StreamedModel:
    """Hands a model's stages to `passes` until it is closed. `inside`, if given, is called during a stage's forward, to start
    what prefetched data allows: a visit of one micro-batch is long where the calling thread computes it. `made`: what the
    stages return, where other ranks compute some."""

    def __init__(
        self, anatomy: Anatomy, passes: Passes, device: torch.device, inside: Callable[..., None] | None, *,
        on_device: bool = False, compiled: CompiledBlocks | None = None, made: Mapping[int, Made] | None = None,
    ) -> None:  # fmt: skip
        self._replaced: list[nn.Module] = []
        self._states: list[StageState] = []  # of these
        self._hooks: list[RemovableHandle] = []
        self._moved_buffers: list[MovedBuffer] = []
        self._anatomy, self._passes = anatomy, passes
        self._device = device if on_device else torch.device("cpu")  # where the model's own forward computes
        self.tape = Tape(passes)
        for index, stage in enumerate(anatomy.stages):
            if stage.module is None or stage.module in self._replaced or stage.expert_range is not None:
                continue
            compiles = compiled is not None and stage.kind == "block"
            original = compiled.of(stage.module) if compiled is not None and compiles else own_forward(stage.module)
            self._replaced.append(stage.module)
            self._hooks += [] if compiles or inside is None else stage.call_inside(inside)
            self._moved_buffers += place_buffers(stage.module, device)
            state = StageState(stage.module) if stage.kind == "block" else None  # others keep nothing
            self._states += [] if state is None else [state]
            stage.module.forward = streamed_forward(
                index, stage.name, original, self.tape, passes, state, None if made is None else made[index]
            )
        if on_device:  # the model's own forward also computes there
            self._moved_buffers += place_buffers(anatomy.model, device)
        self._between = ModuleState(anatomy.model, excluded=anatomy.modules())
        self._calls = CallsByLength(anatomy.model, anatomy.modules(), self._between)

    def divided(self, parts: tuple[MicroBatch, ...], documents: Documents | None, width: int, *, step: int) -> Divided:
        """Tells how rows of `width` tokens are computed in these micro-batches. `documents`: of every row; None: each row is
        one. `step`: of `documents.attended`."""
        if self._anatomy.isolated:
            documents = (
                [[part.width] for part in parts for _ in range(part.first, part.end)] if documents is None else documents
            )
            return Divided(parts=parts, documents=documents, step=step)
        assert documents is None
        return Divided(parts=parts, calls=self._calls.of(parts, width, self._passes.shared, self._device))

    def hidden(self, input_ids: torch.Tensor, positions: torch.Tensor, divided: Divided) -> torch.Tensor:
        """Runs the model's own forward over a batch, (rows, tokens), and returns its last hidden state. What modules keep of
        earlier forwards is forgotten before."""
        model, documents = self._anatomy.model, divided.documents
        self._between.put_back()
        for state in self._states:
            state.begin(look=True)
        with (
            one_row_masks(model, None if documents is None else longest(documents, divided.step)),
            self.tape.forward_of(divided),
        ):
            out = model.base_model(input_ids=input_ids, position_ids=positions, use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def close(self) -> None:
        self._between.put_back()
        for state in self._states:
            state.begin(look=True)
        self._states.clear()
        for module in self._replaced:
            module.__dict__.pop("forward", None)
        self._replaced.clear()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        put_back(self._moved_buffers)


MovedBuffer = tuple[nn.Module, str, torch.Tensor]  # a buffer that was placed elsewhere: its module, its name, and what it was


def place_buffers(root: nn.Module, device: torch.device) -> list[MovedBuffer]:
    """Places all buffers on a device. Returns what `put_back` takes."""
    placed = []
    for module in root.modules():
        for name, value in module._buffers.items():
            if value is not None:
                placed.append((module, name, value))
                module._buffers[name] = value.to(device)
    return placed


def put_back(placed: list[MovedBuffer]) -> None:
    """Gives modules the buffers that they had before, and forgets them."""
    while placed:
        module, name, value = placed.pop()
        module._buffers[name] = value


@dataclass(frozen=True, kw_only=True, slots=True)
class Divided:
    """Describes a batch, or a sweep's share of one. `documents`: of every row, if the model keeps them apart; `step`: of
    `documents.attended`; `calls`: of the stages for each micro-batch, None for one that is computed as the whole is."""

    parts: tuple[MicroBatch, ...]
    documents: Documents | None = None
    step: int = 0
    calls: tuple[Sequence[StageCall] | None, ...] = ()

    def runs(self, number: int, call: StageCall, run_of: Callable[[StageCall], Forward]) -> Sequence[Forward] | None:
        """Returns what computes each micro-batch of one call of a stage. `number`: of the call in the forward; `call`: as the
        whole batch has it."""
        if self.documents is not None:
            of_rows = (self.documents[part.rows] for part in self.parts)
            return [run_of(replace(call, documents=documents, document_step=self.step)) for documents in of_rows]
        if not any(self.calls):
            return None
        whole = run_of(call)
        # A compiled block's call is the one of the whole batch.
        shorter = (None if calls is None else replace(calls[number], original=call.original) for calls in self.calls)
        return [whole if other is None else run_of(other) for other in shorter]
