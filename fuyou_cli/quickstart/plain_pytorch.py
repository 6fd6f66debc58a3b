"""Runs the same recipe's first steps in plain PyTorch, in memory, and prints their losses.

`python -m fuyou_cli.quickstart.plain_pytorch RECIPE STEPS MICRO_BATCH_SIZE THREADS TOTAL_STEPS [key=value ...]` prints one
loss per line. The numbers are those that the run resolved, including `auto` and epochs. The loop is plain: bf16 weights, fp32
masters, torch.optim.AdamW, clip_grad_norm_, the same rows in the same micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fuyou_cli.data.batches import Batch, collate
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.schema import Recipe
from fuyou_cli.training.length import fed, learning_rate


def in_memory_losses(recipe: Recipe, steps: int, *, micro_batch_size: int, total_steps: int) -> Iterator[float]:
    """Yields the loss of each of the first `steps` steps. Needs 16 bytes of RAM per parameter, plus activations."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        recipe.model.name_or_path,
        dtype=getattr(torch, recipe.precision.compute),
        attn_implementation=recipe.model.attn_implementation,
        local_files_only=True,
    ).train()
    masters = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    decays = {True: recipe.optimizer.weight_decay, False: 0.0}  # only matrices decay
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in masters.values() if (m.dim() >= 2) == matrix], "weight_decay": decay}
            for matrix, decay in decays.items()
        ],
        lr=recipe.optimizer.lr,
        betas=recipe.optimizer.betas,
        eps=recipe.optimizer.eps,
    )
    rates = learning_rate(recipe, total_steps)
    for step, batch in enumerate(_batches(recipe, steps), start=1):
        yield _accumulate(model, masters, batch, micro_batch_size)
        if recipe.train.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(masters.values()), recipe.train.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rates.at(step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])


def _accumulate(model: Any, masters: dict[str, Any], batch: Batch, micro_batch_size: int) -> float:
    """Adds the gradients of one step to the masters in fp32, and returns the step's loss."""
    ids, labels = batch.tensors()
    total = 0.0
    for begin in range(0, ids.shape[0], micro_batch_size):
        part = slice(begin, begin + micro_batch_size)
        output = model(input_ids=ids[part], labels=labels[part], num_items_in_batch=batch.label_tokens, use_cache=False)
        output.loss.backward()
        total += float(output.loss.detach())
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.float()
            masters[name].grad = gradient if masters[name].grad is None else masters[name].grad.add_(gradient)
            parameter.grad = None
    return total


def _batches(recipe: Recipe, steps: int) -> Iterator[Batch]:
    rows, sampler = fed(recipe, Path(recipe.model.name_or_path), check=lambda summary: None, say=lambda text: None)
    for step in range(steps):
        yield collate(rows, sampler.batch(step), pad_id=rows.summary.pad_id, max_len=recipe.dataset.max_seq_len)


if __name__ == "__main__":
    steps, micro_batch_size, threads, total_steps = map(int, sys.argv[2:6])
    torch.set_num_threads(threads)
    recipe = load_recipe(sys.argv[1], sys.argv[6:]).recipe
    for loss in in_memory_losses(recipe, steps, micro_batch_size=micro_batch_size, total_steps=total_steps):
        print(loss, flush=True)
