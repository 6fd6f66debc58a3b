"""Frozen parameters: losses and weights as plain PyTorch with `requires_grad=False`; nothing is written or kept for them.

Costs about 15 s of one core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drawn import crossed, every
from transformers import PreTrainedConfig, PreTrainedModel

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import dissect, frozen
from fuyou_cli.engine.skeleton import build

from .comparing import distance, relative, unequal
from .families import gpt2, llama
from .plain_torch import plain_run
from .rig import Rig, Shape, Subject
from .test_exact import _SETTINGS, OPTIMIZER

STEPS = 4
WAYS: dict[str, tuple[str, ...]] = {
    "the lower half": ("model.embed_tokens", "model.layers.[0-0].*"),
    "the upper half": ("model.layers.1", "model.norm", "lm_head"),
    "parts of blocks": ("model.layers.*.mlp", "model.layers.0.self_attn.q*", "*_proj.weight"),
    "all but norms": ("*_proj", "model.embed_tokens", "lm_head"),
    "all but the head": ("model",),
    "the embedding": ("model.embed_tokens",),
}


TIED = llama(tie_word_embeddings=True)
LOWER = ("model.embed_tokens", "model.layers.0")
RUNS: dict[str, tuple[PreTrainedConfig, Shape, tuple[str, ...], dict[str, Any]]] = {
    "tied, cut, emulated, swapped": (TIED, Shape(vocabulary=40), LOWER, {"device": "emulated", "kept": "all"}),
    "tied, cut, in two sweeps": (TIED, Shape(vocabulary=40), ("model.layers.*.mlp",), {"sweeps": 2}),
    "tied, cut, states on the device": (TIED, Shape(vocabulary=40), ("*_proj",), {"device": "emulated", "home": "gpu"}),
    "gpt2, cut, swapped": (gpt2(), Shape(vocabulary=40), ("transformer.wpe", "*.mlp"), {"kept": "all"}),
    "whole": (llama(), Shape(), LOWER, {}),
}


def _frozen_names(subject: Subject) -> set[str]:
    return {t.name for stage in subject.spec.stages for t in stage.tensors if t.frozen}


def _freezing(names: set[str]) -> Any:
    def prepare(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in names)

    return prepare


def _same_as_torch(subject: Subject, folder: Path, *, clip: float | None, family: str = "llama", **rig: Any) -> None:
    names, optimizer = _frozen_names(subject), _SETTINGS.get(family, OPTIMIZER)
    with Rig(subject, folder, clip=clip, optimizer=optimizer, **rig) as run:
        losses, weights = run.run(STEPS), run.weights()
    plain_losses, plain_weights = plain_run(subject, STEPS, clip=clip, optimizer=optimizer, prepare=_freezing(names))
    assert relative(losses, plain_losses) <= 1e-6
    assert distance(weights, plain_weights) <= 1e-6
    moved = set(unequal(weights, {name: subject.initial[name] for name in weights}))  # without a tied head's second name
    assert moved.isdisjoint(names) and moved | names == set(weights)


@crossed(2, clip=[0.5, None], way=WAYS)
def test_any_part_of_a_model(way: str, clip: float | None, tmp_path: Path) -> None:
    _same_as_torch(Subject(llama(), Shape(), freeze=WAYS[way]), tmp_path, clip=clip)


@pytest.mark.parametrize("run", every(2, RUNS))
def test_any_kind_of_run(run: str, tmp_path: Path) -> None:
    config, shape, patterns, rig = RUNS[run]
    subject = Subject(config, shape, freeze=patterns)
    _same_as_torch(subject, tmp_path, clip=0.5, family="gpt2" if run.startswith("gpt2") else "llama", **rig)


@pytest.mark.parametrize("way", ["the lower half", "all but norms"])
def test_a_step_reads_4_bytes_of_a_frozen_bf16_parameter_and_writes_none(way: str, tmp_path: Path) -> None:
    subject = Subject(llama(num_hidden_layers=6), Shape(dtype="bfloat16"), freeze=WAYS[way])
    frozen = sum(stage.params - stage.trained for stage in subject.spec.stages)
    trained = sum(stage.trained for stage in subject.spec.stages)
    with Rig(subject, tmp_path, clip=None, gradients="cpu", boundaries="cpu", lookahead=1) as run:
        run.run(2)
        before = run.counters()
        ids, labels = next(subject.batches(1))
        run.step(ids, labels, 3, last=True)
        run.executor.drain()
        after, planned = run.counters(), run.plan.predicted
    read, written = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
    assert written == 12 * trained == planned.written_per_step
    assert 4 * trained < read <= 4 * frozen + 14 * trained
    assert all(bool(stage.state_bytes) == bool(stage.trained) for stage in subject.spec.stages)


def test_a_pattern_stands_for_whole_numbers_and_names() -> None:
    """Says by hand what is frozen: all else here asks the code for it."""
    anatomy = dissect(build(llama(num_hidden_layers=12), dtype="float32", attention="sdpa"))
    found = frozen(anatomy, ("model.layers.[2-10].mlp", "model.layers.1.self_attn.q*", "lm_head"))
    wanted = {f"model.layers.{block}.mlp.{name}_proj.weight" for block in range(2, 11) for name in ("gate", "up", "down")}
    wanted |= {"model.layers.1.self_attn.q_proj.weight", "lm_head.weight"}
    assert {tensor.name for stage in found.stages for tensor in stage.tensors if tensor.frozen} == wanted


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("model.embed_tokens", "model.layers.[7-9]"), r"no parameter of LlamaForCausalLM matches `model\.layers\.\[7-9\]`"),
        (("model.embed",), r"no parameter of LlamaForCausalLM matches `model\.embed`"),
        (("*",), "every parameter of LlamaForCausalLM matches"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        Subject(llama(), Shape(), freeze=patterns)
    known = "it has model.embed_tokens, model.layers.*, model.norm, lm_head"
    assert refused.value.hint in (known, "leave out the pattern of what is to be trained")
