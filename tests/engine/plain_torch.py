"""Runs a subject's steps in plain PyTorch: torch's own optimizer over the same micro-batches. Where every rig computes on a GPU
(`rig.EVERYWHERE`), so does this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fuyou_cli.engine.updates import Optimizer

from .comparing import Outcome, assert_near, unequal
from .rig import EVERYWHERE, OPTIMIZER, Subject, outcome

DEVICE = "cuda" if EVERYWHERE == "cuda" else "cpu"


def plain_run(
    subject: Subject, steps: int, *, clip: float | None = 0.5, optimizer: Optimizer = OPTIMIZER,
    prepare: Callable[[PreTrainedModel], None] = lambda model: None,
) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """The losses and the weights after `steps` steps of torch's own optimizer over the same micro-batches."""
    model = subject.fresh()
    model.load_state_dict(subject.initial)
    prepare(model.to(DEVICE))
    by_torch = (Lion if subject.shape.rule == "lion" else torch_adamw)(learning(model), optimizer)
    losses: list[float] = []
    for ids, labels in subject.batches(steps):
        losses.append(sum(micro_losses(model, ids, labels, subject.shape.micro)))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        by_torch.step()
        by_torch.zero_grad()
    return losses, {name: value.detach().cpu().clone() for name, value in model.named_parameters()}


def assert_as_plain_torch(
    subject: Subject, folder: Path, steps: int, *, clip: float | None = 0.5, optimizer: Optimizer = OPTIMIZER,
    prepare: Callable[[PreTrainedModel], None] = lambda model: None, moved: str = "", near: float = 1e-6, **way: Any,
) -> Outcome:  # fmt: skip
    """Compares losses and weights of a rig with those of torch; returns the rig's. `moved`: a part of the names of those that
    alone are to be compared, and to be others than in the beginning."""
    losses, weights = outcome(subject, folder, steps, clip=clip, optimizer=optimizer, **way)
    plain_losses, plain_weights = plain_run(subject, steps, clip=clip, optimizer=optimizer, prepare=prepare)
    theirs = subject.stored(plain_weights)
    chosen = {name for name in weights if moved in name}
    before = subject.stored(subject.initial)
    assert not moved or set(unequal(weights, {name: before[name] for name in weights})) == chosen
    ours, theirs = ({name: one[name] for name in chosen} for one in (weights, theirs))
    assert_near((losses, ours), (plain_losses, theirs), weights=near)
    return losses, weights


def learning(model: PreTrainedModel) -> list[torch.Tensor]:
    """Returns the parameters that learn. Biases of experts, one below the other, are marked: no bias decays."""
    for name, parameter in model.named_parameters():
        parameter.is_bias = name.endswith("_bias")  # type: ignore[attr-defined]
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _groups(parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> list[dict[str, Any]]:
    """Decays matrices only."""
    return [
        {"params": [p for p in parameters if _decays(p)], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if not _decays(p)], "weight_decay": 0.0},
    ]


def _decays(parameter: torch.Tensor) -> bool:
    return parameter.dim() >= 2 and not getattr(parameter, "is_bias", False)


class Lion(torch.optim.Optimizer):
    """Lion as its authors print it (arXiv 2302.06675, algorithm 2), with decoupled weight decay."""

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
        super().__init__(_groups(parameters, optimizer), {})
        self._lr, self._betas = optimizer.lr, (optimizer.beta1, optimizer.beta2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (beta1, beta2), lr = self._betas, self._lr
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"]).sub_(lr * torch.sign(beta1 * m + (1 - beta1) * p.grad))
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def torch_adamw(parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> torch.optim.Optimizer:
    betas = (optimizer.beta1, optimizer.beta2)
    return torch.optim.AdamW(_groups(parameters, optimizer), lr=optimizer.lr, betas=betas, eps=optimizer.epsilon)


def micro_losses(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor, micro: int) -> Iterator[float]:
    """Runs backward of each micro-batch's part of the step's mean loss; yields its value."""
    tokens = int((labels[:, 1:] != -100).sum())
    ids, labels = ids.to(model.device), labels.to(model.device)
    for begin in range(0, ids.shape[0], micro):
        rows = slice(begin, begin + micro)
        loss = model(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=tokens, use_cache=False).loss
        loss.backward()
        yield float(loss.detach())
