"""Computes losses with weights that pass through memory: the model's own forward, stage by stage, for all rows of a pass.

Inside a stage rows are computed micro-batch by micro-batch. Two boundaries of all rows are in host memory at most: the one that
goes into a stage and the one that comes out.
"""

from __future__ import annotations

from types import TracebackType

import torch

from .calls import one_row_masks
from .loss import Head, Part, TokenLoss, pieces, shifted
from .streamed import Call, StreamedModel
from .weight_stream import WeightStream


class StreamedLosses:
    """Replaces the forwards of a model's stages until it is closed. The model is in evaluation mode."""

    def __init__(self, weights: WeightStream, *, micro_batch_size: int, head_chunk_tokens: int) -> None:
        """`head_chunk_tokens`: tokens whose logits are there at once; 0: a micro-batch's."""
        self.weights, self._micro, self._chunk = weights, micro_batch_size, head_chunk_tokens
        self.passes = 0  # so far
        self._head = Head(weights.anatomy.model)
        self._streamed = StreamedModel(weights.anatomy, self, weights.device, None)
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity of the source, which is kept with it

    def __enter__(self) -> StreamedLosses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._streamed.close()

    def losses(self, input_ids: torch.Tensor, labels: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Runs one pass over the model. Returns each row's sum of its labels' losses: (rows,) float64, in host memory.

        input_ids, labels: (rows, tokens) int64 in host memory; labels hold -100 where nothing counts. `last`: no pass follows.
        """
        return self.folded(input_ids, shifted(labels), last=last).by_row().cpu()

    def folded(self, input_ids: torch.Tensor, targets: torch.Tensor, *, last: bool) -> TokenLoss:
        """Runs one pass over the model, for what each token's logits say of its target (shifted labels)."""
        anatomy, device = self.weights.anatomy, self.weights.device
        self.weights.begin_pass(last=last)
        self.passes += 1
        self._shared.clear()
        positions = torch.arange(input_ids.shape[1]).unsqueeze(0)
        with torch.no_grad(), one_row_masks(anatomy.model):
            out = anatomy.model.base_model(input_ids=input_ids, position_ids=positions, use_cache=False)
        self._streamed.tape.forget()
        tokens = TokenLoss.of(targets.to(device))
        for index, stage in enumerate(anatomy.stages):
            if stage.kind == "head":
                self._fold(index, out.last_hidden_state, tokens, first=stage.vocabulary[0] if stage.vocabulary else 0)
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
            for rows in self._micro_batches(x.shape[0]):
                out = call.run(x[rows].to(weights.device))
                if y is None:
                    y = torch.empty(x.shape[0], *out.shape[1:], dtype=out.dtype)
                y[rows] = out
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
            for rows in self._micro_batches(hidden.shape[0]):
                batch = hidden[rows].to(self.weights.device)
                for cut in pieces(batch.shape[0], batch.shape[1], self._chunk):
                    tokens.fold(Part(rows, cut), self._head.logits(batch[cut]), first=first)

    def _micro_batches(self, rows: int) -> list[slice]:
        return [slice(begin, min(begin + self._micro, rows)) for begin in range(0, rows, self._micro)]
