"""LoRA streamed as peft computes it in memory: a block has a frozen bank and a trained one, which is its adapter.

Costs about 20 s of one core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every

from fuyou_cli.planner.plan_request import PlanRequest, rest_in_ram
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.recipe.schema import AdapterSection

from .families import FAMILIES
from .plain_torch import assert_as_plain_torch, micro_losses
from .rig import Rig, Shape, Subject

pytest.importorskip("peft", reason="peft comes with the extra lora")
STEPS = 10
SECTIONS: dict[str, AdapterSection] = {
    "plain": AdapterSection(r=4),
    "rslora": AdapterSection(r=4, use_rslora=True),
    "dora": AdapterSection(r=4, use_dora=True),
}


@pytest.mark.parametrize(
    ("family", "section"),
    every(3, [*((family, "plain") for family in ("llama", "qwen3", "gemma2", "gpt2", "opt")),
              ("llama", "rslora"), ("llama", "dora"), ("gpt2", "dora")]),
)  # fmt: skip
def test_losses_and_adapters_of_clipped_steps(family: str, section: str, tmp_path: Path) -> None:
    subject = Subject(FAMILIES[family], Shape(), adapter=SECTIONS[section])
    # rsLoRA's larger scale: 1.08e-6 after 20 steps on a processor without AVX-512, below 1e-6 on one with it.
    assert_as_plain_torch(subject, tmp_path, STEPS, moved="lora_", near=2e-6 if section == "rslora" else 1e-6)


@pytest.mark.parametrize(("family", "section"), [("llama", "plain"), ("gpt2", "plain"), ("llama", "dora")])
def test_first_gradients_in_bfloat16_are_bitwise(family: str, section: str, tmp_path: Path) -> None:
    """Takes one micro-batch, as torch sums several in bfloat16. After one step momentum is the gradient times 1 - beta1."""
    subject = Subject(FAMILIES[family], Shape(dtype="bfloat16", batch=2, micro=2), adapter=SECTIONS[section])
    found: dict[str, torch.Tensor] = {}
    with Rig(subject, tmp_path, clip=None) as run:
        run.run(1)
        for stage in (stage for stage in run.owning_stages() if stage.trained):
            flat = run._resting(stage, "momentum", torch.float32, stage.trained)
            found |= {t.name: flat[t.offset : t.offset + t.numel].view(t.shape) for t in stage.trained_tensors}
    model = subject.fresh()
    model.load_state_dict(subject.initial)
    ((ids, labels),) = subject.batches(1)
    list(micro_losses(model, ids, labels, 2))
    wanted = {name: p.grad.float() * torch.tensor(1 - 0.9) for name, p in model.named_parameters() if p.grad is not None}
    assert wanted.keys() == found.keys()
    assert [name for name, value in wanted.items() if not torch.equal(value, found[name])] == []


def test_with_states_in_ram_nothing_is_written(tmp_path: Path) -> None:
    """Reads frozen weights twice a step and never writes them; the adapter rests in RAM with its gradients and states."""
    changes: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 512}
    config = type(FAMILIES["llama"])(**{**FAMILIES["llama"].to_dict(), **changes})
    subject = Subject(config, Shape(dtype="bfloat16"), adapter=SECTIONS["plain"])
    with Rig(subject, tmp_path, home="ssd", states="cpu", gradients="cpu", boundaries="cpu") as run:
        before = run.counters()
        run.run(4)
        after, planned = run.counters(), run.plan.predicted
    assert after.written_bytes - before.written_bytes == 0 == planned.written_per_step
    begun: dict[int, bool] = {}  # by stage, whether its first visit reads its weights, or has them from the step before
    for visit in plan_schedule(run.spec, run.plan).visits:
        if visit.owner is not None:
            begun.setdefault(visit.owner, visit.fetch)
    kept = sum(run.spec.stages[stage].frozen_weight_bytes for stage, fetched in begun.items() if not fetched)
    assert after.read_bytes - before.read_bytes == 4 * planned.read_per_step + kept > 4 * planned.read_per_step
    assert planned.read_per_step <= 4.0 * run.spec.stored_parameters


def test_the_plan_knows_what_frozen_weights_spare() -> None:
    """No gradient of a frozen matrix is computed, a product of the forward's size: 4 FLOPs a parameter and token, not 6."""
    spec = Subject(FAMILIES["llama"], Shape(), adapter=SECTIONS["plain"]).spec
    shape, blocks = Shape(), [stage for stage in spec.stages if stage.kind == "block"]
    for block in blocks:
        matrices = sum(tensor.numel for tensor in block.tensors if ".base_layer." in tensor.name)
        assert block.frozen_flops == 2 * matrices * shape.micro * shape.tokens > 0.5 * block.forward_flops
    assert [block.passes_on for block in blocks] == [False] + [True] * (len(blocks) - 1)  # below the first nothing learns
    assert spec.flops_per_token == 6 * spec.trained_parameters + 4 * spec.frozen_parameters


def test_what_is_small_rests_in_ram() -> None:
    """It takes an eighth of the budget at most."""
    subject = Subject(FAMILIES["llama"], Shape(), adapter=SECTIONS["plain"])
    touched = 16 * subject.spec.updated_parameters  # float32: weights, gradients and two moments
    asked = PlanRequest(
        numerics=subject.numerics, model_name="any", device="cpu", clip_grad_norm=1.0, cpu_budget=8 * touched, scratch_size=0
    )
    assert rest_in_ram(subject.spec, asked)
    assert not rest_in_ram(subject.spec, replace(asked, cpu_budget=8 * touched - 1))
