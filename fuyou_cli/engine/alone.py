"""Computes one stage of a model by itself, with random weights, in the same way as the executor computes a micro-batch. So it
takes the same time as in a run. No other stage's weights exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..spec.model import Dtype, StageSpec
from ..spec.plan import rounded_up, whole_rows
from .activations import Activations, Arrived, GivingBack, Outputs, Recompute, Sparing
from .anatomy import Anatomy
from .calls import CallsByLength, ModuleState, put_back
from .compiled import CompiledBlocks, graph_bytes
from .gradients import GradientSum
from .loss import Head, TokenLoss, TokenPart, pieces
from .operators import KeptCalls, Notes, handing_over, numbers_of
from .skeleton import TORCH_DTYPE
from .visits import backpropagate

MOST_ROOM = 96 << 20  # bytes of weights and sums that no CPU cache holds; more would waste memory
_MOST_COPIES = 16
# Random values, repeated: drawing one for each weight would take longer than computing. A prime number, so that no two rows of
# a router are alike: it would send tokens to all experts of equal rows, or to the first of them.
_FILLING = 65521


class BlockAlone:
    """Describes a decoder block at micro-batches of `shape` (rows, tokens). A small block has several copies. Each visit of
    `micro_batches` uses the next copy, because in a run no cache holds the next block's weights. `room`: bytes that copies
    beside the first may take. `compiled`: compiles it; `spec` is then that of a compiled block. `like`: the same block at other
    micro-batches, whose weights and sums it takes. `document_step`: of `documents.attended`, where the model keeps documents
    apart; each row is then one."""

    def __init__(self, anatomy: Anatomy, spec: StageSpec, *, dtype: Dtype, accumulate: Dtype, shape: tuple[int, int],
                 device: torch.device, micro_batches: int = 1, room: int = MOST_ROOM, document_step: int = 0,
                 compiled: CompiledBlocks | None = None, like: BlockAlone | None = None) -> None:  # fmt: skip
        self.flops, self.tokens = spec.forward_flops, shape[0] * shape[1]
        self.backward_flops = 3 * spec.forward_flops - spec.unneeded_flops - spec.frozen_flops  # recompute included
        every = sum(operator.flops for operator in spec.operators if not operator.stays)
        self.given_flops = self.backward_flops - every if every else 0.0  # FLOPs if every output was kept; 0: none can be kept
        self.expert_rows = 0.0 if spec.expert_work is None else spec.expert_work.rows
        self._spec, self._stage = spec, anatomy.stages[spec.index]
        longest = rounded_up(shape[1], document_step)  # a mask is as long as documents are computed in
        state = ModuleState(anatomy.model)
        calls = CallsByLength(anatomy.model, anatomy.modules(), state).called(longest, longest, torch.device("cpu"))
        state.put_back()
        call, x = next((call, x) for call, x in calls if call.name == self._stage.name)
        if anatomy.isolated:
            call = replace(call, documents=[[shape[1]]] * shape[0], document_step=document_step)
        self._call = call.map_tensors(lambda value: value.to(device))
        assert self._stage.module is not None
        self.compiled = compiled
        # On a GPU forward runs as the recompute does.
        self._activations: Activations = compiled or Recompute(spec, as_backward=device.type == "cuda")
        if compiled is not None:
            self._call = replace(self._call, original=compiled.of(self._stage.module))
        if device.type == "cuda":
            _begin_backward(device)
        modules = self._stage.module.modules()
        self._buffers = [(m, n, b if b is None else b.to(device)) for m in modules for n, b in m._buffers.items()]
        size = spec.params * (TORCH_DTYPE[dtype].itemsize + TORCH_DTYPE[accumulate].itemsize)
        self._visits: list[tuple[torch.Tensor, GradientSum]] = like._visits if like is not None else [
            (_filled(spec.params, dtype, device), GradientSum(stage=spec, flat=_empty(spec.trained, accumulate, device)))
            for _ in range(min(_MOST_COPIES, 1 + min(room, MOST_ROOM) // size))
        ]  # fmt: skip
        self._micro_batches, self._visited = micro_batches, 0
        self._input = torch.randn(*shape, *x.shape[2:], dtype=TORCH_DTYPE[dtype], device=device)
        self._outputs: Outputs = {}  # outputs of one forward
        self._calls: KeptCalls | None = None
        self._numbers = numbers_of(spec, [operator.index for operator in spec.operators])

    def forward(self) -> None:
        flat, _ = self._visit()
        with torch.no_grad(), self._buffers_placed(), self._stage.installed(flat):
            self._activations.forward(self._call.run, self._input, 0, ())

    def backward(self) -> None:
        """Runs recompute and backward. Adds gradients to a sum, like the second and later micro-batches of a step."""
        self._forward_backward(lambda x, flat, parameters: self._activations.recompute(self._call.run, x, 0, flat, parameters))

    def graph_bytes(self) -> int:
        """Returns the bytes that one forward's graph holds; 0 if the block is not compiled."""
        if self.compiled is None:
            return 0
        flat, _ = self._visit()
        with self._buffers_placed(), self._stage.installed(flat) as parameters:
            return graph_bytes(self._call.run, self._input, parameters)

    def backward_from_kept(self) -> None:
        """Runs backward as if every output that can be kept was kept."""
        outputs = self._outputs
        if not outputs:
            notes = Notes(outputs, lambda: (0, 0))

            def noted(x: torch.Tensor, flat: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor:
                weights = {operator: parameters[number] for operator, number in (self._numbers or {}).items()}
                with handing_over(notes.hand_over, weights, attention=True), _Remembering(self._spec, flat, outputs):
                    return self._call.run(x)

            self._forward_backward(noted)
            self._calls = notes.calls()
        values: Arrived = {index: (list(output[0]), []) for index, output in outputs.items()}

        def given_back(x: torch.Tensor, flat: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor:
            with GivingBack(values, outputs, self._spec, flat).inside(self._calls, self._numbers, parameters):
                return self._call.run(x)

        self._forward_backward(given_back)

    def _forward_backward(self, forward: Callable[[torch.Tensor, torch.Tensor, list[nn.Parameter]], torch.Tensor]) -> None:
        x = self._input.detach().requires_grad_(True)
        flat, total = self._visit()
        with torch.enable_grad(), self._buffers_placed(), self._stage.installed(flat) as parameters:
            y = forward(x, flat, parameters)
            with total.collecting(parameters):
                backpropagate(y, self._input, [x, *parameters])

    @contextmanager
    def _buffers_placed(self) -> Iterator[None]:
        """Puts the stage's buffers on the device inside the context, and puts the old ones back afterwards."""
        assert self._stage.module is not None
        with put_back(self._stage.module):
            for module, name, copy in self._buffers:
                module._buffers[name] = copy
            yield

    def _visit(self) -> tuple[torch.Tensor, GradientSum]:
        """Returns the weights, and the sum of their gradients, for the next micro-batch."""
        number = self._visited // self._micro_batches % len(self._visits)
        self._visited += 1
        return self._visits[number]


class _Remembering(Sparing):
    def __init__(self, stage: StageSpec, flat: torch.Tensor, outputs: Outputs) -> None:
        super().__init__(stage, flat)
        self._wanted, self._outputs = {operator.index for operator in stage.operators}, outputs

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = super().operator(index, kind, func, args, kwargs)
        if index in self._wanted:
            values = out if isinstance(out, tuple) else (out,)
            copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
            self._outputs[index] = copies, isinstance(out, tuple)
        return out


class HeadAlone:
    """Describes the head, or one piece of its vocabulary, on the first chunk of tokens of a micro-batch of `shape`. `owner`:
    the stage whose weights it computes with. `like`: the same head on another chunk, whose weights and sum it takes."""

    def __init__(self, anatomy: Anatomy, spec: StageSpec, owner: StageSpec, *, dtype: Dtype, accumulate: Dtype,
                 shape: tuple[int, int], chunk: int, device: torch.device, like: HeadAlone | None = None) -> None:  # fmt: skip
        cut = next(pieces(*shape, chunk))
        rows, tokens = (part.stop for part in cut)
        self.tokens = rows * tokens
        self.flops = spec.forward_flops * self.tokens / (shape[0] * shape[1])
        self.backward_flops = 3 * self.flops - spec.frozen_flops * self.tokens / (shape[0] * shape[1])
        self._stage, self._head, self._vocabulary = anatomy.stages[owner.index], Head(anatomy.model), spec.vocabulary
        self._flat: torch.Tensor = _filled(owner.params, dtype, device) if like is None else like._flat
        total = GradientSum(stage=owner, flat=_empty(owner.trained, accumulate, device)) if like is None else like._total
        self._total: GradientSum = total
        width = anatomy.model.get_output_embeddings().in_features
        self._hidden = torch.randn(rows, tokens, width, dtype=TORCH_DTYPE[dtype], device=device)
        self._targets = torch.zeros(rows, tokens, dtype=torch.long, device=device)
        self._part = TokenPart(whole_rows(rows, tokens), cut)

    def forward(self) -> None:
        with torch.no_grad(), self._head.stubbed(), self._stage.installed(self._flat):
            logits = self._head.logits(self._hidden)
            if self._vocabulary is not None:
                self._seen().fold(self._part, logits, first=self._vocabulary[0])

    def backward(self) -> None:
        """Runs the one visit of a whole head (loss, forward and backward at once), or the second pass over a piece."""
        piece = self._hidden.detach().requires_grad_(True)
        with torch.enable_grad(), self._head.stubbed(), self._stage.installed(self._flat) as parameters:
            if self._vocabulary is None:
                y, slope = self._head.loss(piece, self._targets, normaliser=self.tokens), None
            else:
                y = self._head.logits(piece)
                first = self._vocabulary[0]
                slope = self._seen().gradient(self._part, y.detach(), first=first, normaliser=self.tokens)
            with self._total.collecting(parameters):
                backpropagate(y, slope, [piece, *parameters])

    def _seen(self) -> TokenLoss:
        """Returns losses as they are after a first pass over every column, so that the totals are not zero."""
        tokens = TokenLoss.of(self._targets)
        tokens.maximum.zero_()
        tokens.total.fill_(1.0)
        return tokens


def _begin_backward(device: torch.device) -> None:
    """Gives autograd's thread for a GPU its context. Without one, torch warns about the first product there."""
    torch.zeros(1, device=device, requires_grad=True).sum().backward()


def _empty(params: int, dtype: Dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(params, dtype=TORCH_DTYPE[dtype], device=device)


def _filled(params: int, dtype: Dtype, device: torch.device) -> torch.Tensor:
    """Returns weights (params,) of the size that training starts with: not zero, and not large."""
    values = torch.randn(_FILLING, dtype=torch.float32).mul_(0.02).to(dtype=TORCH_DTYPE[dtype], device=device)
    return values.repeat(-(-params // _FILLING))[:params]
