"""The embedding's backward visit: its gradients by rows where it is a plain lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .embedding import add_embedding_rows, is_plain
from .gradients import GradientSum
from .skeleton import TORCH_DTYPE
from .streamed import Call

if TYPE_CHECKING:
    from .executor import Executor


def embedding_backward(
    executor: Executor,
    call: Call,
    ids: torch.Tensor,
    grad_y: torch.Tensor,
    flat: torch.Tensor | None,
    total: GradientSum | None,
) -> None:
    """Adds the gradients of one embedding to `total`. ids: (batch, tokens) int64; grad_y: (batch, tokens, width)."""
    assert total is not None
    module = executor.stages[call.stage].module
    device = executor.device.torch_device
    if is_plain(module) and grad_y.shape[0] == ids.shape[0]:
        assert isinstance(module, torch.nn.Embedding)
        for rows in executor.micro_batches(ids.shape[0]):
            add_embedding_rows(module, ids[rows].to(device), grad_y[rows].to(device), total)
            executor.between()
        return
    if flat is None:  # two-phase updates need no weights here; a lookup's gradient does not depend on their values
        params = executor.model.stages[call.stage].params
        flat = torch.zeros(params, dtype=TORCH_DTYPE[executor.model.compute_dtype], device=device)
    with torch.enable_grad(), executor.installed(call.stage, flat, trainable=True) as parameters:
        y = call.run(ids.to(device))
        executor.differentiate(y, grad_y.to(device), parameters, total)
