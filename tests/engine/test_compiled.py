"""Tests compiled blocks: one compilation for all of them wherever their bytes rest, and what a compiler cannot do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.compiled import CompiledBlocks, load_compiler

from .comparing import Outcome, assert_same, distance, relative, unequal
from .families import FAMILIES, gpt2, llama
from .rig import Rig, Shape, Subject, outcome

STEPS = 2
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "llama, 5 blocks": lambda: Subject(llama(num_hidden_layers=5), Shape(micro=1)),
    "llama, bf16, cut": lambda: Subject(llama(num_hidden_layers=3), Shape(dtype="bfloat16", vocabulary=40)),
    "gpt2, dropout": lambda: Subject(gpt2(dropout=0.1), Shape()),
    "gemma2, local and global": lambda: Subject(FAMILIES["gemma2"], Shape()),  # which differ in the mask alone
}
WAYS: dict[str, dict[str, Any]] = {
    "ssd": dict(),
    "RAM, unclipped": dict(home="cpu", clip=None, lookahead=3),
    "on the device": dict(device="emulated", home="cpu"),
    "through the host": dict(device="emulated", batch_on_device=False),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Nothing that an earlier test compiled is found again."""
    load_compiler()
    torch._dynamo.reset()


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_a_process_trains_as_often_as_it_likes() -> None:
    """Each run loads the compiler and compiles anew, as `fuyou bench --model` does for every batch size."""
    for number in range(torch._dynamo.config.recompile_limit + 2):
        load_compiler()
        blocks = CompiledBlocks(backend="aot_eager")
        assert blocks.of(Doubled())(torch.full((2,), float(number), requires_grad=True)).tolist() == [2 * number] * 2
        assert blocks.graphs == 1


@pytest.mark.parametrize("name", every(2, SUBJECTS))
def test_blocks_alike_are_compiled_once(name: str, tmp_path: Path) -> None:
    """Traces and differentiates by the compiler, with operators run one by one: the same arithmetic as without it."""
    subject = SUBJECTS[name]()
    plain = outcome(subject, tmp_path / "plain", STEPS)
    found: list[Outcome] = []
    ways = dict([*WAYS.items()][[*SUBJECTS].index(name) % 2 :: 2])  # in turn: every way with two subjects
    for way, options in ways.items():
        torch._dynamo.reset()
        blocks = CompiledBlocks(backend="aot_eager")
        found.append(outcome(subject, tmp_path / way, STEPS, compiled=blocks, **options))
        assert blocks.graphs == 1, way
    clipped = [outcome for outcome, options in zip(found, ways.values(), strict=True) if "clip" not in options]
    for losses, weights in clipped[1:]:
        assert losses == clipped[0][0] and unequal(weights, clipped[0][1]) == []
    loose = 1e-2 if subject.shape.dtype == "bfloat16" else 1e-5
    assert relative(clipped[0][0], plain[0]) < loose
    assert distance(clipped[0][1], plain[1]) < loose


def test_blocks_that_differ_are_compiled_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles each where they differ in what their code looks at, though their weights are alike."""
    forward = LlamaDecoderLayer.forward

    def differs(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, hidden_states, *args, **kwargs) * (1 + self.self_attn.layer_idx / 4)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", differs)
    subject, blocks = Subject(llama(num_hidden_layers=3), Shape()), CompiledBlocks(backend="aot_eager")
    plain = outcome(subject, tmp_path / "plain", STEPS, home="cpu")
    losses, weights = outcome(subject, tmp_path / "compiled", STEPS, home="cpu", compiled=blocks)
    assert blocks.graphs == 3
    assert relative(losses, plain[0]) < 1e-5 and distance(weights, plain[1]) < 1e-5


@pytest.mark.parametrize("runs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_by_the_real_compiler(runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stays within 1e-5 of the losses and weights without it, and of itself to the bit."""
    monkeypatch.setenv(
        "SETUPTOOLS_USE_DISTUTILS", "stdlib"
    )  # another test may have imported that one: setuptools refuses it else
    subject = Subject(llama(num_hidden_layers=4), Shape(batch=2, micro=1))
    plain = outcome(subject, tmp_path / "plain", STEPS, home="cpu")
    found = []
    for run in range(runs):
        torch._dynamo.reset()
        blocks = CompiledBlocks()
        found.append(outcome(subject, tmp_path / str(run), STEPS, home="cpu", compiled=blocks))
        assert blocks.graphs == 1
    assert_same(found[0], found[-1])
    assert relative(found[0][0], plain[0]) < 1e-5
    assert distance(found[0][1], plain[1]) < 1e-5


def test_a_block_that_cannot_be_compiled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaDecoderLayer.forward
    subject = Subject(llama(), Shape())

    def looks(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", looks)
    with Rig(subject, tmp_path, home="cpu", compiled=CompiledBlocks(backend="aot_eager")) as rig:
        with pytest.raises(UsageError, match=r"^train\.compile: LlamaDecoderLayer cannot be compiled: "):
            rig.run(1)
        rig.executor.abandon()


def test_memory_is_planned_for_all_gradients_of_a_block(tmp_path: Path) -> None:
    """They come at once; one operator stands for all, which never leaves a device, and none is left out."""
    subject = Subject(llama(), Shape())
    with Rig(subject, tmp_path, home="cpu", kept="all", compiled=CompiledBlocks(backend="aot_eager")) as rig:
        for before, after in zip(subject.spec.stages, rig.spec.stages, strict=True):
            assert ([o.stays for o in after.operators], after.unneeded) == ([True], ()) or after.kind != "block"
            assert after.backward_peak - before.backward_peak == (4 * after.params if after.kind == "block" else 0)
        assert not any(stage.kept for stage in rig.plan.stages)
