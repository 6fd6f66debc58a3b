"""The engine, everything on the ssd, beside a plain PyTorch loop with torch.optim.AdamW over the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from drawn import every
from transformers import PreTrainedConfig, PreTrainedModel

from fuyou_cli.engine.updates import Optimizer
from fuyou_cli.engine.visits import random_stream

from .comparing import assert_near
from .families import FAMILIES, gpt2, llama, opt
from .plain_torch import assert_as_plain_torch, plain_run
from .rig import OPTIMIZER, Rig, Shape, Subject

STEPS = 20

# The true gradient of a key bias is zero (softmax ignores what is added to a whole row), so what reaches AdamW is noise
# of 1e-9, which an epsilon of 1e-8 would blow up to updates of the full size, different in any two implementations.
_KEY_BIASES = replace(OPTIMIZER, epsilon=1e-6)
# Norm weights start at zero here, so everything moves far at a low rate, and stays less sensitive to the last bit.
_NORMS_FROM_ZERO = replace(OPTIMIZER, lr=1e-3)
_SETTINGS: dict[str, Optimizer] = {
    "gpt2": _KEY_BIASES, "opt": _KEY_BIASES, "gpt_neox": _KEY_BIASES, "gemma2": _NORMS_FROM_ZERO,
    "gemma3": _NORMS_FROM_ZERO,
}  # fmt: skip


def _same_as_torch(
    config: PreTrainedConfig, folder: Path, *, clip: float | None, optimizer: Optimizer = OPTIMIZER, **shape: int
) -> None:
    assert optimizer.lr >= 1e-3 and optimizer.weight_decay == 0.1
    subject = Subject(config, Shape(**shape))  # type: ignore[arg-type]
    losses, weights = assert_as_plain_torch(subject, folder, STEPS, clip=clip, optimizer=optimizer)
    assert len(losses) == STEPS
    assert {name: moved for name, moved in _moved(subject, weights).items() if moved <= 1e-2} == {}
    assert losses[-1] < losses[0] - 0.3


def _moved(subject: Subject, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns how far each tensor went, as a share of where it is now (some start at zero)."""
    return {n: float((value - subject.initial[n]).norm() / value.norm()) for n, value in weights.items()}


@pytest.mark.parametrize("family", every(4, FAMILIES))
def test_clipped(family: str, tmp_path: Path) -> None:
    _same_as_torch(FAMILIES[family], tmp_path, clip=0.5, optimizer=_SETTINGS.get(family, OPTIMIZER))


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_unclipped(family: str, tmp_path: Path) -> None:
    _same_as_torch(FAMILIES[family], tmp_path, clip=None, optimizer=_SETTINGS.get(family, OPTIMIZER))


@pytest.mark.parametrize("clip", [0.5, None])
def test_lion(clip: float | None, tmp_path: Path) -> None:
    """Runs with no variance on the store."""
    optimizer = replace(OPTIMIZER, lr=1e-3)
    subject = Subject(llama(), Shape(rule="lion"))
    losses, _ = assert_as_plain_torch(subject, tmp_path, STEPS, clip=clip, optimizer=optimizer)
    assert losses[-1] < losses[0] - 0.1


def test_projections_around_the_blocks(tmp_path: Path) -> None:
    _same_as_torch(opt(projected_to=16), tmp_path, clip=0.5, optimizer=_KEY_BIASES)


@pytest.mark.parametrize("clip", [0.5, None])
def test_tied_weights(clip: float | None, tmp_path: Path) -> None:
    _same_as_torch(llama(tie_word_embeddings=True), tmp_path, clip=clip)


def test_micro_batches_that_do_not_divide_the_batch(tmp_path: Path) -> None:
    _same_as_torch(llama(), tmp_path, clip=0.5, batch=5, micro=2)


def test_recompute_draws_the_dropout_of_forward(tmp_path: Path) -> None:
    """Plain PyTorch with each block's generator set as the run sets it, for (step, stage, micro-batch), once: backward
    there uses the masks of forward, and so must ours. (The embeddings' dropout is drawn for the whole batch: off.)"""
    config = gpt2(dropout=0.1)
    config.embd_pdrop = 0.0
    subject = Subject(config, Shape())
    with Rig(subject, tmp_path, optimizer=_KEY_BIASES) as rig:
        ours = rig.run(5), rig.weights()
        assert_near(ours, plain_run(subject, 5, optimizer=_KEY_BIASES, prepare=_seeding(rig)))


def _seeding(rig: Rig) -> Callable[[PreTrainedModel], None]:
    blocks = [stage for stage in rig.spec.stages if stage.kind == "block"]
    micro_batches = rig.subject.shape.batch // rig.subject.shape.micro

    def prepare(model: PreTrainedModel) -> None:
        def seed(stage: int) -> Callable[[object, object], None]:
            calls = count()

            def hook(module: object, arguments: object) -> None:
                step, micro_batch = divmod(next(calls), micro_batches)
                torch.manual_seed(random_stream(rig.plan.numerics.seed, step + 1, stage, micro_batch))

            return hook

        for block in blocks:
            model.base_model.get_submodule(block.name).register_forward_pre_hook(seed(block.index))

    return prepare


@pytest.mark.parametrize(("clip", "rows"), [(0.5, 0), (None, 0), (0.5, 40)])
def test_padding_stays_zero(clip: float | None, rows: int, tmp_path: Path) -> None:
    """It is read, updated and written like everything else, so rubbish in it would one day be seen as not finite."""
    subject = Subject(FAMILIES["gpt2"], Shape(vocabulary=rows))
    with Rig(subject, tmp_path, clip=clip) as rig:
        rig.run(3)
        padding = rig.padding()
    between = sum(t.numel % 64 > 0 for stage in subject.spec.stages for t in stage.tensors[:-1])
    assert padding.numel() > 2048 and between > 4
    assert not padding.any()


def test_clipping_was_at_work(tmp_path: Path) -> None:
    """Shows that clipping was at work: otherwise the tests above would say nothing about it."""
    subject = Subject(llama(), Shape())
    with Rig(subject, tmp_path) as rig:
        ids, labels = next(subject.batches(1))
        norm = rig.step(ids, labels, 1).grad_norm
    model = subject.fresh()
    model.load_state_dict(subject.initial)
    tokens = int((labels[:, 1:] != -100).sum())
    model(input_ids=ids, labels=labels, num_items_in_batch=tokens).loss.backward()
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])), rel=1e-5)
    assert norm > 2 * 0.5
