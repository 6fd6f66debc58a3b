"""bfloat16 weights with their remainders are an exact float32 master; gradients are those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drawn import every
from transformers import PreTrainedConfig, PreTrainedModel

from fuyou_cli.engine.updates import segments_of
from fuyou_cli.spec.model import Dtype
from fuyou_cli.swap.daemon import Update
from fuyou_cli.swap.kernels import adamw

from .comparing import relative, unequal
from .families import FAMILIES, llama
from .plain_torch import micro_losses, torch_adamw
from .rig import OPTIMIZER, Rig, Shape, Subject, as_bytes, named

STEPS = 6


class Shadow:
    """Keeps float32 masters and moments beside the run, updated by the same kernel from the gradients the run produced."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.step = rig, 0
        self.masters: dict[int, torch.Tensor] = {}
        for stage in rig.owning_stages():
            flat = torch.zeros(stage.params)
            for tensor in stage.tensors:
                flat[tensor.offset : tensor.offset + tensor.numel] = rig.subject.initial[tensor.name].float().view(-1)
            self.masters[stage.index] = flat
        self.momentum = {index: torch.zeros_like(flat) for index, flat in self.masters.items()}
        self.variance = {index: torch.zeros_like(flat) for index, flat in self.masters.items()}

    def follow(self) -> None:
        """Follows a clipped step: gradients rest, updates are due."""
        self.step += 1
        for stage in self.rig.owning_stages():
            due = self.rig.executor.visits.residency.records[stage.index].due
            assert due is not None and due.step == self.step
            update = Update(
                params=stage.params, weights_dtype="float32", weights=0, lr=OPTIMIZER.lr, beta1=OPTIMIZER.beta1,
                gradients_dtype=self.rig.plan.numerics.accumulate_dtype, beta2=OPTIMIZER.beta2,
                epsilon=OPTIMIZER.epsilon, gradient_scale=due.gradient_scale, step=self.step,
                segments=segments_of(stage, weight_decay=OPTIMIZER.weight_decay),
            )  # fmt: skip
            index = stage.index
            nonfinite = adamw(
                update, weights=as_bytes(self.masters[index]), momentum=as_bytes(self.momentum[index]),
                variance=as_bytes(self.variance[index]), gradients=as_bytes(self.rig.resting_gradients(stage)),
            )  # fmt: skip
            assert nonfinite == 0

    def named(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for stage in self.rig.owning_stages():
            found |= named(stage, self.masters[stage.index])
        return found


@pytest.mark.parametrize("accumulate", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_rebuilt_master_is_an_fp32_master(family: str, accumulate: Dtype, tmp_path: Path) -> None:
    subject = Subject(FAMILIES[family], Shape(dtype="bfloat16", accumulate=accumulate))
    with Rig(subject, tmp_path, home="ssd", gradients="cpu") as rig:
        shadow = Shadow(rig)
        for number, (ids, labels) in enumerate(subject.batches(STEPS), start=1):
            rig.step(ids, labels, number)
            shadow.follow()
        rig.executor.drain()
        masters, weights = rig.masters(), rig.weights()
    assert unequal(masters, shadow.named()) == []
    assert sum(int((masters[name] != weights[name].float()).sum()) for name in masters) > 1000  # remainders at work


def _plain_gradients(model: PreTrainedModel, subject: Subject, accumulate: Dtype) -> dict[str, torch.Tensor]:
    """Returns the first step's gradients: summed by torch itself in bfloat16, or in float32 from each micro-batch's."""
    ids, labels = next(subject.batches(1))
    sums: dict[str, torch.Tensor] = {}
    for _ in micro_losses(model, ids, labels, subject.shape.micro):
        if accumulate == "bfloat16":
            continue
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            sums[name] = sums[name] + gradient if name in sums else gradient
        model.zero_grad()
    return sums or {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("family", "accumulate"),
    every(
        2, [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32"), ("gpt_neox", "bfloat16"), ("phi3", "float32")]
    ),
)
def test_first_gradients_are_those_of_plain_pytorch(family: str, accumulate: Dtype, tmp_path: Path) -> None:
    subject = Subject(FAMILIES[family], Shape(dtype="bfloat16", accumulate=accumulate, chunk=0))
    _check_first_gradients(subject, accumulate, tmp_path)


@pytest.mark.parametrize("family", every(2, ["gemma2", "gemma3", "gpt2", "opt"]))
def test_first_gradients_of_tied_weights(family: str, tmp_path: Path) -> None:
    """Takes one micro-batch: torch adds the two users' gradients before it adds micro-batches."""
    subject = Subject(FAMILIES[family], Shape(dtype="bfloat16", accumulate="bfloat16", batch=2, micro=2))
    assert subject.spec.tied_head
    _check_first_gradients(subject, "bfloat16", tmp_path)


@pytest.mark.parametrize("accumulate", ["float32", "bfloat16"])
def test_first_gradients_of_an_embedding_that_scales(accumulate: Dtype, tmp_path: Path) -> None:
    """Sums micro-batch by micro-batch, not over the whole batch in bfloat16."""
    subject = Subject(_untied("gemma3"), Shape(dtype="bfloat16", accumulate=accumulate, chunk=0))
    _check_first_gradients(subject, accumulate, tmp_path)


def _untied(family: str) -> PreTrainedConfig:
    config = FAMILIES[family]
    return type(config)(**{**config.to_dict(), "tie_word_embeddings": False})


def _check_first_gradients(subject: Subject, accumulate: Dtype, folder: Path) -> None:
    with Rig(subject, folder, home="ssd", gradients="cpu") as rig:
        ids, labels = next(subject.batches(1))
        rig.step(ids, labels, 1, last=True)
        ours: dict[str, torch.Tensor] = {}
        for stage in rig.owning_stages():
            ours |= named(stage, rig.resting_gradients(stage))
    model = subject.fresh()
    model.load_state_dict(subject.initial)
    theirs = _plain_gradients(model, subject, accumulate)
    assert all(bool(gradient.any()) for gradient in theirs.values())
    assert unequal(ours, theirs) == []


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
def test_losses_follow_plain_pytorch_with_fp32_masters(clip: float | None, tmp_path: Path) -> None:
    subject = Subject(llama(), Shape(dtype="bfloat16", accumulate="float32"))
    with Rig(subject, tmp_path, clip=clip) as rig:
        losses = rig.run(20)
    plain = list(_plain_bf16(subject, 20, clip))
    assert relative(losses, plain) <= 1e-3
    assert losses[-1] < losses[0] - 0.5


def _plain_bf16(subject: Subject, steps: int, clip: float | None) -> Iterator[float]:
    """Runs torch's AdamW on float32 masters; gradients of the bfloat16 model summed in float32."""
    model = subject.fresh()
    model.load_state_dict(subject.initial)
    weights = list(model.parameters())
    masters = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch_adamw(masters, OPTIMIZER)
    for ids, labels in subject.batches(steps):
        loss = 0.0
        for part in micro_losses(model, ids, labels, subject.shape.micro):
            loss += part
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float() if master.grad is None else master.grad + weight.grad.float()
            model.zero_grad()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        yield loss
