"""Measures the same shape in plain PyTorch, with everything in the device's memory, if it fits there."""

from __future__ import annotations

import time
from typing import Any

import torch

from ...core.errors import FuyouError
from ...core.units import gib
from ...data.batches import collate
from ..prepare import Planned
from .measured import Place, rows_of

_BYTES = 20  # per trained parameter: weights and gradients in bf16, fp32 master, its gradient and two moments
_FROZEN_BYTES = 2
_SPARED = 0.15  # share of the memory for activations and torch's own buffers
_STEPS = 3  # the first one does not count


def tokens_per_second(planned: Planned, place: Place) -> tuple[float | None, str]:
    """Returns the rate, or None and the reason."""
    if planned.anatomy.untouched:
        return None, "a model that also takes images or sound is not measured so"
    hardware, frozen = planned.hardware, planned.model.frozen_parameters
    needed = _BYTES * (planned.model.parameters - frozen) + _FROZEN_BYTES * frozen
    room = hardware.device_free or hardware.device_memory if hardware.device == "cuda" else hardware.ram_available
    if needed > (1 - _SPARED) * room:
        return None, f"in memory it needs {gib(needed)} plus activations, but {gib(room)} are free"
    place.say("measuring the same shape in memory, with plain PyTorch")
    try:
        return _measured(planned, place), ""
    except (MemoryError, torch.OutOfMemoryError):
        return None, "it ran out of memory"


def _measured(planned: Planned, place: Place) -> float:
    from transformers import AutoModelForCausalLM

    numerics, cuda = planned.plan.numerics, planned.plan.device == "cuda"
    device = torch.device("cuda" if cuda else "cpu")
    config = planned.anatomy.model.config
    dtype = getattr(torch, numerics.compute_dtype)
    with torch.device(device):
        # Uses the attention of the run beside it. Not every model supports the one the recipe asks for.
        options = {"dtype": dtype, "attn_implementation": config._attn_implementation}
        model: Any = AutoModelForCausalLM.from_config(config, **options).train()
    frozen = {tensor.name for stage in planned.model.stages for tensor in stage.tensors if tensor.frozen}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    masters = [parameter.detach().float().clone() for parameter in _trained(model)]
    optimizer = torch.optim.AdamW(masters, lr=1e-6)
    rows, tokens, seconds = rows_of(planned, place), 0, 0.0
    for step in range(_STEPS):
        indices = range(step * numerics.batch_size, (step + 1) * numerics.batch_size)
        batch = collate(rows, indices, pad_id=0, max_len=numerics.max_seq_len)
        begin = time.monotonic()
        _step(model, masters, optimizer, batch.tensors(), numerics.micro_batch_size, planned.plan.clip_grad_norm, device)
        if cuda:
            torch.cuda.synchronize()
        if step:
            tokens, seconds = tokens + batch.tokens, seconds + time.monotonic() - begin
    if not seconds:
        raise FuyouError("no step was measured")
    return tokens / seconds


def _trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _step(
    model: Any, masters: list[torch.Tensor], optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor],
    micro_batch_size: int, clip: float | None, device: torch.device,
) -> None:  # fmt: skip
    """Runs one step as anyone would write it: micro-batches, gradients summed in fp32 and clipped, AdamW on fp32 masters."""
    ids, labels = (tensor.to(device) for tensor in batch)
    for begin in range(0, ids.shape[0], micro_batch_size):
        part = slice(begin, begin + micro_batch_size)
        model(input_ids=ids[part], labels=labels[part], num_items_in_batch=labels.numel(), use_cache=False).loss.backward()
        for parameter, master in zip(_trained(model), masters, strict=True):
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(masters, clip)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, master in zip(_trained(model), masters, strict=True):
            parameter.copy_(master)
