"""Computes losses with weights that pass through memory: the model's own forward, stage by stage, for all rows of a pass.

Inside a stage rows are computed micro-batch by micro-batch. Two boundaries of all rows are in host memory at most: the one that
goes into a stage and the one that comes out.
"""

from __future__ import annotations

from types import TracebackType

import torch

from ..spec.micro_batch import MicroBatch, even
from ..spec.plan import Numerics
from .forward_only import Rows
from .loss import Head, Part, TokenLoss, pieces, shifted
from .streamed import Call, StreamedModel
from .weight_stream import WeightStream


class StreamedLosses:
    """Replaces the forwards of a model's stages until it is closed. The model is in evaluation mode."""

    def __init__(self, weights: WeightStream, numerics: Numerics) -> None:
        self.weights, self._numerics = weights, numerics
        self._parts: tuple[MicroBatch, ...] = ()
        self.passes = 0  # so far
        self._head = Head(weights.anatomy.model)
        self._streamed = StreamedModel(weights.anatomy, self, weights.device, None)
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity of the source, which is kept with it

    def __enter__(self) -> StreamedLosses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._streamed.close()

    def losses(self, batch: Rows, *, last: bool) -> torch.Tensor:
        """Runs one pass over the model. Returns the loss of every token, 0 where it is no label: (rows, tokens) float64, in
        host memory. `last`: no pass follows."""
        return self.folded(batch, shifted(batch.tensors()[1]), last=last).by_token()

    def folded(self, batch: Rows, targets: torch.Tensor, *, last: bool) -> TokenLoss:
        """Runs one pass over the model, for what each token's logits say of its target. targets: (rows, tokens) int64."""
        anatomy, device, numerics = self.weights.anatomy, self.weights.device, self._numerics
        input_ids, _ = batch.tensors()
        rows, width = input_ids.shape
        self.weights.begin_pass(last=last)
        self.passes += 1
        self._shared.clear()
        self._parts = even(rows, numerics.micro_batch_size, width) if batch.sweeps is None else batch.sweeps[0]
        divided = self._streamed.divided(self._parts, batch.documents, width, step=numerics.document_step)
        with torch.no_grad():
            hidden = self._streamed.hidden(input_ids, torch.arange(width).unsqueeze(0), divided)
        self._streamed.tape.forget()
        tokens = TokenLoss.of(targets.to(device))
        for index, stage in enumerate(anatomy.stages):
            if stage.kind == "head":
                self._fold(index, hidden, tokens, first=stage.vocabulary[0] if stage.vocabulary else 0)
        return tokens

    def forward(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """Returns a stage's output for all rows, in host memory. x: (rows, tokens, ...), ids or a boundary."""
        weights = self.weights
        if call.stage in weights.by_rows:
            found: torch.Tensor = weights.looked_up(call.stage, call.run, x)
            return found.cpu()
        with weights.installed(call.stage):
            if not x.is_floating_point():  # all rows may share the ids
                return call.run(x.to(weights.device)).cpu()
            y: torch.Tensor | None = None
            for number, part in enumerate(self._parts):
                out = call.of(number)(part.of(x).contiguous().to(weights.device))
                if y is None:
                    y = torch.zeros(*x.shape[:2], *out.shape[2:], dtype=out.dtype)
                part.of(y).copy_(out)
        assert y is not None
        return y

    def backward(self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None:
        raise AssertionError("nothing goes back")

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) not in self._shared:
            self._shared[id(value)] = (value, value.to(self.weights.device))
        return self._shared[id(value)][1]

    def _fold(self, stage: int, hidden: torch.Tensor, tokens: TokenLoss, *, first: int) -> None:
        with torch.no_grad(), self._head.stubbed(), self.weights.installed(stage):
            for part in self._parts:
                batch = part.of(hidden).contiguous().to(self.weights.device)
                for cut in pieces(batch.shape[0], batch.shape[1], self._numerics.head_chunk_tokens):
                    tokens.fold(Part(part, cut), self._head.logits(batch[cut]), first=first)
