"""Plain PyTorch beside fuyou: the same recipe's first steps in memory, for their losses.

`python -m fuyou_cli.training.quickstart.reference RECIPE STEPS MICRO_BATCH_SIZE THREADS TOTAL_STEPS [key=value ...]`
prints one loss per line. The numbers are what the run resolved the recipe's to, `auto` and epochs among them. The loop
is what anyone would write: bf16 weights, fp32 masters, torch.optim.AdamW, clip_grad_norm_, the same rows in the same
micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...data import Batch
    from ...recipe.schema import Recipe


def in_memory_losses(recipe: Recipe, steps: int, *, micro_batch_size: int, threads: int, total_steps: int) -> Iterator[float]:
    """The loss of each of the first `steps` steps. Needs 16 bytes of RAM per parameter and its activations."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..rates import learning_rate

    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if recipe.precision.compute == "bfloat16" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(
        recipe.model.name_or_path,
        dtype=dtype,
        attn_implementation=recipe.model.attn_implementation,
        local_files_only=True,
    )
    model.train()
    masters = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in masters.values() if m.dim() >= 2], "weight_decay": recipe.optimizer.weight_decay},
            {"params": [m for m in masters.values() if m.dim() < 2], "weight_decay": 0.0},
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
    """Gradients of one step, summed in fp32 into the masters; the step's loss."""
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
    from ...data import Sampler, collate
    from ..length import tokenised_rows

    rows = tokenised_rows(recipe, Path(recipe.model.name_or_path))
    sampler = Sampler(len(rows), batch_size=recipe.train.batch_size, shuffle=recipe.dataset.shuffle, seed=recipe.seed)
    for step in range(steps):
        yield collate(rows, sampler.batch(step), pad_id=rows.summary.pad_id, max_len=recipe.dataset.max_seq_len)


def main(arguments: list[str]) -> None:
    from ...recipe.load import load_recipe

    recipe = load_recipe(arguments[0], arguments[5:]).recipe
    steps, micro, threads, total = map(int, arguments[1:5])
    for loss in in_memory_losses(recipe, steps, micro_batch_size=micro, threads=threads, total_steps=total):
        print(loss, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
